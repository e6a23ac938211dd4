#include <algorithm>

#include "cuda/dense.hpp"
#include "cuda/instances.hpp"
#include "cuda/sm90_dense.cuh"

namespace openmsa::cuda {

void fill_attention(DenseParams& params, const MsaConfig& config, const TensorView& out, const TensorView& lse) {
  params.out = out.data;
  params.stride_out_token = out.stride[0];
  params.stride_out_head = out.stride[1];
  params.lse = static_cast<float*>(lse.data);
  params.stride_lse_token = lse.stride[0];
  params.num_groups = config.num_kv_heads;
  params.group_size = config.group_size();
  params.log_group = log2_ceil(config.group_size());
  params.scale = static_cast<float>(config.effective_softmax_scale());
  params.scale_log2 = params.scale * 1.4426950408889634f;
  params.slack = kSlack / params.scale_log2;
}

void launch_dense(DenseMode mode, const TensorView& q, const core::KeyBlocks& k, const core::KeyBlocks& v,
                  const core::Geometry& geo, const MsaConfig& config, const DenseParams& params, void* stream) {
  const int cluster = dense_cluster(mode);
  const auto num_clusters =
      std::min<std::int64_t>(num_multiprocessors() / cluster, std::int64_t{params.num_tiles} * config.num_kv_heads);
  const auto num_ctas = static_cast<unsigned>(num_clusters * cluster);
  const std::int64_t size = dtype_bytes(q.dtype);
  const std::int32_t heads = 1 << params.log_group;
  const CUtensorMap map_q =
      make_tensor_map(q.data, q.dtype, {config.head_dim, config.num_q_heads, geo.total_q},
                      {config.num_q_heads > 1 ? q.stride[1] * size : 16, geo.total_q > 1 ? q.stride[0] * size : 16},
                      {64, heads, kDenseRows / heads});
  const CUtensorMap map_k = key_map(k, geo, config.head_dim, config.num_kv_heads, config.block_size / cluster),
                    map_v = key_map(v, geo, config.head_dim, config.num_kv_heads, config.block_size / cluster);
  with_dtype(q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        with_size<0, 1, 2, 3>(static_cast<int>(mode), [&](auto which) {
          using Traits = DenseTraits<decltype(element), dim.value, block.value, static_cast<DenseMode>(which.value)>;
          launch(sm90_dense_kernel<Traits>, dim3(num_ctas), Traits::kThreads, Traits::kSmemBytes, stream, Order::kAfter, map_q,
                 map_k, map_v, params);
        });
      });
    });
  });
}

}  // namespace openmsa::cuda
