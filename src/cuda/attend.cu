#include "cuda/attend.hpp"

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/invert.hpp"
#include "cuda/repair.hpp"
#include "cuda/sm90_attend.cuh"
#include "cuda/smxx_combine.cuh"
#include "cuda/union.hpp"
#include "cuda/union_params.hpp"

namespace openmsa::cuda {
namespace {

constexpr std::int32_t kMaxItem = 512;  // tokens of a work item; 256 to 2,048 measure within 3%

std::int64_t max_total_blocks(const core::Geometry& geo) {
  if (geo.paged()) return geo.num_seqs * geo.max_num_blocks();
  return geo.total_k / geo.block_size + geo.num_seqs;
}

bool can_unite(const AttendScratch& scratch) { return scratch.log_group == kUnionLogGroup; }

}  // namespace

AttendScratch reserve_attend(const core::SparseAttentionParams& params, std::int64_t max_chunk) {
  core::Arena& arena = *params.context.arena;
  const MsaConfig& config = params.config;
  AttendScratch s{};
  s.chunk = std::min(params.geo.total_q, max_chunk);
  s.num_blocks = max_total_blocks(params.geo);
  s.log_group = log2_ceil(config.group_size());
  const std::int64_t pairs = s.chunk * config.num_kv_heads;
  s.num_slots = pairs * config.top_k;
  const auto take = [&](std::int64_t count) { return arena.take<std::int32_t>(static_cast<std::size_t>(count)); };
  s.partial = arena.take<std::uint16_t>(static_cast<std::size_t>((s.num_slots << s.log_group) * config.head_dim));
  s.partial_lse = arena.take<float>(static_cast<std::size_t>(s.num_slots << s.log_group));
  s.ranks = take(s.num_slots);
  s.entries = arena.take<std::uint32_t>(static_cast<std::size_t>(s.num_slots));
  const std::int64_t keys = config.num_kv_heads * s.num_blocks;
  s.items = arena.take<AttendItem>(static_cast<std::size_t>(s.num_slots / kMaxItem + keys));
  s.taken = arena.take<std::uint32_t>(static_cast<std::size_t>(pairs));
  s.first_items = take(keys);
  s.offsets = take(2 * keys + 6);
  s.counts = s.offsets + keys;
  s.zero_bytes = static_cast<std::size_t>(2 * keys + 6) * sizeof(std::int32_t);
  s.next_item = s.counts + keys;
  s.num_work = s.next_item + 1;
  s.next_work = s.num_work + 1;
  s.num_items = s.next_work + 1;
  s.num_rest = s.num_items + 1;
  s.next_ticket = s.num_rest + 1;
  s.rest = take(pairs);
  s.plan = reserve_plan(arena, params.geo, s.chunk, kUnionTokens);
  const std::int64_t tiles = std::int64_t{s.plan.capacity} * config.num_kv_heads;
  s.union_entries = arena.take<std::uint32_t>(static_cast<std::size_t>(tiles * kMaxUnion));
  s.num_entries = take(tiles);
  s.work = take(tiles);
  return s;
}

void attend_chunk(const core::SparseAttentionParams& params, const AttendScratch& s, std::int64_t begin, std::int64_t end) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  void* stream = params.context.stream;
  const BatchParams batch = batch_params(geo);
  const auto chunk_begin = static_cast<std::int32_t>(begin), chunk_tokens = static_cast<std::int32_t>(end - begin);
  const auto* ids = static_cast<const std::int32_t*>(params.block_ids.data);
  const std::int64_t stride_token = params.block_ids.stride[0], stride_group = params.block_ids.stride[1];
  check(cudaMemsetAsync(s.offsets, 0, s.zero_bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  launch_plan(s.plan, batch, begin, end, kUnionTokens, stream);

  const UnionScratch unite{batch,       s.plan.tiles, s.plan.capacity, s.union_entries, s.num_entries, s.work,     s.num_work,
                           s.next_work, s.taken,      s.ranks,         s.partial,       s.partial_lse, chunk_begin};
  std::uint32_t* taken = nullptr;
  if (can_unite(s)) {
    taken = s.taken;
    // Tokens of a broken sequence are in no tile; nobody serves them.
    check(cudaMemsetAsync(taken, 0, static_cast<std::size_t>(chunk_tokens) * config.num_kv_heads * sizeof(std::int32_t),
                          static_cast<cudaStream_t>(stream)),
          "cudaMemsetAsync");
    launch_union_route(params, unite);
  }
  InvertParams invert{};
  invert.batch = batch;
  invert.block_ids = ids;
  invert.stride_token = stride_token;
  invert.stride_group = stride_group;
  invert.block_begin = s.plan.block_begin;
  invert.taken = taken;
  invert.chunk_begin = chunk_begin;
  invert.chunk_tokens = chunk_tokens;
  invert.num_groups = config.num_kv_heads;
  invert.top_k = config.top_k;
  invert.max_blocks = s.num_blocks;
  invert.max_item = kMaxItem;
  invert.counts = s.counts;
  invert.offsets = s.offsets;
  invert.first_items = s.first_items;
  invert.ranks = s.ranks;
  invert.entries = s.entries;
  invert.items = s.items;
  invert.num_items = s.num_items;
  invert.rest = taken ? s.rest : nullptr;
  invert.num_rest = s.num_rest;
  launch_invert(invert, stream);

  AttendParams attend{};
  attend.batch = batch;
  attend.items = s.items;
  attend.num_items = s.num_items;
  attend.next_item = s.next_item;
  attend.entries = s.entries;
  attend.partial_lse = s.partial_lse;
  attend.chunk_begin = chunk_begin;
  attend.num_groups = config.num_kv_heads;
  attend.top_k = config.top_k;
  attend.group_size = config.group_size();
  attend.log_group = s.log_group;
  attend.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  const std::int32_t heads = 1 << s.log_group;
  const CUtensorMap map_q = row_map(params.q, heads);
  const CUtensorMap map_k = key_map(params.k, geo, config.head_dim, config.num_kv_heads);
  const CUtensorMap map_v = key_map(params.v, geo, config.head_dim, config.num_kv_heads);
  const CUtensorMap map_partial = make_tensor_map(s.partial, params.q.dtype, {config.head_dim, s.num_slots << s.log_group},
                                                  {config.head_dim * dtype_bytes(params.q.dtype)}, {64, heads});
  with_dtype(params.q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        using Traits = AttendTraits<decltype(element), dim.value, block.value>;
        launch(sm90_attend_kernel<Traits>, dim3(num_multiprocessors()), Traits::kThreads, Traits::kSmemBytes, stream, Order::kAfter,
               map_q, map_k, map_v, map_partial, attend);
      });
    });
  });
  if (can_unite(s)) launch_union(params, unite);
}

