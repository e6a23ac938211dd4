// dense_attention: tiles of query rows against every visible block.
//
// Roles       warp 0 producer (TMA), warps 1-3 idle, warps 4-11 two consumer warpgroups of 64 query rows each.
// Tile        128 rows = 128/Gp tokens x Gp heads of one group (Gp: G rounded up to a power of two, so that a K or V tile serves the
//             whole group); keys one block a step, the newest block first, so that masks are met at the start only.
// Cluster     kPaired: two CTAs share a tile of twice the tokens and walk the same blocks. Each loads half of every K and V tile
//             into both, so a stage is free once the consumers of both have released it.
// Pipeline    per step the next Q K^T is issued before this P V; the maxima of the scores run under that P V, the exponentials under
//             the other warpgroup's products. Nothing orders the two warpgroups but the stages.
// Softmax     of scores minus an offset that follows a row's maximum only when it must (exponentials()).
// Shared      Q 2 x 128 x 128 B | K kStages tiles | V kStages tiles | barriers
// Work        a persistent CTA takes tiles in turn; the loads of the next run under the last products and stores of this one.
// Barriers    q_full 1, k_full[s], v_full[s] 1 (TMA); q_empty 8; k_empty[s], v_empty[s] 8 a CTA (a warp each); named 1, 2: clear_tail
// Registers   producer 56, consumers 224: S 64, O 64, P 32
// Empty       rows that see no key keep sum 0: out = 0, lse = -inf; softmax_sum() tells them from rows of nothing but -inf. A tile
//             without any key still stores.
#pragma once

#include "cuda/dense_params.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/softmax_sum.cuh"
#include "cuda/store_row.cuh"

namespace openmsa::cuda {

template <typename T_, int kHeadDim_, int kBlock_, DenseMode kMode_>
struct DenseTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr bool kBlockMax = kMode_ == DenseMode::kBlockMax;
  static constexpr int kHalves = (kHeadDim + 63) / 64;
  static constexpr int kRows = kDenseRows;
  static constexpr int kCluster = dense_cluster(kMode_);
  static constexpr int kStages = 3;
  static constexpr int kThreads = 384;
  static constexpr int kBoxBytesQ = kRows * 128, kBoxBytesKv = kBlock * 128;
  static constexpr int kTileBytes = kHalves * kBoxBytesKv;
  static constexpr int kPieceBytes = kBoxBytesKv / kCluster;  // what one CTA loads of a box
  static constexpr int kSmemBytes = kHalves * kBoxBytesQ + 2 * kStages * kTileBytes + 1024 + 256;
};

