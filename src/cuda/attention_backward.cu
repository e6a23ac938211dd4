// Gradients of sparse_attention and dense_attention. Per chunk of query tokens: who visits which block, row statistics, the backward
// kernel, the partials of blocks that several items share, d_q out of the slots. After the last chunk: d_k and d_v out of their fp32 sums.
// No step's result depends on timing, so `deterministic` asks for nothing more.
#include "cuda/attention_backward.hpp"

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/sm90_backward.cuh"
#include "cuda/sums.hpp"

namespace openmsa::cuda {
namespace {

struct Scratch {
  Visits visits;
  std::int32_t log_group;
  void* slots;              // [chunk, Hkv, slots, Gp, D]: d_q of every visit
  float* rows;              // [chunk + 1, Hkv, 2, Gp]
  float* shared;            // [num_shared, 2, Bk, D]
  float* key_grad;          // [2, Hkv, S, D]
  std::int64_t key_values;  // Hkv * S * D
};

Scratch reserve(const core::AttentionBackwardParams& params, const VisitLimits& limits) {
  core::Arena& arena = *params.context.arena;
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  Scratch s{};
  s.log_group = log2_ceil(config.group_size());
  const std::int64_t slot_values = std::int64_t{config.head_dim} << s.log_group;
  s.visits = reserve_visits(arena, geo, config, !params.block_ids.given(), slot_values * dtype_bytes(params.q.dtype), limits);
  s.slots = arena.take<std::uint16_t>(static_cast<std::size_t>(s.visits.num_slots * slot_values));
  s.rows = arena.take<float>(static_cast<std::size_t>(num_row_values(s.visits.chunk, config.num_kv_heads, s.log_group)));
  s.shared = arena.take<float>(static_cast<std::size_t>(s.visits.num_shared * 2 * config.block_size * config.head_dim));
  s.key_values = config.num_kv_heads * geo.total_k * config.head_dim;
  s.key_grad = arena.take<float>(static_cast<std::size_t>(2 * s.key_values));
  return s;
}

void run_items(const core::AttentionBackwardParams& params, const Scratch& s, std::int64_t begin, std::int64_t end) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  void* stream = params.context.stream;
  launch_visits(s.visits, geo, config, params.block_ids, begin, end, stream);

  const BatchParams batch = batch_params(geo);
  const RowsParams rows{static_cast<const float*>(params.lse.data),
                        params.lse.stride[0],
                        params.out.data,
                        params.d_out.data,
                        params.out.stride[0],
                        params.out.stride[1],
                        params.d_out.stride[0],
                        params.d_out.stride[1],
                        s.rows,
                        static_cast<std::int32_t>(begin),
                        static_cast<std::int32_t>(end - begin),
                        config.num_kv_heads,
                        config.group_size(),
                        s.log_group};
  launch_backward_rows(rows, params.q.dtype, config.head_dim, stream);

