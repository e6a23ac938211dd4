// Backward of sparse and dense attention for Hopper, keys outermost: each block of keys meets the query tokens that visit it. dK and
// dV of the block stay in registers for the whole work item; dQ goes, a visit at a time, to the visit's own slot.
//
// Roles       warps 0-2 producers of a stage each in turn (lists, rows, TMA), warp 3 takes items and loads their keys and values,
//             then a consumer warpgroup for every 64 keys of the block. A stage is 64 rows = 64/Gp tokens x Gp heads (Gp: G rounded up to a power of two); all consumers work on the same one.
// Products    S^T = K Q^T and dP^T = V dO^T (64 keys x 64 rows a warpgroup), P^T and dS^T in registers are at once the A operands of
//             dV += P^T dO and dK += dS^T Q; dS goes through shared memory for dQ = dS K, 64 rows x the dims of this warpgroup.
// Pipeline    K and V of the item resident; Q and dO in a ring of kStages; dP is under way behind the softmax, dV behind dS, dK while
//             dQ is stored. dS alternates between two tiles, so that one barrier a stage is enough.
// Shared      K, V 2 x kBlock x 128 B each | stages (Q, dO: 2 x 64 x 128 B each) | dS 2 x consumers x 64 x 128 B |
//             dQ staging, per consumer | rows: lse, delta, limit, slot of each stage row | item, barriers
// Barriers    kv_full 1 (TMA), kv_empty 4 a consumer (a warp each); full[s] 1 (TMA), empty[s] 4 a consumer
// Registers   producer 40, consumers 232: dK 64, dV 64, S 32, dP or dQ 32, P and dS as operands 32
// Empty       an item of count 0 ends the walk; rows without a token read zeros and have lse = +inf, hence P = 0.
#pragma once

#include <cstddef>

#include "cuda/items.hpp"
#include "cuda/key_store.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {

struct BackwardParams {
  BatchParams batch;
  const AttendItem* items;        // [num_items], those of one block consecutive
  const std::int32_t* num_items;  // [1]
  std::int32_t* next_item;        // [1], zero at launch
  const std::uint32_t* entries;   // as Visits has them; null: every block
  const float* rows;              // [chunk_tokens, Hkv, 2, Gp]: lse in log2 units (+inf: no such row), then <d_out, out>
  float* key_grad[2];             // [Hkv, S, D]: sum dS q, sum P d_out, added to
  float* shared;                  // [num_shared, 2, Bk, D]: the same of items whose block has several in the chunk
  std::int32_t max_item;          // tokens
  std::int32_t chunk_begin;       // first packed token of the chunk
  std::int32_t num_groups;        // Hkv
  std::int32_t slots;             // of a (token, group)
  std::int32_t group_size, log_group;
  std::int32_t head_dim;  // D, at most the instance's: what lies beyond reads as zeros and is not stored
  float scale_log2;       // softmax_scale * log2(e)
};

template <typename T_, int kHeadDim_, int kBlock_>
struct BackwardTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr int kHalves = kHeadDim / 64;
  static constexpr int kRows = 64, kConsumers = kBlock / 64;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Together no more than the CTA starts with: 168 a thread of 384.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56, kConsumerRegisters = kConsumers == 2 ? 232 : 240;
  static constexpr int kStages = 3;
  // 64 dims of dQ at a time. Two warpgroups take a half of 128 dims each; of 64 dims they take whole stages in turn.
  static constexpr int kPassesQ = kConsumers == 1 ? kHalves : 1;
  static constexpr bool kInTurn = kConsumers == 2 && kHalves == 1;
  static constexpr int kBoxBytesKv = kBlock * 128, kBoxBytesQ = kRows * 128;
  static constexpr int kStageBytes = 2 * kHalves * kBoxBytesQ;
  static constexpr int kBytesScores = kConsumers * kRows * 128;  // dS of a stage
  static constexpr int kStagingBytes = kPassesQ * kBoxBytesQ;
  static constexpr int kTileBytes =
      2 * kHalves * kBoxBytesKv + kStages * kStageBytes + 2 * kBytesScores + kConsumers * kStagingBytes;
  static constexpr int kSmemBytes = kTileBytes + kStages * (4 * kRows * 4 + 4) + 256 + 1024;
};

// What the consumers are told of an item. They read it again where they need it: registers are dear.
struct BackwardItem {
  std::int32_t count;      // tokens; 0: no more items
  std::int32_t live_keys;  // of the block, before the sequence's end
  std::int32_t shared;     // slot of its partial, or -1: the block's only item
  std::int64_t key;        // row of its first key in key_grad
};

