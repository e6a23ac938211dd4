// Global memory as CTAs share it (PTX ISA "ld", "st").
#pragma once

#include <cstdint>

namespace openmsa::cuda::ptx {

// Two words that another CTA writes once, each whole and in no order with anything else. Looks past the L1; false while one of them
// still is `unwritten`.
__device__ __forceinline__ bool load_written(const float2* from, std::uint32_t unwritten, float2& value) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(from) : "memory");
  return __float_as_uint(value.x) != unwritten && __float_as_uint(value.y) != unwritten;
}
__device__ __forceinline__ void store_relaxed(float2* to, float2 value) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y) : "memory");
}

}  // namespace openmsa::cuda::ptx