// A place in the ring of K (or V) stages, and the parity of its barriers there.
template <int kStages>
struct DenseRing {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One CTA's tile of one group. Tiles without a visible key have no steps, and still store; the CTAs of a cluster have the same
// number of steps, and the later ones may have no tokens.
struct DenseWork {
  Sequence sequence;
  int seq, group, num_tokens, first_position, first_token, num_steps;
};

template <typename Traits, bool kReport = false>
__device__ __forceinline__ DenseWork dense_work(const DenseParams& params, int index) {
  DenseWork work{};
  const QueryTile tile = params.tiles[index / params.num_groups];
  work.seq = tile.seq;
  work.group = index % params.num_groups;
  if (tile.seq < 0 || !params.batch.load<kReport>(tile.seq, &work.sequence)) return work;
  const int first =
      Traits::kCluster == 1 ? tile.first : tile.first + static_cast<int>(ptx::cluster_rank()) * (Traits::kRows >> params.log_group);
  work.num_tokens = Traits::kCluster == 1 ? tile.end - first : max(min(tile.end - first, Traits::kRows >> params.log_group), 0);
  work.first_position = work.sequence.first_position + first;
  work.first_token = work.sequence.query_begin + first;
  work.num_steps = (work.sequence.num_visible(work.sequence.first_position + tile.end - 1) + Traits::kBlock - 1) / Traits::kBlock;
  return work;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_dense_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ CUtensorMap map_v, const __grid_constant__ DenseParams params) {
  using T = typename Traits::T;
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock;
  unsigned char* smem_q = ptx::dynamic_smem_aligned_late();
  unsigned char* smem_k = smem_q + kHalves * Traits::kBoxBytesQ;
  unsigned char* smem_v = smem_k + kStages * Traits::kTileBytes;
  auto* k_full = reinterpret_cast<std::uint64_t*>(smem_v + kStages * Traits::kTileBytes);
  std::uint64_t* k_empty = k_full + kStages;
  std::uint64_t* v_full = k_empty + kStages;
  std::uint64_t* v_empty = v_full + kStages;
  std::uint64_t* q_full = v_empty + kStages;
  std::uint64_t* q_empty = q_full + 1;

  // One group after the other, so that all CTAs of a time stream the same keys through the L2.
  const int first_work = blockIdx.x / Traits::kCluster, num_workers = gridDim.x / Traits::kCluster;
  const int num_work = params.num_tiles * params.num_groups;
  const auto work_of = [&](int i) { return i % params.num_tiles * params.num_groups + i / params.num_tiles; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&k_full[s], 1);
      ptx::mbarrier_init(&v_full[s], 1);
      ptx::mbarrier_init(&k_empty[s], 8 * Traits::kCluster);
      ptx::mbarrier_init(&v_empty[s], 8 * Traits::kCluster);
    }
    ptx::mbarrier_init(q_full, 1);
    ptx::mbarrier_init(q_empty, 8);
    ptx::fence_barrier_init();
  }
  if (Traits::kCluster > 1)
    ptx::cluster_sync();
  else
    __syncthreads();

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (warpgroup == 0) {
    ptx::shrink_registers<56>();
    if (threadIdx.x == 0) {
      const int rank = Traits::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank());
      int loaded = 0;  // Q tiles so far
      DenseRing<kStages> ring{0, 1};
      const auto load_tile = [&](unsigned char* tile, const CUtensorMap& map, std::uint64_t* full, std::uint64_t* empty, int token,
                                 int group, int page) {
        ptx::mbarrier_wait(&empty[ring.stage], ring.parity);  // a fresh barrier counts as released
        ptx::mbarrier_arrive_expect(&full[ring.stage], Traits::kTileBytes);
        for (int h = 0; h < kHalves; ++h) {
          unsigned char* target = tile + ring.stage * Traits::kTileBytes + h * Traits::kBoxBytesKv + rank * Traits::kPieceBytes;
          if constexpr (Traits::kCluster == 1) {
            ptx::tma_load_4d(target, &map, &full[ring.stage], h * 64, token, group, page);
          } else {
            ptx::tma_load_4d_multicast(target, &map, &full[ring.stage], (1 << Traits::kCluster) - 1, h * 64,
                                       token + rank * (kBlock / Traits::kCluster), group, page);
          }
        }
      };
      for (int i = first_work; i < num_work; i += num_workers) {
        const DenseWork work = dense_work<Traits, true>(params, work_of(i));
        if (work.num_steps == 0) continue;
        if (loaded > 0) ptx::mbarrier_wait(q_empty, (loaded - 1) & 1);
        ++loaded;
        ptx::mbarrier_arrive_expect(q_full, kHalves * Traits::kBoxBytesQ);
        for (int h = 0; h < kHalves; ++h) {
          ptx::tma_load_3d(smem_q + h * Traits::kBoxBytesQ, &map_q, q_full, h * 64, work.group * params.group_size,
                           work.first_token);
        }
        for (int step = 0; step < work.num_steps; ++step) {
          const int block = work.num_steps - 1 - step;
          const int token = work.sequence.pages ? 0 : work.sequence.key_begin + block * kBlock;
          const int page = params.batch.page(work.sequence, work.seq, block);  // -1 reads as zeros
          load_tile(smem_k, map_k, k_full, k_empty, token, work.group, page);
          load_tile(smem_v, map_v, v_full, v_empty, token, work.group, page);
          ring.next();
        }
      }
    }
  } else {
    ptx::grow_registers<224>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32, quad = lane % 4;
    const int row0 = consumer * 64 + warp * 16 + lane / 4;  // this thread's rows: row0 and row0 + 8

    const std::uint32_t q_address = ptx::warp_uniform(ptx::smem_address(smem_q) + consumer * 64 * 128);
    const std::uint32_t k_address = ptx::smem_address(smem_k), v_address = ptx::smem_address(smem_v);
    int loaded = 0;
    DenseRing<kStages> ring;
    const auto release = [&](std::uint64_t* empty, int s) {
      if (Traits::kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(&empty[s]);
      } else if (lane < Traits::kCluster) {
        ptx::mbarrier_arrive_cluster(&empty[s], lane);
      }
    };
    for (int i = first_work; i < num_work; i += num_workers) {
      int num_steps, seqlen_k, full_keys, visible[2];
      {
        const DenseWork work = dense_work<Traits>(params, work_of(i));
        num_steps = work.num_steps;
        seqlen_k = work.sequence.seqlen_k;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          visible[r] = work.sequence.num_visible(work.first_position + ((row0 + 8 * r) >> params.log_group));
        // Blocks that end below this need no mask for any row of the tile.
        full_keys = work.sequence.num_visible(work.first_position);
      }

      float scores[kBlock / 2], out[Traits::kHeadDim / 2];
      std::uint32_t p[kBlock / 16][4];
      float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
      float offset[2] = {0.f, 0.f}, bound[2] = {-INFINITY, -INFINITY};  // row_max scaled; and plus the slack
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] = 0.f;

      auto issue_qk = [&](std::uint32_t k_tile) {
        const std::uint64_t q = ptx::smem_descriptor(q_address, 16, 1024);
        const std::uint64_t k = ptx::smem_descriptor(k_tile, 16, 1024);
        ptx::wgmma_fence_operands(scores);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
          ptx::WgmmaSS<T, kBlock>::template run<ptx::Major::kK>(
              scores, ptx::smem_descriptor_step(q, (i / 4) * Traits::kBoxBytesQ + (i % 4) * 32),
              ptx::smem_descriptor_step(k, (i / 4) * Traits::kBoxBytesKv + (i % 4) * 32), i > 0);
        }
        ptx::wgmma_commit();
      };
      auto issue_pv = [&](std::uint32_t v_tile) {
        const std::uint64_t v = ptx::smem_descriptor(v_tile, Traits::kBoxBytesKv, 1024);
        ptx::wgmma_fence_operands(out);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlock / 16; ++i) {
          ptx::WgmmaRS<T, Traits::kHeadDim>::template run<ptx::Major::kMN>(out, p[i], ptx::smem_descriptor_step(v, i * 16 * 128),
                                                                           1);
        }
        ptx::wgmma_commit();
      };
      auto tile_at = [&](std::uint32_t base, int s) { return ptx::warp_uniform(base + s * Traits::kTileBytes); };
      // A block's maximum keeps NaN; the softmax needs no more than a maximum of numbers, and a row with a NaN is NaN by its sum.
      auto larger = [](float a, float b) { return Traits::kBlockMax ? ptx::max_nan(a, b) : fmaxf(a, b); };
      auto row_maximum = [&](float x) {
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
        return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
      };
      auto block_of = [&](int step) { return num_steps - 1 - step; };
      float top[2];  // this thread's largest score of the step, a row
      auto mask_and_max = [&](int step) {
        const int block = block_of(step);
        if ((block + 1) * kBlock > full_keys) {
          int limit[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) limit[r] = visible[r] - block * kBlock - quad * 2;
#pragma unroll
          for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if (j * 8 + c % 2 >= limit[c / 2]) scores[4 * j + c] = -INFINITY;
            }
          }
        }
        // Four chains of maxima: one or two would wait for their own latency.
        float chain[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
        for (int j = 1; j < kBlock / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) chain[c] = larger(chain[c], scores[4 * j + c]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = larger(chain[2 * r], chain[2 * r + 1]);
        if constexpr (Traits::kBlockMax) {
          const DenseWork work = dense_work<Traits>(params, work_of(i));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float block_max = row_maximum(top[r]);
            const int row = row0 + 8 * r, token = row >> params.log_group, head = row & ((1 << params.log_group) - 1);
            if (quad == 0 && token < work.num_tokens && head < params.group_size) {
              params.block_max[(std::int64_t{work.first_token} + token) * params.stride_max_token +
                               (work.group * params.group_size + head) * params.stride_max_head + block] = block_max * params.scale;
            }
          }
        }
      };
      // P = exp2(scores - offset) and its sums. Any offset gives the same quotient, so it follows the maximum only once a row of the
      // warp exceeds it by kSlack: no exchange between lanes and no rescaling in most steps, and the maxima leave the critical path.
      auto exponentials = [&] {
        if (__any_sync(0xffffffffu, top[0] > bound[0] || top[1] > bound[1])) {
          float rescale[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float before = row_max[r];
            row_max[r] = fmaxf(before, row_maximum(top[r]));
            bound[r] = row_max[r] + params.slack;
            offset[r] = row_max[r] == -INFINITY ? 0.f : row_max[r] * params.scale_log2;
            rescale[r] = exp2_approx(fmaf(before, params.scale_log2, -offset[r]));
            row_sum[r] *= rescale[r];
          }
#pragma unroll
          for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] *= rescale[j / 2 % 2];
        }
