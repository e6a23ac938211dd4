// Attention of tiles of neighbouring query tokens over the union of their selection lists, as far as smxx_union.cuh routed it here.
//
// Roles       warp 0 takes tiles from a counter and loads K and V (TMA), warps 1-3 each one consumer warpgroup's tasks and Q, warps
//             4-15 three consumer warpgroups.
// Tile        12 tokens x 16 heads of one group, four tokens (64 rows) a warpgroup, one token a warp. More tokens share what a block
//             costs the L2, which bounded a tile of 8.
// Steps       blocks of the union, in the order that smxx_union.cuh gave them. A warpgroup passes over those that none of its tokens chose.
// Pipeline    three chains side by side: product, softmax, product. Inside one, the second half of the exponentials runs under the
//             first half of P V. Nothing orders the warpgroups but the ring, which lets one run ahead by some two blocks.
// Softmax     of scores minus an offset that follows a row's maximum only when a score exceeds it by kSlack (see sm90_dense.cuh).
// Shared      Q 3 x kHalves x 64 x 128 B | ring of kStages parts | tasks, two a warpgroup | barriers | two tile numbers
// Ring        a block is 2 kHalves parts of kBlock x 128 B: K by 64 dims, then V by kBlock / kHalves keys.
// Barriers    full[s] 1 (TMA); empty[s] 12 (a warp each); q_full[w] 1 (TMA); q_empty[w] 4 (a warp each); named 1-3: clear_tail, 7: producers
// Registers   producers 32, consumers 160: O 64, S 64, which P's 32 replace
// Output      out and lse of the tokens that it serves. The partials of those with slots elsewhere are added at a tile's end: sm90_attend
//             ran before, its last CTAs under the first tiles here (programmatic dependent launch).
// Empty       a token that is served sees keys, so a sum of 0 is that of scores that are all -inf: out and lse are NaN.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/softmax_sum.cuh"
#include "cuda/store_row.cuh"
#include "cuda/union_params.hpp"

namespace openmsa::cuda {

// What a warpgroup has to know of a tile, written beside its Q. Two of each, since the end of a tile still looks at the first while
// the second is written.
struct UnionTask {
  std::int32_t num_steps;  // -1: no further tile
  std::int32_t group, seqlen_k, first_token;
  std::int32_t visible[kUnionSideTokens];  // keys that a token sees
  std::uint32_t served[kUnionSideTokens];  // 0: nothing to store for it
  std::uint32_t others[kUnionSideTokens];  // its slots that sm90_attend has served, a bit each
  std::uint32_t entries[kMaxUnion];
};

template <typename T_, int kHeadDim_, int kBlock_>
struct UnionTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr int kHalves = (kHeadDim + 63) / 64;                      // and parts of a K or a V tile
  static constexpr int kParts = 2 * kHalves, kPartKeys = kBlock / kHalves;  // of a block; keys of a part of V
  static constexpr int kThreads = 128 * (1 + kUnionSides);
  static constexpr int kStageBytes = kBlock * 128, kBoxBytesQ = 64 * 128, kBoxBytesV = kPartKeys * 128;
  static constexpr int kQBytes = kUnionSides * kHalves * kBoxBytesQ;
  static constexpr int kTaskBytes = 2 * kUnionSides * static_cast<int>(sizeof(UnionTask));
  static constexpr int kSmemLimit = 227 * 1024;
  static constexpr int kStages = (kSmemLimit - kQBytes - kTaskBytes - 16 * kUnionSides - 8) / (kStageBytes + 16);
  static constexpr int kSmemBytes = kQBytes + kStages * (kStageBytes + 16) + kTaskBytes + 16 * kUnionSides + 8;
};

