// How a warp's rows of a wgmma accumulator leave for memory.
#pragma once

#include "cuda/ptx/convert.cuh"

namespace openmsa::cuda {

// Row r (0: lane / 4, 1: 8 below) of `out`, a warp's share of an m64 accumulator [.., kHeadDim], times `factor`, to `target`, null where
// there is none. A quad trades its 4-byte pairs so that each lane holds 16 contiguous bytes: lane q = `quad` takes column group 4m + q.
template <typename T, int kHeadDim>
__device__ __forceinline__ void store_row(T* target, const float (&out)[kHeadDim / 2], int r, float factor, int quad) {
#pragma unroll
  for (int m = 0; m < kHeadDim / 32; ++m) {
    std::uint32_t mine[4], got[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mine[i] = pack2<T>(out[4 * (4 * m + i) + 2 * r] * factor, out[4 * (4 * m + i) + 2 * r + 1] * factor);
#pragma unroll
    for (int turn = 0; turn < 4; ++turn) {
      // In turn t lane q sends its pair of group q ^ t and receives the pair of its own group from lane q ^ t.
      const int partner = quad ^ turn;
      const std::uint32_t send = partner == 0 ? mine[0] : partner == 1 ? mine[1] : partner == 2 ? mine[2] : mine[3];
      const std::uint32_t received = __shfl_xor_sync(0xffffffffu, send, turn);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (partner == i) got[i] = received;
      }
    }
    if (target) *reinterpret_cast<uint4*>(target + (4 * m + quad) * 8) = uint4{got[0], got[1], got[2], got[3]};
  }
}

}  // namespace openmsa::cuda
