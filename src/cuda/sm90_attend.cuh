// sparse_attention for Hopper, keys outermost: each block of keys meets the query tokens that chose it.
//
// Roles       warps 0-2 producers of a stage each in turn (lists, TMA), warp 3 takes items and loads their keys, warps 4-15 three
//             consumer warpgroups; a stage of 64/Gp tokens x Gp heads = 64 rows goes to one warpgroup (Gp: G rounded up to a power
//             of two).
// Pipeline    K and V of the item's block resident (separate barriers, so the next K loads under the last P V); Q in a ring of
//             kStages tiles. One block means one softmax, no rescaling; its normalised result goes back through the Q tile it came
//             from to the slot this block has in the token's own list: no atomics, bitwise repeatable.
// Shared      K 2 x 128 x 128 B | V the same | Q kStages x 2 x 64 x 128 B | entries, item, barriers
// Barriers    k_full, v_full 1 (TMA); k_empty, v_empty 12 (a warp each); q_full[s] 1 (TMA); q_empty[s] 4 (a warp each)
// Registers   producer 32, consumers 160: S 64, then P 32 and O 64. Three warpgroups rather than two: the chain of one stage
//             (products, softmax, store) is long, and memory waits for nobody
// Empty       an item of count 0 is never listed; rows of absent tokens compute on stale Q and store nothing.
#pragma once

#include <cfloat>

#include "cuda/items.hpp"
#include "cuda/params.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {

struct AttendParams {
  BatchParams batch;
  const AttendItem* items;             // [num_items]
  const std::int32_t* num_items;       // [1]
  std::int32_t* next_item;             // [1], zero at launch
  const std::uint32_t* entries;        // [chunk tokens * Hkv * k], grouped by (group, block)
  float* partial_lse;                  // [chunk tokens, Hkv, k, Gp]; -FLT_MAX: all scores -inf
  std::int32_t chunk_begin;            // first packed token of the chunk
  std::int32_t num_groups;             // Hkv
  std::int32_t top_k;                  // k
  std::int32_t group_size, log_group;  // G, and log2 of Gp: G rounded up to a power of two, at most 16
  float scale_log2;                    // softmax_scale * log2(e)
};