void combine_chunk(const core::SparseAttentionParams& params, const AttendScratch& s, std::int64_t begin, std::int64_t end,
                   Order order) {
  const MsaConfig& config = params.config;
  const auto chunk_begin = static_cast<std::int32_t>(begin), chunk_tokens = static_cast<std::int32_t>(end - begin);
  const CombineParams combine{s.partial,
                              s.partial_lse,
                              s.ranks,
                              can_unite(s) ? s.rest : nullptr,
                              s.num_rest,
                              s.next_ticket,
                              params.out.data,
                              params.out.stride[0],
                              params.out.stride[1],
                              static_cast<float*>(params.lse.data),
                              params.lse.stride[0],
                              chunk_begin,
                              chunk_tokens,
                              config.num_kv_heads,
                              config.top_k,
                              config.group_size(),
                              s.log_group};
  with_dtype(params.q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_bound<16, 32>(config.top_k, [&](auto bound) {
        using Traits = CombineTraits<decltype(element), dim.value, bound.value>;
        const std::int64_t threads = (std::int64_t{chunk_tokens} * config.num_kv_heads << s.log_group) * Traits::kParts;
        launch(smxx_combine_kernel<Traits>,
               dim3(std::min(blocks_for(threads, kCombineThreads * kCombineTurns),
                             static_cast<unsigned>(num_multiprocessors() * Traits::kCtas))),
               kCombineThreads, 0, params.context.stream, order, combine);
      });
    });
  });
}

float combine_us(const MsaConfig& config) {
  constexpr float kBytesPerUs = 47e3f;  // a multiprocessor, beside others that score
  return static_cast<float>(((config.top_k + 1) << log2_ceil(config.group_size())) * config.head_dim * 2) / kBytesPerUs;
}

void sparse_attention_reserve(const core::SparseAttentionParams& params) { reserve_attend(params); }

void sparse_attention(const core::SparseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  const AttendScratch scratch = reserve_attend(params);
  for (std::int64_t begin = 0; begin < params.geo.total_q; begin += scratch.chunk) {
    const std::int64_t end = std::min(begin + scratch.chunk, params.geo.total_q);
    attend_chunk(params, scratch, begin, end);
    combine_chunk(params, scratch, begin, end, Order::kAfter);
  }
  launch_repair(params);
}

}  // namespace openmsa::cuda
