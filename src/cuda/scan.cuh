// A prefix sum over one CTA of kScanThreads threads.
#pragma once

namespace openmsa::cuda {

inline constexpr int kScanThreads = 1024;

// Exclusive prefix sum of one value a thread; the total comes back to all. `sums`: 32 words of shared memory.
__device__ inline int scan_prefix(int value, int* sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, inclusive, o);
    if (lane >= o) inclusive += x;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    int x = sums[lane];
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int y = __shfl_up_sync(0xffffffffu, x, o);
      if (lane >= o) x += y;
    }
    sums[lane] = x;
  }
  __syncthreads();
  *total = sums[31];
  return inclusive - value + (warp > 0 ? sums[warp - 1] : 0);
}

}  // namespace openmsa::cuda
