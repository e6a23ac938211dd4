// The wrappers of src/cuda/ptx/cluster.cuh over the emulator. A kernel that is launched without clusters is a cluster of one CTA.
#pragma once

#include "cuda/ptx/tma.cuh"

namespace openmsa::cuda::ptx {

inline std::uint32_t cluster_rank() { return emulation::cluster_rank(); }
inline void cluster_sync() { emulation::cluster_sync(); }

inline void mbarrier_arrive_cluster(std::uint64_t* barrier, std::uint32_t cta) { emulation::mbarrier_arrive_remote(barrier, cta); }

inline void tma_load_4d_multicast(void* smem, const CUtensorMap* map, std::uint64_t* barrier, std::uint16_t ctas, std::int32_t x,
                                  std::int32_t y, std::int32_t z, std::int32_t w) {
  if (ctas == 0) emulation::fail("multicasts to no CTA");
  emulation::load_box(smem, *map, barrier, 4, {x, y, z, w}, ctas);
}

}  // namespace openmsa::cuda::ptx
