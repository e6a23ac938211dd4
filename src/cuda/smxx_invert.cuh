// Inverts the selection lists of a chunk of query tokens: for each (group, block) the tokens that chose it, and work items over them.
//
// Roles   count: a thread a list slot; an atomic on the block's counter returns the slot's rank in the block. Where the counters of a
//         group fit, a CTA counts 8,192 slots in shared memory first: a million atomics on 4,096 counters take 60 us. scan: one CTA
//         turns the counters into each block's first entry and first item. fill: a thread a slot writes its entry, and the first of
//         an item the item. Ranks inside a block depend on timing; results do not, since every (token, slot) writes its own partial.
// Rest    the tokens that the union does not serve at all are listed for smxx_combine while counting.
// Skipped slots that the union took, slots of -1, and slots that break the rules (reported).
#pragma once

#include "cuda/invert.hpp"
#include "cuda/ptx/tile.cuh"
#include "cuda/scan.cuh"

namespace openmsa::cuda {

inline constexpr int kInvertThreads = 256, kCountThreads = 1024, kCountSlots = 8;
inline constexpr std::int64_t kMaxSharedBlocks = 12288;  // 48 KB of counters: two CTAs fit a multiprocessor

struct InvertSlot {
  std::int64_t index;  // into ranks
  std::int64_t key;    // into counts
  std::uint32_t entry;
  std::int32_t seq, block, group;
  bool in_range, live;
  bool rest;  // the first of a list that the union does not serve at all
};

template <bool kCheck>
__device__ inline InvertSlot invert_slot(const InvertParams& params, int token, int group, int i) {
  InvertSlot slot{};
  if (token >= params.chunk_tokens || group >= params.num_groups) return slot;
  const std::int64_t row = std::int64_t{token} * params.num_groups + group;
  slot.index = row * params.top_k + i;
  slot.in_range = true;
  const int packed = params.chunk_begin + token;
  const std::int32_t* ids = params.block_ids + std::int64_t{packed} * params.stride_token + group * params.stride_group;
  const int id = ids[i];
  const std::uint32_t taken = params.taken ? params.taken[row] : 0;
  slot.rest = params.rest && i == 0 && taken == 0;
  if (id == -1 || (taken >> i & 1) != 0) return slot;
  const int seq = params.batch.sequence_of(packed);
  Sequence sequence;
  if (!params.batch.load(seq, &sequence)) return slot;
  const int visible = sequence.num_visible(sequence.first_position + packed - sequence.query_begin);
  const std::int64_t reported = std::int64_t{packed} * params.num_groups + group;
  if (id < -1 || id * std::int64_t{params.batch.block_size} >= visible) {
    if (kCheck) report(params.batch.fault, FaultCode::kBlockId, reported, i, id);
    return slot;
  }
  if (i > 0 && (ids[i - 1] < 0 || ids[i - 1] >= id)) {
    if (kCheck) report(params.batch.fault, FaultCode::kBlockOrder, reported, i, id);
    return slot;
  }
  if (kCheck) params.batch.page(sequence, seq, id);  // reported; reads as zeros
  const int blocks = params.block_begin[params.batch.num_seqs];
  if (blocks == 0) return slot;  // more than there is room for, by broken offsets: nobody serves them
  slot.key = std::int64_t{group} * blocks + params.block_begin[seq] + id;
  slot.seq = seq;
  slot.block = id;
  slot.group = group;
  slot.entry = static_cast<std::uint32_t>(token) << kSlotBits | static_cast<std::uint32_t>(i);
  slot.live = true;
  return slot;
}

// Of slot `index` of the chunk, counted over all.
template <bool kCheck>
__device__ inline InvertSlot invert_slot(const InvertParams& params, std::int64_t index) {
  const std::int64_t row = index / params.top_k;
  if (row >= std::int64_t{params.chunk_tokens} * params.num_groups) return InvertSlot{};
  return invert_slot<kCheck>(params, static_cast<int>(row / params.num_groups), static_cast<int>(row % params.num_groups),
                             static_cast<int>(index % params.top_k));
}

__global__ void __launch_bounds__(kInvertThreads) smxx_invert_count_kernel(const __grid_constant__ InvertParams params) {
  const InvertSlot slot = invert_slot<true>(params, std::int64_t{blockIdx.x} * kInvertThreads + threadIdx.x);
  if (slot.rest) params.rest[atomicAdd(params.num_rest, 1)] = static_cast<std::int32_t>(slot.index / params.top_k);
  if (slot.in_range) params.ranks[slot.index] = slot.live ? atomicAdd(&params.counts[slot.key], 1) : -1;
}

__global__ void __launch_bounds__(kCountThreads) smxx_invert_count_shared_kernel(const __grid_constant__ InvertParams params) {
  auto* counts = reinterpret_cast<std::int32_t*>(ptx::dynamic_smem());
  __shared__ int num_rest, rest_begin;
  const int group = static_cast<int>(blockIdx.y), blocks = params.block_begin[params.batch.num_seqs];
  for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kCountThreads) counts[b] = 0;
  if (threadIdx.x == 0) num_rest = 0;
  __syncthreads();
  const auto index_of = [&](int n) {  // of the group's slots
    return (static_cast<int>(blockIdx.x) * kCountSlots + n) * kCountThreads + static_cast<int>(threadIdx.x);
  };
  int keys[kCountSlots], ranks[kCountSlots];  // of the group; a slot without a key has its final rank
  int rest[kCountSlots];                      // place among the CTA's, or -1
#pragma unroll
  for (int n = 0; n < kCountSlots; ++n) {
    const InvertSlot slot = invert_slot<true>(params, index_of(n) / params.top_k, group, index_of(n) % params.top_k);
    rest[n] = slot.rest ? atomicAdd(&num_rest, 1) : -1;
    keys[n] = slot.live ? static_cast<int>(slot.key - std::int64_t{group} * blocks) : -1;
    ranks[n] = slot.live ? atomicAdd(&counts[keys[n]], 1) : -1;
  }
  __syncthreads();
  if (threadIdx.x == 0 && num_rest > 0) rest_begin = atomicAdd(params.num_rest, num_rest);
  for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kCountThreads) {
    if (counts[b] > 0) counts[b] = atomicAdd(&params.counts[std::int64_t{group} * blocks + b], counts[b]);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCountSlots; ++n) {
    const int token = index_of(n) / params.top_k;
    if (token >= params.chunk_tokens) continue;
    const std::int64_t pair = std::int64_t{token} * params.num_groups + group;
    if (rest[n] >= 0) params.rest[rest_begin + rest[n]] = static_cast<std::int32_t>(pair);
    params.ranks[pair * params.top_k + index_of(n) % params.top_k] = ranks[n] + (keys[n] < 0 ? 0 : counts[keys[n]]);
  }
}

