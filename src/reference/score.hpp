// The scores of one (query token, GQA group): shared by block_scores and index_select.
#pragma once

#include "reference/rows.hpp"

namespace openmsa::reference {

// scores[b] = M[t,g,b] for b = 0 .. num_blocks-1.
void score_query(const core::Geometry& geo, const core::KeyBlocks& k_idx, const Query& query, const std::vector<double>& q_idx,
                 std::int64_t num_blocks, double* scores);

}  // namespace openmsa::reference
