// Merges the partial results of a token's blocks by their LSE: the last step of sparse_attention.
//
// Roles   a thread takes 8 dims of one head, Gp * D/8 threads a (token, group); all partials of a row are read at once.
// Bytes   (k * Gp * D * 2) read and G * D * 2 written a (token, group): bound by memory.
// Empty   lists without a live slot give out = 0, lse = -inf; tokens that the union served are left alone.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/convert.cuh"

namespace openmsa::cuda {

struct CombineParams {
  const void* partial;        // [chunk tokens, Hkv, k, Gp, D]
  const float* partial_lse;   // [chunk tokens, Hkv, k, Gp]
  const std::int32_t* ranks;  // [chunk tokens, Hkv, k]; -1: this slot left no partial
  const std::int32_t* taken;  // [chunk tokens, Hkv] or null
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
  static constexpr int kBatch = 8;  // loads in flight a thread
};

template <typename T>
__device__ inline float2 unpack2(std::uint32_t pair);
template <>
__device__ inline float2 unpack2<__nv_bfloat16>(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack2<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename Traits>
__global__ void __launch_bounds__(256) smxx_combine_kernel(const __grid_constant__ CombineParams params) {
  using T = typename Traits::T;
  const std::int64_t index = std::int64_t{blockIdx.x} * 256 + threadIdx.x, unit = index / Traits::kParts;
  const int part = static_cast<int>(index % Traits::kParts);
  const std::int64_t pair = unit >> params.log_group;  // token of the chunk * Hkv + group
  const int head = static_cast<int>(unit & ((1 << params.log_group) - 1));
  if (pair >= std::int64_t{params.chunk_tokens} * params.num_groups || head >= params.group_size) return;
  if (params.taken && params.taken[pair] != 0) return;

  const std::int64_t first = pair * params.top_k;
  float weight[Traits::kMaxTopK], best = -INFINITY;
#pragma unroll
  for (int i = 0; i < Traits::kMaxTopK; ++i) {
    const bool live = i < params.top_k && params.ranks[first + i] >= 0;
    weight[i] = live ? params.partial_lse[((first + i) << params.log_group) + head] : -INFINITY;
    best = fmaxf(best, weight[i]);
  }
  const float offset = best == -INFINITY ? 0.f : best;
  float sum = 0.f, acc[8] = {};
#pragma unroll
  for (int base = 0; base < Traits::kMaxTopK; base += Traits::kBatch) {
    uint4 rows[Traits::kBatch];
#pragma unroll
    for (int i = 0; i < Traits::kBatch; ++i) {
      rows[i] = uint4{0, 0, 0, 0};
      if (weight[base + i] != -INFINITY) {
        rows[i] =
            __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(params.partial) +
                                                  (((first + base + i) << params.log_group) + head) * Traits::kHeadDim + part * 8));
      }
    }
#pragma unroll
    for (int i = 0; i < Traits::kBatch; ++i) {
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
  const int token = params.chunk_begin + static_cast<int>(pair / params.num_groups);
  const int out_head = static_cast<int>(pair % params.num_groups) * params.group_size + head;
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
                            out_head * params.stride_out_head + part * 8) =
      uint4{pack2<T>(acc[0] * inverse, acc[1] * inverse), pack2<T>(acc[2] * inverse, acc[3] * inverse),
            pack2<T>(acc[4] * inverse, acc[5] * inverse), pack2<T>(acc[6] * inverse, acc[7] * inverse)};
  if (params.lse && part == 0) {
    params.lse[std::int64_t{token} * params.stride_lse_token + out_head] = sum == 0.f ? -INFINITY : offset + __logf(sum);
  }
}

}  // namespace openmsa::cuda
