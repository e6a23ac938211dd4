// block_scores for Hopper: S = Q_idx K_idx^T with a row-max epilogue, one block of keys at a time.
//
// Roles       warps 0-3 producer (one thread issues TMA), warps 4-11 two consumer warpgroups of 128 query rows each.
// Tile        256 rows = tokens x index heads (the heads share the one index key), against 128 keys a step. 256 rows keep the
//             L2 traffic at 23 GB/s an SM; 128 rows would need twice that.
// Pipeline    Q resident; K in a ring of kStages tiles. Each warpgroup alternates two m64n128 accumulators, so that one product
//             runs while the row maxima of the other are taken.
// Shared      Q 2 column halves x 256 rows x 128 B = 64 KB | K kStages x 2 x 128 x 128 B = 32 KB each | barriers
// Barriers    q_full 1 (TMA); full[s] 1 (TMA); empty[s] 8 (one arrival a consumer warp)
// Registers   producer 40, consumers 232; accumulators 128
// Split       grid y: with few tiles, each takes a share of the keys.
// Empty rows  rows past the sequence's last query are computed and not stored; blocks without a visible key are -inf.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {

struct ScoreParams {
  BatchParams batch;
  const QueryTile* tiles;                   // [num_tiles], longest first
  float* scores;                            // [tokens, Hkv, num_blocks], its first token being packed token `token_begin`
  std::int64_t stride_token, stride_group;  // elements
  std::int32_t token_begin;
  std::int32_t num_blocks;   // width of scores
  std::int32_t num_groups;   // Hkv, at most 256
  std::int32_t tile_tokens;  // tokens per tile: 256 / Hkv rounded down
  bool fill;                 // write -inf from the last visible block to the width (select does not look there)
};

