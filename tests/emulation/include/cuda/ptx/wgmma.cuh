// The wrappers of src/cuda/ptx/wgmma.cuh over the emulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::commit_wgmma(); }
template <int kPending>
void wgmma_wait() {
  emulation::wait_wgmma(kPending);
}
template <int kCount>
void wgmma_fence_operands(float (&)[kCount]) {}
inline void schedule_after(float) {}

inline std::uint64_t smem_descriptor(std::uint32_t address, std::uint32_t leading, std::uint32_t stride) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{stride >> 4} << 32) | (std::uint64_t{leading >> 4} << 16) |
         ((address & 0x3ffffu) >> 4);
}
inline std::uint64_t smem_descriptor_step(std::uint64_t base, std::uint32_t bytes) {
  const std::uint32_t low = static_cast<std::uint32_t>(base) + (bytes >> 4);
  return base >> 32 << 32 | low;
}
inline std::uint32_t warp_uniform(std::uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

enum class Major { kK = 0, kMN = 1 };

template <typename T, int kN>
struct WgmmaSS {
  template <Major kMajorB>
  static void run(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, int accumulate) {
    emulation::issue_wgmma({kN, std::is_same_v<T, __half>, false, false, kMajorB == Major::kMN, a, b, accumulate != 0}, d, nullptr);
  }
};
template <typename T, int kN>
struct WgmmaRS {
  template <Major kMajorB>
  static void run(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b, int accumulate) {
    emulation::issue_wgmma({kN, std::is_same_v<T, __half>, true, false, kMajorB == Major::kMN, 0, b, accumulate != 0}, d, a);
  }
};

}  // namespace openmsa::cuda::ptx
