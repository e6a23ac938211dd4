// block_scores for Hopper: S = Q_idx K_idx^T with a row-max epilogue, two or four blocks of keys at a time.
//
// Roles       warps 0-3 producer (one thread issues TMA), warps 4-11 two consumer warpgroups of 128 query rows each.
// Tile        256 rows a CTA = tokens x index heads (the heads share the one index key), against stages of 256 keys: an m64n256
//             product a half of a warpgroup's rows. Persistent; items are (tile, key segment), see score_items.cuh.
// Cluster     kCluster 2: two CTAs have a tile of twice the tokens and walk the same keys. Each loads half of every block and
//             multicasts it to both, so a key crosses the L2 once for 512 rows. kCluster 1 is for sequences too short to fill both.
// Pipeline    Q resident for an item; K in a ring of kStages stages. An item's first stage is under way while the last item's
//             products still read Q. The warpgroups take turns at the tensor cores: one takes the row maxima of its 128
//             accumulators while the other's product, issued after it, runs.
// Shared      Q kHalves column halves x 256 rows x 128 B = 32 KB a half | K kStages x kHalves x 256 x 128 B | barriers | ScoreItem
// Barriers    q_full 1 (TMA; the item's description too); q_empty 8 (a consumer warp each, after the item's last product);
//             full[s] 1 (TMA of every CTA); empty[s] 8 kCluster (the consumer warps of every CTA, since each CTA fills them all);
//             named 1 + consumer: that warpgroup may issue
// Registers   producer 56, consumers 224; accumulators 128
// Beside      clusters that leave at once make room for smxx_combine, where that is launched behind (see msa_attention.cu).
// Empty       rows past the sequence's last query are computed and not stored; blocks without a visible key are -inf.
#pragma once

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma256.cuh"
#include "cuda/row_max.cuh"
#include "cuda/score_items.cuh"

