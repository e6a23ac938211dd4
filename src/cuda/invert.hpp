// Launches the kernels that invert selection lists.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/lists.hpp"

namespace openmsa::cuda {

struct InvertParams {
  BatchParams batch;
  const std::int32_t* block_ids;  // [T, Hkv, k]
  std::int64_t stride_token, stride_group;
  const std::int32_t* block_begin;  // [B+1] first global block of every sequence
  const std::uint32_t* taken;       // [chunk tokens, Hkv]: see lists.hpp; null: nothing is taken
  std::int32_t chunk_begin, chunk_tokens, num_groups, top_k;
  std::int64_t max_blocks;    // of all sequences: bound of block_begin[B]
  std::int32_t max_item;      // longest work item, tokens
  std::int32_t* counts;       // [Hkv * blocks], zero at launch; blocks = block_begin[B]
  std::int32_t* offsets;      // [Hkv * blocks] first entry of a block
  std::int32_t* first_items;  // [Hkv * blocks] its first item
  std::int32_t* ranks;        // [chunk tokens, Hkv, k]; -1: no partial in this slot
  std::uint32_t* entries;     // [chunk tokens * Hkv * k]
  AttendItem* items;
  std::int32_t* num_items;                  // [1]
  std::int32_t *rest = nullptr, *num_rest;  // [chunk tokens * Hkv], [1] zero at launch: who is not `taken`; or null
};

void launch_invert(const InvertParams& params, void* stream);

}  // namespace openmsa::cuda
