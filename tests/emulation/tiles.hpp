// What the stand-in for the tile kernel (include/cuda/sm90_dense.cuh) checks of its input, and what it has seen.
#pragma once

#include "cuda/dense_params.hpp"

namespace openmsa::emulation {

// Tiles that reached the kernel, and how it serves their tokens (a token counts once a group).
struct TileCounts {
  int tiles = 0, full = 0;                  // full: with kMaxUnion blocks
  int alone = 0, partly = 0, unserved = 0;  // all of the token's blocks, some, none
};
extern TileCounts tile_counts;

// Fail where the kernel, or smxx_combine after it, would go wrong: a tile listed twice or not at all, ...
void check_work(const cuda::DenseParams& params);
// ... entries other than ascending blocks with tokens that see them, a word of `taken` that disagrees with them. Counts the tile.
void check_tile(const cuda::DenseParams& params, int index);

}  // namespace openmsa::emulation
