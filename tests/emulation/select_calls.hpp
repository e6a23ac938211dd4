// The CUDA backend's calls around selection on a Problem, see calls.hpp. A batch's longest sequence of queries is given as it is, which
// decides between the kernels for few and for many query tokens.
#pragma once

#include "calls.hpp"

namespace openmsa::test {

// One sequence, paged, of `num_blocks` blocks of `num_pages` different pages.
Problem long_sequence(const MsaConfig& config, std::int32_t seqlen_q, std::int32_t num_pages, std::int32_t num_blocks,
                      Values values, Rng& rng);

// In `extra_blocks` more columns than the longest sequence has.
Tensor emulated_block_scores(const Problem& problem, std::int64_t extra_blocks = 1);
Tensor emulated_select_blocks(const Problem& problem, const Tensor& scores);
Tensor emulated_index_select(const Problem& problem);
Attention emulated_sparse_decode(const Problem& problem, const Tensor& block_ids);
// Without `optional_outputs` lse and block_ids are left out.
MsaResult emulated_msa_attention(const Problem& problem, bool optional_outputs = true);
// msa_attention's way for prompts, in chunks of `max_chunk` tokens.
MsaResult emulated_prefill(const Problem& problem, std::int64_t max_chunk);

}  // namespace openmsa::test
