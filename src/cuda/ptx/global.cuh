// Global memory as CTAs share it (PTX ISA "ld", "st").
#pragma once

#include <cstdint>

namespace openmsa::cuda::ptx {

// A look, past the L1, at two words that another CTA writes once, each whole and in no order with anything else.
__device__ __forceinline__ float2 look(const float2* from) {
  float2 value;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(from) : "memory");
  return value;
}
// Whether either word is that bit pattern.
__device__ __forceinline__ bool holds(float2 value, std::uint32_t word) {
  return __float_as_uint(value.x) == word || __float_as_uint(value.y) == word;
}
__device__ __forceinline__ void store_relaxed(float2* to, float2 value) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y) : "memory");
}

}  // namespace openmsa::cuda::ptx
