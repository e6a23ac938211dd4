#include "cuda/plan.hpp"

#include <algorithm>

#include "cuda/smxx_plan.cuh"

namespace openmsa::cuda {

Plan reserve_plan(core::Arena& arena, const core::Geometry& geo, std::int64_t num_tokens, std::int32_t tile_tokens) {
  Plan plan;
  // Every sequence may end in a partly filled tile.
  plan.capacity = static_cast<std::int32_t>(num_tokens / tile_tokens + std::min<std::int64_t>(geo.num_seqs, num_tokens) + 1);
  plan.tiles = arena.take<QueryTile>(plan.capacity);
  plan.tile_begin = arena.take<std::int32_t>(geo.num_seqs + 1);
  plan.block_begin = arena.take<std::int32_t>(geo.num_seqs + 1);
  plan.sum = arena.take<PlanSum>(1);
  return plan;
}

void launch_plan(const Plan& plan, const BatchParams& batch, std::int64_t token_begin, std::int64_t token_end,
                 std::int32_t tile_tokens, void* stream) {
  const PlanParams params{batch,
                          static_cast<std::int32_t>(token_begin),
                          static_cast<std::int32_t>(token_end),
                          tile_tokens,
                          plan.capacity,
                          plan.tiles,
                          plan.tile_begin,
                          plan.block_begin,
                          plan.sum};
  launch(smxx_plan_kernel, dim3(1), kPlanThreads, 0, stream, Order::kAfter, params);
}

}  // namespace openmsa::cuda
