// Puts every block's entries in ascending order: the inversion leaves them in an order that depends on timing, and sums over the
// tokens of a block are to have the same bits in every run.
//
// Roles   a CTA a (group, block). A token lists a block at most once, so a bit per token of the chunk sorts: an entry's place is the
//         number of bits below its own.
// Shared  bits and their prefix sums, 2 x 2 KiB
// Empty   blocks that nobody chose. A list that broke the rules (reported) may hold a block twice; the place that this leaves open
//         takes a copy of another entry, so that none is ever undefined.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"

namespace openmsa::cuda {

inline constexpr int kSortThreads = 256, kSortWords = 2 * kSortThreads;
inline constexpr int kMaxSortTokens = 32 * kSortWords;  // of a chunk

struct SortEntriesParams {
  const std::int32_t* block_begin;  // [B+1]
  const std::int32_t* counts;       // [Hkv * blocks], blocks = block_begin[B]
  const std::int32_t* offsets;      // the same
  const std::uint32_t* unsorted;    // [chunk tokens * Hkv * k]
  std::uint32_t* entries;           // the same
  std::int32_t num_seqs, num_groups;
};

__global__ void __launch_bounds__(kSortThreads) smxx_sort_entries_kernel(const __grid_constant__ SortEntriesParams params) {
  __shared__ unsigned bits[kSortWords];
  __shared__ int before[kSortWords];  // bits in the words before
  __shared__ int warp_sums[kSortThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (blockIdx.x >= static_cast<unsigned>(params.num_groups * params.block_begin[params.num_seqs])) return;
  const int count = params.counts[blockIdx.x], first = params.offsets[blockIdx.x];
  if (count == 0) return;

  for (int i = thread; i < kSortWords; i += kSortThreads) bits[i] = 0;
  __syncthreads();
  for (int i = thread; i < count; i += kSortThreads) {
    const std::uint32_t token = params.unsorted[first + i] >> kSlotBits;
    atomicOr(&bits[token / 32], 1u << token % 32);
  }
  __syncthreads();

  const int low = __popc(bits[2 * thread]), both = low + __popc(bits[2 * thread + 1]);
  int inclusive = both;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, inclusive, o);
    if (lane >= o) inclusive += x;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int total = 0, earlier = 0;
#pragma unroll
  for (int w = 0; w < kSortThreads / 32; ++w) {
    if (w == warp) earlier = total;
    total += warp_sums[w];
  }
  before[2 * thread] = earlier + inclusive - both;
  before[2 * thread + 1] = before[2 * thread] + low;
  __syncthreads();

  for (int i = thread; i < count; i += kSortThreads) {
    const std::uint32_t entry = params.unsorted[first + i], token = entry >> kSlotBits;
    const int place = before[token / 32] + __popc(bits[token / 32] & ((1u << token % 32) - 1));
    params.entries[first + place] = entry;
  }
  for (int i = total + thread; i < count; i += kSortThreads) params.entries[first + i] = params.unsorted[first];
}

}  // namespace openmsa::cuda