#pragma unroll
        for (int j = 0; j < kBlock / 8; ++j) {
          float e[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            e[c] = exp2_approx(fmaf(scores[4 * j + c], params.scale_log2, -offset[c / 2]));
            row_sum[c / 2] += e[c];
          }
          p[j / 2][j % 2 * 2] = pack2<T>(e[0], e[1]);
          p[j / 2][j % 2 * 2 + 1] = pack2<T>(e[2], e[3]);
        }
      };
      // V slots past the sequence's end may hold NaN, and 0 x NaN would leak; both warpgroups write the same zeros.
      auto clear_tail = [&](int s, int block) {
        const int live = seqlen_k - block * kBlock;
        if (live >= kBlock) return;
        unsigned char* v = smem_v + s * Traits::kTileBytes;
        for (int c = threadIdx.x % 128; c < (kBlock - live) * kHalves * 8; c += 128) {
          const int row = live + c / (kHalves * 8), h = c / 8 % kHalves;
          *reinterpret_cast<uint4*>(v + h * Traits::kBoxBytesKv + row * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
        }
        ptx::fence_async_proxy();
        ptx::named_barrier(1 + consumer, 128);
      };

      if (num_steps > 0) {
        ptx::mbarrier_wait(q_full, loaded & 1);
        ++loaded;
        // Runs once: the inner loop takes the other steps. Written without a loop, ptxas moves descriptors to uniform registers before
        // every wgmma.
        for (int step = 0; step < num_steps;) {
          const std::uint32_t k_tile = tile_at(k_address, ring.stage);
          ptx::mbarrier_wait(&k_full[ring.stage], ring.parity);
          issue_qk(k_tile);
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operands(scores);
          release(k_empty, ring.stage);
          mask_and_max(step);
          exponentials();
          ptx::mbarrier_wait(&v_full[ring.stage], ring.parity);
          clear_tail(ring.stage, block_of(step));
          int held = ring.stage;
          ring.next();
          for (++step; step < num_steps; ++step) {
            const std::uint32_t k_next = tile_at(k_address, ring.stage), v_tile = tile_at(v_address, held);
            ptx::mbarrier_wait(&k_full[ring.stage], ring.parity);
            issue_qk(k_next);
            issue_pv(v_tile);
            ptx::wgmma_wait<1>();
            ptx::wgmma_fence_operands(scores);
            release(k_empty, ring.stage);
            mask_and_max(step);
            ptx::schedule_after(top[0] + top[1]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_fence_operands(out);
            release(v_empty, held);
            exponentials();
            ptx::mbarrier_wait(&v_full[ring.stage], ring.parity);
            held = ring.stage;
            ring.next();
          }
          if (lane == 0) ptx::mbarrier_arrive(q_empty);
          issue_pv(tile_at(v_address, held));
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_operands(out);
          release(v_empty, held);
        }
      }

      // Looked up again rather than held in registers through the loop.
      const DenseWork work = dense_work<Traits>(params, work_of(i));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
        const int row = row0 + 8 * r, token = row >> params.log_group, row_head = row & ((1 << params.log_group) - 1);
        row_sum[r] = softmax_sum(row_sum[r], work.sequence.num_visible(work.first_position + token) > 0);
        const float inverse = row_sum[r] == 0.f ? 0.f : 1.f / row_sum[r];
        const int head = work.group * params.group_size + row_head;
        const bool live = token < work.num_tokens && row_head < params.group_size;
        if (live && quad == 0 && params.lse) {
          params.lse[(std::int64_t{work.first_token} + token) * params.stride_lse_token + head] =
              row_sum[r] == 0.f ? -INFINITY : row_max[r] * params.scale + logf(row_sum[r]);
        }
        if (live && Traits::kBlockMax) {
          float* row_out =
              params.block_max + (std::int64_t{work.first_token} + token) * params.stride_max_token + head * params.stride_max_head;
          for (int b = num_steps + quad; b < params.num_blocks; b += 4) row_out[b] = -INFINITY;
        }
        T* target = nullptr;
        if (live) {
          target = static_cast<T*>(params.out) + (std::int64_t{work.first_token} + token) * params.stride_out_token +
                   head * params.stride_out_head;
        }
        store_row<T, Traits::kHeadDim>(target, out, r, inverse, quad);
      }
    }
  }
  // Nobody leaves while the other CTA may still arrive on its barriers.
  if (Traits::kCluster > 1) ptx::cluster_sync();
}

}  // namespace openmsa::cuda
