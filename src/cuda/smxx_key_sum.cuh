// Key gradients: partials of items that share a block into the accumulators, and the accumulators into the result.
//
// Roles   share: kShareParts CTAs look at the same kShareItems items, find those that begin a shared block, and each adds its part of
//         the block's values item by item, so that a value has one order of additions. sum: a thread takes 8 dims of a key.
// Bytes   sum: 4 * dim read and 2 * dim written a row: bound by memory
// Empty   blocks of one item, which that item has added itself; rows past the end of the sequence, which belong to another one.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/sums.hpp"

namespace openmsa::cuda {

inline constexpr int kShareThreads = 256, kShareItems = 32, kShareParts = 16, kKeySumThreads = 256;

__global__ void __launch_bounds__(kShareThreads) smxx_key_share_kernel(const __grid_constant__ KeyShareParams params) {
  const int num_items = *params.num_items, base = static_cast<int>(blockIdx.x) * kShareItems;
  if (base >= num_items) return;
  const int index = base + static_cast<int>(threadIdx.x % 32);
  const bool first_shared =
      index + 1 < num_items && !item_continues(params.items, index) && item_continues(params.items, index + 1);
  const int block_values = params.batch.block_size * params.dim;
  for (unsigned left = __ballot_sync(0xffffffffu, first_shared); left != 0; left &= left - 1) {
    const int first = base + __ffs(static_cast<int>(left)) - 1;
    const AttendItem item = params.items[first];
    int end = first + 2;
    while (end < num_items && item_continues(params.items, end)) ++end;
    Sequence sequence;
    params.batch.load<false>(item.seq, &sequence);
    const int key = item.block * params.batch.block_size;  // of the sequence
    const int values = min(params.batch.block_size, sequence.seqlen_k - key) * params.dim;
    const std::int64_t row = std::int64_t{item.group} * params.total_k + sequence.key_begin + key;
    for (int n = 0; n < params.num_sums; ++n) {
      float* sum = params.sums[n] + row * params.dim;
      for (int v = static_cast<int>(blockIdx.y * kShareThreads + threadIdx.x) * 4; v < values;
           v += kShareParts * kShareThreads * 4) {
        float4 acc = *reinterpret_cast<const float4*>(sum + v);
#pragma unroll 4
        for (int i = 0; i < end - first; ++i) {
          const std::int64_t slot = shared_slot(item.begin + i * params.max_item, params.max_item, i == 0);
          const float4 x = *reinterpret_cast<const float4*>(params.shared + (slot * params.num_sums + n) * block_values + v);
          acc.x += x.x;
          acc.y += x.y;
          acc.z += x.z;
          acc.w += x.w;
        }
        *reinterpret_cast<float4*>(sum + v) = acc;
      }
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kKeySumThreads) smxx_key_sum_kernel(const __grid_constant__ KeySumParams params) {
  constexpr int kParts = kDim / 8;
  const std::int64_t index = std::int64_t{blockIdx.x} * kKeySumThreads + threadIdx.x, key = index / kParts;
  const int part = static_cast<int>(index % kParts), group = static_cast<int>(blockIdx.y);
  if (key >= params.total_k) return;
  const int end = params.over_groups ? params.num_groups : group + 1;
  float acc[8] = {};
  for (int g = group; g < end; ++g) {
    const auto* source = reinterpret_cast<const float4*>(params.sum + (std::int64_t{g} * params.total_k + key) * kDim + part * 8);
    const float4 low = __ldcs(source), high = __ldcs(source + 1);
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] += values[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] *= params.scale;
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + key * params.stride_out_token + group * params.stride_out_head +
                            part * 8) =
      uint4{pack2<T>(acc[0], acc[1]), pack2<T>(acc[2], acc[3]), pack2<T>(acc[4], acc[5]), pack2<T>(acc[6], acc[7])};
}

}  // namespace openmsa::cuda
