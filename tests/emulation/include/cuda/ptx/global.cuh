// The wrappers of src/cuda/ptx/global.cuh over the emulator.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda::ptx {

inline void add_release(std::int32_t* counter, std::int32_t value) { atomicAdd(counter, value); }
inline std::int32_t load_acquire(const std::int32_t* counter) { return emulation::poll(counter); }

}  // namespace openmsa::cuda::ptx
