// Index queries of scattered tokens into a tile of shared memory. Their rows are 128 to 256 bytes, and the copy engine takes about 60
// cycles for each of its boxes, however small, so the threads ask for 16 bytes each.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma.cuh"

namespace openmsa::cuda {

struct IndexQueries {
  const void* data;  // [T, Hkv, dim] of T
  std::int64_t stride_token, stride_group;
  std::int32_t dim;
};

// Rows 0..31 of a tile of kHalves boxes of 128-byte-swizzled rows, lane i naming the packed token of row i; a negative one's row, and
// what lies beyond `dim`, become zeros. For a whole warp, which commits and waits (copy_async_*), then fences (fence_async_proxy).
template <typename T, int kHalves>
__device__ __forceinline__ void copy_index_rows(const IndexQueries& queries, int group, int token, const unsigned char* tile,
                                                int box_bytes, int lane) {
  constexpr int kPieces = kHalves * 8, kRowsAtOnce = 32 / kPieces;  // pieces of 16 bytes
  const int piece = lane % kPieces;
  const bool inside = piece * 8 < queries.dim;
  const T* column = static_cast<const T*>(queries.data) + group * queries.stride_group + (inside ? piece * 8 : 0);
  const std::uint32_t target = ptx::smem_address(tile) + piece / 8 * box_bytes;
#pragma unroll 4
  for (int first = 0; first < 32; first += kRowsAtOnce) {
    const int row = first + lane / kPieces, at = __shfl_sync(0xffffffffu, token, row);
    ptx::copy_async<16>(target + row * 128 + ((piece ^ row) % 8) * 16, column + max(at, 0) * queries.stride_token,
                        at >= 0 && inside ? 16 : 0);
  }
}

}  // namespace openmsa::cuda
