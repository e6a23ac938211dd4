#include "cuda/cuda.hpp"
#include "cuda/dense.hpp"
#include "cuda/instances.hpp"
#include "cuda/plan.hpp"
#include "cuda/repair.hpp"

namespace openmsa::cuda {
namespace {

// Pairs of CTAs halve what K and V cost the L2 (128K tokens: 616 to 653 TFLOP/s). A sequence's last pair may be half empty, so
// sequences must be long enough for that not to matter.
DenseMode dense_mode(const core::DenseAttentionParams& params) {
  if (params.block_max.given()) return DenseMode::kBlockMax;
  const std::int64_t tokens = dense_tile_tokens(DenseMode::kPaired, log2_ceil(params.config.group_size()));
  return params.geo.total_q >= 8 * tokens * params.geo.num_seqs ? DenseMode::kPaired : DenseMode::kPlain;
}

}  // namespace

void dense_attention_reserve(const core::DenseAttentionParams& params) {
  // The smallest tiles of any mode, since a later call may ask for block_max.
  reserve_plan(*params.context.arena, params.geo, params.geo.total_q,
               dense_tile_tokens(DenseMode::kPlain, log2_ceil(params.config.group_size())));
}

void dense_attention(const core::DenseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  const MsaConfig& config = params.config;
  const DenseMode mode = dense_mode(params);
  const std::int32_t tokens = dense_tile_tokens(mode, log2_ceil(config.group_size()));
  const Plan plan = reserve_plan(*params.context.arena, params.geo, params.geo.total_q, tokens);
  DenseParams device{};
  device.batch = batch_params(params.geo);
  device.tiles = plan.tiles;
  device.num_tiles = plan.capacity;
  fill_attention(device, config, params.out, params.lse);
  if (params.block_max.given()) {
    device.block_max = static_cast<float*>(params.block_max.data);
    device.stride_max_token = params.block_max.stride[0];
    device.stride_max_head = params.block_max.stride[1];
    device.num_blocks = static_cast<std::int32_t>(params.block_max.shape[2]);
  }
  launch_plan(plan, device.batch, 0, params.geo.total_q, tokens, params.context.stream);
  launch_dense(mode, params.q, params.k, params.v, params.geo, config, device, params.context.stream);
  launch_repair(params);
}

}  // namespace openmsa::cuda