inline constexpr int kUnionFeedBarrier = 7;
// Where the ring is: the first part of a block.
template <int kStages>
struct UnionRing {
  int first = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ int stage(int part) const { return first + part < kStages ? first + part : first + part - kStages; }
  __device__ __forceinline__ std::uint32_t parity_of(int part) const { return first + part < kStages ? parity : parity ^ 1; }
  __device__ __forceinline__ void advance(int parts) {
    parity = parity_of(parts);
    first = stage(parts);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_union_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                      const __grid_constant__ CUtensorMap map_v, const __grid_constant__ UnionTileParams params) {
  using T = typename Traits::T;
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock, kParts = Traits::kParts;
  unsigned char* smem_q = ptx::dynamic_smem();
  unsigned char* smem_ring = smem_q + Traits::kQBytes;
  auto* tasks = reinterpret_cast<UnionTask*>(smem_ring + kStages * Traits::kStageBytes);  // [2][kUnionSides]
  auto* full = reinterpret_cast<std::uint64_t*>(tasks + 2 * kUnionSides);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* q_full = empty + kStages;
  std::uint64_t* q_empty = q_full + kUnionSides;
  auto* feed = reinterpret_cast<std::int32_t*>(q_empty + kUnionSides);  // [2]

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 4 * kUnionSides);
    }
    for (int w = 0; w < kUnionSides; ++w) {
      ptx::mbarrier_init(&q_full[w], 1);
      ptx::mbarrier_init(&q_empty[w], 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  // Through a shuffle, so that the compiler knows it to be the same for the whole warp.
  const int warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warpgroup = warp_index / 4;
  if (warpgroup == 0) {
    ptx::shrink_registers<32>();
    const int num_work = *params.num_work, side = warp_index - 1;
    UnionRing<kStages> ring{0, 1};  // a fresh barrier counts as released
    const auto load_keys = [&](int index) {
      const int group = index % params.num_groups, num_steps = params.num_entries[index];
      const int seq = params.tiles[index / params.num_groups].seq;
      Sequence sequence;
      params.batch.load<false>(seq, &sequence);
      int token = 0, page = 0;  // of step `lane`
      if (lane < num_steps) {
        const int block = static_cast<int>(params.entries[std::int64_t{index} * kMaxUnion + lane] & (kUnionBlocks - 1));
        // Checked where the lists were; an id outside the pool reads as zeros.
        if (sequence.pages)
          page = sequence.pages[block];
        else
          token = sequence.key_begin + block * kBlock;
      }
      for (int step = 0; step < num_steps; ++step) {
        const int step_token = __shfl_sync(0xffffffffu, token, step), step_page = __shfl_sync(0xffffffffu, page, step);
        if (lane == 0) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int s = ring.stage(part);
            unsigned char* target = smem_ring + s * Traits::kStageBytes;
            ptx::mbarrier_wait(&empty[s], ring.parity_of(part));
            ptx::mbarrier_arrive_expect(&full[s], Traits::kStageBytes);
            if (part < kHalves) {
              ptx::tma_load_4d(target, &map_k, &full[s], part * 64, step_token, group, step_page);
            } else {
              for (int h = 0; h < kHalves; ++h) {
                ptx::tma_load_4d(target + h * Traits::kBoxBytesV, &map_v, &full[s], h * 64,
                                 step_token + (part - kHalves) * Traits::kPartKeys, group, step_page);
              }
            }
          }
        }
        __syncwarp();
        ring.advance(kParts);
      }
    };
    // Of the n-th tile; index -1: none.
    const auto give_task = [&](int n, int index) {
      UnionTask* task = &tasks[n % 2 * kUnionSides + side];
      int num_steps = -1, group = 0, seqlen_k = 0, first_token = 0, visible = 0;
      std::uint32_t entry = 0, served = 0, others = 0;
      if (index >= 0) {
        const QueryTile tile = params.tiles[index / params.num_groups];
        group = index % params.num_groups;
        num_steps = params.num_entries[index];
        if (lane < num_steps) entry = params.entries[std::int64_t{index} * kMaxUnion + lane];
        Sequence sequence;
        params.batch.load<false>(tile.seq, &sequence);
        const int first = tile.first + side * kUnionSideTokens;
        seqlen_k = sequence.seqlen_k;
        first_token = sequence.query_begin + first;
        if (lane < kUnionSideTokens && first + lane < tile.end) {
          visible = sequence.num_visible(sequence.first_position + first + lane);
          served = params.taken[(std::int64_t{first_token} + lane - params.chunk_begin) * params.num_groups + group];
        }
        for (int t = 0; t < kUnionSideTokens && first + t < tile.end; ++t) {
          const std::int64_t pair = (std::int64_t{first_token} + t - params.chunk_begin) * params.num_groups + group;
          const std::uint32_t mask =
              __ballot_sync(0xffffffffu, lane < params.top_k && params.ranks[pair * params.top_k + lane] >= 0);
          if (lane == t) others = mask;
        }
      }
      // Also says that the tile before the last is done with, whose task this one replaces.
      if (n > 0) ptx::mbarrier_wait(&q_empty[side], (n - 1) & 1);
      task->entries[lane] = entry;
      if (lane < kUnionSideTokens) {
        task->visible[lane] = visible;
        task->served[lane] = served;
        task->others[lane] = others;
      }
      if (lane == 0) {
        task->num_steps = num_steps;
        task->group = group;
        task->seqlen_k = seqlen_k;
        task->first_token = first_token;
      }
      __syncwarp();
      if (lane == 0) {
        if (num_steps < 0) {
          ptx::mbarrier_arrive(&q_full[side]);
        } else {
          ptx::mbarrier_arrive_expect(&q_full[side], kHalves * Traits::kBoxBytesQ);
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_3d(smem_q + (side * kHalves + h) * Traits::kBoxBytesQ, &map_q, &q_full[side], h * 64,
                             group * params.group_size, first_token);
          }
        }
      }
      __syncwarp();
    };
    int next = blockIdx.x;  // of thread 0
    for (int n = 0;; ++n) {
      // The n-th work of this CTA. A warp comes here when it is through with the one before.
      if (threadIdx.x == 0) feed[n % 2] = next;
      ptx::named_barrier(kUnionFeedBarrier, 128);
      const int work = feed[n % 2];
      const bool more = work < num_work;
      if (threadIdx.x == 0 && more) next = gridDim.x + atomicAdd(params.next_work, 1);  // under this one's loads
      if (warp_index > 0) {
        give_task(n, more ? params.work[work] : -1);
      } else if (more) {
        load_keys(params.work[work]);
      }
      if (!more) break;
    }
    return;
  }

  ptx::grow_registers<160>();
  const int side = warpgroup - 1, warp = warp_index % 4, quad = lane % 4;
  const std::uint32_t ring_address = ptx::smem_address(smem_ring);
  const std::uint64_t desc_q = ptx::smem_descriptor(ptx::smem_address(smem_q) + side * kHalves * Traits::kBoxBytesQ, 16, 1024);
  UnionRing<kStages> ring;
  const auto wait_full = [&](int part) { ptx::mbarrier_wait(&full[ring.stage(part)], ring.parity_of(part)); };
  const auto release = [&](int part) {
    if (lane == 0) ptx::mbarrier_arrive(&empty[ring.stage(part)]);
  };
  const auto address_of = [&](int part) { return ptx::warp_uniform(ring_address + ring.stage(part) * Traits::kStageBytes); };

  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(&q_full[side], n & 1);
    const UnionTask* task = &tasks[n % 2 * kUnionSides + side];
    const int num_steps = task->num_steps;
    if (num_steps < 0) {
      ptx::grid_dependency_wait();  // this kernel's end also says that sm90_attend has ended
      break;
    }
    const std::uint32_t entries = task->entries[lane];  // of step `lane`
    // Steps whose block one of the four tokens chose.
    std::uint32_t left = __ballot_sync(0xffffffffu, union_side(entries, side) != 0);

    float out[Traits::kHeadDim / 2];
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] = 0.f;
    const auto row_maximum = [](float x) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    };

    if (left == 0 && lane == 0) ptx::mbarrier_arrive(&q_empty[side]);
    for (int step = 0; step < num_steps; ++step, ring.advance(kParts)) {
      if ((left >> step & 1) == 0) {
        // Waited for all the same, and by all lanes: the release would else count for a stage's use before this one, or let the next one
        // in, and whoever waits later would take one phase for another.
#pragma unroll
        for (int part = 0; part < kParts; ++part) wait_full(part);
        __syncwarp();
#pragma unroll
        for (int part = 0; part < kParts; ++part) release(part);
        continue;
      }
      left &= ~(1u << step);

      float scores[kBlock / 2];
#pragma unroll
      for (int part = 0; part < kHalves; ++part) wait_full(part);
      {
        std::uint64_t desc_k[kHalves];
#pragma unroll
        for (int h = 0; h < kHalves; ++h) desc_k[h] = ptx::smem_descriptor(address_of(h), 16, 1024);
        ptx::wgmma_fence_operands(scores);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
          ptx::WgmmaSS<T, kBlock>::template run<ptx::Major::kK>(
              scores, ptx::smem_descriptor_step(desc_q, (i / 4) * Traits::kBoxBytesQ + (i % 4) * 32),
              ptx::smem_descriptor_step(desc_k[i / 4], (i % 4) * 32), i > 0);
        }
        ptx::wgmma_commit();
      }
      const std::uint32_t entry = __shfl_sync(0xffffffffu, entries, step);
      const int block = static_cast<int>(entry & (kUnionBlocks - 1));
      // A token that did not choose the block sees none of its keys.
      const bool chosen = (union_side(entry, side) >> warp & 1) != 0;
      const int limit = chosen ? task->visible[warp] - block * kBlock : 0;
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
#pragma unroll
      for (int part = 0; part < kHalves; ++part) release(part);
      if (left == 0 && lane == 0) ptx::mbarrier_arrive(&q_empty[side]);

      if (limit < kBlock) {
        const int quad_limit = limit - quad * 2;
#pragma unroll
        for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (j * 8 + c % 2 >= quad_limit) scores[4 * j + c] = -INFINITY;
          }
        }
      }
      // Four chains of maxima: one or two would wait for their own latency.
      float chain[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
      for (int j = 1; j < kBlock / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) chain[c] = fmaxf(chain[c], scores[4 * j + c]);
      }
      const float top[2] = {fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3])};
      const auto offset_of = [&](float maximum) { return maximum == -INFINITY ? 0.f : maximum * params.scale_log2; };
      if (__any_sync(0xffffffffu, top[0] > row_max[0] + params.slack || top[1] > row_max[1] + params.slack)) {
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float before = row_max[r];
          row_max[r] = fmaxf(before, row_maximum(top[r]));
          rescale[r] = exp2_approx(fmaf(before, params.scale_log2, -offset_of(row_max[r])));
          row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int j = 0; j < Traits::kHeadDim / 2; ++j) out[j] *= rescale[j / 2 % 2];
      }
      const float offset[2] = {offset_of(row_max[0]), offset_of(row_max[1])};

      // P V by halves of the keys.
      constexpr int kHalfSteps = kBlock / 32;
      std::uint32_t p[kBlock / 16][4];
      const auto exponentials = [&](int half) {
#pragma unroll
        for (int j = half * kBlock / 16; j < (half + 1) * kBlock / 16; ++j) {
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
      const auto issue_pv = [&](int half, std::uint64_t desc_v) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfSteps; ++i) {
          ptx::WgmmaRS<T, Traits::kHeadDim>::template run<ptx::Major::kMN>(out, p[half * kHalfSteps + i],
                                                                           ptx::smem_descriptor_step(desc_v, i * 16 * 128), 1);
        }
        ptx::wgmma_commit();
      };
      exponentials(0);
