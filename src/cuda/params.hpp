// Device structs: what kernels are given, by value. Every pointer carries its shape.
#pragma once

#include <cstdint>

#include "cuda/fault.hpp"

namespace openmsa::cuda {

// One sequence of a batch, checked.
struct Sequence {
  std::int32_t query_begin, seqlen_q;  // packed query tokens [query_begin, query_begin + seqlen_q)
  std::int32_t key_begin, seqlen_k;    // packed keys; key_begin is 0 when paged
  std::int32_t first_position;         // of its first query
  const std::int32_t* pages;           // its row of the page table, or null

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
  // Number of keys 0.. that a query at position p sees.
  __device__ __forceinline__ int num_visible(int p) const { return min(max(p + 1, 0), seqlen_k); }
#endif
};

// A batch as kernels see it; core/geometry.hpp gives the meaning. Index data lies on the device, unread by the host, so whoever
// loads a sequence checks it: a broken one is reported and treated as empty, and no address is ever formed from it.
struct BatchParams {
  std::int32_t num_seqs;                    // B
  std::int32_t block_size;                  // Bk
  const std::int32_t* cu_seqlens_q;         // [B+1]
  const std::int32_t* cu_seqlens_k;         // [B+1], packed keys; null when paged
  const std::int32_t* seqlens_k;            // [B], paged keys; null when packed
  const std::int32_t* page_table;           // [B, max_pages], paged keys
  std::int64_t stride_page_table;           // elements
  const std::int32_t* q_start;              // [B] or null
  std::int32_t total_q, total_k;            // T, S (packed; -1 where no keys are involved)
  std::int32_t max_pages, num_pages;        // paged
  std::int32_t max_seqlen_q, max_seqlen_k;  // the bounds that grids and scratch were sized by
  Fault* fault;                             // where to report

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
  // Where another thread of the kernel loads the same sequence and reports, kReport false keeps the call out of a hot loop.
  template <bool kReport = true>
  __device__ __forceinline__ bool load(int seq, Sequence* out) const {
    *out = Sequence{};
    // All loads before the first look at one of them, so that they are waited for once.
    const int q0 = cu_seqlens_q[seq], q1 = cu_seqlens_q[seq + 1];
    const int k0 = page_table ? 0 : cu_seqlens_k[seq], k1 = page_table ? seqlens_k[seq] : cu_seqlens_k[seq + 1];
    const int given_start = q_start ? q_start[seq] : 0;
    if (q0 < 0 || q1 < q0 || q1 > total_q || (seq == 0 && q0 != 0) || (seq == num_seqs - 1 && q1 != total_q)) {
      if (kReport) report(fault, FaultCode::kCuSeqlensQ, seq, q0, q1);
      return false;
    }
    if (page_table) {
      if (k1 < 0 || k1 > std::int64_t{max_pages} * block_size) {
        if (kReport) report(fault, FaultCode::kSeqlensK, seq, k1, max_pages);
        return false;
      }
    } else if (k0 < 0 || k1 < k0 || (seq == 0 && k0 != 0) ||
               (total_k >= 0 && (k1 > total_k || (seq == num_seqs - 1 && k1 != total_k)))) {
      if (kReport) report(fault, FaultCode::kCuSeqlensK, seq, k0, k1);
      return false;
    }
    const int length = k1 - k0;
    if (q1 - q0 > max_seqlen_q || length > max_seqlen_k) {
      if (kReport) report(fault, FaultCode::kMaxSeqlen, seq, q1 - q0, length);
      return false;
    }
    *out = {q0,
            q1 - q0,
            k0,
            length,
            q_start ? given_start : length - (q1 - q0),
            page_table ? page_table + seq * stride_page_table : nullptr};
    return true;
  }

  // The page of a block of a sequence; -1, reported, if the table holds nonsense there. 0 for packed keys.
  __device__ __forceinline__ int page(const Sequence& sequence, int seq, int block) const {
    if (!sequence.pages) return 0;
    return checked_page(seq, block, sequence.pages[block]);
  }
  __device__ __forceinline__ int checked_page(int seq, int block, int id) const {
    if (id >= 0 && id < num_pages) return id;
    report(fault, FaultCode::kPageId, seq, block, id);
    return -1;
  }

  // The sequence that holds a packed query token: the last with cu_seqlens_q[seq] <= token. In range whatever the array holds.
  __device__ __forceinline__ int sequence_of(int token) const {
    int low = 0, high = num_seqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (cu_seqlens_q[middle] <= token)
        low = middle;
      else
        high = middle;
    }
    return low;
  }

  // load<false> for a kernel at its register limit: it waits for each word in turn.
  __device__ __forceinline__ bool load_in_turn(int seq, Sequence* out) const {
    *out = Sequence{};
    const int q0 = cu_seqlens_q[seq], q1 = cu_seqlens_q[seq + 1];
    if (q0 < 0 || q1 < q0 || q1 > total_q || (seq == 0 && q0 != 0) || (seq == num_seqs - 1 && q1 != total_q)) return false;
    int k0 = 0, length;
    if (page_table) {
      length = seqlens_k[seq];
      if (length < 0 || (length + block_size - 1) / block_size > max_pages) return false;
    } else {
      k0 = cu_seqlens_k[seq];
      const int k1 = cu_seqlens_k[seq + 1];
      if (k0 < 0 || k1 < k0 || (seq == 0 && k0 != 0) ||
          (total_k >= 0 && (k1 > total_k || (seq == num_seqs - 1 && k1 != total_k)))) {
        return false;
      }
      length = k1 - k0;
    }
    if (q1 - q0 > max_seqlen_q || length > max_seqlen_k) return false;
    *out = {q0,
            q1 - q0,
            k0,
            length,
            q_start ? q_start[seq] : length - (q1 - q0),
            page_table ? page_table + seq * stride_page_table : nullptr};
    return true;
  }
#endif
};

// A tile of query tokens: [first, first + tile size) of sequence seq, counted from the sequence's first query, cut at `end`.
struct QueryTile {
  std::int32_t seq;  // -1: nothing to do
  std::int32_t first, end;
};

// How far a score may exceed the offset of its row's softmax, in powers of two: probabilities before the final division stay below
// 2^8, in range of fp16 and of no weight in fp32 sums.
inline constexpr float kSlack = 8.f;

// What the tiles of a plan add up to, in blocks that their last tokens see.
struct PlanSum {
  std::int32_t num_tiles, longest;
  unsigned long long total;
};

}  // namespace openmsa::cuda
