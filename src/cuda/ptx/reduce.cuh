// Additions to global memory that return nothing (PTX ISA "red").
#pragma once

namespace openmsa::cuda::ptx {

// Two neighbouring fp32 values, the first 8-byte aligned. Where one thread alone adds to an address, the sum is as repeatable as a
// load, an addition and a store, and nobody waits for the load.
__device__ inline void reduce_add2(float* address, float a, float b) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(a), "f"(b) : "memory");
}

}  // namespace openmsa::cuda::ptx
