// Register budget of a warpgroup (PTX ISA "setmaxnreg"): takes effect only under __launch_bounds__(threads, 1). And arithmetic that
// the compiler does not find by itself.
#pragma once

#include <cstdint>

namespace openmsa::cuda::ptx {

template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// IEEE maximum that keeps a NaN of either operand; the same speed as fmaxf, which drops it.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ISETP and a predicated add; the compiler's own choice is one instruction longer.
__device__ __forceinline__ void count_if_greater(int& counter, std::uint32_t other, std::uint32_t mine) {
  asm("{.reg .pred p; setp.gt.u32 p, %1, %2; @p add.s32 %0, %0, 1;}" : "+r"(counter) : "r"(other), "r"(mine));
}

}  // namespace openmsa::cuda::ptx