namespace openmsa::cuda {

template <typename T_, int kIndexDim_, int kBlock_, int kCluster_>
struct ScoreTraits {
  using T = T_;
  static constexpr int kIndexDim = kIndexDim_;  // 64, 96 or 128
  static constexpr int kBlock = kBlock_;        // 64 or 128
  static constexpr int kCluster = kCluster_;    // 1 or 2
  static constexpr int kRows = 256, kKeys = 256;
  static constexpr int kHalves = (kIndexDim + 63) / 64;  // 64-column boxes of a row
  static constexpr int kSteps = kIndexDim / 16;          // k16 products
  static constexpr int kStageBlocks = kKeys / kBlock;    // blocks a stage
  static constexpr int kQuadStages = 4 / kStageBlocks;   // stages of a quad of blocks
  static constexpr int kPiece = kBlock / kCluster;       // keys of a block that one CTA loads
  static constexpr int kStages = 4 / kHalves;
  static constexpr int kThreads = 384;
  static constexpr int kBoxBytesQ = kRows * 128, kBoxBytesK = kKeys * 128;  // one half, all rows
  static constexpr int kStageBytes = kHalves * kBoxBytesK;
  static constexpr int kSmemBytes = kHalves * kBoxBytesQ + kStages * kStageBytes + 256;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_score_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ ScoreParams params) {
  using T = typename Traits::T;
  constexpr int kStages = Traits::kStages, kHalves = Traits::kHalves, kCluster = Traits::kCluster, kKeys = Traits::kKeys;
  unsigned char* smem_q = ptx::dynamic_smem();
  unsigned char* smem_k = smem_q + kHalves * Traits::kBoxBytesQ;
  auto* full = reinterpret_cast<std::uint64_t*>(smem_k + kStages * Traits::kStageBytes);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* q_full = empty + kStages;
  std::uint64_t* q_empty = q_full + 1;
  auto* shared_item = reinterpret_cast<ScoreItem*>(q_empty + 1);

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (params.beside_pairs) ptx::grid_dependency_launch();
  const int num_clusters = scoring_clusters<Traits>(params);
  if (static_cast<int>(blockIdx.x) / kCluster >= num_clusters) return;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 8 * kCluster);
    }
    ptx::mbarrier_init(q_full, 1);
    ptx::mbarrier_init(q_empty, 8);
    ptx::fence_barrier_init();
  }
  if constexpr (kCluster > 1)
    ptx::cluster_sync();
  else
    __syncthreads();

  if (warpgroup == 0) {
    ptx::shrink_registers<56>();
    if (threadIdx.x < 32) {
      const ScoreSchedule schedule = score_schedule(*params.sum, 4 * Traits::kBlock, num_clusters);
      if (lane == 0) {
        const int rank = kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank());
        const int num_rounds = schedule.num_rounds();
        std::uint32_t fills = 0, items = 0;  // of K's stages and of Q
        ScoreSource source;
        ScoreItem item{};
        const auto hand_over = [&] {
          if (items > 0) ptx::mbarrier_wait(q_empty, (items - 1) & 1);
          ++items;
          *shared_item = item;
          if (item.end_stage <= item.first_stage) {
            ptx::mbarrier_arrive(q_full);
            return;
          }
          ptx::mbarrier_arrive_expect(q_full, kHalves * params.tile_tokens * params.num_groups * 128);
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_3d(smem_q + h * Traits::kBoxBytesQ, &map_q, q_full, h * 64, 0, item.first_token);
          }
        };
        for (int round = 0; round < num_rounds; ++round) {
          int tile, segment;
          if (!schedule.item(round, static_cast<int>(blockIdx.x) / kCluster, &tile, &segment)) continue;
          if (!load_score_item<Traits>(params, schedule.num_segments, tile, segment, rank, &source, &item)) continue;
          int bad_block = -1;  // reported after the loop, which a call would cost registers
          for (int stage = item.first_stage; stage < item.end_stage; ++stage) {
            const std::uint32_t s = fills % kStages;
            ptx::mbarrier_wait(&empty[s], (fills / kStages + 1) & 1);
            ptx::mbarrier_arrive_expect(&full[s], Traits::kStageBytes);
            ++fills;
#pragma unroll
            for (int b = 0; b < Traits::kStageBlocks; ++b) {
              const int block = stage * Traits::kStageBlocks + b;
              // A stage may reach past the last block anybody sees; loading its first block again keeps the byte count.
              const int live = block < source.num_blocks ? block : stage * Traits::kStageBlocks;
              const int token =
                  (source.sequence.pages ? 0 : source.sequence.key_begin + live * Traits::kBlock) + rank * Traits::kPiece;
              int page = source.sequence.pages ? source.sequence.pages[live] : 0;
              if (source.sequence.pages && static_cast<unsigned>(page) >= static_cast<unsigned>(params.batch.num_pages)) {
                bad_block = live;
                page = -1;  // reads as zeros
              }
              unsigned char* k = smem_k + s * Traits::kStageBytes + (b * Traits::kBlock + rank * Traits::kPiece) * 128;
              for (int h = 0; h < kHalves; ++h, k += Traits::kBoxBytesK) {
                if constexpr (kCluster == 1)
                  ptx::tma_load_4d(k, &map_k, &full[s], h * 64, token, 0, page);
                else
                  ptx::tma_load_4d_multicast(k, &map_k, &full[s], (1 << kCluster) - 1, h * 64, token, 0, page);
              }
            }
            // Q's place is free later than the first stage's.
            if (stage == item.first_stage) hand_over();
          }
          if (item.end_stage <= item.first_stage) hand_over();
          if (bad_block >= 0) params.batch.page(source.sequence, source.seq, bad_block);
        }
        item.num_tokens = -1;
        item.end_stage = item.first_stage = 0;
        hand_over();
      }
      __syncwarp();
    }
  } else {
    ptx::grow_registers<224>();
    const int consumer = warpgroup - 1, quad_lane = lane % 4;
    const int row0 = consumer * 128 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // rows of this thread: row0 + {0, 8, 64, 72}
    const std::uint32_t k_address = ptx::smem_address(smem_k);
    const std::uint32_t q_address = ptx::warp_uniform(ptx::smem_address(smem_q) + consumer * 128 * 128);
    std::uint32_t uses = 0;
    if (consumer == 1) ptx::named_barrier_arrive(1, 256);
    for (std::uint32_t items = 0;; ++items) {
      ptx::mbarrier_wait(q_full, items & 1);
      const ScoreItem item = *shared_item;
      __syncwarp();  // read by all lanes before lane 0 gives it back
      if (item.num_tokens < 0) break;
      const auto visible_at = [&](int position) { return min(max(position + 1, 0), item.seqlen_k); };
      const int full_keys = visible_at(item.first_position);  // what every row sees needs no mask
      int visible[4];
      float* out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + i / 2 * 64 + i % 2 * 8, token = row / params.num_groups, group = row % params.num_groups;
        const bool live = token < item.num_tokens;
        visible[i] = live ? visible_at(item.first_position + token) : 0;
        out[i] = live ? params.scores + std::int64_t{item.first_token + token - params.token_begin} * params.stride_token +
                            group * params.stride_group
                      : nullptr;
      }

      // The accumulators of a stage and half m of the warpgroup's rows, in turn with the other warpgroup.
      const auto multiply = [&](float(&acc)[128], int m, std::uint64_t k_desc) {
        const std::uint64_t q_desc = ptx::smem_descriptor(q_address, 16, 1024);
        ptx::named_barrier(1 + consumer, 256);
        ptx::wgmma_fence_operands(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kSteps; ++step) {
          ptx::WgmmaSS<T, kKeys>::template run<ptx::Major::kK>(
              acc, ptx::smem_descriptor_step(q_desc, step / 4 * Traits::kBoxBytesQ + m * 64 * 128 + step % 4 * 32),
              ptx::smem_descriptor_step(k_desc, step / 4 * Traits::kBoxBytesK + step % 4 * 32), step > 0);
        }
        ptx::wgmma_commit();
        ptx::named_barrier_arrive(2 - consumer, 256);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operands(acc);
      };
      const auto mask = [&](float(&acc)[128], int m, int stage) {
        if ((stage + 1) * kKeys <= full_keys) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int limit = visible[2 * m + r] - stage * kKeys - quad_lane * 2;
#pragma unroll
          for (int i = 0; i < kKeys / 8; ++i) {
            if (i * 8 >= limit) acc[4 * i + 2 * r] = -INFINITY;
            if (i * 8 + 1 >= limit) acc[4 * i + 2 * r + 1] = -INFINITY;
          }
        }
      };
      // Four lanes trade their partial maxima of the rows they share: of blocks 0 and 1, or 2 and 3, with the neighbour; then of
      // the two pairs, so that lane q ends with the maximum of block q, and four blocks leave as one 16-byte row segment.
      const auto pair_of = [&](float even, float odd) {
        const float mine = lane & 1 ? odd : even, other = lane & 1 ? even : odd;
        return ptx::max_nan(mine, __shfl_xor_sync(0xffffffffu, other, 1));
      };
      const auto store = [&](int i, int quad, float low, float high) {
        const float mine = lane & 2 ? high : low, other = lane & 2 ? low : high;
        const float result = ptx::max_nan(mine, __shfl_xor_sync(0xffffffffu, other, 2));
        const int column = quad * 4 + quad_lane;
        if (out[i] && column < params.num_blocks) out[i][column] = result;
      };

      // No product stays in flight over the back edge: ptxas serialises them otherwise (C7514).
      for (int stage = item.first_stage; stage < item.end_stage;) {
        const int quad = stage / Traits::kQuadStages;
        float kept[4];  // the quad's first pair, where it is a stage of its own
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[i] = -INFINITY;
#pragma unroll
        for (int sub = 0; sub < Traits::kQuadStages; ++sub, ++stage) {
          // The keys that anybody sees may end within a quad.
          if (sub > 0 && stage >= item.end_stage) {
#pragma unroll
            for (int i = 0; i < 4; ++i) store(i, quad, kept[i], -INFINITY);
            break;
          }
          const std::uint32_t s = uses % kStages;
          ptx::mbarrier_wait(&full[s], (uses / kStages) & 1);
          ++uses;
          const std::uint64_t k_desc = ptx::smem_descriptor(ptx::warp_uniform(k_address + s * Traits::kStageBytes), 16, 1024);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            float acc[128];
            multiply(acc, m, k_desc);
            if (m == 1) {
              if (kCluster == 1) {
                if (lane == 0) ptx::mbarrier_arrive(&empty[s]);
              } else if (lane < kCluster) {
                ptx::mbarrier_arrive_cluster(&empty[s], lane);
              }
              if (stage + 1 == item.end_stage && lane == 0) ptx::mbarrier_arrive(q_empty);
            }
            mask(acc, m, stage);
            float low[2], high[2];
            constexpr int kGroups = Traits::kBlock / 8, kBlockAcc = Traits::kBlock / 2;
            if constexpr (Traits::kQuadStages == 2) {
              row_max<0, kGroups>(acc, low);
              row_max<kBlockAcc, kGroups>(acc, high);
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float pair = pair_of(low[r], high[r]);
                if (sub == 0)
                  kept[2 * m + r] = pair;
                else
                  store(2 * m + r, quad, kept[2 * m + r], pair);
              }
            } else {
              float low2[2], high2[2];
              row_max<0, kGroups>(acc, low);
              row_max<kBlockAcc, kGroups>(acc, high);
              row_max<2 * kBlockAcc, kGroups>(acc, low2);
              row_max<3 * kBlockAcc, kGroups>(acc, high2);
#pragma unroll
              for (int r = 0; r < 2; ++r) store(2 * m + r, quad, pair_of(low[r], high[r]), pair_of(low2[r], high2[r]));
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (out[i] == nullptr) continue;
        for (int column = item.fill_from + quad_lane; column < params.num_blocks; column += 4) out[i][column] = -INFINITY;
      }
      if (item.end_stage <= item.first_stage && lane == 0) ptx::mbarrier_arrive(q_empty);
    }
    // The turn that nobody takes any more.
    if (consumer == 0) ptx::named_barrier(1, 256);
  }
  // Nobody leaves while the other may still arrive on its barriers.
  if constexpr (kCluster > 1) ptx::cluster_sync();
}

}  // namespace openmsa::cuda
