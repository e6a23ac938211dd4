// Inverts the selection lists of a chunk of query tokens: for each (group, block) the tokens that chose it, and work items over them.
//
// Roles   count: a thread a list slot; an atomic on the block's counter returns the slot's rank in the block. items: one CTA scans the
//         counters, writes each block's first entry and cuts its tokens into items. fill: a thread a slot writes its entry.
//         Ranks inside a block depend on timing; results do not, since every (token, slot) writes its own partial.
// Skipped tokens of tiles that the union took (num_union > 0), slots of -1, and slots that break the rules (reported).
#pragma once

#include "cuda/invert.hpp"
#include "cuda/scan.cuh"

namespace openmsa::cuda {

struct InvertSlot {
  std::int64_t index;  // into ranks
  std::int64_t key;    // into counts
  std::uint32_t entry;
  bool in_range, live;
};

template <bool kCheck>
__device__ inline InvertSlot invert_slot(const InvertParams& params) {
  InvertSlot slot{};
  slot.index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t row = slot.index / params.top_k;
  const int i = static_cast<int>(slot.index % params.top_k);
  if (row >= std::int64_t{params.chunk_tokens} * params.num_groups) return slot;
  slot.in_range = true;
  const int token = static_cast<int>(row / params.num_groups), group = static_cast<int>(row % params.num_groups);
  const int packed = params.chunk_begin + token;
  const std::int32_t* ids = params.block_ids + std::int64_t{packed} * params.stride_token + group * params.stride_group;
  const int id = ids[i];
  if (id == -1 || (params.taken && params.taken[row] != 0)) return slot;
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
  slot.key = std::int64_t{group} * params.block_begin[params.batch.num_seqs] + params.block_begin[seq] + id;
  slot.entry = static_cast<std::uint32_t>(token) << kSlotBits | static_cast<std::uint32_t>(i);
  slot.live = true;
  return slot;
}

__global__ void __launch_bounds__(256) smxx_invert_count_kernel(const __grid_constant__ InvertParams params) {
  const InvertSlot slot = invert_slot<true>(params);
  if (slot.in_range) params.ranks[slot.index] = slot.live ? atomicAdd(&params.counts[slot.key], 1) : -1;
}

__global__ void __launch_bounds__(256) smxx_invert_fill_kernel(const __grid_constant__ InvertParams params) {
  const InvertSlot slot = invert_slot<false>(params);
  if (slot.live) params.entries[params.offsets[slot.key] + params.ranks[slot.index]] = slot.entry;
}

__global__ void __launch_bounds__(kScanThreads) smxx_invert_items_kernel(const __grid_constant__ InvertParams params) {
  __shared__ int sums[32];
  const int blocks = params.block_begin[params.batch.num_seqs], total = params.num_groups * blocks;
  constexpr int kRun = 4;  // consecutive keys a thread
  int num_entries = 0, num_items = 0, seq = 0;
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
      if (first + i < total) params.offsets[first + i] = entry;
      if (counts[i] == 0) continue;
      const int group = (first + i) / blocks, global = (first + i) % blocks;
      if (params.block_begin[seq] > global || params.block_begin[seq + 1] <= global) {
        int low = 0, high = params.batch.num_seqs;
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (params.block_begin[middle] <= global)
            low = middle;
          else
            high = middle;
        }
        seq = low;
      }
      for (int c = 0; c < counts[i]; c += params.max_item, ++item) {
        params.items[item] = {seq, global - params.block_begin[seq], group, entry + c, min(params.max_item, counts[i] - c)};
      }
      entry += counts[i];
    }
    num_entries += all_entries;
    num_items += all_items;
  }
  if (threadIdx.x == 0) *params.num_items = num_items;
}

}  // namespace openmsa::cuda