// What the consumers need of a stage beside the tiles.
struct BackwardRows {
  float lse[64], delta[64];
  std::int32_t limit[64];  // keys 0.. of the block that the row sees
  std::int32_t slot[64];   // first row of the visit in the slots, or -1
};

template <typename Traits>
__device__ inline void backward_produce(const CUtensorMap& map_q, const CUtensorMap& map_d_out, const CUtensorMap& map_k,
                                        const CUtensorMap& map_v, const BackwardParams& params, unsigned char* smem_k,
                                        unsigned char* smem_stages, BackwardRows* stage_rows, std::int32_t* stage_masked,
                                        BackwardItem* item_slot, ItemFeed* feed, std::uint64_t* full, std::uint64_t* empty,
                                        std::uint64_t* kv_full, std::uint64_t* kv_empty, int warp) {
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock;
  const int lane = threadIdx.x % 32;
  const int tokens = Traits::kRows >> params.log_group, token_bytes = 128 << params.log_group;  // per stage; per half tile
  int stage_count = 0;
  for (int round = 0;; ++round) {
    AttendItem item;
    Sequence sequence;
    const int index = take_item(feed, params.batch, params.items, params.num_items, params.next_item, &item, &sequence);
    const int live_keys = min(sequence.seqlen_k - item.block * kBlock, kBlock);
    if (warp == kItemWarp) {
      if (lane == 0) {
        if (round > 0) ptx::mbarrier_wait(kv_empty, (round - 1) & 1);
        if (item.count > 0) {
          const bool shared = item_shared(params.items, index, *params.num_items);
          *item_slot = {item.count, live_keys,
                        shared ? shared_slot(item.begin, params.max_item, !item_continues(params.items, index)) : -1,
                        std::int64_t{item.group} * params.batch.total_k + sequence.key_begin + item.block * kBlock};
          const int token = sequence.key_begin + item.block * kBlock;
          ptx::mbarrier_arrive_expect(kv_full, 2 * kHalves * Traits::kBoxBytesKv);
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_4d(smem_k + h * Traits::kBoxBytesKv, &map_k, kv_full, h * 64, token, item.group, 0);
            ptx::tma_load_4d(smem_k + (kHalves + h) * Traits::kBoxBytesKv, &map_v, kv_full, h * 64, token, item.group, 0);
          }
        } else {
          item_slot->count = 0;
          ptx::mbarrier_arrive(kv_full);
        }
      }
      __syncwarp();
    }
    if (item.count == 0) return;

    const int to_visible = params.chunk_begin - sequence.query_begin + sequence.first_position + 1 - item.block * kBlock;
    const int num_stages = (item.count + tokens - 1) / tokens;
    // Stages go round the warps across items, so that a stage's slot is always the same one's.
    const int first_stage = warp == kItemWarp ? num_stages : (warp + kStages - stage_count % kStages) % kStages;
    for (int n = first_stage; n < num_stages; n += kStages) {
      const int count = stage_count + n;
      // Two rows a lane. Everything is fetched before the wait for the stage.
      int token[2], slot[2], limit[2];
      float lse[2], delta[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 32 + lane, at = n * tokens + (row >> params.log_group), head = row & ((1 << params.log_group) - 1);
        token[i] = -1;
        slot[i] = -1;
        limit[i] = kBlock;
        lse[i] = INFINITY;
        delta[i] = 0.f;
        if (at >= item.count) continue;
        const int2 visit = item_visit(params.entries, item, at);
        token[i] = visit.x;
        const std::int64_t pair = std::int64_t{token[i]} * params.num_groups + item.group;
        slot[i] = static_cast<int>((pair * params.slots + visit.y) << params.log_group);
        limit[i] = min(token[i] + to_visible, live_keys);
        const float* values = params.rows + ((pair * 2) << params.log_group) + head;
        lse[i] = values[0];
        delta[i] = values[1 << params.log_group];
      }
      const bool masked = __any_sync(0xffffffffu, min(limit[0], limit[1]) < kBlock);
      if (count >= kStages) ptx::mbarrier_wait(&empty[warp], (count / kStages - 1) & 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 32 + lane;
        stage_rows[warp].lse[row] = lse[i];
        stage_rows[warp].delta[row] = delta[i];
        stage_rows[warp].limit[row] = limit[i];
        stage_rows[warp].slot[row] = slot[i];
      }
      if (lane == 0) stage_masked[warp] = masked;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive_expect(&full[warp], Traits::kStageBytes);
      __syncwarp();
      unsigned char* stage = smem_stages + warp * Traits::kStageBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 32 + lane;
        if ((row & ((1 << params.log_group) - 1)) != 0) continue;
        // A token beyond the last one reads as zeros.
        const int packed = token[i] < 0 ? params.batch.total_q : params.chunk_begin + token[i];
        unsigned char* rows = stage + (row >> params.log_group) * token_bytes;
        for (int h = 0; h < kHalves; ++h) {
          ptx::tma_load_3d(rows + h * Traits::kBoxBytesQ, &map_q, &full[warp], h * 64, item.group * params.group_size, packed);
          ptx::tma_load_3d(rows + (kHalves + h) * Traits::kBoxBytesQ, &map_d_out, &full[warp], h * 64,
                           item.group * params.group_size, packed);
        }
      }
    }
    stage_count += num_stages;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_backward_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_d_out,
                         const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                         const __grid_constant__ CUtensorMap map_slots, const __grid_constant__ BackwardParams params) {
  using T = typename Traits::T;
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  constexpr int kConsumers = Traits::kConsumers, kRows = Traits::kRows;
  unsigned char* smem_k = ptx::dynamic_smem();
  unsigned char* smem_v = smem_k + kHalves * Traits::kBoxBytesKv;
  unsigned char* smem_stages = smem_v + kHalves * Traits::kBoxBytesKv;
  unsigned char* smem_scores = smem_stages + kStages * Traits::kStageBytes;
  unsigned char* smem_staging = smem_scores + 2 * Traits::kBytesScores;
  auto* stage_rows = reinterpret_cast<BackwardRows*>(smem_staging + kConsumers * Traits::kStagingBytes);
  auto* full = reinterpret_cast<std::uint64_t*>(stage_rows + kStages);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* kv_full = empty + kStages;
  std::uint64_t* kv_empty = kv_full + 1;
  auto* item_slot = reinterpret_cast<BackwardItem*>(kv_empty + 1);
  auto* feed = reinterpret_cast<ItemFeed*>(item_slot + 1);
  auto* stage_masked = reinterpret_cast<std::int32_t*>(feed + 1);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 4 * kConsumers);
    }
    ptx::mbarrier_init(kv_full, 1);
    ptx::mbarrier_init(kv_empty, 4 * kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_index < 4) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    backward_produce<Traits>(map_q, map_d_out, map_k, map_v, params, smem_k, smem_stages, stage_rows, stage_masked, item_slot, feed,
                             full, empty, kv_full, kv_empty, warp_index);
    return;
  }

  ptx::grow_registers<Traits::kConsumerRegisters>();
  const int consumer = warp_index / 4 - 1, warp = warp_index % 4, quad = lane % 4;
  const std::uint32_t address_k = ptx::warp_uniform(ptx::smem_address(smem_k));
  const std::uint64_t desc_k = ptx::smem_descriptor(ptx::warp_uniform(address_k + consumer * 64 * 128), 16, 1024);
  const std::uint64_t desc_q = ptx::smem_descriptor(address_k + 2 * kHalves * Traits::kBoxBytesKv, 16, 1024);
  // The same tiles with rows as the depth of the product.
  const std::uint64_t desc_q_rows = ptx::smem_descriptor(address_k + 2 * kHalves * Traits::kBoxBytesKv, Traits::kBoxBytesQ, 1024);
  const std::uint64_t desc_k_rows = ptx::smem_descriptor(address_k, Traits::kBoxBytesKv, 1024);
  constexpr std::uint32_t kToV = kHalves * Traits::kBoxBytesKv / 16;       // from K to V, descriptor units
  constexpr std::uint32_t kToScores = kStages * Traits::kStageBytes / 16;  // from the first stage to dS
  constexpr std::uint32_t kToDOut = kHalves * Traits::kBoxBytesQ / 16;     // from Q to dO of a stage, descriptor units
  const std::uint32_t rows_address = ptx::smem_address(stage_rows) + quad * 8;
  // dS is stored transposed, [row][64 keys of this warpgroup]; matrices: keys 0-7 and 8-15 of this warp's 16 at rows 0-7, then at 8-15.
  const std::uint32_t scores_address = ptx::smem_address(smem_scores) + consumer * kRows * 128 + (lane / 16 * 8 + lane % 8) * 128 +
                                       ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  // dQ goes to this warp's own 16 rows; matrices: rows 0-7 and 8-15 of columns 16j .. 16j+7, then of 16j+8 .. 16j+15.
  const std::uint32_t staging_address =
      ptx::smem_address(smem_staging) + consumer * Traits::kStagingBytes + (warp * 16 + lane % 16) * 128;
  const std::uint32_t staging_chunk = (lane / 16 ^ lane % 8) * 16;

  const int tokens = kRows >> params.log_group;
  int stage_count = 0;
  for (int round = 0;; ++round) {
    ptx::mbarrier_wait(kv_full, round & 1);
    const int num_stages = (item_slot->count + tokens - 1) / tokens;
    if (num_stages == 0) break;
    const int live_keys = item_slot->live_keys;
    if (live_keys < kBlock) {
      // Rows past the sequence's end belong to others and may hold NaN, and 0 x NaN would reach dQ.
      const int chunks = (kBlock - live_keys) * 2 * kHalves * 8;
      for (int c = ptx::not_hoisted(threadIdx.x) - 128; c < chunks; c += 128 * kConsumers) {
        const int row = live_keys + c / (2 * kHalves * 8), h = c / 8 % (2 * kHalves);
        *reinterpret_cast<uint4*>(smem_k + h * Traits::kBoxBytesKv + row * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
      }
      ptx::fence_async_proxy();
      ptx::named_barrier(1, 128 * kConsumers);
    }
    float d_k[kHeadDim / 2], d_v[kHeadDim / 2];
    for (int i = 0; i < num_stages; ++i, ++stage_count) {
      const int s = __shfl_sync(0xffffffffu, stage_count % kStages, 0);
      const std::uint32_t stage_offset = s * Traits::kStageBytes / 16;
      ptx::mbarrier_wait(&full[s], (stage_count / kStages) & 1);
      float scores[kRows / 2], d_p[kRows / 2];
      ptx::wgmma_fence_operands(scores);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const std::uint32_t column = (step % 4) * 32;
        ptx::WgmmaSS<T, kRows>::template run<ptx::Major::kK>(
            scores, desc_k + ((step / 4) * Traits::kBoxBytesKv + column) / 16,
            desc_q + stage_offset + ((step / 4) * Traits::kBoxBytesQ + column) / 16, step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_fence_operands(d_p);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const std::uint32_t column = (step % 4) * 32;
        ptx::WgmmaSS<T, kRows>::template run<ptx::Major::kK>(
            d_p, desc_k + kToV + ((step / 4) * Traits::kBoxBytesKv + column) / 16,
            desc_q + stage_offset + kToDOut + ((step / 4) * Traits::kBoxBytesQ + column) / 16, step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operands(scores);

      const std::uint32_t rows = rows_address + s * static_cast<std::uint32_t>(sizeof(BackwardRows));
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const float2 lse = ptx::load_shared_float2(rows + offsetof(BackwardRows, lse) + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          scores[4 * j + c] = exp2_approx(fmaf(scores[4 * j + c], params.scale_log2, c % 2 == 0 ? -lse.x : -lse.y));
        }
      }
      if (stage_masked[s]) {
        const int key = ptx::not_hoisted(consumer * 64 + warp * 16 + lane / 4);
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          const int2 limit = ptx::load_shared_int2(rows + offsetof(BackwardRows, limit) + 32 * j);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (key + 8 * (c / 2) >= (c % 2 == 0 ? limit.x : limit.y)) scores[4 * j + c] = 0.f;
          }
        }
      }
      std::uint32_t operand[kRows / 16][4];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        operand[j / 2][j % 2 * 2] = pack2<T>(scores[4 * j], scores[4 * j + 1]);
        operand[j / 2][j % 2 * 2 + 1] = pack2<T>(scores[4 * j + 2], scores[4 * j + 3]);
      }
      ptx::wgmma_fence_operands(d_v);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step) {
        ptx::WgmmaRS<T, kHeadDim>::template run<ptx::Major::kMN>(
            d_v, operand[step], desc_q_rows + stage_offset + kToDOut + step * 16 * 128 / 16, i > 0 || step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operands(d_p);

      std::uint32_t d_s[kRows / 16][4];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const float2 delta = ptx::load_shared_float2(rows + offsetof(BackwardRows, delta) + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[4 * j + c] *= d_p[4 * j + c] - (c % 2 == 0 ? delta.x : delta.y);
        d_s[j / 2][j % 2 * 2] = pack2<T>(scores[4 * j], scores[4 * j + 1]);
        d_s[j / 2][j % 2 * 2 + 1] = pack2<T>(scores[4 * j + 2], scores[4 * j + 3]);
      }
      const int parity = stage_count & 1;
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step) {
        ptx::stmatrix_x4_trans(scores_address + parity * Traits::kBytesScores + step * 16 * 128, d_s[step][0], d_s[step][1],
                               d_s[step][2], d_s[step][3]);
      }
      ptx::fence_async_proxy();
      ptx::named_barrier(1, 128 * kConsumers);

#pragma unroll
      for (int pass = 0; pass < Traits::kPassesQ; ++pass) {
        // Which 64 dims, or whether this stage's dQ is this warpgroup's at all.
        const int half = kConsumers == 1 ? pass : Traits::kInTurn ? 0 : consumer;
        const bool mine = !Traits::kInTurn || parity == consumer;
        float d_q[32];
        if (mine) {
          ptx::wgmma_fence_operands(d_q);
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < kBlock / 16; ++step) {
            ptx::WgmmaSS<T, 64>::template run<ptx::Major::kMN>(
                d_q,
                desc_q + kToScores +
                    static_cast<std::uint32_t>(parity * Traits::kBytesScores + (step / 4) * kRows * 128 + (step % 4) * 32) / 16,
                desc_k_rows + static_cast<std::uint32_t>(half * Traits::kBoxBytesKv + step * 16 * 128) / 16, step > 0);
          }
          ptx::wgmma_commit();
        }
        if (pass == 0) {
          ptx::wgmma_fence_operands(d_k);
          ptx::wgmma_fence();
#pragma unroll
          for (int step = 0; step < kRows / 16; ++step) {
            ptx::WgmmaRS<T, kHeadDim>::template run<ptx::Major::kMN>(
                d_k, d_s[step], desc_q_rows + stage_offset + step * 16 * 128 / 16, i > 0 || step > 0);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
        } else {
          ptx::wgmma_wait<0>();
        }
        if (!mine) continue;
        ptx::wgmma_fence_operands(d_q);
        if (lane == 0) ptx::bulk_wait_read<Traits::kPassesQ - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::stmatrix_x4(staging_address + pass * Traits::kBoxBytesQ + (staging_chunk ^ (j * 32)),
                           pack2<T>(d_q[8 * j], d_q[8 * j + 1]), pack2<T>(d_q[8 * j + 2], d_q[8 * j + 3]),
                           pack2<T>(d_q[8 * j + 4], d_q[8 * j + 5]), pack2<T>(d_q[8 * j + 6], d_q[8 * j + 7]));
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          // One store a token; a warp holds 16/Gp.
#pragma unroll 1
          for (int t = 0; t < 16 >> params.log_group; ++t) {
            const int slot = stage_rows[s].slot[warp * 16 + (t << params.log_group)];
            if (slot < 0) continue;
            ptx::tma_store_2d(&map_slots,
                              smem_staging + consumer * Traits::kStagingBytes + pass * Traits::kBoxBytesQ + warp * 16 * 128 +
                                  t * (128 << params.log_group),
                              half * 64, slot);
          }
          ptx::bulk_commit();
        }
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(d_k);
      ptx::wgmma_fence_operands(d_v);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&empty[s]);
    }
    const BackwardItem item = *item_slot;
    __syncwarp();  // read by all lanes before the slot is free
    if (lane == 0) ptx::mbarrier_arrive(kv_empty);

    const int keys = min(max(item.live_keys - consumer * 64, 0), 64);
    const int thread = ptx::not_hoisted(warp * 32 + lane);
    if (item.shared >= 0) {
      float* partial = params.shared + (std::int64_t{item.shared} * 2 * kBlock + consumer * 64) * params.head_dim;
      store_key_rows<kHeadDim, false>(d_k, partial, keys, params.head_dim, thread);
      store_key_rows<kHeadDim, false>(d_v, partial + kBlock * params.head_dim, keys, params.head_dim, thread);
    } else {
      const std::int64_t key = (item.key + consumer * 64) * params.head_dim;
      store_key_rows<kHeadDim, true>(d_k, params.key_grad[0] + key, keys, params.head_dim, thread);
      store_key_rows<kHeadDim, true>(d_v, params.key_grad[1] + key, keys, params.head_dim, thread);
    }
  }
  ptx::bulk_wait<0>();  // shared memory must outlive the stores that read it
}

}  // namespace openmsa::cuda
