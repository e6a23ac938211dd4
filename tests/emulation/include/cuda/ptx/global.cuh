// The wrappers of src/cuda/ptx/global.cuh over the emulator.
#pragma once

#include <cuda_runtime.h>

#include <bit>

namespace openmsa::cuda::ptx {

// Words that are looked at in turn start as all ones where they are their own flags: only those are waited for.
inline float2 look(const float2* from) {
  const auto* words = reinterpret_cast<const std::int32_t*>(from);
  for (int i = 0; i < 2; ++i) {
    if (words[i] == -1) emulation::poll(words + i);
  }
  return *from;
}
inline bool holds(float2 value, std::uint32_t word) {
  return std::bit_cast<std::uint32_t>(value.x) == word || std::bit_cast<std::uint32_t>(value.y) == word;
}
inline void store_relaxed(float2* to, float2 value) { *to = value; }

}  // namespace openmsa::cuda::ptx
