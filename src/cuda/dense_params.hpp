// What the tile kernel (sm90_dense.cuh) is given.
#pragma once

#include "cuda/params.hpp"

namespace openmsa::cuda {

struct DenseParams {
  BatchParams batch;
  const QueryTile* tiles;  // [num_tiles]; dense: longest first
  std::int32_t num_tiles;
  // Union mode only (see smxx_union.cuh); work is tile * Hkv + group.
  const std::int32_t* work;                        // [num_work]
  const std::int32_t* num_work;                    // [1]
  const std::uint32_t* entries;                    // [num_tiles * Hkv, kMaxUnion]: block | token mask << 24
  const std::int32_t* num_entries;                 // [num_tiles * Hkv]
  void* out;                                       // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;  // elements
  float* lse;                                      // [T, Hq] or null
  std::int64_t stride_lse_token;
  float* block_max;  // [T, Hq, num_blocks] or null
  std::int64_t stride_max_token, stride_max_head;
  std::int32_t num_blocks;             // width of block_max
  std::int32_t num_groups;             // Hkv
  std::int32_t group_size, log_group;  // G, and log2 of Gp: G rounded up to a power of two, at most 16
  float scale, scale_log2;             // softmax_scale, times log2(e)
};

// kPlain and kBlockMax walk every visible block; kUnion walks the union of a tile's selection lists.
enum class DenseMode { kPlain, kBlockMax, kUnion };
inline constexpr int kMaxUnion = 32;

}  // namespace openmsa::cuda
