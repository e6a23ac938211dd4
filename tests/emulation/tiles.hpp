// What the tile kernel of sparse_attention (sm90_union.cuh) is given: whether it may be, and what it was.
#pragma once

#include "cuda/union_params.hpp"

namespace openmsa::emulation {

// Tiles that reached the kernel, and how it serves their tokens (a token counts once a group).
struct TileCounts {
  int tiles = 0, full = 0;                  // full: with kMaxUnion blocks
  int alone = 0, partly = 0, unserved = 0;  // all of the token's blocks, some, none
  int passed = 0, steps = 0;                // blocks of a tile that a warpgroup passes over, and those that it takes
};
extern TileCounts tile_counts;

// Fails where the kernel, or smxx_combine after it, would go wrong: a tile listed twice or not at all, entries other than blocks, each
// once, with tokens that see them, a word of `taken` that disagrees with them. Counts the tiles.
void check_tiles(const cuda::UnionTileParams& params);

}  // namespace openmsa::emulation
