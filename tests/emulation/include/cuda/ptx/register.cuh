// The wrappers of src/cuda/ptx/register.cuh.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda::ptx {

template <int kRegisters>
void grow_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulation::set_registers(kRegisters);
}
template <int kRegisters>
void shrink_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulation::set_registers(kRegisters);
}

inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : fmaxf(a, b); }
inline void count_if_greater(int& counter, std::uint32_t other, std::uint32_t mine) { counter += other > mine ? 1 : 0; }

}  // namespace openmsa::cuda::ptx
