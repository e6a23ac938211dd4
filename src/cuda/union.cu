#include "cuda/union.hpp"

#include <algorithm>

#include "cuda/instances.hpp"
#include "cuda/launch.hpp"
#include "cuda/sm90_union.cuh"
#include "cuda/smxx_union.cuh"

namespace openmsa::cuda {

void launch_union_route(const core::SparseAttentionParams& params, const UnionScratch& scratch) {
  const std::int32_t num_groups = params.config.num_kv_heads;
  const UnionParams route{scratch.batch,
                          scratch.tiles,
                          static_cast<const std::int32_t*>(params.block_ids.data),
                          params.block_ids.stride[0],
                          params.block_ids.stride[1],
                          scratch.num_tiles,
                          num_groups,
                          params.config.top_k,
                          scratch.entries,
                          scratch.num_entries,
                          scratch.taken,
                          scratch.chunk_begin,
                          scratch.work,
                          scratch.num_work};
  launch(smxx_union_kernel, dim3(blocks_for(std::int64_t{scratch.num_tiles} * num_groups, kUnionWarps)), 32 * kUnionWarps, 0,
         params.context.stream, Order::kAfter, route);
}

void launch_union(const core::SparseAttentionParams& params, const UnionScratch& scratch) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  UnionTileParams device{};
  device.batch = scratch.batch;
  device.tiles = scratch.tiles;
  device.work = scratch.work;
  device.num_work = scratch.num_work;
  device.next_work = scratch.next_work;
  device.entries = scratch.entries;
  device.num_entries = scratch.num_entries;
  device.taken = scratch.taken;
  device.ranks = scratch.ranks;
  device.partial = scratch.partial;
  device.partial_lse = scratch.partial_lse;
  device.out = params.out.data;
  device.stride_out_token = params.out.stride[0];
  device.stride_out_head = params.out.stride[1];
  device.lse = static_cast<float*>(params.lse.data);
  device.stride_lse_token = params.lse.stride[0];
  device.chunk_begin = scratch.chunk_begin;
  device.num_tiles = scratch.num_tiles;
  device.num_groups = config.num_kv_heads;
  device.top_k = config.top_k;
  device.group_size = config.group_size();
  device.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  device.slack = kSlack / device.scale_log2;

  const auto num_ctas =
      static_cast<unsigned>(std::min<std::int64_t>(num_multiprocessors(), std::int64_t{scratch.num_tiles} * config.num_kv_heads));
  const CUtensorMap map_q = row_map(params.q, 1 << kUnionLogGroup, kUnionSideTokens);
  const CUtensorMap map_k = key_map(params.k, geo, config.head_dim, config.num_kv_heads);
  with_dtype(params.q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        using Traits = UnionTraits<decltype(element), dim.value, block.value>;
        const CUtensorMap map_v = key_map(params.v, geo, config.head_dim, config.num_kv_heads, Traits::kPartKeys);
        launch(sm90_union_kernel<Traits>, dim3(num_ctas), Traits::kThreads, Traits::kSmemBytes, params.context.stream,
               Order::kDependent, map_q, map_k, map_v, device);
      });
    });
  });
}

}  // namespace openmsa::cuda