  BackwardParams backward{};
  backward.batch = batch;
  backward.items = s.visits.items;
  backward.num_items = s.visits.num_items;
  backward.next_item = s.visits.next_item;
  backward.entries = s.visits.entries;
  backward.rows = s.rows;
  backward.key_grad[0] = s.key_grad;
  backward.key_grad[1] = s.key_grad + s.key_values;
  backward.shared = s.shared;
  backward.max_item = s.visits.max_item;
  backward.chunk_begin = static_cast<std::int32_t>(begin);
  backward.num_groups = config.num_kv_heads;
  backward.slots = s.visits.slots;
  backward.group_size = config.group_size();
  backward.log_group = s.log_group;
  backward.head_dim = config.head_dim;
  backward.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  const std::int64_t heads = std::int64_t{1} << s.log_group;
  const CUtensorMap map_q = row_map(params.q, heads), map_d_out = row_map(params.d_out, heads);
  const CUtensorMap map_k = key_map(params.k, geo, config.head_dim, config.num_kv_heads);
  const CUtensorMap map_v = key_map(params.v, geo, config.head_dim, config.num_kv_heads);
  const CUtensorMap map_slots = make_tensor_map(s.slots, params.q.dtype, {config.head_dim, s.visits.num_slots << s.log_group},
                                                {config.head_dim * dtype_bytes(params.q.dtype)}, {64, heads});
  with_dtype(params.q.dtype, [&](auto element) {
    using T = decltype(element);
    with_bound<64, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        using Traits = BackwardTraits<T, dim.value, block.value>;
        launch(sm90_backward_kernel<Traits>, dim3(num_multiprocessors()), Traits::kThreads, Traits::kSmemBytes, stream,
               Order::kAfter, map_q, map_d_out, map_k, map_v, map_slots, backward);
      });
    });
  });
  const KeyShareParams share{
      batch, s.visits.items,    s.visits.num_items, s.shared,       {backward.key_grad[0], backward.key_grad[1]},
      2,     s.visits.max_item, batch.total_k,      config.head_dim};
  launch_key_share(share, s.visits.max_items, s.visits.num_shared, stream);
}

void sum_keys(const core::AttentionBackwardParams& params, const float* sum, const TensorView& out, double scale) {
  const KeySumParams key_sum{sum,
                             out.data,
                             out.stride[0],
                             out.stride[1],
                             params.config.num_kv_heads,
                             static_cast<std::int32_t>(params.geo.total_k),
                             params.config.head_dim,
                             false,
                             static_cast<float>(scale)};
  launch_key_sum(key_sum, params.q.dtype, params.context.stream);
}

}  // namespace

void attention_backward_reserve(const core::AttentionBackwardParams& params, const VisitLimits& limits) { reserve(params, limits); }

void attention_backward(const core::AttentionBackwardParams& params, const VisitLimits& limits) {
  const DeviceGuard guard(params.q.device.index);
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  void* stream = params.context.stream;
  const Scratch s = reserve(params, limits);
  const double scale = config.effective_softmax_scale();
  check(
      cudaMemsetAsync(s.key_grad, 0, static_cast<std::size_t>(2 * s.key_values) * sizeof(float), static_cast<cudaStream_t>(stream)),
      "cudaMemsetAsync");
  const bool any_visits = geo.num_seqs > 0 && geo.total_k > 0;
  for (std::int64_t begin = 0; begin < geo.total_q; begin += s.visits.chunk) {
    const std::int64_t end = std::min(begin + s.visits.chunk, geo.total_q);
    SlotSumParams d_q{};
    d_q.lists = slot_lists(s.visits, geo, config, begin, end);
    if (any_visits) {
      run_items(params, s, begin, end);
    } else {
      d_q.lists.ranks = nullptr;
      d_q.lists.slots = 0;
    }
    d_q.partial = s.slots;
    d_q.out = params.d_q.data;
    d_q.stride_out_token = params.d_q.stride[0];
    d_q.stride_out_head = params.d_q.stride[1];
    d_q.group_size = config.group_size();
    d_q.log_group = s.log_group;
    d_q.scale = static_cast<float>(scale);
    launch_slot_sum(d_q, params.q.dtype, config.head_dim, stream);
  }
  sum_keys(params, s.key_grad, params.d_k, scale);
  sum_keys(params, s.key_grad + s.key_values, params.d_v, 1.0);
}

void sparse_attention_backward(const core::AttentionBackwardParams& params) { attention_backward(params, VisitLimits{}); }
void sparse_attention_backward_reserve(const core::AttentionBackwardParams& params) {
  attention_backward_reserve(params, VisitLimits{});
}
void dense_attention_backward(const core::AttentionBackwardParams& params) { attention_backward(params, VisitLimits{}); }
void dense_attention_backward_reserve(const core::AttentionBackwardParams& params) {
  attention_backward_reserve(params, VisitLimits{});
}

}  // namespace openmsa::cuda
