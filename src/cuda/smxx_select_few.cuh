// select_blocks for few rows (decode): one CTA of 16 warps a row, also as a stage of smxx_decode.cuh.
//
// Work    rows up to 8,192 blocks are held in registers, 2 or 16 scores a thread. The least of the warps' best (half warps' for k
//         above 16) is reached by k scores, so it bounds the k-th best from below; the 40 or so that pass are ranked by counting, four
//         threads each.
//         Longer rows, and those where more than 256 pass (equal scores, few of them), are ranked by a warp for every 1,024 blocks,
//         whose k best each are then ranked against each other by the whole CTA. Scores come to shared memory first where they fit.
// Empty   a query that sees nothing gets -1 throughout.
#pragma once

#include "cuda/smxx_score_few.cuh"
#include "cuda/smxx_select.cuh"

namespace openmsa::cuda {

inline constexpr int kSelectFewWarps = kFewThreads / 32, kSelectFewCopied = 1024, kSelectFewCandidates = 256;

template <int kItems>
struct SelectFewMemory {
  std::uint64_t lists[kSelectFewWarps][WarpTopK<kItems>::kWords];
  std::uint64_t candidates[kSelectFewWarps * 16 * kItems];
  std::uint64_t chosen[16 * kItems];
  std::uint32_t best[kSelectFewWarps * kItems];
  std::int32_t counts[kSelectFewWarps];
  std::int32_t num_passed;
  alignas(16) float scores[kSelectFewCopied];
};
inline constexpr int kSelectFewBytes = sizeof(SelectFewMemory<2>);

// The keys in `memory.chosen` go to row.ids by ascending id, -1 in the tail. By the first warp, which may then read them.
template <int kItems>
__device__ __forceinline__ void select_few_store(const SelectParams& params, const SelectRow& row, int num_chosen,
                                                 const SelectFewMemory<kItems>& memory) {
  const int slot = threadIdx.x;
  if (slot >= 32) return;
  const std::uint32_t mine = static_cast<std::uint32_t>(memory.chosen[min(slot, 16 * kItems - 1)]);  // ~id: larger is a smaller id
  int rank = 0;
#pragma unroll
  for (int j = 0; j < 16 * kItems; ++j) rank += j<num_chosen&& static_cast<std::uint32_t>(memory.chosen[j])> mine;
  if (slot < num_chosen) {
    row.ids[rank] = static_cast<int>(~mine);
  } else if (slot < params.top_k) {
    row.ids[slot] = -1;
  }
  __syncwarp();
}

// Rows of up to kHeld scores a thread. False, for all threads, if too many may be among the best.
template <int kItems, int kHeld>
__device__ __forceinline__ bool select_few_held(const SelectParams& params, const SelectRow& row, SelectFewMemory<kItems>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = row.num_visible_blocks;
  // A row shorter than the CTA is dealt to all warps, so that each has a best one.
  const int first = n <= kFewThreads ? lane * kSelectFewWarps + warp : threadIdx.x;
  std::uint32_t order[kHeld], best = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int id = first + i * kFewThreads;
    order[i] = 0;
    if (id < n) order[i] = rank_order(row.scores[id], id < params.num_init_blocks || id > row.own_block - params.num_local_blocks);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) best = max(best, order[i]);
  constexpr int kLanes = 32 / kItems;
  best = __reduce_max_sync(0xffffffffu >> (32 - kLanes) << lane / kLanes * kLanes, best);
  if (lane % kLanes == 0) memory.best[threadIdx.x / kLanes] = best;
  if (threadIdx.x == 0) memory.num_passed = 0;
  __syncthreads();
  const std::uint32_t bound = max(__reduce_min_sync(0xffffffffu, memory.best[lane % (kSelectFewWarps * kItems)]), 1u);
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) mine += order[i] >= bound;
  if (mine > 0) {
    int place = atomicAdd(&memory.num_passed, mine);  // in any order: ranks do not depend on it
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (order[i] < bound) continue;
      if (place < kSelectFewCandidates) memory.candidates[place] = rank_key(order[i], first + i * kFewThreads);
      ++place;
    }
  }
  __syncthreads();
  const int total = memory.num_passed;
  if (total > kSelectFewCandidates) return false;
  for (int i0 = 0; i0 < total; i0 += kFewThreads / 4) {
    if (i0 + warp * 8 >= total) break;
    const int i = i0 + threadIdx.x / 4;
    const std::uint64_t key = i < total ? memory.candidates[i] : ~std::uint64_t{0};
    int rank = 0;
#pragma unroll 4
    for (int j = lane % 4; j < total; j += 4) rank += memory.candidates[j] > key;
    rank += __shfl_xor_sync(0xffffffffu, rank, 1);
    rank += __shfl_xor_sync(0xffffffffu, rank, 2);
    if (lane % 4 == 0 && i < total && rank < params.top_k) memory.chosen[rank] = key;
  }
  __syncthreads();
  select_few_store(params, row, min(total, params.top_k), memory);
  return true;
}

