// The part of sparse_attention that takes blocks for a tile of neighbouring tokens at a time.
#pragma once

#include "core/params.hpp"
#include "cuda/params.hpp"

namespace openmsa::cuda {

// The chunk, what the routing leaves for the tile kernel, and whom it serves.
struct UnionScratch {
  BatchParams batch;
  const QueryTile* tiles;  // [num_tiles], each of kUnionTokens
  std::int32_t num_tiles;
  std::uint32_t* entries;              // [num_tiles * Hkv, kMaxUnion]
  std::int32_t *num_entries, *work;    // [num_tiles * Hkv]
  std::int32_t *num_work, *next_work;  // [1], zero before routing
  std::uint32_t* taken;                // [chunk tokens, Hkv], zero before routing: see lists.hpp
  const std::int32_t* ranks;           // [chunk tokens, Hkv, k], by smxx_invert
  const void* partial;                 // [chunk tokens, Hkv, k, 16, D], by sm90_attend
  const float* partial_lse;            // [chunk tokens, Hkv, k, 16]
  std::int32_t chunk_begin;            // first packed token of the chunk
};

void launch_union_route(const core::SparseAttentionParams& params, const UnionScratch& scratch);
// Right behind sm90_attend, whose end it runs under.
void launch_union(const core::SparseAttentionParams& params, const UnionScratch& scratch);

}  // namespace openmsa::cuda
