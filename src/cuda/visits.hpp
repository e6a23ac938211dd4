// Who meets which block in a chunk of consecutive query tokens: a visit is (token, group, block). Kernels that hold a block and go
// over its visitors walk the items; what a visit leaves goes to the slot that it has in its token's own list, so that nothing is
// added atomically and every sum has one order.
#pragma once

#include "cuda/items.hpp"
#include "cuda/launch.hpp"

namespace openmsa::cuda {

inline constexpr int kVisitCounters = 4;

// How queries are cut. Tests choose smaller numbers.
struct VisitLimits {
  std::int64_t chunk_tokens = 16384;                      // of a chunk, at most kMaxSortTokens
  std::int32_t item_tokens = 1024;                        // of an item
  std::int64_t slot_bytes_total = std::int64_t{4} << 30;  // of what the caller keeps a chunk
};

struct Visits {
  std::int64_t chunk;       // query tokens of a chunk, at most
  std::int32_t slots;       // per (token, group): k, or for every block the most blocks that a sequence may have
  std::int32_t max_item;    // tokens of an item, at most
  std::int64_t num_slots;   // chunk * Hkv * slots
  std::int64_t max_items;   // capacity of items
  std::int64_t num_shared;  // partials of items that share a block, see shared_slot(); every block: 0, no item shares one
  AttendItem* items;        // [max_items], those of one block neighbours with ascending begin. begin: sparse, the first entry;
                            // every block, the first token of the chunk
  std::int32_t* num_items;  // [1]
  std::int32_t* next_item;  // [kVisitCounters], zero after launch_visits: one for each kernel that walks the items
  std::uint32_t* entries;   // [num_slots] token of the chunk << kSlotBits | slot, ascending inside an item. Null: every block,
                            // where entry i of an item is token begin + i, and its slot the block
  std::int32_t* ranks;      // [chunk, Hkv, k], -1: the slot has no visit. Null: every block

  // What visits.cu works with; sparse alone.
  std::int64_t num_keys;  // (group, block) of all sequences, at most
  std::int32_t *counts, *offsets, *first_items, *block_begin;
  std::uint32_t* unsorted;
  std::size_t zero_bytes;  // from next_item on: next_item, num_items, counts, offsets
};

// `slot_bytes`: what the caller keeps per (token, group, slot). A chunk is cut where that exceeds the limit, but holds 64 tokens (or
// as many as the other limits allow). Depends on the shapes alone.
Visits reserve_visits(core::Arena& arena, const core::Geometry& geo, const MsaConfig& config, bool every_block,
                      std::int64_t slot_bytes, const VisitLimits& limits = {});

// The visits of query tokens [begin, end), at most visits.chunk of them. `block_ids` absent: every visible block. Broken sequences
// have none, nor have slots that break the rules; both are reported.
void launch_visits(const Visits& visits, const core::Geometry& geo, const MsaConfig& config, const TensorView& block_ids,
                   std::int64_t begin, std::int64_t end, void* stream);

SlotLists slot_lists(const Visits& visits, const core::Geometry& geo, const MsaConfig& config, std::int64_t begin,
                     std::int64_t end);

}  // namespace openmsa::cuda
