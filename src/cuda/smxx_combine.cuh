// Merges the partial results of a token's blocks by their LSE: the last step of sparse_attention.
//
// Roles   a thread takes 8 dims of one head, Gp * D/8 threads a (token, group); partials of a row are read eight at a time.
// Bytes   (k * Gp * D * 2) read and G * D * 2 written a (token, group): bound by memory.
// Tokens  those that the union did not serve, from a list, so that the others cost nothing; each CTA takes two after two from a
//         counter, as memory serves some multiprocessors faster.
// Beside  sm90_score of the next chunk, where msa_attention launches it behind that (programmatic dependent launch). Partials are complete
//         then, since that kernel began after they were.
// Empty   lists without a live slot give out = 0, lse = -inf; where there are slots, and none has any weight, both are NaN.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"

namespace openmsa::cuda {

inline constexpr int kCombineThreads = 256, kCombineTurns = 2;

struct CombineParams {
  const void* partial;        // [chunk tokens, Hkv, k, Gp, D]
  const float* partial_lse;   // [chunk tokens, Hkv, k, Gp]; -FLT_MAX: all scores -inf
  const std::int32_t* ranks;  // [chunk tokens, Hkv, k]; -1: no partial in this slot
  const std::int32_t* rest;   // [num_rest] token of the chunk * Hkv + group; null: all of them
  const std::int32_t* num_rest;
  std::int32_t* next_ticket;  // [1], zero at launch
  void* out;                  // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;
  float* lse;  // [T, Hq] or null
  std::int64_t stride_lse_token;
  std::int32_t chunk_begin, chunk_tokens, num_groups, top_k, group_size, log_group;
};

template <typename T_, int kHeadDim_, int kMaxTopK_>
struct CombineTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kParts = kHeadDim / 8, kMaxTopK = kMaxTopK_;
  static constexpr int kCtas = kMaxTopK > 16 ? 2 : kHeadDim == 96 ? 4 : 5;  // a multiprocessor: as many as spill nothing
};

// 8 dims of one head of one token.
template <typename Traits>
__device__ __forceinline__ void combine_part(const CombineParams& params, int pair, int head, int part) {
  using T = typename Traits::T;
  const std::int64_t first = std::int64_t{pair} * params.top_k;
  constexpr int kMaxTopK = Traits::kMaxTopK, kBatch = 8;  // loads in flight a thread
  float weight[kMaxTopK], best = -INFINITY;
#pragma unroll
  for (int slot = 0; slot < kMaxTopK; ++slot) {
    weight[slot] = slot < params.top_k && params.ranks[first + slot] >= 0
                       ? params.partial_lse[((first + slot) << params.log_group) + head]
                       : -INFINITY;
    best = fmaxf(best, weight[slot]);
  }
  // 0 without partials. If all scores of all of them were -inf NaN, and so is all that comes of it.
  const float offset = best > -FLT_MAX ? best : best == -FLT_MAX ? NAN : 0.f;
  float acc[8] = {}, sum = 0.f;
#pragma unroll
  for (int base = 0; base < kMaxTopK; base += kBatch) {
    uint4 rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      rows[i] = uint4{0, 0, 0, 0};
      if (weight[base + i] != -INFINITY) {
        rows[i] =
            __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(params.partial) +
                                                  (((first + base + i) << params.log_group) + head) * Traits::kHeadDim + part * 8));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __expf(weight[base + i] - offset);
      sum += w;
      const std::uint32_t words[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 value = unpack2<T>(words[j]);
        acc[2 * j] = fmaf(w, value.x, acc[2 * j]);
        acc[2 * j + 1] = fmaf(w, value.y, acc[2 * j + 1]);
      }
    }
  }
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  const int token = params.chunk_begin + pair / params.num_groups;
  const int out_head = pair % params.num_groups * params.group_size + head;
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
                            out_head * params.stride_out_head + part * 8) =
      uint4{pack2<T>(acc[0] * inverse, acc[1] * inverse), pack2<T>(acc[2] * inverse, acc[3] * inverse),
            pack2<T>(acc[4] * inverse, acc[5] * inverse), pack2<T>(acc[6] * inverse, acc[7] * inverse)};
  if (params.lse && part == 0) {
    params.lse[std::int64_t{token} * params.stride_lse_token + out_head] = sum == 0.f ? -INFINITY : offset + __logf(sum);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kCombineThreads, Traits::kCtas)
    smxx_combine_kernel(const __grid_constant__ CombineParams params) {
  __shared__ int tickets[2];
  const int num_pairs = params.rest ? *params.num_rest : params.chunk_tokens * params.num_groups;
  const int num_parts = (num_pairs << params.log_group) * Traits::kParts;
  int begin = blockIdx.x * kCombineTurns * kCombineThreads;
  for (int n = 0; begin < num_parts; ++n) {
    int ticket = 0;  // on its way under this one's loads
    if (threadIdx.x == 0) ticket = atomicAdd(params.next_ticket, 1);
#pragma unroll 1
    for (int turn = 0; turn < kCombineTurns; ++turn) {
      const int index = begin + turn * kCombineThreads + threadIdx.x, row = index / Traits::kParts;
      const int head = row & ((1 << params.log_group) - 1);
      if (index >= num_parts || head >= params.group_size) continue;
      const int at = row >> params.log_group;
      combine_part<Traits>(params, params.rest ? params.rest[at] : at, head, index % Traits::kParts);
    }
    if (threadIdx.x == 0) tickets[n % 2] = ticket;
    __syncthreads();
    begin = (gridDim.x + tickets[n % 2]) * kCombineTurns * kCombineThreads;
  }
  if (blockIdx.x == 0) ptx::grid_dependency_wait();  // this kernel's end also says that the kernel before it has ended
}

}  // namespace openmsa::cuda
