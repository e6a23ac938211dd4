// The select stage on rows of scores, shared by select_blocks and index_select.
#pragma once

#include <cstdint>

#include "core/geometry.hpp"
#include "openmsa/config.hpp"
#include "openmsa/tensor.hpp"

namespace openmsa::cpu {

// Scores of query tokens token_begin, token_begin + 1, ...: row (t, g) starts at data + (t - token_begin) * stride_token +
// g * stride_head and holds at least as many entries as t sees blocks.
struct ScoreRows {
  const float* data = nullptr;
  std::int64_t token_begin = 0;
  std::int64_t stride_token = 0;  // elements
  std::int64_t stride_head = 0;   // elements
};

// Writes block_ids[t, g, :] for t in [rows.token_begin, token_end) and every g.
void select_rows(const MsaConfig& config, const core::Geometry& geo, const ScoreRows& rows, std::int64_t token_end,
                 const TensorView& block_ids, std::int32_t num_threads);

}  // namespace openmsa::cpu
