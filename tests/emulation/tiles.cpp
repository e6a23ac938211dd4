#include "tiles.hpp"

#include <array>
#include <bit>
#include <set>
#include <string>
#include <vector>

#include "cuda/lists.hpp"

namespace openmsa::emulation {

TileCounts tile_counts;

namespace {

void check_work(const cuda::UnionTileParams& params) {
  const int num_indices = params.num_tiles * params.num_groups, num_work = *params.num_work;
  if (num_work < 0 || num_work > num_indices) fail(std::to_string(num_work) + " tiles of " + std::to_string(num_indices));
  std::vector<bool> listed(static_cast<std::size_t>(num_indices));
  for (int i = 0; i < num_work; ++i) {
    const int index = params.work[i];
    if (index < 0 || index >= num_indices) fail("work " + std::to_string(i) + " is tile " + std::to_string(index));
    if (listed[static_cast<std::size_t>(index)]) fail("tile " + std::to_string(index) + " is listed twice");
    listed[static_cast<std::size_t>(index)] = true;
  }
  for (int index = 0; index < num_indices; ++index) {
    if (listed[static_cast<std::size_t>(index)] != (params.num_entries[index] != 0)) {
      fail("tile " + std::to_string(index) + " has " + std::to_string(params.num_entries[index]) + " entries and is " +
           (listed[static_cast<std::size_t>(index)] ? "listed" : "not listed"));
    }
  }
}

void check_tile(const cuda::UnionTileParams& params, int index) {
  const std::string name = "tile " + std::to_string(index);
  if (params.group_size <= 8 || params.group_size > 16) fail("union tiles of " + std::to_string(params.group_size) + " heads");
  const cuda::QueryTile tile = params.tiles[index / params.num_groups];
  const int num_tokens = tile.end - tile.first, num_entries = params.num_entries[index];
  cuda::Sequence sequence;
  if (tile.seq < 0 || tile.seq >= params.batch.num_seqs || !params.batch.load<false>(tile.seq, &sequence)) {
    fail(name + " is of no sequence");
  }
  if (tile.first < 0 || num_tokens < 1 || num_tokens > cuda::kUnionTokens || tile.end > sequence.seqlen_q) {
    fail(name + " has tokens " + std::to_string(tile.first) + " to " + std::to_string(tile.end));
  }
  if (num_entries < 1 || num_entries > cuda::kMaxUnion) fail(name + " has " + std::to_string(num_entries) + " entries");

  std::array<int, cuda::kUnionTokens> num_chosen{};
  std::set<int> blocks;
  for (int e = 0; e < num_entries; ++e) {
    const std::uint32_t entry = params.entries[std::int64_t{index} * cuda::kMaxUnion + e];
    const int block = static_cast<int>(entry & (cuda::kUnionBlocks - 1));
    const std::uint32_t chosen = entry >> cuda::kUnionBlockBits;
    if (!blocks.insert(block).second) fail(name + ": block " + std::to_string(block) + " twice");
    if (chosen == 0 || chosen >> num_tokens != 0) fail(name + ": an entry of tokens that it does not have");
    for (int token = 0; token < num_tokens; ++token) {
      if ((chosen >> token & 1) == 0) continue;
      ++num_chosen[static_cast<std::size_t>(token)];
      if (std::int64_t{block} * params.batch.block_size >= sequence.num_visible(sequence.first_position + tile.first + token)) {
        fail(name + ": token " + std::to_string(token) + " does not see block " + std::to_string(block));
      }
    }
    for (int side = 0; side < cuda::kUnionSides; ++side) {
      ++(cuda::union_side(entry, side) != 0 ? tile_counts.steps : tile_counts.passed);
    }
  }

  for (int token = 0; token < num_tokens; ++token) {
    const int chosen = num_chosen[static_cast<std::size_t>(token)];
    const std::int64_t chunk_token = std::int64_t{sequence.query_begin} + tile.first + token - params.chunk_begin;
    if (chunk_token < 0) fail(name + " begins before its chunk");
    const std::uint32_t taken = params.taken[chunk_token * params.num_groups + index % params.num_groups];
    const bool alone = taken == cuda::kTakenAll;
    if (alone ? chosen == 0 : std::popcount(taken) != chosen || std::uint64_t{taken} >> params.top_k != 0) {
      fail(name + ": token " + std::to_string(token) + " is in " + std::to_string(chosen) + " entries, `taken` says otherwise");
    }
    ++(alone ? tile_counts.alone : taken != 0 ? tile_counts.partly : tile_counts.unserved);
  }
  ++tile_counts.tiles;
  tile_counts.full += num_entries == cuda::kMaxUnion ? 1 : 0;
}

}  // namespace

void check_tiles(const cuda::UnionTileParams& params) {
  check_work(params);
  for (int i = 0; i < *params.num_work; ++i) check_tile(params, params.work[i]);
}

}  // namespace openmsa::emulation
