#include "cuda/visits.hpp"

#include <algorithm>

#include "cuda/invert.hpp"
#include "cuda/smxx_block_begin.cuh"
#include "cuda/smxx_every_block.cuh"
#include "cuda/smxx_sort_entries.cuh"

namespace openmsa::cuda {
namespace {

constexpr std::int64_t kFewestTokens = 64;  // of a chunk: fewer would leave the tensor cores idle

std::int64_t chunk_tokens(const core::Geometry& geo, bool every_block, std::int64_t token_bytes, const VisitLimits& limits) {
  std::int64_t most = std::min<std::int64_t>(limits.chunk_tokens, kMaxSortTokens);
  // Of every block's visitors in a chunk one item is made, so that no two share a block.
  if (every_block && geo.max_seqlen_q > limits.item_tokens) most = std::min<std::int64_t>(most, limits.item_tokens);
  const std::int64_t fit = limits.slot_bytes_total / std::max<std::int64_t>(token_bytes, 1) / kFewestTokens * kFewestTokens;
  return std::min({std::max(fit, kFewestTokens), most, geo.total_q});
}

}  // namespace

Visits reserve_visits(core::Arena& arena, const core::Geometry& geo, const MsaConfig& config, bool every_block,
                      std::int64_t slot_bytes, const VisitLimits& limits) {
  Visits v{};
  const std::int64_t groups = config.num_kv_heads;
  v.slots = every_block ? static_cast<std::int32_t>(geo.max_num_blocks()) : config.top_k;
  v.max_item = limits.item_tokens;
  v.chunk = chunk_tokens(geo, every_block, groups * v.slots * slot_bytes, limits);
  v.num_slots = v.chunk * groups * v.slots;
  if (every_block) {
    const std::int64_t seqs = std::min<std::int64_t>(geo.num_seqs, v.chunk);
    v.max_items = groups * std::min(seqs * geo.max_num_blocks(), geo.total_k / geo.block_size + seqs);
  } else {
    v.num_keys = groups * (geo.total_k / geo.block_size + geo.num_seqs);
    v.max_items = std::min(v.num_slots, v.num_slots / v.max_item + v.num_keys);
    v.num_shared = 2 * ((v.num_slots + v.max_item - 1) / v.max_item);
  }
  v.items = arena.take<AttendItem>(static_cast<std::size_t>(v.max_items));
  const auto num_zeros = static_cast<std::size_t>(kVisitCounters + 1 + 2 * v.num_keys);
  v.next_item = arena.take<std::int32_t>(num_zeros);
  v.zero_bytes = num_zeros * sizeof(std::int32_t);
  v.num_items = v.next_item + kVisitCounters;
  if (every_block) return v;
  v.counts = v.num_items + 1;
  v.offsets = v.counts + v.num_keys;
  v.first_items = arena.take<std::int32_t>(static_cast<std::size_t>(v.num_keys));
  v.block_begin = arena.take<std::int32_t>(static_cast<std::size_t>(geo.num_seqs + 1));
  v.ranks = arena.take<std::int32_t>(static_cast<std::size_t>(v.num_slots));
  v.unsorted = arena.take<std::uint32_t>(static_cast<std::size_t>(v.num_slots));
  v.entries = arena.take<std::uint32_t>(static_cast<std::size_t>(v.num_slots));
  return v;
}

void launch_visits(const Visits& visits, const core::Geometry& geo, const MsaConfig& config, const TensorView& block_ids,
                   std::int64_t begin, std::int64_t end, void* stream) {
  check(cudaMemsetAsync(visits.next_item, 0, visits.zero_bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  const BatchParams batch = batch_params(geo);
  const auto chunk_begin = static_cast<std::int32_t>(begin), chunk_tokens = static_cast<std::int32_t>(end - begin);
  if (!block_ids.given()) {
    const EveryBlockParams every{
        batch,        chunk_begin,     chunk_tokens, config.num_kv_heads, static_cast<std::int32_t>(visits.max_items),
        visits.items, visits.num_items};
    launch(smxx_every_block_kernel, dim3(1), kScanThreads, 0, stream, Order::kAfter, every);
    return;
  }
  const BlockBeginParams blocks{batch, static_cast<std::int32_t>(visits.num_keys / config.num_kv_heads), visits.block_begin};
  launch(smxx_block_begin_kernel, dim3(1), kScanThreads, 0, stream, Order::kAfter, blocks);
  InvertParams invert{};
  invert.batch = batch;
  invert.block_ids = static_cast<const std::int32_t*>(block_ids.data);
  invert.stride_token = block_ids.stride[0];
  invert.stride_group = block_ids.stride[1];
  invert.block_begin = visits.block_begin;
  invert.chunk_begin = chunk_begin;
  invert.chunk_tokens = chunk_tokens;
  invert.num_groups = config.num_kv_heads;
  invert.top_k = config.top_k;
  invert.max_blocks = visits.num_keys / config.num_kv_heads;
  invert.max_item = visits.max_item;
  invert.counts = visits.counts;
  invert.offsets = visits.offsets;
  invert.first_items = visits.first_items;
  invert.ranks = visits.ranks;
  invert.entries = visits.unsorted;
  invert.items = visits.items;
  invert.num_items = visits.num_items;
  launch_invert(invert, stream);
  const SortEntriesParams sort{visits.block_begin, visits.counts, visits.offsets,     visits.unsorted,
                               visits.entries,     geo.num_seqs,  config.num_kv_heads};
  launch(smxx_sort_entries_kernel, dim3(static_cast<unsigned>(visits.num_keys)), kSortThreads, 0, stream, Order::kAfter, sort);
}

SlotLists slot_lists(const Visits& visits, const core::Geometry& geo, const MsaConfig& config, std::int64_t begin,
                     std::int64_t end) {
  return {batch_params(geo),   visits.ranks, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end - begin),
          config.num_kv_heads, visits.slots};
}

}  // namespace openmsa::cuda
