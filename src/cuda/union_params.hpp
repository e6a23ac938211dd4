// Unions of selection lists: what the routing kernel (smxx_union.cuh) hands to the tile kernel (sm90_union.cuh).
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"

namespace openmsa::cuda {

// A tile is 12 tokens of 16 heads, four tokens a warpgroup.
inline constexpr int kUnionTokens = 12, kUnionSideTokens = 4, kUnionSides = kUnionTokens / kUnionSideTokens;
inline constexpr int kUnionLogGroup = 4;
inline constexpr int kMaxUnion = 32;  // blocks of a tile

// An entry is a block and who of the tile's tokens chose it: block | token mask << kUnionBlockBits.
inline constexpr int kUnionBlockBits = 20;
inline constexpr std::uint32_t kUnionBlocks = 1u << kUnionBlockBits;  // later blocks (134M keys on) do not fit an entry
static_assert(kUnionBlockBits + kUnionTokens <= 32);
// The mask of one warpgroup's tokens.
constexpr std::uint32_t union_side(std::uint32_t entry, int side) {
  return entry >> (kUnionBlockBits + side * kUnionSideTokens) & ((1u << kUnionSideTokens) - 1);
}

struct UnionTileParams {
  BatchParams batch;
  const QueryTile* tiles;                          // [num_tiles], each of kUnionTokens
  const std::int32_t* work;                        // [num_work], tile * Hkv + group
  const std::int32_t* num_work;                    // [1]
  std::int32_t* next_work;                         // [1], zero at launch: how many CTAs have come back for more
  const std::uint32_t* entries;                    // [num_tiles * Hkv, kMaxUnion], as union_place() orders them
  const std::int32_t* num_entries;                 // [num_tiles * Hkv]
  const std::uint32_t* taken;                      // [chunk tokens, Hkv], see lists.hpp
  const std::int32_t* ranks;                       // [chunk tokens, Hkv, k]; -1: no partial in this slot
  const void* partial;                             // [chunk tokens, Hkv, k, 16, D]
  const float* partial_lse;                        // [chunk tokens, Hkv, k, 16]
  void* out;                                       // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;  // elements
  float* lse;                                      // [T, Hq] or null
  std::int64_t stride_lse_token;
  std::int32_t chunk_begin;            // first packed token of the chunk
  std::int32_t num_tiles, num_groups;  // Hkv
  std::int32_t top_k, group_size;
  float scale_log2;  // softmax_scale times log2(e)
  float slack;       // how far a raw score may exceed its row's offset: kSlack / scale_log2
};

}  // namespace openmsa::cuda
