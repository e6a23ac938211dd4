// Attention over tiles of query rows: dense_attention, and sparse_attention where neighbouring tokens share most of their blocks.
//
// Roles       warp 0 producer (TMA), warps 1-3 idle, warps 4-11 two consumer warpgroups of 64 query rows each.
// Tile        128 rows = 128/Gp tokens x Gp heads of one group (Gp: G rounded up to a power of two, so that a K or V tile serves the
//             whole group); keys one block a step, the newest block first, so that masks are met at the start only.
// Pipeline    per step the next Q K^T is issued before this step's P V, and the softmax runs under both; the two warpgroups take
//             turns at issuing (named barriers), so that one's softmax runs under the other's products.
// Shared      Q 2 x 128 x 128 B (reused for the output) | K kStages tiles | V kStages tiles | barriers
// Work        a persistent CTA takes tiles in turn; the loads of the next run under the last products and stores of this one.
// Barriers    q_full 1, k_full[s], v_full[s] 1 (TMA); q_empty 8; k_empty[s], v_empty[s] 8 (a warp each); named 1, 2: the warpgroups' turns
// Registers   producer 40, consumers 232: S 64, O 64, P 32
// Empty       rows that see no key keep sum 0: out = 0, lse = -inf. A tile without any key still stores.
#pragma once

#include "cuda/dense_params.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {

template <typename T_, int kHeadDim_, int kBlock_, DenseMode kMode_>
struct DenseTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr bool kBlockMax = kMode_ == DenseMode::kBlockMax, kUnion = kMode_ == DenseMode::kUnion;
  static constexpr int kHalves = (kHeadDim + 63) / 64;
  static constexpr int kRows = 128;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 384;
  static constexpr int kBoxBytesQ = kRows * 128, kBoxBytesKv = kBlock * 128;
  static constexpr int kTileBytes = kHalves * kBoxBytesKv;
  static constexpr int kSmemBytes = kHalves * kBoxBytesQ + 2 * kStages * kTileBytes + 1024 + 256;
};

// One tile of one group. Tiles without a visible key have no steps, and still store.
struct DenseWork {
  Sequence sequence;
  int seq, group, num_tokens, first_position, first_token, num_steps;
  const std::uint32_t* entries;
};

