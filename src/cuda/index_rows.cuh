// Index queries of scattered tokens into a tile of shared memory. Their rows are 128 to 256 bytes, and the copy engine takes about 60
// cycles for each of its boxes, however small, so these go through registers.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda {

struct IndexQueries {
  const void* data;  // [T, Hkv, dim] of T
  std::int64_t stride_token, stride_group;
  std::int32_t dim;
};

// Rows 0..31 of a tile of kHalves boxes of 128-byte-swizzled rows, lane i naming the packed token of row i; a negative one's row, and
// what lies beyond `dim`, become zeros. For a whole warp; what follows needs fence_async_proxy.
template <typename T, int kHalves>
__device__ __forceinline__ void load_index_rows(const IndexQueries& queries, int group, int token, unsigned char* tile,
                                                int box_bytes, int lane) {
  constexpr int kPieces = kHalves * 8, kRowsAtOnce = 32 / kPieces, kBatch = 4;  // pieces of 16 bytes
  const int piece = lane % kPieces, inner = lane / kPieces;
  const bool inside = piece * 8 < queries.dim;
  const T* column = static_cast<const T*>(queries.data) + group * queries.stride_group + piece * 8;
#pragma unroll 1
  for (int first = 0; first < 32; first += kBatch * kRowsAtOnce) {
    uint4 value[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = __shfl_sync(0xffffffffu, token, first + b * kRowsAtOnce + inner);
      value[b] = uint4{0, 0, 0, 0};
      if (at >= 0 && inside) value[b] = __ldg(reinterpret_cast<const uint4*>(column + at * queries.stride_token));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = first + b * kRowsAtOnce + inner;
      *reinterpret_cast<uint4*>(tile + piece / 8 * box_bytes + row * 128 + ((piece ^ row) % 8) * 16) = value[b];
    }
  }
}

}  // namespace openmsa::cuda