#pragma unroll
      for (int part = kHalves; part < kParts; ++part) wait_full(part);
      const int live = task->seqlen_k - block * kBlock;
      if (live < kBlock) {
        // Slots past the sequence's end may hold NaN, and 0 x NaN would leak: every warpgroup that comes by writes the same zeros.
        for (int c = threadIdx.x % 128; c < (kBlock - live) * kHalves * 8; c += 128) {
          const int key = live + c / (kHalves * 8), h = c / 8 % kHalves;
          unsigned char* v = smem_ring + ring.stage(kHalves + key / Traits::kPartKeys) * Traits::kStageBytes;
          *reinterpret_cast<uint4*>(v + h * Traits::kBoxBytesV + key % Traits::kPartKeys * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
        }
        ptx::fence_async_proxy();
        ptx::named_barrier(1 + side, 128);
      }
      const std::uint64_t desc_v0 = ptx::smem_descriptor(address_of(kHalves), Traits::kBoxBytesV, 1024);
      const std::uint64_t desc_v1 = kHalves == 1 ? ptx::smem_descriptor_step(desc_v0, kBlock / 2 * 128)
                                                 : ptx::smem_descriptor(address_of(kParts - 1), Traits::kBoxBytesV, 1024);
      ptx::wgmma_fence_operands(out);
      issue_pv(0, desc_v0);
      exponentials(1);
      issue_pv(1, desc_v1);
      if (kHalves == 2) {
        ptx::wgmma_wait<1>();
        release(kHalves);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(out);
      release(kParts - 1);
    }

    if (task->served[warp] == 0) continue;  // the warp's token, and with it all lanes
    const int token = task->first_token + warp, group = task->group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
      row_max[r] *= params.scale_log2;
    }
    if (std::uint32_t others = task->others[warp]; others != 0) {
      ptx::grid_dependency_wait();
      const std::int64_t first = ((std::int64_t{token} - params.chunk_begin) * params.num_groups + group) * params.top_k;
      // Further steps, whose scores are one number: the log-sum-exp of the slot.
#pragma unroll 1
      for (; others != 0; others &= others - 1) {
        const std::int64_t slot = first + __ffs(static_cast<int>(others)) - 1;
        std::uint32_t pairs[2][Traits::kHeadDim / 8];
        float score[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const std::int64_t row = (slot << kUnionLogGroup) + min(lane / 4 + 8 * r, params.group_size - 1);
          const auto* words =
              reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(params.partial) + row * Traits::kHeadDim);
          score[r] = params.partial_lse[row] * 1.4426950408889634f;
#pragma unroll
          for (int j = 0; j < Traits::kHeadDim / 8; ++j) pairs[r][j] = words[4 * j + quad];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float top = fmaxf(row_max[r], score[r]), offset = top == -INFINITY ? 0.f : top;
          const float before = exp2_approx(row_max[r] - offset), weight = exp2_approx(score[r] - offset);
          row_max[r] = top;
          row_sum[r] = fmaf(row_sum[r], before, weight);
#pragma unroll
          for (int j = 0; j < Traits::kHeadDim / 8; ++j) {
            const float2 value = unpack2<T>(pairs[r][j]);
            out[4 * j + 2 * r] = fmaf(weight, value.x, out[4 * j + 2 * r] * before);
            out[4 * j + 2 * r + 1] = fmaf(weight, value.y, out[4 * j + 2 * r + 1] * before);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = softmax_sum(row_sum[r], true);
      const float inverse = 1.f / row_sum[r];
      const int row_head = lane / 4 + 8 * r, head = group * params.group_size + row_head;
      T* target = nullptr;
      if (row_head < params.group_size) {
        target = static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token + head * params.stride_out_head;
        if (quad == 0 && params.lse) {
          params.lse[std::int64_t{token} * params.stride_lse_token + head] = (row_max[r] + log2f(row_sum[r])) * 0.6931471805599453f;
        }
      }
      store_row<T, Traits::kHeadDim>(target, out, r, inverse, quad);
    }
  }
}

}  // namespace openmsa::cuda
