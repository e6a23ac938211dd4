// Global memory as CTAs share it (PTX ISA "red", "ld.acquire").
#pragma once

#include <cstdint>

namespace openmsa::cuda::ptx {

// Counts what this thread wrote, and what a barrier ordered before it, as done.
__device__ __forceinline__ void add_release(std::int32_t* counter, std::int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// What was counted before the value seen may be read afterwards, past the L1.
__device__ __forceinline__ std::int32_t load_acquire(const std::int32_t* counter) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace openmsa::cuda::ptx
