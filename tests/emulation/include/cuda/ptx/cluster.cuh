// The wrappers of src/cuda/ptx/cluster.cuh. CTAs run one after the other, so those of a cluster cannot meet: instances for clusters
// compile, and fail where they would.
#pragma once

#include "cuda/ptx/tma.cuh"

namespace openmsa::cuda::ptx {

[[noreturn]] inline void fail_cluster() { emulation::fail("runs in clusters of CTAs, which are not emulated"); }
inline std::uint32_t cluster_rank() { fail_cluster(); }
inline void cluster_sync() { fail_cluster(); }
inline void mbarrier_arrive_cluster(std::uint64_t*, std::uint32_t) { fail_cluster(); }
inline void tma_load_4d_multicast(void*, const CUtensorMap*, std::uint64_t*, std::uint16_t, std::int32_t, std::int32_t,
                                  std::int32_t, std::int32_t) {
  fail_cluster();
}

}  // namespace openmsa::cuda::ptx
