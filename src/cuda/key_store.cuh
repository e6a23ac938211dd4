// How a warpgroup's gradient of 64 keys, an accumulator of wgmma, gets to fp32 rows in global memory.
#pragma once

#include "cuda/ptx/reduce.cuh"

namespace openmsa::cuda {

// The first `keys` rows of 64 x kDim, to rows of `dim` <= kDim values from `destination` on; kAdd adds to what lies there. `thread`
// is that of the warpgroup.
template <int kDim, bool kAdd>
__device__ inline void store_key_rows(const float (&grad)[kDim / 2], float* destination, int keys, int dim, int thread) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = thread / 32 * 16 + thread % 32 / 4 + 8 * r;
    if (key >= keys) continue;
    float* row = destination + key * dim + thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if (8 * j >= dim) continue;
      if constexpr (kAdd) {
        ptx::reduce_add2(row + 8 * j, grad[4 * j + 2 * r], grad[4 * j + 2 * r + 1]);
      } else {
        *reinterpret_cast<float2*>(row + 8 * j) = float2{grad[4 * j + 2 * r], grad[4 * j + 2 * r + 1]};
      }
    }
  }
}

}  // namespace openmsa::cuda