template <typename T_, int kIndexDim_, int kBlock_>
struct ScoreTraits {
  using T = T_;
  static constexpr int kIndexDim = kIndexDim_;  // 64, 96 or 128
  static constexpr int kBlock = kBlock_;        // 64 or 128
  static constexpr int kRows = 256, kKeys = 128;
  static constexpr int kHalves = (kIndexDim + 63) / 64;  // 64-column boxes of a row
  static constexpr int kSteps = kIndexDim / 16;          // k16 products
  static constexpr int kBlocksPerStep = kKeys / kBlock;
  static constexpr int kStages = 4;
  static constexpr int kThreads = 384;
  static constexpr int kBoxBytesQ = kRows * 128, kBoxBytesK = kKeys * 128;
  static constexpr int kSmemBytes = kHalves * (kBoxBytesQ + kStages * kBoxBytesK) + 1024 + 256;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_score_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ ScoreParams params) {
  using T = typename Traits::T;
  constexpr int kStages = Traits::kStages, kHalves = Traits::kHalves;
  extern __shared__ unsigned char raw_smem[];
  unsigned char* smem =
      reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(raw_smem) + 1023) & ~std::uintptr_t{1023});
  unsigned char* smem_q = smem;
  unsigned char* smem_k = smem + kHalves * Traits::kBoxBytesQ;
  auto* full = reinterpret_cast<std::uint64_t*>(smem_k + kStages * kHalves * Traits::kBoxBytesK);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* q_full = empty + kStages;

  const QueryTile tile = params.tiles[blockIdx.x];
  if (tile.seq < 0) return;
  Sequence sequence;
  if (!params.batch.load(tile.seq, &sequence)) return;
  const int first_position = sequence.first_position + tile.first, num_tokens = tile.end - tile.first;
  const int tile_visible = sequence.num_visible(first_position + num_tokens - 1);
  const int all_steps = (tile_visible + Traits::kKeys - 1) / Traits::kKeys;
  // Few tiles are split over the keys too (grid y), at whole segments of four blocks.
  constexpr int kSegmentSteps = 4 / Traits::kBlocksPerStep;
  const int share = (all_steps + gridDim.y * kSegmentSteps - 1) / (gridDim.y * kSegmentSteps) * kSegmentSteps;
  const int first_step = min(static_cast<int>(blockIdx.y) * share, all_steps), num_steps = min(share, all_steps - first_step);
  const int first_token = sequence.query_begin + tile.first;

  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 8);
    }
    ptx::mbarrier_init(q_full, 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::shrink_registers<40>();
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(q_full, kHalves * params.tile_tokens * params.num_groups * 128);
      for (int h = 0; h < kHalves; ++h) ptx::tma_load_3d(smem_q + h * Traits::kBoxBytesQ, &map_q, q_full, h * 64, 0, first_token);
      for (int step = 0; step < num_steps; ++step) {
        const int s = step % kStages;
        if (step >= kStages) ptx::mbarrier_wait(&empty[s], (step / kStages - 1) & 1);
        ptx::mbarrier_arrive_expect(&full[s], kHalves * Traits::kBoxBytesK);
        unsigned char* k = smem_k + s * kHalves * Traits::kBoxBytesK;
        for (int b = 0; b < Traits::kBlocksPerStep; ++b) {
          const int block = (first_step + step) * Traits::kBlocksPerStep + b;
          // A step may reach past the last block when two blocks share it; loading the first block again keeps the byte count.
          const int live = block * Traits::kBlock < sequence.seqlen_k ? block : (first_step + step) * Traits::kBlocksPerStep;
          const int token = sequence.pages ? 0 : sequence.key_begin + live * Traits::kBlock;
          const int page = params.batch.page(sequence, tile.seq, live);  // -1 reads as zeros
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_4d(k + h * Traits::kBoxBytesK + b * Traits::kBlock * 128, &map_k, &full[s], h * 64, token, 0, page);
          }
        }
      }
    }
    return;
  }

  ptx::grow_registers<232>();
  const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32, quad = lane % 4;
  // Rows of this thread: two in each of the two m64 tiles.
  int visible[4];
  float* out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = consumer * 128 + (i / 2) * 64 + (thread / 32) * 16 + lane / 4 + (i % 2) * 8;
    const int token = row / params.num_groups, group = row % params.num_groups;
    const bool live = token < num_tokens;
    visible[i] = live ? sequence.num_visible(first_position + token) : 0;
    out[i] = live ? params.scores + std::int64_t{first_token + token - params.token_begin} * params.stride_token +
                        group * params.stride_group
                  : nullptr;
  }
  // Blocks wholly visible to every row of the tile need no mask.
  const int full_keys = sequence.num_visible(first_position);

  float acc[2][64];
  // Lane q of a quad keeps the score of block 4j + q, so that four blocks leave as one 16-byte row segment.
  float kept[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};

  auto issue = [&](int half, int s) {
    const std::uint32_t q = ptx::smem_address(smem_q) + (consumer * 128 + half * 64) * 128;
    const std::uint32_t k = ptx::smem_address(smem_k) + s * kHalves * Traits::kBoxBytesK;
    ptx::wgmma_fence_operands(acc[half]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      const std::uint32_t column = (step % 4) * 32;
      ptx::WgmmaSS<T, 128>::template run<ptx::Major::kK>(
          acc[half], ptx::smem_descriptor(q + (step / 4) * Traits::kBoxBytesQ + column, 16, 1024),
          ptx::smem_descriptor(k + (step / 4) * Traits::kBoxBytesK + column, 16, 1024), step > 0);
    }
    ptx::wgmma_commit();
  };
  auto reduce = [&](int half, int local_step) {
    const int step = first_step + local_step;
    ptx::wgmma_fence_operands(acc[half]);
    constexpr int kPairs = 16 / Traits::kBlocksPerStep;  // 8-column groups of one block
    if ((step + 1) * Traits::kKeys > full_keys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int limit = visible[half * 2 + r] - step * Traits::kKeys - quad * 2;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i * 8 >= limit) acc[half][4 * i + 2 * r] = -INFINITY;
          if (i * 8 + 1 >= limit) acc[half][4 * i + 2 * r + 1] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < Traits::kBlocksPerStep; ++b) {
      const int block = step * Traits::kBlocksPerStep + b;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float m = ptx::max_nan(acc[half][4 * b * kPairs + 2 * r], acc[half][4 * b * kPairs + 2 * r + 1]);
#pragma unroll
        for (int i = 1; i < kPairs; ++i) {
          m = ptx::max_nan(m, ptx::max_nan(acc[half][4 * (b * kPairs + i) + 2 * r], acc[half][4 * (b * kPairs + i) + 2 * r + 1]));
        }
        m = ptx::max_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = ptx::max_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float& keep = kept[half * 2 + r];
        if (block % 4 == quad) keep = m;
        if (block % 4 == 3) {
          const int column = block - 3 + quad;
          if (out[half * 2 + r] && column < params.num_blocks) out[half * 2 + r][column] = keep;
          keep = -INFINITY;
        }
      }
    }
  };

  // No product stays in flight over the back edge: ptxas serialises them otherwise (C7514). While one warpgroup takes its second
  // row maxima, the other keeps the tensor cores busy.
  if (num_steps > 0) ptx::mbarrier_wait(q_full, 0);
  for (int step = 0; step < num_steps; ++step) {
    const int s = step % kStages;
    ptx::mbarrier_wait(&full[s], (step / kStages) & 1);
    issue(0, s);
    issue(1, s);
    ptx::wgmma_wait<1>();
    reduce(0, step);
    ptx::wgmma_wait<0>();
    if (lane == 0) ptx::mbarrier_arrive(&empty[s]);
    reduce(1, step);
  }
  // The last, partly filled segment, and -inf up to the width of the row.
  const int done = (first_step + num_steps) * Traits::kBlocksPerStep, all = all_steps * Traits::kBlocksPerStep;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (out[i] == nullptr) continue;
    if (num_steps > 0 && done % 4 != 0) {
      const int column = done / 4 * 4 + quad;
      if (column < params.num_blocks && (column < done || params.fill)) out[i][column] = column < done ? kept[i] : -INFINITY;
    }
    if (params.fill && blockIdx.y == 0) {
      for (int column = (all + 3) / 4 * 4 + quad; column < params.num_blocks; column += 4) out[i][column] = -INFINITY;
    }
  }
}

}  // namespace openmsa::cuda
