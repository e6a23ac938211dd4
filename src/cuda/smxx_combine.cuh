// Merges the partial results of a token's blocks by their LSE: the last step of sparse_attention.
//
// Roles   a thread takes 8 dims of one head, Gp * D/8 threads a (token, group); partials of a row are read eight at a time.
// Bytes   (k * Gp * D * 2) read and G * D * 2 written a (token, group): bound by memory.
// Empty   lists without a live slot give out = 0, lse = -inf; tokens that the union served alone are left alone.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#include "cuda/ptx/convert.cuh"

namespace openmsa::cuda {

struct CombineParams {
  const void* partial;         // [chunk tokens, Hkv, k, Gp, D]
  const float* partial_lse;    // [chunk tokens, Hkv, k, Gp]
  const std::int32_t* ranks;   // [chunk tokens, Hkv, k]; -1: no partial in this slot
  const std::uint32_t* taken;  // [chunk tokens, Hkv], see lists.hpp; or null
  void* out;                   // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;
  float* lse;  // [T, Hq] or null
  std::int64_t stride_lse_token;
  std::int32_t chunk_begin, chunk_tokens, num_groups, top_k, group_size, log_group;
};

template <typename T_, int kHeadDim_, int kMaxTopK_>
struct CombineTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kParts = kHeadDim / 8, kMaxTopK = kMaxTopK_;
  static constexpr int kFew = 4;  // partials that are merged without looking at the other slots
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

// Of one head's 8 dims: the sum of the partials, weighted by exp(lse - offset), and of the weights.
struct Combined {
  float acc[8], sum, offset;

  template <typename T>
  __device__ __forceinline__ void add(float weight, const uint4& row) {
    sum += weight;
    const std::uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 value = unpack2<T>(words[j]);
      acc[2 * j] = fmaf(weight, value.x, acc[2 * j]);
      acc[2 * j + 1] = fmaf(weight, value.y, acc[2 * j + 1]);
    }
  }
};

// `slot_of(i)` is the i-th slot to merge, i < kCount; `lse_of` and `row_of` read one, lse -inf where there is none.
template <typename T, int kCount, typename SlotOf, typename LseOf, typename RowOf>
__device__ __forceinline__ void combine_slots(Combined& result, SlotOf slot_of, LseOf lse_of, RowOf row_of) {
  constexpr int kBatch = kCount < 8 ? kCount : 8;  // loads in flight a thread
  float weight[kCount], best = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weight[i] = lse_of(slot_of(i));
    best = fmaxf(best, weight[i]);
  }
  result.offset = best == -INFINITY ? 0.f : best;
#pragma unroll
  for (int base = 0; base < kCount; base += kBatch) {
    uint4 rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) rows[i] = weight[base + i] != -INFINITY ? row_of(slot_of(base + i)) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) result.add<T>(__expf(weight[base + i] - result.offset), rows[i]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(256) smxx_combine_kernel(const __grid_constant__ CombineParams params) {
  using T = typename Traits::T;
  const std::int64_t index = std::int64_t{blockIdx.x} * 256 + threadIdx.x, unit = index / Traits::kParts;
  const int part = static_cast<int>(index % Traits::kParts);
  const std::int64_t pair = unit >> params.log_group;  // token of the chunk * Hkv + group
  const int head = static_cast<int>(unit & ((1 << params.log_group) - 1));
  if (pair >= std::int64_t{params.chunk_tokens} * params.num_groups) return;

  const std::int64_t first = pair * params.top_k;
  const std::uint32_t taken = params.taken ? params.taken[pair] : 0;
  if (taken == kTakenAll) return;
  // Where the union took most blocks of a token few partials are left, and the other slots have to cost nothing.
  std::uint32_t live = 0xffffffffu;
  if (taken != 0) {  // only with 16 heads a group, where a warp has one list
    const int lane = static_cast<int>(threadIdx.x % 32);
    live = __ballot_sync(0xffffffffu, lane < params.top_k && params.ranks[first + lane] >= 0);
  }
  if (head >= params.group_size) return;

  Combined result{};
  const auto lse_of = [&](int slot) {
    return slot >= 0 && slot < params.top_k && params.ranks[first + slot] >= 0
               ? params.partial_lse[((first + slot) << params.log_group) + head]
               : -INFINITY;
  };
  const auto row_of = [&](int slot) {
    return __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(params.partial) +
                                                 (((first + slot) << params.log_group) + head) * Traits::kHeadDim + part * 8));
  };
  if (__popc(live) <= Traits::kFew) {
    int slots[Traits::kFew];
#pragma unroll
    for (int& slot : slots) {
      slot = __ffs(static_cast<int>(live)) - 1;
      live &= live - 1;
    }
    combine_slots<T, Traits::kFew>(
        result, [&](int i) { return slots[i]; }, lse_of, row_of);
  } else {
    combine_slots<T, Traits::kMaxTopK>(
        result, [](int i) { return i; }, lse_of, row_of);
  }
  const float inverse = result.sum == 0.f ? 0.f : 1.f / result.sum;
  const float(&acc)[8] = result.acc;
  const int token = params.chunk_begin + static_cast<int>(pair / params.num_groups);
  const int out_head = static_cast<int>(pair % params.num_groups) * params.group_size + head;
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
                            out_head * params.stride_out_head + part * 8) =
      uint4{pack2<T>(acc[0] * inverse, acc[1] * inverse), pack2<T>(acc[2] * inverse, acc[3] * inverse),
            pack2<T>(acc[4] * inverse, acc[5] * inverse), pack2<T>(acc[6] * inverse, acc[7] * inverse)};
  if (params.lse && part == 0) {
    params.lse[std::int64_t{token} * params.stride_lse_token + out_head] =
        result.sum == 0.f ? -INFINITY : result.offset + __logf(result.sum);
  }
}

}  // namespace openmsa::cuda
