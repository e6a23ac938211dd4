// Batch: where each sequence's queries and keys lie, and at which positions the queries stand.
//
// Packed keys:  give cu_seqlens_k; k and v are [S, Hkv, D], k_idx [S, Di].
// Paged keys:   give seqlens_k and page_table; k and v are [num_pages, Hkv, Bk, D], k_idx [num_pages, Bk, Di]. The page size
//               is the block size, so block b of sequence s is page page_table[s][b]. Table entries past the sequence's last
//               block are never read; they may hold anything, -1 included.
// Query i of sequence s stands at position p = q_start[s] + i and sees key j iff j <= p and j < seqlen_k[s].
// q_start defaults to seqlen_k - seqlen_q (bottom-right causal). A query whose p is negative sees nothing.
#pragma once

#include <cstdint>

#include "openmsa/tensor.hpp"

namespace openmsa {

struct Batch {
  TensorView cu_seqlens_q{};  // int32 [B+1]: starts at 0, never decreases, ends at T
  TensorView cu_seqlens_k{};  // int32 [B+1]: the same for S; packed keys only
  TensorView seqlens_k{};     // int32 [B]: live keys of each sequence; paged keys only
  TensorView page_table{};    // int32 [B, max_pages]; paged keys only
  TensorView q_start{};       // int32 [B]; optional
  // Upper bounds on the lengths, for tensors that lie on a GPU (nothing is copied back to look). On the CPU they may stay 0;
  // if given, a longer sequence is refused.
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
};

}  // namespace openmsa
