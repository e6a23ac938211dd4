#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/plan.hpp"
#include "cuda/repair.hpp"
#include "cuda/sm90_dense.cuh"

namespace openmsa::cuda {
namespace {

// Pairs of CTAs halve what K and V cost the L2 (128K tokens: 616 to 653 TFLOP/s). A sequence's last pair may be half empty, so
// sequences must be long enough for that not to matter.
DenseMode dense_mode(const core::DenseAttentionParams& params) {
  if (params.block_max.given()) return DenseMode::kBlockMax;
  const std::int64_t tokens = dense_tile_tokens(DenseMode::kPaired, log2_ceil(params.config.group_size()));
  return params.geo.total_q >= 8 * tokens * params.geo.num_seqs ? DenseMode::kPaired : DenseMode::kPlain;
}

void launch_dense(DenseMode mode, const core::DenseAttentionParams& params, const DenseParams& device) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  const int cluster = dense_cluster(mode);
  const auto num_clusters =
      std::min<std::int64_t>(num_multiprocessors() / cluster, std::int64_t{device.num_tiles} * config.num_kv_heads);
  const auto num_ctas = static_cast<unsigned>(num_clusters * cluster);
  const CUtensorMap map_q = row_map(params.q, 1 << device.log_group, kDenseRows >> device.log_group);
  const CUtensorMap map_k = key_map(params.k, geo, config.head_dim, config.num_kv_heads, config.block_size / cluster),
                    map_v = key_map(params.v, geo, config.head_dim, config.num_kv_heads, config.block_size / cluster);
  with_dtype(params.q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        with_size<0, 1, 2>(static_cast<int>(mode), [&](auto which) {
          using Traits = DenseTraits<decltype(element), dim.value, block.value, static_cast<DenseMode>(which.value)>;
          launch_clusters(sm90_dense_kernel<Traits>, cluster, dim3(num_ctas), Traits::kThreads, Traits::kSmemBytes,
                          params.context.stream, Order::kAfter, map_q, map_k, map_v, device);
        });
      });
    });
  });
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
  device.out = params.out.data;
  device.stride_out_token = params.out.stride[0];
  device.stride_out_head = params.out.stride[1];
  device.lse = static_cast<float*>(params.lse.data);
  device.stride_lse_token = params.lse.stride[0];
  device.num_groups = config.num_kv_heads;
  device.group_size = config.group_size();
  device.log_group = log2_ceil(config.group_size());
  device.scale = static_cast<float>(config.effective_softmax_scale());
  device.scale_log2 = device.scale * 1.4426950408889634f;
  device.slack = kSlack / device.scale_log2;
  if (params.block_max.given()) {
    device.block_max = static_cast<float*>(params.block_max.data);
    device.stride_max_token = params.block_max.stride[0];
    device.stride_max_head = params.block_max.stride[1];
    device.num_blocks = static_cast<std::int32_t>(params.block_max.shape[2]);
  }
  launch_plan(plan, device.batch, 0, params.geo.total_q, tokens, params.context.stream);
  launch_dense(mode, params, device);
  launch_repair(params);
}

}  // namespace openmsa::cuda
