// What must not build, one fault a value of BAD; 0 is sound. See strict_build_test.
#include <cuda_bf16.h>

#include "cuda/ptx/register.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {

#if BAD == 1  // spills: 200 live values a thread, 64 registers
__global__ void __launch_bounds__(1024) kernel(float* x) {
  float values[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) values[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 200; ++i) values[i] = values[i] * values[(i * 7 + 3) % 200] + x[i];
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = values[i];
}
#elif BAD == 2  // a stack frame: an array indexed at run time
__global__ void kernel(float* x, const int* order) {
  float values[32];
  for (int i = 0; i < 32; ++i) values[order[i] & 31] = x[i] * 2.f;
  x[threadIdx.x] = values[order[threadIdx.x] & 31];
}
#elif BAD == 3  // accumulators touched while the product runs: serialised
__global__ void __launch_bounds__(128, 1) kernel(float* x, unsigned long long a, unsigned long long b) {
  float values[64] = {};
  for (int n = 0; n < 10; ++n) {
    ptx::wgmma_fence();
    ptx::WgmmaSS<__nv_bfloat16, 128>::template run<ptx::Major::kK>(values, a, b, 1);
    ptx::wgmma_commit();
    for (float& value : values) value *= 1.5f;
    ptx::wgmma_wait<0>();
  }
  for (int i = 0; i < 64; ++i) x[i * 128 + threadIdx.x] = values[i];
}
#elif BAD == 4  // no launch bounds: setmaxnreg is ignored
__global__ void kernel(float* x) {
  ptx::grow_registers<232>();
  x[threadIdx.x] = 1.f;
}
#else
__global__ void kernel(float* x) { x[threadIdx.x] *= 2.f; }
#endif

}  // namespace openmsa::cuda