template <typename T_, int kHeadDim_, int kBlock_>
struct AttendTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr int kHalves = (kHeadDim + 63) / 64;
  static constexpr int kRows = 64;  // per stage: 64/Gp tokens x Gp heads
  // ptxas finds no allocation for three at 96 dims.
  static constexpr int kConsumers = kHeadDim == 96 ? 2 : 3;
  // A multiple of the warpgroups: a stage is always the same one's, which waits for every one of its phases. Another could come a lap
  // early, find the parity of the phase before, and take it for its own.
  static constexpr int kStages = kConsumers == 3 ? 9 : 8;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBoxBytesKv = kBlock * 128, kBoxBytesQ = kRows * 128;
  static constexpr int kStageBytes = kHalves * kBoxBytesQ;
  static constexpr int kSmemBytes = 2 * kHalves * kBoxBytesKv + kStages * kStageBytes + kStages * kRows * 4 + 1024 + 256;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_attend_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                       const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_partial,
                       const __grid_constant__ AttendParams params) {
  using T = typename Traits::T;
  ptx::grid_dependency_launch();  // sm90_union may begin where a CTA of this has ended
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock;
  unsigned char* smem_k = ptx::dynamic_smem_aligned_late();
  unsigned char* smem_v = smem_k + kHalves * Traits::kBoxBytesKv;
  unsigned char* smem_q = smem_v + kHalves * Traits::kBoxBytesKv;
  auto* q_full = reinterpret_cast<std::uint64_t*>(smem_q + kStages * Traits::kStageBytes);
  std::uint64_t* q_empty = q_full + kStages;
  std::uint64_t* k_full = q_empty + kStages;
  std::uint64_t* k_empty = k_full + 1;
  std::uint64_t* v_full = k_empty + 1;
  std::uint64_t* v_empty = v_full + 1;
  auto* item_slot = reinterpret_cast<AttendItem*>(v_empty + 1);
  auto* feed = reinterpret_cast<ItemFeed*>(item_slot + 1);
  auto* stage_entries = reinterpret_cast<std::uint32_t*>(feed + 1);  // [kStages][kRows]
  constexpr std::uint32_t kNoToken = 0xffffffffu;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&q_full[s], 1);
      ptx::mbarrier_init(&q_empty[s], 4);
    }
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(v_full, 1);
    ptx::mbarrier_init(k_empty, 4 * Traits::kConsumers);
    ptx::mbarrier_init(v_empty, 4 * Traits::kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  // Through a shuffle, so that the compiler knows these to be the same for the whole warp and computes addresses once a warp.
  const int warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warpgroup = warp_index / 4;
  if (warpgroup == 0) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    const int tokens = Traits::kRows >> params.log_group, token_bytes = 128 << params.log_group;  // per stage; per half tile
    int stage_count = 0;
    for (int round = 0;; ++round) {
      AttendItem item;
      Sequence sequence;
      take_item<true>(feed, params.batch, params.items, params.num_items, params.next_item, &item, &sequence);
      if (warp_index == kItemWarp) {
        if (lane == 0) {
          if (round > 0) ptx::mbarrier_wait(k_empty, (round - 1) & 1);
          *item_slot = item;
          if (item.count == 0) {
            ptx::mbarrier_arrive(k_full);
          } else {
            // Checked where the lists were; an id outside the pool reads as zeros.
            const int page = sequence.pages ? sequence.pages[item.block] : 0;
            const int token = sequence.pages ? 0 : sequence.key_begin + item.block * kBlock;
            ptx::mbarrier_arrive_expect(k_full, kHalves * Traits::kBoxBytesKv);
            for (int h = 0; h < kHalves; ++h) {
              ptx::tma_load_4d(smem_k + h * Traits::kBoxBytesKv, &map_k, k_full, h * 64, token, item.group, page);
            }
            if (round > 0) ptx::mbarrier_wait(v_empty, (round - 1) & 1);
            ptx::mbarrier_arrive_expect(v_full, kHalves * Traits::kBoxBytesKv);
            for (int h = 0; h < kHalves; ++h) {
              ptx::tma_load_4d(smem_v + h * Traits::kBoxBytesKv, &map_v, v_full, h * 64, token, item.group, page);
            }
          }
        }
        __syncwarp();
      }
      if (item.count == 0) return;
      const int num_stages = (item.count + tokens - 1) / tokens;
      if (warp_index < Traits::kConsumers) {
        const std::uint32_t* entries = params.entries + item.begin;
        // As the consumers: stages go round the warps across items, so that a stage's slot is always the same one's.
        for (int n = (warp_index + Traits::kConsumers - stage_count % Traits::kConsumers) % Traits::kConsumers; n < num_stages;
             n += Traits::kConsumers) {
          const int count = stage_count + n, s = count % kStages, first = n * tokens, num_tokens = min(tokens, item.count - first);
          std::uint32_t entry[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) entry[i] = i * 32 + lane < num_tokens ? entries[first + i * 32 + lane] : kNoToken;
          if (count >= kStages) ptx::mbarrier_wait(&q_empty[s], (count / kStages - 1) & 1);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (i * 32 + lane < tokens) stage_entries[s * Traits::kRows + i * 32 + lane] = entry[i];
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive_expect(&q_full[s], num_tokens * kHalves * token_bytes);
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (entry[i] == kNoToken) continue;
            for (int h = 0; h < kHalves; ++h) {
              ptx::tma_load_3d(smem_q + s * Traits::kStageBytes + h * Traits::kBoxBytesQ + (i * 32 + lane) * token_bytes, &map_q,
                               &q_full[s], h * 64, item.group * params.group_size,
                               params.chunk_begin + static_cast<int>(entry[i] >> kSlotBits));
            }
          }
        }
      }
      stage_count += num_stages;
    }
  }

  ptx::grow_registers<Traits::kConsumerRegisters>();
  const int consumer = warpgroup - 1, warp = warp_index % 4, quad = lane % 4;
  const std::uint64_t desc_q = ptx::smem_descriptor(ptx::smem_address(smem_q), 16, 1024);
  const std::uint64_t desc_k = ptx::smem_descriptor(ptx::smem_address(smem_k), 16, 1024);
  const std::uint64_t desc_v = ptx::smem_descriptor(ptx::smem_address(smem_v), Traits::kBoxBytesKv, 1024);
  const std::uint32_t entries_address = ptx::smem_address(stage_entries);
  const int per_warp = 16 >> params.log_group;  // tokens
  int stage_count = 0;
  // A stage goes back to the producer once its store has read it, which is left to run under the next stage's work.
  int stage_held = -1;
  auto release = [&] {
    if (stage_held < 0) return;
    ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&q_empty[stage_held]);
  };
  for (int round = 0;; ++round) {
    ptx::mbarrier_wait(k_full, round & 1);
    const AttendItem item = *item_slot;
    __syncwarp();  // read by all lanes before lane 0 frees the slot with k_empty
    if (item.count == 0) break;
    const int tokens = Traits::kRows >> params.log_group;
    const int num_stages = (item.count + tokens - 1) / tokens;
    Sequence sequence;
    params.batch.load_in_turn(item.seq, &sequence);
    // Packed token index + this = number of keys of the block that a query sees, before clamping to the sequence's end.
    const int to_visible = params.chunk_begin - sequence.query_begin + sequence.first_position + 1 - item.block * kBlock;
    const int live_keys = min(sequence.seqlen_k - item.block * kBlock, kBlock);
    bool v_ready = false;

    // Stages go round the warpgroups across items, so that all stay equally loaded.
    const int first_stage = (consumer + Traits::kConsumers - stage_count % Traits::kConsumers) % Traits::kConsumers;
    for (int i = first_stage; i < num_stages; i += Traits::kConsumers) {
      const int s = __shfl_sync(0xffffffffu, (stage_count + i) % kStages, 0);
      const std::uint64_t stage_q = desc_q + static_cast<std::uint32_t>(s * Traits::kStageBytes / 16);
      ptx::mbarrier_wait(&q_full[s], ((stage_count + i) / kStages) & 1);
      // The tokens of this thread's two rows; with 16 heads a group both are the warp's one token.
      std::uint32_t entry[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        entry[r] =
            ptx::load_shared(entries_address + (s * Traits::kRows + ((warp * 16 + lane / 4 + 8 * r) >> params.log_group)) * 4);
      float scores[kBlock / 2];
      ptx::wgmma_fence_operands(scores);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
        const std::uint32_t column = (step % 4) * 32;
        ptx::WgmmaSS<T, kBlock>::template run<ptx::Major::kK>(scores, stage_q + ((step / 4) * Traits::kBoxBytesQ + column) / 16,
                                                              desc_k + ((step / 4) * Traits::kBoxBytesKv + column) / 16, step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      if (i + Traits::kConsumers >= num_stages && lane == 0) ptx::mbarrier_arrive(k_empty);

      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        limit[r] = entry[r] == kNoToken ? kBlock : min(static_cast<int>(entry[r] >> kSlotBits) + to_visible, live_keys);
      }
      if (min(limit[0], limit[1]) < kBlock) {
#pragma unroll
        for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (j * 8 + quad * 2 + c % 2 >= limit[c / 2]) scores[4 * j + c] = -INFINITY;
          }
        }
      }
      float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) row_max[c / 2] = fmaxf(row_max[c / 2], scores[4 * j + c]);
      }
      float offset[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 1));
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 2));
        offset[r] = row_max[r] == -INFINITY ? 0.f : row_max[r] * params.scale_log2;
      }
      std::uint32_t p[kBlock / 16][4];
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          scores[4 * j + c] = exp2_approx(fmaf(scores[4 * j + c], params.scale_log2, -offset[c / 2]));
          row_sum[c / 2] += scores[4 * j + c];
        }
        p[j / 2][j % 2 * 2] = pack2<T>(scores[4 * j], scores[4 * j + 1]);
        p[j / 2][j % 2 * 2 + 1] = pack2<T>(scores[4 * j + 2], scores[4 * j + 3]);
      }

      if (!v_ready) {
        ptx::mbarrier_wait(v_full, round & 1);
        v_ready = true;
        if (live_keys < kBlock) {
          // Slots past the sequence's end may hold NaN, and 0 x NaN would leak: zero them once, all warpgroups the same bytes.
          const int chunks = (kBlock - live_keys) * kHalves * 8;
          for (int c = threadIdx.x % 128; c < chunks; c += 128) {
            const int row = live_keys + c / (kHalves * 8), h = c / 8 % kHalves;
            *reinterpret_cast<uint4*>(smem_v + h * Traits::kBoxBytesKv + row * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
          }
          ptx::fence_async_proxy();
          ptx::named_barrier(1 + consumer, 128);
        }
      }
      float out[Traits::kHeadDim / 2];
      ptx::wgmma_fence_operands(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlock / 16; ++step) {
        ptx::WgmmaRS<T, Traits::kHeadDim>::template run<ptx::Major::kMN>(out, p[step], desc_v + step * 16 * 128 / 16, step > 0);
      }
      ptx::wgmma_commit();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(out);
      if (i + Traits::kConsumers >= num_stages && lane == 0) ptx::mbarrier_arrive(v_empty);

      const auto partial_row = [&](std::uint32_t e) {
        return (((e >> kSlotBits) * params.num_groups + item.group) * params.top_k + (e & ((1u << kSlotBits) - 1)))
               << params.log_group;
      };
      float inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        inverse[r] = row_sum[r] == 0.f ? 0.f : __fdividef(1.f, row_sum[r]);
      }
      // Back through this warp's own rows of the Q tile: 16 x 64 columns a half, 128-byte swizzled like the tensor map.
      unsigned char* tile = smem_q + s * Traits::kStageBytes + warp * 16 * 128;
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 16; ++j) {
        const std::uint32_t a0 = pack2<T>(out[8 * j] * inverse[0], out[8 * j + 1] * inverse[0]);
        const std::uint32_t a1 = pack2<T>(out[8 * j + 2] * inverse[1], out[8 * j + 3] * inverse[1]);
        const std::uint32_t a2 = pack2<T>(out[8 * j + 4] * inverse[0], out[8 * j + 5] * inverse[0]);
        const std::uint32_t a3 = pack2<T>(out[8 * j + 6] * inverse[1], out[8 * j + 7] * inverse[1]);
        // Matrices: rows 0-7 and 8-15 of columns 16j .. 16j+7, then of 16j+8 .. 16j+15; lane gives the row address of one.
        const int matrix_row = lane % 16, chunk = (2 * j + lane / 16) % 8, half = j / 4;
        const std::uint32_t address =
            ptx::smem_address(tile + half * Traits::kBoxBytesQ + matrix_row * 128 + ((chunk ^ (matrix_row % 8)) * 16));
        ptx::stmatrix_x4(address, a0, a1, a2, a3);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      release();
      // One store a token; a warp holds 16/Gp.
#pragma unroll 1
      for (int t = 0; t < per_warp; ++t) {
        const std::uint32_t token =
            __shfl_sync(0xffffffffu, ptx::load_shared(entries_address + (s * Traits::kRows + warp * per_warp + t) * 4), 0);
        if (token != kNoToken && lane == 0) {
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_store_2d(&map_partial, tile + h * Traits::kBoxBytesQ + t * (128 << params.log_group), h * 64,
                              static_cast<std::int32_t>(partial_row(token)));
          }
        }
      }
      ptx::bulk_commit();
      stage_held = s;
      // After the fence, which would wait for these.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (quad == 0 && entry[r] != kNoToken) {
          const int head = (lane / 4 + 8 * r) & ((1 << params.log_group) - 1);
          // Scores that are all -inf give a partial of no weight, which is one all the same: its values may be NaN.
          params.partial_lse[partial_row(entry[r]) + head] =
              row_sum[r] == 0.f ? -FLT_MAX : (offset[r] + log2_approx(row_sum[r])) * 0.6931471805599453f;
        }
      }
    }
    // A warpgroup without a stage in this item still gives the buffers back.
    __syncwarp();
    if (first_stage >= num_stages && lane == 0) {
      ptx::mbarrier_wait(v_full, round & 1);
      ptx::mbarrier_arrive(k_empty);
      ptx::mbarrier_arrive(v_empty);
    }
    stage_count += num_stages;
  }
  ptx::bulk_wait<0>();  // shared memory must outlive the stores that read it
}

}  // namespace openmsa::cuda
