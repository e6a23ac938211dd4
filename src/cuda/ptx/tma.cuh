// Bulk tensor copies (TMA) from global to shared memory, completing on an mbarrier.
#pragma once

#include <cuda.h>

#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda::ptx {

// Loads the box at the given element coordinates, x innermost.
__device__ inline void tma_load_3d(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::int32_t x, std::int32_t y,
                                   std::int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                   smem_address(smem)),
               "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ inline void tma_load_4d(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::int32_t x, std::int32_t y,
                                   std::int32_t z, std::int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Stores; completion is tracked per thread in bulk groups.
__device__ inline void tma_store_2d(const CUtensorMap* map, const void* smem, std::int32_t x, std::int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(smem_address(smem)),
               "r"(x), "r"(y)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but kPending groups have read their shared memory, which may then be overwritten.
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace openmsa::cuda::ptx
