// Scores of one tile of query tokens, for callers that go on with the scores at once (index_select) instead of storing them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/geometry.hpp"
#include "openmsa/tensor.hpp"

namespace openmsa::cpu {

struct ScoreInputs {
  core::Geometry geo;
  TensorView q_idx;       // [T, Hkv, Di]
  core::KeyBlocks k_idx;  // [S, Di] or [num_pages, Bk, Di]
  std::int32_t num_kv_heads = 0;
  std::int32_t index_dim = 0;
};

// Query tokens a tile should hold for full speed: each key block is converted once per tile. Any number is correct.
std::int64_t score_tile_tokens(const ScoreInputs& inputs);

// Scratch floats that one call of score_tile needs, aligned to 64 bytes; the same for every tile and every SIMD target.
std::size_t score_tile_scratch(const ScoreInputs& inputs);

// Scores of the packed query tokens [token_begin, token_end), all of sequence seq, against its blocks [block_begin, block_end):
//   scores[(t - token_begin) * stride_token + g * stride_head + (b - block_begin)]
// -inf where t sees no key of b, b past the sequence's last block included. Serial: callers run tiles in parallel, each with
// its own scratch. A row's values do not depend on how tokens and blocks are cut into tiles.
void score_tile(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
                std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token,
                std::int64_t stride_head, float* scratch);

}  // namespace openmsa::cpu
