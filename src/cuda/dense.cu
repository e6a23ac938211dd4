#include "cuda/cuda.hpp"
#include "cuda/dense.hpp"
#include "cuda/instances.hpp"
#include "cuda/plan.hpp"
#include "cuda/repair.hpp"

namespace openmsa::cuda {
namespace {

std::int32_t tile_tokens(const MsaConfig& config) { return 128 >> log2_ceil(config.group_size()); }

}  // namespace

void dense_attention_reserve(const core::DenseAttentionParams& params) {
  reserve_plan(*params.context.arena, params.geo, params.geo.total_q, tile_tokens(params.config));
}

void dense_attention(const core::DenseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  const MsaConfig& config = params.config;
  const std::int32_t tokens = tile_tokens(config);
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
  launch_dense(params.block_max.given() ? DenseMode::kBlockMax : DenseMode::kPlain, params.q, params.k, params.v, params.geo,
               config, device, params.context.stream);
  launch_repair(params);
}

}  // namespace openmsa::cuda
