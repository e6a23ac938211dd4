// Stands in for the CUDA header: bfloat16 with the conversions of openmsa/half.hpp.
#pragma once

#include "cuda_runtime.h"
#include "openmsa/half.hpp"

namespace openmsa::emulation {

template <typename Storage>
struct Half16 {
  std::uint16_t bits;
  Half16() = default;
  Half16(float value) : bits(Storage(value).bits) {}
  operator float() const {
    Storage storage;
    storage.bits = bits;
    return static_cast<float>(storage);
  }
};
template <typename Storage>
struct alignas(4) Half16x2 {
  Half16<Storage> x, y;
};

}  // namespace openmsa::emulation

using __nv_bfloat16 = ::openmsa::emulation::Half16<::openmsa::BFloat16>;
using __nv_bfloat162 = ::openmsa::emulation::Half16x2<::openmsa::BFloat16>;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {float{a.x} + float{b.x}, float{a.y} + float{b.y}}; }
inline __nv_bfloat162 __hge2(__nv_bfloat162 a, __nv_bfloat162 b) { return {float{a.x} >= float{b.x}, float{a.y} >= float{b.y}}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
