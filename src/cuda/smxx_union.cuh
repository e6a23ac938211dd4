// Routes the blocks of tiles of neighbouring query tokens: those that many of a tile's tokens chose go to the tile kernel
// (sm90_union.cuh), the others meet their tokens one by one in sm90_attend.cuh.
//
// Roles   one warp a (tile, group). The ids of all lists set bits of a map of 1,024: more bits than a tile worth looking at has
//         blocks, and the tile is turned away at once, as most tiles with scattered lists are. The others are merged: lane
//         j < 12 walks the list of token j, all lists being ascending.
// Cost    in the union a block costs its load and a step of every warpgroup that has a token there, however many; elsewhere each of
//         its tokens costs as much as any. So few tokens are left out, and then the union has to be worth what is in it.
// Order   of tiles: one group after the other, so that tiles of a time find each other's keys in the L2. Of blocks: union_place().
// Full    blocks past kMaxUnion are left out as well, and those whose number does not fit an entry.
#pragma once

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#include "cuda/union_params.hpp"

namespace openmsa::cuda {

struct UnionParams {
  BatchParams batch;
  const QueryTile* tiles;         // [num_tiles], tiles of kUnionTokens; seq -1: none
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

inline constexpr int kUnionWarps = 4, kUnionMaxTopK = 32, kUnionMapWords = 32;
// Blocks of a tile worth looking at. Clustered lists as in the benchmark, 12 x 16: 31 at 64K, 32 at 128K keys, at most 46.
inline constexpr int kUnionMaxDistinct = 64;
// A warpgroup's only token, and then blocks of no more tokens than this, are left out.
inline constexpr int kUnionMaxLeft = 2;
// What things cost over the whole chip, in tenths of a nanosecond: the tile kernel's load of a block, a warpgroup's step there (behind
// which loads hide, or the other way round), a tile, a token's other slots there, and a (token, block) pair of the other way.
inline constexpr int kUnionLoad = 125, kUnionStep = 65, kUnionTile = 150, kUnionOthers = 22, kUnionPair = 34;

// Of the tokens that chose a block those that the union serves: a warpgroup's step costs as much as two or three pairs of the other way.
__device__ __forceinline__ std::uint32_t union_served(std::uint32_t tokens) {
#pragma unroll
  for (int side = 0; side < kUnionSides; ++side) {
    const std::uint32_t mine = tokens & ((1u << kUnionSideTokens) - 1) << side * kUnionSideTokens;
    if ((mine & (mine - 1)) == 0) tokens &= ~mine;
  }
  return tokens;
}

// Where the entry of this lane comes in its tile; the lanes without one (0) come last. First the blocks that all warpgroups want,
// then the others, each that one wants right behind one that only the other two want: so none runs ahead of what the ring holds.
__device__ __forceinline__ int union_place(std::uint32_t entry) {
  const int lane = threadIdx.x % 32;
  int wants = 0;
#pragma unroll
  for (int side = 0; side < kUnionSides; ++side) wants |= union_side(entry, side) != 0 ? 1 << side : 0;
  constexpr int kAll = (1 << kUnionSides) - 1;
  int rank = 0;  // among the lanes that want the same
  for (int j = 0; j < 32; ++j) rank += __shfl_sync(0xffffffffu, wants, j) == wants && j < lane;
  int key = wants == kAll ? lane : (wants == 0 ? 128 : 64) + 2 * lane;
  for (int j = 0; j < 32; ++j) {
    const bool same = __shfl_sync(0xffffffffu, rank, j) == rank, others = __shfl_sync(0xffffffffu, wants, j) == (wants ^ kAll);
    if (same && others && wants != 0 && __popc(wants) == 1) key = 64 + 2 * j + 1;
  }
  int place = 0;
  for (int j = 0; j < 32; ++j) place += __shfl_sync(0xffffffffu, key, j) < key;
  return place;
}

__global__ void __launch_bounds__(32 * kUnionWarps) smxx_union_kernel(const __grid_constant__ UnionParams params) {
  static_assert(kMaxUnion <= 32, "a lane an entry");
  __shared__ std::int32_t lists[kUnionWarps][kUnionTokens][kUnionMaxTopK + 1];
  __shared__ std::uint32_t maps[kUnionWarps][kUnionMapWords];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, turn = blockIdx.x * kUnionWarps + warp;
  if (turn >= params.num_tiles * params.num_groups) return;
  const int group = turn / params.num_tiles, index = turn % params.num_tiles * params.num_groups + group;
  const QueryTile tile = params.tiles[index / params.num_groups];
  int count = 0;
  if (tile.seq >= 0) {
    Sequence sequence;
    params.batch.load(tile.seq, &sequence);
    const int num_tokens = tile.end - tile.first;
    maps[warp][lane] = 0;
    __syncwarp();
    constexpr int kBatch = 4;  // loads in flight
    for (int i0 = lane; i0 < num_tokens * params.top_k; i0 += 32 * kBatch) {
      int id[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int token = (i0 + 32 * b) / params.top_k, slot = (i0 + 32 * b) % params.top_k;
        const std::int32_t* ids =
            params.block_ids + (std::int64_t{sequence.query_begin} + tile.first + token) * params.stride_token;
        id[b] = token < num_tokens ? ids[group * params.stride_group + slot] : -1;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int token = (i0 + 32 * b) / params.top_k, slot = (i0 + 32 * b) % params.top_k;
        if (token >= num_tokens) break;
        lists[warp][token][slot] = id[b];
        if (id[b] >= 0) atomicOr(&maps[warp][id[b] / 32 % kUnionMapWords], 1u << id[b] % 32);
      }
    }
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
        const std::uint32_t mask = union_served(__ballot_sync(0xffffffffu, head == least));
        const bool in_union = __popc(mask) > kUnionMaxLeft && count < kMaxUnion && least < kUnionBlocks;
        if (in_union) {
          if (lane == count) {
            mine = least | mask << kUnionBlockBits;
            params.batch.page(sequence, tile.seq, static_cast<int>(least));  // reported; reads as zeros
          }
          ++count;
        }
        if (head == least) {
          if (in_union && (mask >> lane & 1) != 0) taken |= 1u << slot;
          head = read(++slot);
          if (head <= least) {
            report(params.batch.fault, FaultCode::kBlockOrder, reported, slot, static_cast<std::int32_t>(head));
            head = kEnd;
          }
        }
      }
      int num_ids = 0;  // of token `lane`
      for (int i = 0; i < params.top_k && lane < num_tokens; ++i) num_ids += lists[warp][lane][i] == -1 ? 0 : 1;
      const bool left = __popc(taken) < num_ids;  // some of this lane's token's blocks
      const int others = __popc(__ballot_sync(0xffffffffu, taken != 0 && left));
      int sides = 0;
#pragma unroll
      for (int side = 0; side < kUnionSides; ++side) sides += union_side(mine, side) != 0 ? 1 : 0;
      const int steps = __reduce_add_sync(0xffffffffu, sides);
      const int pairs = __reduce_add_sync(0xffffffffu, __popc(mine >> kUnionBlockBits));
      if (kUnionTile + max(kUnionLoad * count, kUnionStep * steps) + kUnionOthers * others > kUnionPair * pairs) {
        count = 0;
        taken = 0;
      }
      if (taken != 0 && !left) taken = kTakenAll;
      const int place = union_place(lane < count ? mine : 0);
      if (lane < count) params.entries[std::int64_t{index} * kMaxUnion + place] = mine;
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
