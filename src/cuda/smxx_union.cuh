// Routes tiles of neighbouring query tokens: where a tile's tokens share most of their blocks, the union of their lists goes to the
// tile kernel (sm90_dense.cuh, union mode); otherwise the tokens go one by one to sm90_attend.cuh.
//
// Roles   one warp a (tile, group). The ids of all lists set bits of a map of 1,024: more bits than a union may have blocks, and the
//         tile is turned away at once, as most tiles with scattered lists are. The others are merged: lane j < 8 walks the list of
//         token j, all lists being ascending.
// Cost    the tile kernel's two warpgroups take 4 tokens each and skip blocks that none of them chose, so what counts is the two
//         unions of 4, compared with the (token, block) pairs that the other way would take.
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
  float max_steps_per_pair;   // the tile kernel is worth it up to this many warpgroup steps a (token, block) pair
  std::uint32_t* entries;     // [num_tiles * Hkv, kMaxUnion]
  std::int32_t* num_entries;  // [num_tiles * Hkv]; 0: routed token by token
  std::int32_t* taken;        // [chunk tokens, Hkv]: nonzero where the tile kernel serves the token
  std::int32_t chunk_begin;   // first packed token of the chunk
  std::int32_t* work;         // [num_tiles * Hkv]
  std::int32_t* num_work;     // [1], zero at launch
};

inline constexpr int kUnionWarps = 4, kUnionTileTokens = 8, kUnionMaxTopK = 32, kUnionMapWords = 32;

__global__ void __launch_bounds__(32 * kUnionWarps) smxx_union_kernel(const __grid_constant__ UnionParams params) {
  __shared__ std::int32_t lists[kUnionWarps][kUnionTileTokens][kUnionMaxTopK + 1];
  __shared__ std::uint32_t maps[kUnionWarps][kUnionMapWords];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * kUnionWarps + warp;
  if (index >= params.num_tiles * params.num_groups) return;
  const QueryTile tile = params.tiles[index / params.num_groups];
  const int group = index % params.num_groups;
  int count = 0;
  if (tile.seq >= 0) {
    Sequence sequence;
    params.batch.load(tile.seq, &sequence);
    const int num_tokens = tile.end - tile.first;
    maps[warp][lane] = 0;
    __syncwarp();
    {
      const int token = lane / 4;
      const std::int32_t* ids = params.block_ids + (std::int64_t{sequence.query_begin} + tile.first + token) * params.stride_token +
                                group * params.stride_group;
      for (int slot = lane % 4; slot < params.top_k && token < num_tokens; slot += 4) {
        const int id = ids[slot];
        lists[warp][token][slot] = id;
        if (id >= 0) atomicOr(&maps[warp][id / 32 % kUnionMapWords], 1u << id % 32);
      }
    }
    __syncwarp();
    if (__reduce_add_sync(0xffffffffu, __popc(maps[warp][lane])) <= kMaxUnion) {
      const int token = tile.first + min(lane, num_tokens - 1);
      const std::int64_t reported = (std::int64_t{sequence.query_begin} + token) * params.num_groups + group;
      const int num_blocks =
          (sequence.num_visible(sequence.first_position + token) + params.batch.block_size - 1) / params.batch.block_size;
      constexpr std::uint32_t kEnd = 0xffffffffu;  // larger than any id; also what an id of -1 reads as
      const auto read = [&](int slot) {
        const std::int32_t id = slot < params.top_k ? lists[warp][token - tile.first][slot] : -1;
        if (id >= -1 && id < num_blocks) return static_cast<std::uint32_t>(id);
        report(params.batch.fault, FaultCode::kBlockId, reported, slot, id);
        return kEnd;
      };
      int next = 1, steps = 0, pairs = 0;
      std::uint32_t head = lane < num_tokens ? read(0) : kEnd;
      std::uint32_t mine[(kMaxUnion + 31) / 32] = {};
      for (;; ++count) {
        const std::uint32_t least = __reduce_min_sync(0xffffffffu, head);
        if (least == kEnd) break;
        if (count == kMaxUnion) {
          steps = 0x7fffffff;  // too many
          break;
        }
        const std::uint32_t mask = __ballot_sync(0xffffffffu, head == least);
        steps += ((mask & 0x0fu) != 0) + ((mask & 0xf0u) != 0);
        pairs += __popc(mask);
        if (lane == count % 32) {
#pragma unroll
          for (int i = 0; i < (kMaxUnion + 31) / 32; ++i) mine[i] = count / 32 == i ? least | mask << 24 : mine[i];
          params.batch.page(sequence, tile.seq, static_cast<int>(least));  // reported; reads as zeros
        }
        if (head == least) {
          head = read(next++);
          if (head <= least) {
            report(params.batch.fault, FaultCode::kBlockOrder, reported, next - 1, static_cast<std::int32_t>(head));
            head = kEnd;
          }
        }
      }
      if (static_cast<float>(steps) > params.max_steps_per_pair * static_cast<float>(pairs)) count = 0;
#pragma unroll
      for (int i = 0; i < (kMaxUnion + 31) / 32; ++i) {
        if (i * 32 + lane < count) params.entries[std::int64_t{index} * kMaxUnion + i * 32 + lane] = mine[i];
      }
    }
    if (lane < num_tokens) {
      params.taken[(std::int64_t{sequence.query_begin} + tile.first + lane - params.chunk_begin) * params.num_groups + group] =
          count > 0;
    }
  }
  if (lane == 0) {
    params.num_entries[index] = count;
    if (count > 0) params.work[atomicAdd(params.num_work, 1)] = index;
  }
}

}  // namespace openmsa::cuda