__global__ void __launch_bounds__(kScanThreads) smxx_invert_scan_kernel(const __grid_constant__ InvertParams params) {
  __shared__ int sums[32];
  const int total = params.num_groups * params.block_begin[params.batch.num_seqs];
  constexpr int kRun = 4;  // consecutive keys a thread
  int num_entries = 0, num_items = 0;
  for (int base = 0; base < total; base += kRun * kScanThreads) {
    const int first = base + static_cast<int>(threadIdx.x) * kRun;
    int counts[kRun], entries = 0, items = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      counts[i] = first + i < total ? params.counts[first + i] : 0;
      entries += counts[i];
      items += (counts[i] + params.max_item - 1) / params.max_item;
    }
    int all_entries, all_items;
    int entry = num_entries + scan_prefix(entries, sums, &all_entries);
    int item = num_items + scan_prefix(items, sums, &all_items);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i >= total) break;
      params.offsets[first + i] = entry;
      params.first_items[first + i] = item;
      entry += counts[i];
      item += (counts[i] + params.max_item - 1) / params.max_item;
    }
    num_entries += all_entries;
    num_items += all_items;
  }
  if (threadIdx.x == 0) *params.num_items = num_items;
}

__global__ void __launch_bounds__(kInvertThreads) smxx_invert_fill_kernel(const __grid_constant__ InvertParams params) {
  const InvertSlot slot = invert_slot<false>(params, std::int64_t{blockIdx.x} * kInvertThreads + threadIdx.x);
  if (!slot.live) return;
  const int rank = params.ranks[slot.index], begin = params.offsets[slot.key] + rank;
  params.entries[begin] = slot.entry;
  if (rank % params.max_item != 0) return;
  // The first of an item writes it.
  params.items[params.first_items[slot.key] + rank / params.max_item] = {slot.seq, slot.block, slot.group, begin,
                                                                         min(params.max_item, params.counts[slot.key] - rank)};
}

}  // namespace openmsa::cuda
