// Routes tiles of neighbouring query tokens: where a tile's tokens share most of their blocks, the union of their lists goes to the
// tile kernel (sm90_dense.cuh, union mode); otherwise the tokens go one by one to sm90_attend.cuh.
//
// Roles   one warp a (tile, group); lane j < 8 walks the list of token j, all lists being ascending, and the warp merges them.
#pragma once

#include "cuda/params.hpp"
#include "cuda/sm90_dense.cuh"

namespace openmsa::cuda {

struct UnionParams {
  BatchParams batch;
  const QueryTile* tiles;         // [num_tiles], tiles of 8 tokens; seq -1: none
  const std::int32_t* block_ids;  // [T, Hkv, k]
  std::int64_t stride_token, stride_group;
  std::int32_t num_tiles, num_groups, top_k;
  std::int32_t limit;         // longest union worth the tile kernel, at most kMaxUnion
  std::uint32_t* entries;     // [num_tiles * Hkv, kMaxUnion]
  std::int32_t* num_entries;  // [num_tiles * Hkv]; 0: routed token by token
  std::int32_t* taken;        // [chunk tokens, Hkv]: nonzero where the tile kernel serves the token
  std::int32_t chunk_begin;   // first packed token of the chunk
  std::int32_t* work;         // [num_tiles * Hkv]
  std::int32_t* num_work;     // [1], zero at launch
};

__global__ void __launch_bounds__(128, 8) smxx_union_kernel(const __grid_constant__ UnionParams params) {
  const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= params.num_tiles * params.num_groups) return;
  const QueryTile tile = params.tiles[index / params.num_groups];
  const int group = index % params.num_groups;
  int count = 0;
  if (tile.seq >= 0) {
    Sequence sequence;
    params.batch.load(tile.seq, &sequence);
    const int num_tokens = tile.end - tile.first, token = tile.first + min(lane, num_tokens - 1);
    const std::int32_t* ids =
        params.block_ids + (std::int64_t{sequence.query_begin} + token) * params.stride_token + group * params.stride_group;
    const int num_blocks =
        (sequence.num_visible(sequence.first_position + token) + params.batch.block_size - 1) / params.batch.block_size;
    const auto read = [&](int slot) {
      const std::int32_t id = slot < params.top_k ? ids[slot] : -1;
      if (id >= -1 && id < num_blocks) return static_cast<std::uint32_t>(id);
      report(params.batch.fault, FaultCode::kBlockId, (std::int64_t{sequence.query_begin} + token) * params.num_groups + group,
             slot, id);
      return 0xffffffffu;
    };
    constexpr std::uint32_t kEnd = 0xffffffffu;  // also what an id of -1 reads as
    int next = 1;
    std::uint32_t head = lane < num_tokens ? read(0) : kEnd;
    std::uint32_t mine = 0;
    for (;; ++count) {
      const std::uint32_t least = __reduce_min_sync(0xffffffffu, head);
      if (least == kEnd || count == params.limit) {
        if (least != kEnd) count = 0;  // too long
        break;
      }
      const std::uint32_t mask = __ballot_sync(0xffffffffu, head == least);
      if (lane == count) {
        mine = least | mask << 24;
        params.batch.page(sequence, tile.seq, static_cast<int>(least));  // reported; reads as zeros
      }
      if (head == least) {
        head = read(next++);
        if (head <= least) {  // kEnd is larger than any id
          report(params.batch.fault, FaultCode::kBlockOrder,
                 (std::int64_t{sequence.query_begin} + token) * params.num_groups + group, next - 1,
                 static_cast<std::int32_t>(head));
          head = kEnd;
        }
      }
    }
    if (lane < count) params.entries[std::int64_t{index} * kMaxUnion + lane] = mine;
    if (lane < num_tokens) {
      params.taken[std::int64_t{sequence.query_begin + token - params.chunk_begin} * params.num_groups + group] = count > 0;
    }
  }
  if (lane == 0) {
    params.num_entries[index] = count;
    if (count > 0) params.work[atomicAdd(params.num_work, 1)] = index;
  }
}

}  // namespace openmsa::cuda
