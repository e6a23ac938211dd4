// What CTAs of a cluster do together (PTX ISA "barrier.cluster", "mapa", "cp.async.bulk.tensor ... .multicast::cluster").
#pragma once

#include <cuda.h>

#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda::ptx {

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier among all threads of the cluster.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives on the barrier at the same offset in the shared memory of CTA `cta` of the cluster.
__device__ inline void mbarrier_arrive_cluster(std::uint64_t* barrier, std::uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(cta)
      : "memory");
}

// Loads a box for every CTA of the cluster whose bit is set in `ctas`, to the same shared-memory offset of each, completing on each
// one's own barrier.
__device__ inline void tma_load_4d_multicast(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::uint16_t ctas,
                                             std::int32_t x, std::int32_t y, std::int32_t z, std::int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, "
      "%7}], "
      "[%2], %3;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "h"(ctas), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

}  // namespace openmsa::cuda::ptx
