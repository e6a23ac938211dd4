#include "cuda/repair.hpp"

#include <algorithm>

#include "cuda/dense_params.hpp"
#include "cuda/instances.hpp"
#include "cuda/launch.hpp"
#include "cuda/smxx_repair.cuh"

namespace openmsa::cuda {
namespace {

static_assert(dense_tile_tokens(DenseMode::kPaired, 0) <= kRepairReach);

template <typename Params>
void launch_repair(const Params& params, const TensorView& block_ids) {
  const MsaConfig& config = params.config;
  const std::int64_t size = dtype_bytes(params.q.dtype);
  RepairParams device{};
  device.batch = batch_params(params.geo);
  device.q = params.q.data;
  device.k = params.k.data;
  device.v = params.v.data;
  device.stride_q_token = params.q.stride[0];
  device.stride_q_head = params.q.stride[1];
  device.stride_k_token = params.k.stride_token / size;
  device.stride_k_head = params.k.stride_head / size;
  device.stride_k_page = params.k.stride_page / size;
  device.stride_v_token = params.v.stride_token / size;
  device.stride_v_head = params.v.stride_head / size;
  device.stride_v_page = params.v.stride_page / size;
  device.block_ids = static_cast<const std::int32_t*>(block_ids.data);
  device.stride_id_token = block_ids.stride[0];
  device.stride_id_group = block_ids.stride[1];
  device.out = params.out.data;
  device.stride_out_token = params.out.stride[0];
  device.stride_out_head = params.out.stride[1];
  device.num_groups = config.num_kv_heads;
  device.group_size = config.group_size();
  device.head_dim = config.head_dim;
  device.top_k = config.top_k;
  device.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  const std::int64_t rows = params.geo.total_q * config.num_kv_heads;
  const unsigned grid = std::min<unsigned>(blocks_for(rows, kRepairRows), 4 * num_multiprocessors());
  with_dtype(params.q.dtype, [&](auto element) {
    launch(smxx_repair_kernel<decltype(element)>, dim3(grid), kRepairThreads, 0, params.context.stream, Order::kDependent, device);
  });
}

}  // namespace

void launch_repair(const core::SparseAttentionParams& params) { launch_repair(params, params.block_ids); }
void launch_repair(const core::DenseAttentionParams& params) { launch_repair(params, TensorView{}); }

}  // namespace openmsa::cuda
