// The wrappers of src/cuda/ptx/reduce.cuh.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda::ptx {

inline void reduce_add2(float* address, float a, float b) {
  emulation::check_aligned(reinterpret_cast<float2*>(address));
  address[0] += a;
  address[1] += b;
}

}  // namespace openmsa::cuda::ptx
