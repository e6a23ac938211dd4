// What the tile kernel (sm90_dense.cuh) is given.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"

namespace openmsa::cuda {

struct DenseParams {
  BatchParams batch;
  const QueryTile* tiles;  // [num_tiles], each of dense_tile_tokens(); dense: longest first
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
  float slack;                         // how far a raw score may exceed its row's offset: kSlack / scale_log2
  // Union mode only: `taken` (see lists.hpp) says where the rows of a token go.
  const std::uint32_t* taken;  // [chunk tokens, Hkv]
  void* partial;               // [chunk tokens, Hkv, k, Gp, D]
  float* partial_lse;          // [chunk tokens, Hkv, k, Gp]
  std::int32_t chunk_begin, top_k;
};

// kPlain, kPaired and kBlockMax walk every visible block, kPaired by clusters of two CTAs with a tile of two CTAs' tokens; kUnion
// walks the union of a tile's selection lists.
enum class DenseMode { kPlain, kBlockMax, kUnion, kPaired };
inline constexpr int kDenseRows = 128;  // query rows of a CTA: tokens times heads of a group
inline constexpr int kMaxUnion = 32;
// In powers of two: probabilities before the final division stay below 2^8, in range of fp16 and of no weight in fp32 sums.
inline constexpr float kSlack = 8.f;

constexpr int dense_cluster(DenseMode mode) { return mode == DenseMode::kPaired ? 2 : 1; }
constexpr std::int32_t dense_tile_tokens(DenseMode mode, int log_group) { return dense_cluster(mode) * (kDenseRows >> log_group); }

}  // namespace openmsa::cuda
