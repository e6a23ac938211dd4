// The tile kernel's own source, behind checks of what the routing (smxx_union) gives it: work, entries and `taken` have to be what it,
// and smxx_combine after it, relies on (tiles.hpp).
#pragma once

#define sm90_union_kernel sm90_union_unchecked_kernel
#include "../../../../src/cuda/sm90_union.cuh"
#undef sm90_union_kernel

#include "tiles.hpp"

namespace openmsa::cuda {

template <typename Traits>
__global__ void sm90_union_kernel(const CUtensorMap map_q, const CUtensorMap map_k, const CUtensorMap map_v,
                                  const UnionTileParams params) {
  if (blockIdx.x == 0 && threadIdx.x == 0) emulation::check_tiles(params);
  sm90_union_unchecked_kernel<Traits>(map_q, map_k, map_v, params);
}

}  // namespace openmsa::cuda
