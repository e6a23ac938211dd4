// The wrappers of src/cuda/ptx/tma.cuh over the emulator.
#pragma once

#include "copies.hpp"
#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda::ptx {

inline void tma_load_3d(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::int32_t x, std::int32_t y,
                        std::int32_t z) {
  emulation::load_box(smem, *map, barrier, 3, {x, y, z});
}
inline void tma_load_4d(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::int32_t x, std::int32_t y, std::int32_t z,
                        std::int32_t w) {
  emulation::load_box(smem, *map, barrier, 4, {x, y, z, w});
}
inline void tma_store_2d(const CUtensorMap* map, const void* smem, std::int32_t x, std::int32_t y) {
  emulation::store_box(*map, smem, 2, {x, y});
}
inline void bulk_commit() { emulation::commit_stores(); }
template <int kPending>
void bulk_wait_read() {
  emulation::wait_stores(kPending);
}
template <int kPending>
void bulk_wait() {
  emulation::wait_stores(kPending);
}

}  // namespace openmsa::cuda::ptx
