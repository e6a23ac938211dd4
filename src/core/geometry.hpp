// Geometry: a validated Batch, as kernels see it. Built only by the api layer (see src/api/check.hpp), so kernels may trust it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "openmsa/tensor.hpp"

namespace openmsa::core {

struct Geometry {
  std::int32_t num_seqs = 0;                   // B
  const std::int32_t* cu_seqlens_q = nullptr;  // [B+1]
  const std::int32_t* cu_seqlens_k = nullptr;  // [B+1], packed keys; null when paged
  const std::int32_t* seqlens_k = nullptr;     // [B], paged keys; null when packed
  const std::int32_t* page_table = nullptr;    // [B, max_pages], paged keys
  std::int64_t stride_page_table = 0;          // elements from one sequence's row to the next
  const std::int32_t* q_start = nullptr;       // [B] or null
  std::int64_t total_q = 0;                    // T
  std::int64_t max_seqlen_q = 0;               // over the batch, exact on the CPU
  std::int64_t max_seqlen_k = 0;
  std::int32_t block_size = 0;  // Bk

  bool paged() const { return page_table != nullptr; }
  std::int64_t query_begin(std::int32_t seq) const { return cu_seqlens_q[seq]; }
  std::int64_t seqlen_q(std::int32_t seq) const { return std::int64_t{cu_seqlens_q[seq + 1]} - cu_seqlens_q[seq]; }
  std::int64_t seqlen_k(std::int32_t seq) const {
    return paged() ? seqlens_k[seq] : std::int64_t{cu_seqlens_k[seq + 1]} - cu_seqlens_k[seq];
  }
  std::int64_t num_blocks(std::int32_t seq) const { return (seqlen_k(seq) + block_size - 1) / block_size; }
  std::int64_t max_num_blocks() const { return (max_seqlen_k + block_size - 1) / block_size; }

  // Position p of the sequence's query number i (not the packed token index).
  std::int64_t position(std::int32_t seq, std::int64_t i) const {
    return (q_start ? q_start[seq] : seqlen_k(seq) - seqlen_q(seq)) + i;
  }
  // Keys 0 .. num_visible-1 of its sequence are what a query at position p sees.
  std::int64_t num_visible(std::int32_t seq, std::int64_t p) const { return std::clamp<std::int64_t>(p + 1, 0, seqlen_k(seq)); }
  // The sequence that packed query token t belongs to: the last seq with cu_seqlens_q[seq] <= t (empty sequences are skipped).
  std::int32_t seq_of_token(std::int64_t t) const {
    return static_cast<std::int32_t>(std::upper_bound(cu_seqlens_q, cu_seqlens_q + num_seqs + 1, t,
                                                      [](std::int64_t a, std::int32_t b) { return a < b; }) -
                                     cu_seqlens_q) -
           1;
  }
};

// Where block b of a sequence lies in k, v or k_idx, packed or paged alike. All products are 64-bit.
struct KeyBlocks {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t stride_page = 0;   // bytes; paged only
  std::int64_t stride_token = 0;  // bytes from one key token to the next inside a block
  std::int64_t stride_head = 0;   // bytes; 0 for the shared index key head

  // view: [S, Hkv, D] or [S, Di] packed; [num_pages, Hkv, Bk, D] or [num_pages, Bk, Di] paged.
  static KeyBlocks of(const TensorView& view, bool paged) {
    const std::int64_t size = dtype_bytes(view.dtype);
    KeyBlocks keys;
    keys.data = static_cast<const std::byte*>(view.data);
    keys.dtype = view.dtype;
    if (paged) {
      const bool has_heads = view.rank == 4;
      keys.stride_page = view.stride[0] * size;
      keys.stride_head = has_heads ? view.stride[1] * size : 0;
      keys.stride_token = view.stride[has_heads ? 2 : 1] * size;
    } else {
      keys.stride_token = view.stride[0] * size;
      keys.stride_head = view.rank == 3 ? view.stride[1] * size : 0;
    }
    return keys;
  }

  // First key of block b of sequence seq, for KV head g. Rows follow at stride_token; the last axis is contiguous.
  const std::byte* block(const Geometry& geo, std::int32_t seq, std::int64_t b, std::int32_t head) const {
    if (geo.paged()) {
      return data + geo.page_table[seq * geo.stride_page_table + b] * stride_page + head * stride_head;
    }
    return data + (geo.cu_seqlens_k[seq] + b * geo.block_size) * stride_token + head * stride_head;
  }
};

}  // namespace openmsa::core
