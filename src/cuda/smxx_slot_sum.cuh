// Sums what the visits of a token left in its slots: a row of a query gradient.
//
// Roles   a thread takes 8 dims of one row, dim/8 threads a row; kSlotBatch loads in flight, added by ascending slot.
// Bytes   2 * dim read a visit and row: bound by memory
// Empty   a row without visits is 0; slots without a visit hold nothing and are not read.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/sums.hpp"

namespace openmsa::cuda {

inline constexpr int kSlotSumThreads = 256, kSlotBatch = 8;

template <typename T, int kDim>
__global__ void __launch_bounds__(kSlotSumThreads) smxx_slot_sum_kernel(const __grid_constant__ SlotSumParams params) {
  constexpr int kParts = kDim / 8;
  const SlotLists& lists = params.lists;
  const std::int64_t index = std::int64_t{blockIdx.x} * kSlotSumThreads + threadIdx.x, unit = index / kParts;
  const int part = static_cast<int>(index % kParts);
  const std::int64_t pair = unit >> params.log_group;
  const int row = static_cast<int>(unit & ((1 << params.log_group) - 1));
  if (pair >= std::int64_t{lists.chunk_tokens} * lists.num_groups || row >= params.group_size) return;

  const T* partial = static_cast<const T*>(params.partial) + (((pair * lists.slots) << params.log_group) + row) * kDim + part * 8;
  const std::int64_t stride_slot = std::int64_t{kDim} << params.log_group;
  const int end = lists.slot_end(pair);
  float acc[8] = {};
  for (int base = 0; base < end; base += kSlotBatch) {
    uint4 rows[kSlotBatch];
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      rows[i] = uint4{0, 0, 0, 0};
      if (base + i < end && lists.has_visit(pair, base + i)) {
        rows[i] = __ldcs(reinterpret_cast<const uint4*>(partial + (base + i) * stride_slot));
      }
    }
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const std::uint32_t words[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 value = unpack2<T>(words[j]);
        acc[2 * j] += value.x;
        acc[2 * j + 1] += value.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] *= params.scale;
  const std::int64_t token = lists.chunk_begin + pair / lists.num_groups;
  const int head = static_cast<int>(pair % lists.num_groups) * params.group_size + row;
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + token * params.stride_out_token + head * params.stride_out_head +
                            part * 8) =
      uint4{pack2<T>(acc[0], acc[1]), pack2<T>(acc[2], acc[3]), pack2<T>(acc[4], acc[5]), pack2<T>(acc[6], acc[7])};
}

}  // namespace openmsa::cuda
