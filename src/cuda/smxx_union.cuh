// Routes the blocks of tiles of neighbouring query tokens: those that many of a tile's tokens chose go to the tile kernel
// (sm90_dense.cuh, union mode), the others meet their tokens one by one in sm90_attend.cuh.
//
// Roles   one warp a (tile, group). The ids of all lists set bits of a map of 1,024: more bits than a tile worth looking at has
//         blocks, and the tile is turned away at once, as most tiles with scattered lists are. The others are merged: lane j < 8
//         walks the list of token j, all lists being ascending.
// Cost    a block in the union costs the same for one token as for four, and a little more for the other four; elsewhere each of its
//         tokens costs as much as any. So few tokens are left out, and then the union has to be worth what is in it.
// Full    blocks past kMaxUnion are left out as well.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#include "cuda/sm90_dense.cuh"

namespace openmsa::cuda {

struct UnionParams {
  BatchParams batch;
  const QueryTile* tiles;         // [num_tiles], tiles of 8 tokens; seq -1: none
  const std::int32_t* block_ids;  // [T, Hkv, k]
  std::int64_t stride_token, stride_group;
  std::int32_t num_tiles, num_groups, top_k;
  std::uint32_t* entries;     // [num_tiles * Hkv, kMaxUnion]
  std::int32_t* num_entries;  // [num_tiles * Hkv]; 0: nothing for the tile kernel
  std::uint32_t* taken;       // [chunk tokens, Hkv], see lists.hpp
  std::int32_t chunk_begin;   // first packed token of the chunk
  std::int32_t* work;         // [num_tiles * Hkv]
  std::int32_t* num_work;     // [1], zero at launch
};

inline constexpr int kUnionWarps = 4, kUnionTileTokens = 8, kUnionMaxTopK = 32, kUnionMapWords = 32;
// Blocks of a tile worth looking at. Clustered lists as in the benchmark, 8 x 16: 27 at 64K and 128K keys, at most 38.
inline constexpr int kUnionMaxDistinct = 48;
// Blocks of no more tokens than this are left out.
inline constexpr int kUnionMaxLeft = 2;
// What things cost over the whole chip, in tenths of a nanosecond: a block for one or both of the tile kernel's warpgroups, a tile,
// a token's partial from there, and a (token, block) pair of the other way.
inline constexpr int kUnionOneSide = 130, kUnionBothSides = 155, kUnionTile = 100, kUnionPartial = 22, kUnionPair = 34;

__global__ void __launch_bounds__(32 * kUnionWarps) smxx_union_kernel(const __grid_constant__ UnionParams params) {
  static_assert(kMaxUnion <= 32, "a lane an entry");
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
    int num_ids = 0;  // of the list of token lane / 4, then of token `lane`
    __syncwarp();
    {
      const int token = lane / 4;
      const std::int32_t* ids = params.block_ids + (std::int64_t{sequence.query_begin} + tile.first + token) * params.stride_token +
                                group * params.stride_group;
      for (int slot = lane % 4; slot < params.top_k && token < num_tokens; slot += 4) {
        const int id = ids[slot];
        lists[warp][token][slot] = id;
        num_ids += id == -1 ? 0 : 1;
        if (id >= 0) atomicOr(&maps[warp][id / 32 % kUnionMapWords], 1u << id % 32);
      }
    }
    num_ids += __shfl_xor_sync(0xffffffffu, num_ids, 1);
    num_ids += __shfl_xor_sync(0xffffffffu, num_ids, 2);
    num_ids = __shfl_sync(0xffffffffu, num_ids, lane * 4 % 32);
    __syncwarp();
    std::uint32_t taken = 0;
    if (__reduce_add_sync(0xffffffffu, __popc(maps[warp][lane])) <= kUnionMaxDistinct) {
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
      int slot = 0;
      std::uint32_t head = lane < num_tokens ? read(0) : kEnd, mine = 0;
      for (;;) {
        const std::uint32_t least = __reduce_min_sync(0xffffffffu, head);
        if (least == kEnd) break;
        const std::uint32_t mask = __ballot_sync(0xffffffffu, head == least);
        const bool in_union = __popc(mask) > kUnionMaxLeft && count < kMaxUnion;
        if (in_union) {
          if (lane == count) {
            mine = least | mask << 24;
            params.batch.page(sequence, tile.seq, static_cast<int>(least));  // reported; reads as zeros
          }
          ++count;
        }
        if (head == least) {
          if (in_union) taken |= 1u << slot;
          head = read(++slot);
          if (head <= least) {
            report(params.batch.fault, FaultCode::kBlockOrder, reported, slot, static_cast<std::int32_t>(head));
            head = kEnd;
          }
        }
      }
      const bool left = __popc(taken) < num_ids;  // some of this lane's token's blocks
      const int partials = __popc(__ballot_sync(0xffffffffu, taken != 0 && left));
      const int both_sides = __popc(__ballot_sync(0xffffffffu, (mine >> 24 & 0xfu) != 0 && mine >> 28 != 0));
      const int pairs = __reduce_add_sync(0xffffffffu, __popc(mine >> 24));
      const int cost =
          kUnionTile + kUnionOneSide * count + (kUnionBothSides - kUnionOneSide) * both_sides + kUnionPartial * partials;
      if (cost > kUnionPair * pairs) {
        count = 0;
        taken = 0;
      }
      if (taken != 0 && !left) taken = kTakenAll;
      if (lane < count) params.entries[std::int64_t{index} * kMaxUnion + lane] = mine;
    }
    if (lane < num_tokens) {
      params.taken[(std::int64_t{sequence.query_begin} + tile.first + lane - params.chunk_begin) * params.num_groups + group] =
          taken;
    }
  }
  if (lane == 0) {
    params.num_entries[index] = count;
    if (count > 0) params.work[atomicAdd(params.num_work, 1)] = index;
  }
}

}  // namespace openmsa::cuda
