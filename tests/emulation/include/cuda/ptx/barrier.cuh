// The wrappers of src/cuda/ptx/barrier.cuh over the emulator.
#pragma once

#include <cuda_runtime.h>

namespace openmsa::cuda::ptx {

inline std::uint32_t smem_address(const void* pointer) { return emulation::shared_address(pointer); }

inline std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value;
  if (address % sizeof value != 0) emulation::fail("ld.shared.u32 of an address that is not aligned");
  std::memcpy(&value, emulation::shared_pointer(address, sizeof value), sizeof value);
  return value;
}

inline void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) { emulation::mbarrier_init(barrier, arrivals); }
inline void fence_barrier_init() {}
inline void mbarrier_arrive(std::uint64_t* barrier) { emulation::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  emulation::mbarrier_arrive_expect(barrier, bytes);
}
inline void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) { emulation::mbarrier_wait(barrier, parity); }
inline void fence_async_proxy() { emulation::fence_async(); }
inline void named_barrier(std::uint32_t id, std::uint32_t threads) { emulation::named_barrier(id, threads); }
inline void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) { emulation::named_barrier_arrive(id, threads); }

}  // namespace openmsa::cuda::ptx
