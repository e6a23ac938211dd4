// What the kernel of dense_attention (sm90_dense.cuh) is given.
#pragma once

#include "cuda/params.hpp"

namespace openmsa::cuda {

struct DenseParams {
  BatchParams batch;
  const QueryTile* tiles;  // [num_tiles], each of dense_tile_tokens(), longest first
  std::int32_t num_tiles;
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
};

// kPaired: by clusters of two CTAs with a tile of two CTAs' tokens.
enum class DenseMode { kPlain, kBlockMax, kPaired };
inline constexpr int kDenseRows = 128;  // query rows of a CTA: tokens times heads of a group

constexpr int dense_cluster(DenseMode mode) { return mode == DenseMode::kPaired ? 2 : 1; }
constexpr std::int32_t dense_tile_tokens(DenseMode mode, int log_group) { return dense_cluster(mode) * (kDenseRows >> log_group); }

}  // namespace openmsa::cuda
