// The index branch's KL loss. Per chunk of query tokens: who visits which block, the teacher of every visit, the student's normalisers,
// then the student meets the teacher; partials of blocks that several items share, d_q_idx out of the slots, the items' losses. After
// the last chunk: d_k_idx out of its fp32 sums. No step's result depends on timing, so `deterministic` asks for nothing more.
#include "cuda/index_kl.hpp"

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/sm90_student.cuh"
#include "cuda/sm90_teacher.cuh"
#include "cuda/smxx_index_kl.cuh"
#include "cuda/sums.hpp"

namespace openmsa::cuda {
namespace {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

struct Scratch {
  Visits visits;
  std::int32_t log_group;
  float* rows;              // [chunk + 1, Hkv, 2, Gp]
  float* teacher;           // [chunk * Hkv * slots, Bk]: see teacher_row()
  float* partial_lse;       // [chunk, Hkv, slots]
  float* lse;               // [chunk, Hkv]
  float* item_loss;         // [max_items, Bk / 16]
  double* total;            // [1]
  void* slots_out;          // [chunk, Hkv, slots, Di]; this and the next two only with gradients
  float* shared;            // [num_shared, Bk, Di]
  float* key_grad;          // [Hkv, S, Di]
  std::int64_t key_values;  // Hkv * S * Di
};

bool wants_gradients(const core::IndexKlParams& params) { return params.d_q_idx.given(); }

// What a (token, group) weighs in the mean.
double loss_weight(const core::IndexKlParams& params) {
  return 1.0 / (static_cast<double>(params.num_tokens) * params.config.num_kv_heads);
}

Scratch reserve(const core::IndexKlParams& params, const VisitLimits& limits) {
  core::Arena& arena = *params.context.arena;
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  const bool gradients = wants_gradients(params);
  const auto floats = [&](std::int64_t count) { return arena.take<float>(static_cast<std::size_t>(count)); };
  Scratch s{};
  s.log_group = log2_ceil(config.group_size());
  s.key_values = config.num_kv_heads * geo.total_k * config.index_dim;
  if (gradients) s.key_grad = floats(s.key_values);
  const std::int64_t slot_bytes = (config.block_size + 1) * std::int64_t{sizeof(float)} + (gradients ? config.index_dim * 2 : 0);
  s.visits = reserve_visits(arena, geo, config, !params.block_ids.given(), slot_bytes, limits);
  const Visits& visits = s.visits;
  s.rows = floats(num_row_values(visits.chunk, config.num_kv_heads, s.log_group));
  s.teacher = floats(visits.num_slots * config.block_size);
  s.partial_lse = floats(visits.num_slots);
  s.lse = floats(visits.chunk * config.num_kv_heads);
  s.item_loss = floats(visits.max_items * (config.block_size / 16));
  s.total = arena.take<double>(1);
  if (!gradients) return s;
  s.slots_out = arena.take<std::uint16_t>(static_cast<std::size_t>(visits.num_slots * config.index_dim));
  s.shared = floats(visits.num_shared * config.block_size * config.index_dim);
  return s;
}

IndexQueries index_queries(const core::IndexKlParams& params) {
  return {params.q_idx.data, params.q_idx.stride[0], params.q_idx.stride[1], params.config.index_dim};
}

// Instances for 64 and 128 dims: between them, what is missing reads as zeros.
template <typename F>
void with_instance(DType dtype, std::int32_t dim, std::int32_t block_size, F&& f) {
  with_dtype(dtype, [&](auto element) {
    with_bound<64, 128>(dim, [&](auto bound) { with_size<64, 128>(block_size, [&](auto block) { f(element, bound, block); }); });
  });
}

// Of the main branch, or of the index branch.
template <bool kStudent>
void launch_teacher(const core::IndexKlParams& params, const Scratch& s, std::int32_t chunk_begin) {
  const MsaConfig& config = params.config;
  const std::int32_t dim = kStudent ? config.index_dim : config.head_dim;
  const double scale = kStudent ? config.effective_index_scale() : config.effective_softmax_scale();
  TeacherParams teacher{};
  teacher.batch = batch_params(params.geo);
  teacher.items = s.visits.items;
  teacher.num_items = s.visits.num_items;
  teacher.next_item = s.visits.next_item + (kStudent ? 1 : 0);
  teacher.entries = s.visits.entries;
  teacher.rows = s.rows;
  if (kStudent) teacher.queries = index_queries(params);
  teacher.out = kStudent ? s.partial_lse : s.teacher;
  teacher.chunk = static_cast<std::int32_t>(s.visits.chunk);
  teacher.chunk_begin = chunk_begin;
  teacher.num_groups = config.num_kv_heads;
  teacher.slots = s.visits.slots;
  teacher.group_size = kStudent ? 1 : config.group_size();
  teacher.log_group = kStudent ? 0 : s.log_group;
  teacher.scale_log2 = static_cast<float>(scale * kLog2E);
  teacher.mean = 1.f / static_cast<float>(config.group_size());
  const CUtensorMap map_q = row_map(kStudent ? params.q_idx : params.q, 1 << teacher.log_group);
  const CUtensorMap map_k =
      kStudent ? key_map(params.k_idx, params.geo, dim, 1) : key_map(params.k, params.geo, dim, config.num_kv_heads);
  with_instance(params.q.dtype, dim, config.block_size, [&](auto element, auto bound, auto block) {
    using Traits = TeacherTraits<decltype(element), bound.value, block.value, kStudent>;
    launch(sm90_teacher_kernel<Traits>, dim3(num_multiprocessors()), Traits::kThreads, Traits::kSmemBytes, params.context.stream,
           Order::kAfter, map_q, map_k, teacher);
  });
}

template <bool kGradients>
void launch_student(const core::IndexKlParams& params, const Scratch& s, std::int32_t chunk_begin) {
  const MsaConfig& config = params.config;
  StudentParams student{};
  student.batch = batch_params(params.geo);
  student.items = s.visits.items;
  student.num_items = s.visits.num_items;
  student.next_item = s.visits.next_item + 2;
  student.entries = s.visits.entries;
  student.queries = index_queries(params);
  student.teacher = s.teacher;
  student.lse = s.lse;
  student.item_loss = s.item_loss;
  student.slots_out = s.slots_out;
  student.key_grad = s.key_grad;
  student.shared = s.shared;
  student.max_item = s.visits.max_item;
  student.chunk_begin = chunk_begin;
  student.chunk = static_cast<std::int32_t>(s.visits.chunk);
  student.num_groups = config.num_kv_heads;
  student.slots = s.visits.slots;
  student.index_dim = config.index_dim;
  student.scale_log2 = static_cast<float>(config.effective_index_scale() * kLog2E);
  const CUtensorMap map_k = key_map(params.k_idx, params.geo, config.index_dim, 1);
  with_instance(params.q.dtype, config.index_dim, config.block_size, [&](auto element, auto bound, auto block) {
    using Traits = StudentTraits<decltype(element), bound.value, block.value, kGradients>;
    launch(sm90_student_kernel<Traits>, dim3(num_multiprocessors()), Traits::kThreads, Traits::kSmemBytes, params.context.stream,
           Order::kAfter, map_k, student);
  });
}

void run_items(const core::IndexKlParams& params, const Scratch& s, const SlotLists& lists) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  void* stream = params.context.stream;
  const Visits& visits = s.visits;
  const std::int32_t begin = lists.chunk_begin, end = begin + lists.chunk_tokens;
  launch_visits(visits, geo, config, params.block_ids, begin, end, stream);

