// Lays out and launches the plan kernel.
#pragma once

#include "cuda/launch.hpp"

namespace openmsa::cuda {

struct Plan {
  QueryTile* tiles = nullptr;           // [capacity]
  std::int32_t* tile_begin = nullptr;   // [B+1]
  std::int32_t* block_begin = nullptr;  // [B+1]
  PlanSum* sum = nullptr;               // [1]
  std::int32_t capacity = 0;
};

// Room for the tiles of at most `num_tokens` query tokens.
Plan reserve_plan(core::Arena& arena, const core::Geometry& geo, std::int64_t num_tokens, std::int32_t tile_tokens);
void launch_plan(const Plan& plan, const BatchParams& batch, std::int64_t token_begin, std::int64_t token_end,
                 std::int32_t tile_tokens, void* stream);

}  // namespace openmsa::cuda
