// The wrappers of src/cuda/ptx/global.cuh over the emulator.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda::ptx {

inline bool load_written(const float2* from, std::uint32_t unwritten, float2& value) {
  const auto* words = reinterpret_cast<const std::int32_t*>(from);
  for (int i = 0; i < 2; ++i) {
    if (static_cast<std::uint32_t>(words[i]) == unwritten) emulation::poll(words + i);
  }
  value = *from;
  return static_cast<std::uint32_t>(words[0]) != unwritten && static_cast<std::uint32_t>(words[1]) != unwritten;
}
inline void store_relaxed(float2* to, float2 value) { *to = value; }

}  // namespace openmsa::cuda::ptx
