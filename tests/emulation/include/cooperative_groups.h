// Stands in for the CUDA header: the barrier of a grid that is launched together, which here is one CTA (Options::fold_together). As in
// CUDA's implementation the CTA meets in either half.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct grid_group {
  static constexpr unsigned kToken = 0x6e1d;  // of the thread that waits for the other CTAs

  unsigned barrier_arrive() const {
    __syncthreads();
    return threadIdx.x == 0 ? kToken : 0;
  }
  void barrier_wait(unsigned&& token) const {
    if (token != (threadIdx.x == 0 ? kToken : 0)) openmsa::emulation::fail("waits at the grid's barrier without having arrived");
    token = 1;  // spent
    __syncthreads();
  }
  void sync() const { barrier_wait(barrier_arrive()); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