template <typename Traits, bool kReport = false>
__device__ __forceinline__ DenseWork dense_work(const DenseParams& params, int index) {
  DenseWork work{};
  const QueryTile tile = params.tiles[index / params.num_groups];
  work.seq = tile.seq;
  work.group = index % params.num_groups;
  if (tile.seq < 0 || !params.batch.load<kReport>(tile.seq, &work.sequence)) return work;
  work.num_tokens = tile.end - tile.first;
  work.first_position = work.sequence.first_position + tile.first;
  work.first_token = work.sequence.query_begin + tile.first;
  work.entries = params.entries + std::int64_t{index} * kMaxUnion;
  work.num_steps =
      Traits::kUnion ? params.num_entries[index]
                     : (work.sequence.num_visible(work.first_position + work.num_tokens - 1) + Traits::kBlock - 1) / Traits::kBlock;
  return work;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_dense_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ CUtensorMap map_v, const __grid_constant__ DenseParams params) {
  using T = typename Traits::T;
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock;
  extern __shared__ unsigned char raw_smem[];
  unsigned char* smem =
      reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(raw_smem) + 1023) & ~std::uintptr_t{1023});
  unsigned char* smem_q = smem;
  unsigned char* smem_k = smem_q + kHalves * Traits::kBoxBytesQ;
  unsigned char* smem_v = smem_k + kStages * Traits::kTileBytes;
  auto* k_full = reinterpret_cast<std::uint64_t*>(smem_v + kStages * Traits::kTileBytes);
  std::uint64_t* k_empty = k_full + kStages;
  std::uint64_t* v_full = k_empty + kStages;
  std::uint64_t* v_empty = v_full + kStages;
  std::uint64_t* q_full = v_empty + kStages;
  std::uint64_t* q_empty = q_full + 1;

  if (Traits::kUnion && static_cast<int>(blockIdx.x) >= *params.num_work) return;
  // Dense: one group after the other, so that all CTAs of a time stream the same keys through the L2.
  const int num_work = Traits::kUnion ? *params.num_work : params.num_tiles * params.num_groups;
  const auto work_of = [&](int i) {
    return Traits::kUnion ? params.work[i] : i % params.num_tiles * params.num_groups + i / params.num_tiles;
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&k_full[s], 1);
      ptx::mbarrier_init(&v_full[s], 1);
      ptx::mbarrier_init(&k_empty[s], 8);
      ptx::mbarrier_init(&v_empty[s], 8);
    }
    ptx::mbarrier_init(q_full, 1);
    ptx::mbarrier_init(q_empty, 8);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (warpgroup == 0) {
    ptx::shrink_registers<40>();
    if (threadIdx.x > 0) return;
    int loaded = 0, filled = 0;  // Q tiles and K, V tiles so far
    for (int i = blockIdx.x; i < num_work; i += gridDim.x) {
      const DenseWork work = dense_work<Traits, true>(params, work_of(i));
      if (work.num_steps == 0) continue;
      if (loaded > 0) ptx::mbarrier_wait(q_empty, (loaded - 1) & 1);
      ++loaded;
      ptx::mbarrier_arrive_expect(q_full, kHalves * Traits::kBoxBytesQ);
      for (int h = 0; h < kHalves; ++h) {
        ptx::tma_load_3d(smem_q + h * Traits::kBoxBytesQ, &map_q, q_full, h * 64, work.group * params.group_size, work.first_token);
      }
      for (int step = 0; step < work.num_steps; ++step, ++filled) {
        const int s = filled % kStages, parity = (filled / kStages - 1) & 1;
        const int block = Traits::kUnion ? static_cast<int>(work.entries[step] & 0xffffffu) : work.num_steps - 1 - step;
        const int token = work.sequence.pages ? 0 : work.sequence.key_begin + block * kBlock;
        const int page = params.batch.page(work.sequence, work.seq, block);  // -1 reads as zeros
        if (filled >= kStages) ptx::mbarrier_wait(&k_empty[s], parity);
        ptx::mbarrier_arrive_expect(&k_full[s], Traits::kTileBytes);
        for (int h = 0; h < kHalves; ++h) {
          ptx::tma_load_4d(smem_k + s * Traits::kTileBytes + h * Traits::kBoxBytesKv, &map_k, &k_full[s], h * 64, token, work.group,
                           page);
        }
        if (filled >= kStages) ptx::mbarrier_wait(&v_empty[s], parity);
        ptx::mbarrier_arrive_expect(&v_full[s], Traits::kTileBytes);
        for (int h = 0; h < kHalves; ++h) {
          ptx::tma_load_4d(smem_v + s * Traits::kTileBytes + h * Traits::kBoxBytesKv, &map_v, &v_full[s], h * 64, token, work.group,
                           page);
        }
      }
    }
    return;
  }

  ptx::grow_registers<232>();
  const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32, quad = lane % 4;
  const int row0 = consumer * 64 + warp * 16 + lane / 4;  // this thread's rows: row0 and row0 + 8

  int loaded = 0, filled = 0;
  for (int i = blockIdx.x; i < num_work; i += gridDim.x) {
    int num_steps, seqlen_k, full_keys, visible[2];
    const std::uint32_t* entries;
    {
      const DenseWork work = dense_work<Traits>(params, work_of(i));
      num_steps = work.num_steps;
      seqlen_k = work.sequence.seqlen_k;
      entries = work.entries;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        visible[r] = work.sequence.num_visible(work.first_position + ((row0 + 8 * r) >> params.log_group));
      // Blocks that end below this need no mask for any row of the tile.
      full_keys = work.sequence.num_visible(work.first_position);
    }

    float scores[kBlock / 2], out[Traits::kHeadDim / 2];
    std::uint32_t p[kBlock / 16][4];
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f}, rescale[2];
#pragma unroll
    for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] = 0.f;

    auto issue_qk = [&](int s) {
      const std::uint32_t q = ptx::smem_address(smem_q) + consumer * 64 * 128;
      const std::uint32_t k = ptx::smem_address(smem_k) + s * Traits::kTileBytes;
      ptx::wgmma_fence_operands(scores);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
        ptx::WgmmaSS<T, kBlock>::template run<ptx::Major::kK>(
            scores, ptx::smem_descriptor(q + (i / 4) * Traits::kBoxBytesQ + (i % 4) * 32, 16, 1024),
            ptx::smem_descriptor(k + (i / 4) * Traits::kBoxBytesKv + (i % 4) * 32, 16, 1024), i > 0);
      }
      ptx::wgmma_commit();
    };
    auto issue_pv = [&](int s) {
      const std::uint32_t v = ptx::smem_address(smem_v) + s * Traits::kTileBytes;
      ptx::wgmma_fence_operands(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        ptx::WgmmaRS<T, Traits::kHeadDim>::template run<ptx::Major::kMN>(
            out, p[i], ptx::smem_descriptor(v + i * 16 * 128, Traits::kBoxBytesKv, 1024), 1);
      }
      ptx::wgmma_commit();
    };
    auto turn_wait = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory"); };
    auto turn_pass = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory"); };
    // Masks, updates max and sum, leaves exp2 of the scores in place and the factor for older results in `rescale`.
    // Which block a step is about; in union mode also whether this warp's token (16 rows are one token there) chose it.
    auto block_of = [&](std::uint32_t entry, int step) {
      return Traits::kUnion ? static_cast<int>(entry & 0xffffffu) : num_steps - 1 - step;
    };
    auto entry_at = [&](int step) { return Traits::kUnion && step < num_steps ? entries[step] : 0u; };
    auto softmax = [&](std::uint32_t entry, int step) {
      const int block = block_of(entry, step);
      // In union mode a token that did not choose the block sees none of its keys.
      const bool chosen = !Traits::kUnion || (entry >> (24 + consumer * 4 + warp) & 1) != 0;
      if (!chosen || (block + 1) * kBlock > full_keys) {
        int limit[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) limit[r] = chosen ? visible[Traits::kUnion ? 0 : r] - block * kBlock - quad * 2 : 0;
#pragma unroll
        for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (j * 8 + c % 2 >= limit[c / 2]) scores[4 * j + c] = -INFINITY;
          }
        }
      }
      float block_max[2] = {scores[0], scores[2]};
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) block_max[c / 2] = fmaxf(block_max[c / 2], scores[4 * j + c]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(0xffffffffu, block_max[r], 1));
        block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(0xffffffffu, block_max[r], 2));
        if (Traits::kBlockMax) {
          const DenseWork work = dense_work<Traits>(params, work_of(i));
          const int row = row0 + 8 * r, token = row >> params.log_group, head = row & ((1 << params.log_group) - 1);
          if (quad == 0 && token < work.num_tokens && head < params.group_size) {
            params.block_max[(std::int64_t{work.first_token} + token) * params.stride_max_token +
                             (work.group * params.group_size + head) * params.stride_max_head + block] =
                block_max[r] * params.scale;
          }
        }
        const float old_max = row_max[r];
        row_max[r] = fmaxf(old_max, block_max[r]);
        const float offset = row_max[r] == -INFINITY ? 0.f : row_max[r] * params.scale_log2;
        rescale[r] = exp2_approx(fmaf(old_max, params.scale_log2, -offset));
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; ++c) {
            scores[4 * j + c] = exp2_approx(fmaf(scores[4 * j + c], params.scale_log2, -offset));
            sum += scores[4 * j + c];
          }
        }
        row_sum[r] = fmaf(row_sum[r], rescale[r], sum);
      }
    };
    auto convert = [&] {
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j) {
        p[j / 2][j % 2 * 2] = pack2<T>(scores[4 * j], scores[4 * j + 1]);
        p[j / 2][j % 2 * 2 + 1] = pack2<T>(scores[4 * j + 2], scores[4 * j + 3]);
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
      ptx::named_barrier(3 + consumer, 128);
    };

    if (num_steps > 0) {
      const auto stage = [&](int step) { return (filled + step) % kStages; };
      const auto parity = [&](int step) { return (filled + step) / kStages & 1; };
      if (consumer == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");  // the first turn is warpgroup 0's
      ptx::mbarrier_wait(q_full, loaded & 1);
      ++loaded;
      ptx::mbarrier_wait(&k_full[stage(0)], parity(0));
      turn_wait();
      issue_qk(stage(0));
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      turn_pass();
      if (lane == 0) ptx::mbarrier_arrive(&k_empty[stage(0)]);
      std::uint32_t entry = entry_at(0);
      softmax(entry, 0);
      convert();
      ptx::mbarrier_wait(&v_full[stage(0)], parity(0));
      clear_tail(stage(0), block_of(entry, 0));
      entry = entry_at(1);
      for (int step = 1; step < num_steps; ++step) {
        const int s = stage(step), before = stage(step - 1);
        ptx::mbarrier_wait(&k_full[s], parity(step));
        turn_wait();
        issue_qk(s);
        ptx::mbarrier_wait(&v_full[before], parity(step - 1));
        issue_pv(before);
        turn_pass();
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operands(scores);
        if (lane == 0) ptx::mbarrier_arrive(&k_empty[s]);
        softmax(entry, step);
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_operands(out);
        if (lane == 0) ptx::mbarrier_arrive(&v_empty[before]);
#pragma unroll
        for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] *= rescale[j / 2 % 2];
        convert();
        if (Traits::kUnion) {
          // The tail block comes first in the dense order, anywhere in a union.
          if (block_of(entry, step) * kBlock + kBlock > seqlen_k) {
            ptx::mbarrier_wait(&v_full[s], parity(step));
            clear_tail(s, block_of(entry, step));
          }
          entry = entry_at(step + 1);
        }
      }
      if (lane == 0) ptx::mbarrier_arrive(q_empty);
      const int last = num_steps - 1;
      ptx::mbarrier_wait(&v_full[stage(last)], parity(last));
      issue_pv(stage(last));
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(out);
      if (lane == 0) ptx::mbarrier_arrive(&v_empty[stage(last)]);
      if (consumer == 0) turn_wait();  // takes the turn that nobody needs any more, so that the barrier ends balanced
      filled += num_steps;
    }

    // Looked up again rather than held in registers through the loop.
    const DenseWork work = dense_work<Traits>(params, work_of(i));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
      const float inverse = row_sum[r] == 0.f ? 0.f : 1.f / row_sum[r];
      const int row = row0 + 8 * r, token = row >> params.log_group, row_head = row & ((1 << params.log_group) - 1);
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
      T* target = live ? static_cast<T*>(params.out) + (std::int64_t{work.first_token} + token) * params.stride_out_token +
                             head * params.stride_out_head
                       : nullptr;
      // A quad trades its 4-byte pairs so that each lane holds 16 contiguous bytes: lane q takes column group 4m + q.
#pragma unroll
      for (int m = 0; m < Traits::kHeadDim / 32; ++m) {
        std::uint32_t mine[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mine[i] = pack2<T>(out[4 * (4 * m + i) + 2 * r] * inverse, out[4 * (4 * m + i) + 2 * r + 1] * inverse);
        std::uint32_t got[4];
#pragma unroll
        for (int turn = 0; turn < 4; ++turn) {
          // In turn t lane q sends its pair of group q ^ t and receives the pair of its own group from lane q ^ t.
          const int partner = quad ^ turn;
          const std::uint32_t send = partner == 0 ? mine[0] : partner == 1 ? mine[1] : partner == 2 ? mine[2] : mine[3];
          const std::uint32_t received = __shfl_xor_sync(0xffffffffu, send, turn);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (partner == i) got[i] = received;
          }
        }
        if (target) *reinterpret_cast<uint4*>(target + (4 * m + quad) * 8) = uint4{got[0], got[1], got[2], got[3]};
      }
    }
  }
}

}  // namespace openmsa::cuda
