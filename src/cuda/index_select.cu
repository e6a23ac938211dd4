#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/score.hpp"
#include "cuda/select.hpp"

namespace openmsa::cuda {
namespace {

struct Layout {
  std::int64_t num_blocks;  // row width
  std::int64_t chunk;       // query tokens
};

Layout layout_of(const core::IndexSelectParams& params) {
  const std::int64_t num_blocks = score_width(params.geo);
  // The few-query kernel takes whole sequences, so it needs all tokens in one chunk; they are few.
  if (score_is_few(params.geo, params.config)) return {num_blocks, params.geo.total_q};
  const std::int64_t token_bytes = num_blocks * params.config.num_kv_heads * 4;
  // Whole waves of score tiles: 132 multiprocessors x 64 tokens at four groups.
  const std::int64_t wave = 132 * (256 / params.config.num_kv_heads);
  std::int64_t chunk = std::max<std::int64_t>(kMaxScoreBytes / token_bytes, 1);
  if (chunk > wave) chunk = chunk / wave * wave;
  return {num_blocks, std::min(chunk, params.geo.total_q)};
}

}  // namespace

void index_select_reserve(const core::IndexSelectParams& params) {
  const Layout layout = layout_of(params);
  core::Arena& arena = *params.context.arena;
  arena.take<float>(static_cast<std::size_t>(layout.chunk * params.config.num_kv_heads * layout.num_blocks));
  reserve_score(arena, params.geo, params.config, layout.chunk);
}

void index_select(const core::IndexSelectParams& params) {
  const DeviceGuard guard(params.q_idx.device.index);
  const Layout layout = layout_of(params);
  core::Arena& arena = *params.context.arena;
  const std::int64_t stride_group = layout.num_blocks, stride_token = stride_group * params.config.num_kv_heads;
  auto* scores = arena.take<float>(static_cast<std::size_t>(layout.chunk * stride_token));
  const Plan plan = reserve_score(arena, params.geo, params.config, layout.chunk);
  for (std::int64_t begin = 0; begin < params.geo.total_q; begin += layout.chunk) {
    const std::int64_t end = std::min(begin + layout.chunk, params.geo.total_q);
    launch_score({&params.geo, &params.config, params.q_idx, params.k_idx, scores, stride_token, stride_group,
                  static_cast<std::int32_t>(layout.num_blocks), begin, end, false, params.context.stream},
                 plan);
    launch_select({&params.geo, &params.config, scores, stride_token, stride_group, params.block_ids, begin, end,
                   plan.capacity == 0, params.context.stream});
  }
}

}  // namespace openmsa::cuda
