// sparse_attention in chunks of query tokens, as sparse_attention and msa_attention share it.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/plan.hpp"

namespace openmsa::cuda {

// Query tokens per chunk: partials take Hkv * k * Gp * D * 2 bytes a token, 4 GiB at the reference shape.
inline constexpr std::int64_t kAttendChunk = 16384;

// Of a chunk; every chunk uses the same.
struct AttendScratch {
  std::int64_t chunk;       // tokens
  std::int64_t num_blocks;  // of all sequences, at most
  std::int64_t num_slots;   // chunk * Hkv * k
  std::int32_t log_group;
  void* partial;
  float* partial_lse;
  std::int32_t *ranks, *offsets, *first_items, *num_entries, *work, *rest;
  std::uint32_t *entries, *union_entries, *taken;
  AttendItem* items;
  // Zeroed before every chunk, in one piece from `offsets` on: these, counts, then the single counters.
  std::int32_t* counts;
  std::size_t zero_bytes;
  std::int32_t *next_item, *num_work, *next_work, *num_items, *num_rest, *next_ticket;
  Plan plan;
};

AttendScratch reserve_attend(const core::SparseAttentionParams& params, std::int64_t max_chunk = kAttendChunk);
// Everything of query tokens [begin, end) but the merge: partials of the tokens that no union serves, results of the others.
void attend_chunk(const core::SparseAttentionParams& params, const AttendScratch& scratch, std::int64_t begin, std::int64_t end);
// The merge. It begins without looking whether the kernel before it has ended, so with Order::kDependent that must be one that
// itself began after attend_chunk's; its own end says that it has.
void combine_chunk(const core::SparseAttentionParams& params, const AttendScratch& scratch, std::int64_t begin, std::int64_t end,
                   Order order);
// Multiprocessor time that the merge of a (token, group) takes, us.
float combine_us(const MsaConfig& config);

}  // namespace openmsa::cuda
