// Division by what the host knows: a product and a correction instead of some 25 instructions that wait for each other.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

struct Divisor {
  std::int32_t value;     // d, at least 1
  std::uint32_t inverse;  // floor((2^32 - 1) / d)

  static Divisor of(std::int32_t d) { return {d, 0xffffffffu / static_cast<std::uint32_t>(d)}; }

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
  // floor(x / d) for 0 <= x < 2^31. x * inverse / 2^32 is above x / d - 1, so its floor is at most one too small.
  __device__ __forceinline__ int quotient(int x) const {
    const int q = static_cast<int>(std::uint64_t{static_cast<std::uint32_t>(x)} * inverse >> 32);
    return x - q * value >= value ? q + 1 : q;
  }
#endif
};

}  // namespace openmsa::cuda
