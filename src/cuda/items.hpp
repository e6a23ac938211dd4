// Visits as kernels see them: which work items share a block, and which slots of a query token hold a result.
#pragma once

#include <cuda_runtime.h>

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
#include "cuda/ptx/barrier.cuh"
#endif

namespace openmsa::cuda {

// The place of an item's fp32 partial where its block has several items in the chunk. Of a block's items all but the last are
// max_item long, so no two begin in one stretch of max_item entries, and of two blocks that meet in a stretch one begins there and
// the other ends: every item has a place of its own among 2 * ceil(entries / max_item).
__host__ __device__ inline std::int32_t shared_slot(std::int32_t begin, std::int32_t max_item, bool first) {
  return 2 * (begin / max_item) + (first ? 1 : 0);
}

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
__device__ __forceinline__ bool same_block(const AttendItem& a, const AttendItem& b) {
  return a.seq == b.seq && a.block == b.block && a.group == b.group;
}

// Item `index` goes on where the one before it stopped, or is gone on with: items of a block are neighbours.
__device__ __forceinline__ bool item_continues(const AttendItem* items, int index) {
  return index > 0 && same_block(items[index - 1], items[index]);
}
__device__ __forceinline__ bool item_shared(const AttendItem* items, int index, int num_items) {
  return item_continues(items, index) || (index + 1 < num_items && item_continues(items, index + 1));
}

// How the warps of a producer warpgroup share the walk over the items: the last warp takes an item from the counter, when the others
// have nothing left to load of the one before, and tells it through shared memory; it then loads the block's keys, while the others
// load a stage each in turn. One warp alone is a chain of about 1,300 cycles a stage, longer than the consumers take.
struct ItemFeed {
  AttendItem item;
  std::int32_t index;
};
inline constexpr int kProducerThreads = 128, kItemWarp = 3, kFeedBarrier = 15;

// The next item, for all threads of the producer warpgroup, and its sequence; an item of count 0 where there is none. Its index.
template <bool kInTurn = false>  // BatchParams::load_in_turn
__device__ __forceinline__ int take_item(ItemFeed* feed, const BatchParams& batch, const AttendItem* items,
                                         const std::int32_t* num_items, std::int32_t* next_item, AttendItem* item,
                                         Sequence* sequence) {
  ptx::named_barrier(kFeedBarrier, kProducerThreads);
  if (threadIdx.x == kItemWarp * 32) {
    const int index = atomicAdd(next_item, 1);
    *feed = {index < *num_items ? items[index] : AttendItem{}, index};
  }
  ptx::named_barrier(kFeedBarrier, kProducerThreads);
  *item = feed->item;
  *sequence = Sequence{};
  if (item->count > 0) kInTurn ? batch.load_in_turn(item->seq, sequence) : batch.load<false>(item->seq, sequence);
  return feed->index;
}

// Visit `at` of an item: x its token of the chunk, y its slot. `entries` as Visits has them; null: every block.
__device__ __forceinline__ int2 item_visit(const std::uint32_t* entries, const AttendItem& item, int at) {
  if (!entries) return int2{item.begin + at, item.block};
  const std::uint32_t entry = entries[item.begin + at];
  return int2{static_cast<int>(entry >> kSlotBits), static_cast<int>(entry & ((1u << kSlotBits) - 1))};
}
#endif

// Slots of the pairs (token of the chunk, group) of a chunk; pair = token * num_groups + group.
struct SlotLists {
  BatchParams batch;
  const std::int32_t* ranks;  // [chunk_tokens, Hkv, slots], -1: no visit; null: every block, slot b being block b
  std::int32_t chunk_begin, chunk_tokens, num_groups, slots;

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
  // Visits of a pair lie in slots 0 .. end - 1, of which has_visit() tells the live ones.
  __device__ __forceinline__ int slot_end(std::int64_t pair) const {
    if (ranks || slots == 0) return slots;
    const int packed = chunk_begin + static_cast<int>(pair / num_groups), seq = batch.sequence_of(packed);
    Sequence sequence;
    if (!batch.load<false>(seq, &sequence)) return 0;
    const int visible = sequence.num_visible(sequence.first_position + packed - sequence.query_begin);
    return (visible + batch.block_size - 1) / batch.block_size;
  }
  __device__ __forceinline__ bool has_visit(std::int64_t pair, int slot) const { return !ranks || ranks[pair * slots + slot] >= 0; }
#endif
};

}  // namespace openmsa::cuda
