// What the backward kernels need of every row of a chunk: its lse in log2 units, and delta = sum over d of d_out * out.
//
// Roles   16 lanes a row, each 16 bytes of d_out and out; their sums meet by shuffles in one fixed order.
// Bytes   4 * D read a row, or none of it where only the lse is wanted: bound by memory
// Empty   see RowsParams: rows that give no probability get lse +inf and delta 0, whatever d_out and out hold there. A row of lse NaN
//         gives NaN to the keys that it sees; its delta is 0 as well, since NaN would reach those of a block that it does not see.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/sums.hpp"

namespace openmsa::cuda {

inline constexpr int kRowsThreads = 256, kRowLanes = 16;

template <typename T, int kDim>
__global__ void __launch_bounds__(kRowsThreads) smxx_backward_rows_kernel(const __grid_constant__ RowsParams params) {
  static_assert(kDim / 8 <= kRowLanes);
  const std::int64_t index = (std::int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / kRowLanes;
  const int lane = threadIdx.x % kRowLanes, heads = 1 << params.log_group, head = static_cast<int>(index & (heads - 1));
  const std::int64_t pair = index >> params.log_group;  // token of the chunk * Hkv + group; the last token is the absent one
  const int token = static_cast<int>(pair / params.num_groups), group = static_cast<int>(pair % params.num_groups);
  const std::int64_t packed = std::int64_t{params.chunk_begin} + token;
  const int q_head = group * params.group_size + head;

  float lse = -INFINITY, delta = 0.f;
  if (token < params.chunk_tokens && head < params.group_size) lse = params.lse[packed * params.stride_lse_token + q_head];
  if (params.d_out && lse > -INFINITY && lane < kDim / 8) {
    const uint4 out = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.out) + packed * params.stride_out_token +
                                                      q_head * params.stride_out_head + lane * 8);
    const uint4 d_out = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.d_out) + packed * params.stride_d_out_token +
                                                        q_head * params.stride_d_out_head + lane * 8);
    const std::uint32_t a[4] = {out.x, out.y, out.z, out.w}, b[4] = {d_out.x, d_out.y, d_out.z, d_out.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack2<T>(a[i]), y = unpack2<T>(b[i]);
      delta = fmaf(x.x, y.x, delta);
      delta = fmaf(x.y, y.y, delta);
    }
  }
#pragma unroll
  for (int o = kRowLanes / 2; o > 0; o /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, o);
  if (lane != 0 || token > params.chunk_tokens) return;
  float* row = params.rows + ((pair * 2) << params.log_group) + head;
  row[0] = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
  row[heads] = delta;
}

}  // namespace openmsa::cuda