// By the whole CTA, which must not touch `memory` meanwhile; row.ids may lie in shared memory. The first warp may read it on return.
template <int kItems, int kRun>
__device__ __forceinline__ void select_few_items(const SelectParams& params, SelectRow row, SelectFewMemory<kItems>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = row.num_visible_blocks;
  if (n <= 2 * kFewThreads && select_few_held<kItems, 2>(params, row, memory)) return;
  if (n > 2 * kFewThreads && n <= 16 * kFewThreads && select_few_held<kItems, 16>(params, row, memory)) return;
  const int warps = min(max((n + 1023) / 1024, 1), kSelectFewWarps), part = ((n + warps - 1) / warps + 3) / 4 * 4;
  if (n <= kSelectFewCopied) {
    for (int i = threadIdx.x; i < n; i += kFewThreads) memory.scores[i] = row.scores[i];
    row.scores = memory.scores;
    __syncthreads();
  }
  WarpTopK<kItems> list(memory.lists[warp]);
  if (warp < warps) {
    const int begin = min(warp * part, n);
    select_scan<32, kRun>(list, params, row, begin, min(begin + part, n));
    if (warps == 1) {
      list.store(row.ids, params.top_k);
      __syncwarp();
    }
  }
  if (warps == 1) return;
  if (lane == 0) memory.counts[warp] = list.count;
  __syncthreads();
  int offset = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kSelectFewWarps; ++w) {
    offset += w < warp ? memory.counts[w] : 0;
    total += memory.counts[w];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * 32 + lane < list.count) memory.candidates[offset + i * 32 + lane] = list.keys[i * 32 + lane];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < total; i += kFewThreads) {
    const std::uint64_t mine = memory.candidates[i];
    int rank = 0;
#pragma unroll 8
    for (int j = 0; j < total; ++j) rank += memory.candidates[j] > mine;
    if (rank < params.top_k) memory.chosen[rank] = mine;
  }
  __syncthreads();
  select_few_store(params, row, min(total, params.top_k), memory);
}

// Scores start on 16 bytes in every row.
__device__ __forceinline__ void select_few(const SelectParams& params, const SelectRow& row, unsigned char* memory) {
  if (params.top_k <= 16) {
    select_few_items<1, 4>(params, row, *reinterpret_cast<SelectFewMemory<1>*>(memory));
  } else {
    select_few_items<2, 4>(params, row, *reinterpret_cast<SelectFewMemory<2>*>(memory));
  }
}

template <int kItems, int kRun>
__global__ void __launch_bounds__(kFewThreads, 1) smxx_select_few_kernel(const __grid_constant__ SelectParams params) {
  __shared__ __align__(16) SelectFewMemory<kItems> memory;
  const SelectRow row = select_row(params, select_token(params, blockIdx.x / params.num_groups), blockIdx.x % params.num_groups);
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  select_few_items<kItems, kRun>(params, row, memory);
}

}  // namespace openmsa::cuda
