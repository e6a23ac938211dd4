// Stands in for the CUDA header: binary16 with the conversions of openmsa/half.hpp.
#pragma once

#include "cuda_bf16.h"

using __half = ::openmsa::emulation::Half16<::openmsa::Float16>;
using __half2 = ::openmsa::emulation::Half16x2<::openmsa::Float16>;

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
