// select_blocks for few rows (decode): one CTA of 16 warps a row, also as a stage of smxx_decode.cuh.
//
// Work    the row's scores come to shared memory first where they fit, since candidates are looked at again. Rows up to 1,024 blocks
//         are ranked by one warp; longer ones by a warp for every 1,024 blocks, whose k best each are then ranked against each other
//         by the whole CTA.
// Empty   a query that sees nothing gets -1 throughout.
#pragma once

#include "cuda/smxx_score_few.cuh"
#include "cuda/smxx_select.cuh"

namespace openmsa::cuda {

inline constexpr int kSelectFewWarps = kFewThreads / 32, kSelectFewCopied = 1024;

template <int kItems>
struct SelectFewMemory {
  std::uint64_t lists[kSelectFewWarps][WarpTopK<kItems>::kWords];
  std::uint64_t candidates[kSelectFewWarps * 16 * kItems];
  std::uint64_t chosen[16 * kItems];
  std::int32_t counts[kSelectFewWarps];
  alignas(16) float scores[kSelectFewCopied];
};
inline constexpr int kSelectFewBytes = sizeof(SelectFewMemory<2>);

// By the whole CTA, which must not touch `memory` meanwhile; row.ids may lie in shared memory and is readable by all on return.
template <int kItems, int kRun>
__device__ __forceinline__ void select_few_items(const SelectParams& params, SelectRow row, SelectFewMemory<kItems>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = row.num_visible_blocks;
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
    if (warps == 1) list.store(row.ids, params.top_k);
  }
  if (warps == 1) {
    __syncthreads();
    return;
  }
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
  const int slot = threadIdx.x, num_chosen = min(total, params.top_k);
  if (slot < num_chosen) {
    const std::uint32_t mine = static_cast<std::uint32_t>(memory.chosen[slot]);  // ~id: larger is a smaller id
    int rank = 0;
    for (int j = 0; j < num_chosen; ++j) rank += static_cast<std::uint32_t>(memory.chosen[j]) > mine;
    row.ids[rank] = static_cast<int>(~mine);
  } else if (slot < params.top_k) {
    row.ids[slot] = -1;
  }
  __syncthreads();
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
