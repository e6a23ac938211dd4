// The wrappers of src/cuda/ptx/convert.cuh. The GPU's approximations err by two units of the last place; here they are exact, but
// flush subnormal numbers to zero likewise.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace openmsa::cuda {

inline float flush_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float exp2_approx(float x) { return flush_subnormal(::exp2f(flush_subnormal(x))); }
inline float log2_approx(float x) { return ::log2f(flush_subnormal(x)); }

template <typename T>
std::uint32_t pack2(float low, float high) {
  return std::uint32_t{T(low).bits} | std::uint32_t{T(high).bits} << 16;
}

template <typename T>
float2 unpack2(std::uint32_t pair) {
  T low, high;
  low.bits = static_cast<std::uint16_t>(pair), high.bits = static_cast<std::uint16_t>(pair >> 16);
  return {low, high};
}

}  // namespace openmsa::cuda
