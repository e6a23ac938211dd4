// Maxima of accumulator rows, three values an instruction.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda {

// m[r] = the largest of acc[kFirst + 4 i + 2 r + {0, 1}], i < kGroups: of 8 kGroups columns of a wgmma accumulator, what this
// thread holds of its upper (r = 0) and lower row. An IEEE maximum that keeps NaN, as max.NaN computes it.
//
// Floats order as signed integers do while any is positive; wgmma's only NaN, 0x7fffffff, is above all. Where all are negative they
// order the other way round, which random data hardly shows: a branch. max.NaN takes two values an instruction, this three.
template <int kFirst, int kGroups, int kCount>
__device__ __forceinline__ void row_max(const float (&acc)[kCount], float (&m)[2]) {
  static_assert(kGroups % 2 == 0 && kFirst + 4 * kGroups <= kCount);
  const auto value = [&](int i, int r, int j) { return __float_as_int(acc[kFirst + 4 * i + 2 * r + j]); };
  int top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int even = max(value(0, r, 0), value(0, r, 1)), odd = max(value(1, r, 0), value(1, r, 1));  // two chains, for latency
#pragma unroll
    for (int i = 2; i < kGroups; i += 2) {
      even = __vimax3_s32(even, value(i, r, 0), value(i, r, 1));
      odd = __vimax3_s32(odd, value(i + 1, r, 0), value(i + 1, r, 1));
    }
    top[r] = max(even, odd);
  }
  if (min(top[0], top[1]) < 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int low = min(value(0, r, 0), value(0, r, 1));
#pragma unroll
      for (int i = 1; i < kGroups; ++i) low = __vimin3_s32(low, value(i, r, 0), value(i, r, 1));
      if (top[r] < 0) top[r] = low;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) m[r] = __int_as_float(top[r]);
}

}  // namespace openmsa::cuda