  RowsParams rows{};
  rows.lse = static_cast<const float*>(params.lse.data);
  rows.stride_lse_token = params.lse.stride[0];
  rows.rows = s.rows;
  rows.chunk_begin = begin;
  rows.chunk_tokens = lists.chunk_tokens;
  rows.num_groups = config.num_kv_heads;
  rows.group_size = config.group_size();
  rows.log_group = s.log_group;
  launch_backward_rows(rows, params.q.dtype, config.head_dim, stream);
  launch_teacher<false>(params, s, begin);
  launch_teacher<true>(params, s, begin);
  launch(smxx_index_lse_kernel, dim3(blocks_for(std::int64_t{lists.chunk_tokens} * config.num_kv_heads * 32, kIndexLseThreads)),
         kIndexLseThreads, 0, stream, Order::kAfter, IndexLseParams{lists, s.partial_lse, s.lse});
  if (wants_gradients(params)) {
    launch_student<true>(params, s, begin);
    const KeyShareParams share{lists.batch, visits.items,    visits.num_items,    s.shared,        {s.key_grad, nullptr},
                               1,           visits.max_item, lists.batch.total_k, config.index_dim};
    launch_key_share(share, visits.max_items, visits.num_shared, stream);
  } else {
    launch_student<false>(params, s, begin);
  }
  if (!params.loss.given()) return;
  const IndexLossParams loss{s.item_loss,
                             visits.num_items,
                             config.block_size / 16,
                             begin == 0,
                             end == geo.total_q,
                             s.total,
                             static_cast<float*>(params.loss.data),
                             kLn2 * loss_weight(params)};
  launch(smxx_index_loss_kernel, dim3(1), kIndexLossThreads, 0, stream, Order::kAfter, loss);
}

}  // namespace

void index_kl_loss_reserve(const core::IndexKlParams& params, const VisitLimits& limits) { reserve(params, limits); }

void index_kl_loss(const core::IndexKlParams& params, const VisitLimits& limits) {
  const DeviceGuard guard(params.q.device.index);
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  void* stream = params.context.stream;
  const Scratch s = reserve(params, limits);
  const auto zero = [&](void* data, std::int64_t bytes) {
    check(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  };
  const bool gradients = wants_gradients(params), any_visits = geo.num_seqs > 0 && geo.total_k > 0 && geo.total_q > 0;
  const auto scale = static_cast<float>(config.effective_index_scale() * loss_weight(params));
  if (gradients) zero(s.key_grad, s.key_values * std::int64_t{sizeof(float)});
  if (params.loss.given() && !any_visits) zero(params.loss.data, sizeof(float));
  for (std::int64_t begin = 0; begin < geo.total_q; begin += s.visits.chunk) {
    SlotLists lists = slot_lists(s.visits, geo, config, begin, std::min(begin + s.visits.chunk, geo.total_q));
    if (any_visits) {
      run_items(params, s, lists);
    } else {
      lists.ranks = nullptr;
      lists.slots = 0;
    }
    if (!gradients) continue;
    const SlotSumParams d_q_idx{lists, s.slots_out, params.d_q_idx.data, params.d_q_idx.stride[0], params.d_q_idx.stride[1], 1,
                                0,     scale};
    launch_slot_sum(d_q_idx, params.q.dtype, config.index_dim, stream);
  }
  if (!gradients) return;
  const KeySumParams d_k_idx{s.key_grad,
                             params.d_k_idx.data,
                             params.d_k_idx.stride[0],
                             0,
                             config.num_kv_heads,
                             static_cast<std::int32_t>(geo.total_k),
                             config.index_dim,
                             true,
                             scale};
  launch_key_sum(d_k_idx, params.q.dtype, stream);
}

void index_kl_loss(const core::IndexKlParams& params) { index_kl_loss(params, VisitLimits{}); }
void index_kl_loss_reserve(const core::IndexKlParams& params) { index_kl_loss_reserve(params, VisitLimits{}); }

}  // namespace openmsa::cuda
