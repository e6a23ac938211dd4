// The student meets the teacher, for Hopper, keys outermost: the index branch's KL loss and its gradients. d_k_idx of a block stays in
// registers for the whole work item; d_q_idx goes, a visit at a time, to the visit's own slot.
//
// Roles       warps 0-2 producers of a stage each in turn, warp 3 takes items and loads their keys, then a consumer warpgroup for
//             every 64 keys of the block. A stage is 64 visits; all consumers work on the same one.
// Products    S^T = K_idx Q_idx^T (64 keys x 64 visits a warpgroup); D^T = P_idx - teacher is at once the A operand of
//             d_k_idx += D^T Q_idx, and goes through shared memory for d_q_idx = D K_idx, 64 visits x the dims of this warpgroup.
// Pipeline    K_idx of the item resident; q_idx (cp.async) and the teacher's rows (one bulk copy) in a ring of kStages; S^T of the next stage is under way while d_q_idx of this one is stored. D alternates between two tiles, so that
//             one barrier a stage is enough. After that barrier nobody reads the stage's teacher, whose place d_q_idx passes through
//             on its way to global memory.
// Shared      K_idx halves x kBlock x 128 B | stages (q_idx halves x 64 x 128 B, teacher 64 x kBlock fp32)
//             | D 2 x consumers x 64 x 128 B | rows: lse, limit, visit of each stage row | item, barriers
// Barriers    k_full 1 (TMA), k_empty 4 a consumer (a warp each); full[s] 2 (TMA, a producer warp), empty[s] 4 a
//             consumer
// Registers   producers 40, consumers 232: d_k_idx 64, S 32, D as operand 16, d_q_idx 32
// Bytes       4 * kBlock + 4 * Di a visit: bound by memory, 1.5 times the products' time
// Empty       an item of count 0 ends the walk; rows without a visit read zeros, see no key (hence D = 0, whatever their teacher holds)
//             and store nothing.
#pragma once

#include <cfloat>
#include <cstddef>

#include "cuda/index_rows.cuh"
#include "cuda/items.hpp"
#include "cuda/key_store.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/teacher_rows.cuh"

namespace openmsa::cuda {

struct StudentParams {
  BatchParams batch;
  const AttendItem* items;        // [num_items], those of one block consecutive
  const std::int32_t* num_items;  // [1]
  std::int32_t* next_item;        // [1], zero at launch
  const std::uint32_t* entries;   // as Visits has them; null: every block
  IndexQueries queries;           // q_idx
  const float* teacher;           // rows of Bk, as teacher_row() and teacher_column() have them
  const float* lse;               // [chunk tokens, Hkv]: the student's, in log2 units
  float* item_loss;               // [num_items, kBlock / 16]: sums of P * log2(P / P_idx), one a warp
  void* slots_out;                // [chunk tokens, Hkv, slots, Di] of T: d_q_idx of a visit, without its scale
  float* key_grad;                // [Hkv, S, Di]: sum of D q_idx, added to
  float* shared;                  // [num_shared, Bk, Di]: the same of items whose block has several in the chunk
  std::int32_t max_item;          // tokens
  std::int32_t chunk_begin;       // first packed token of the chunk
  std::int32_t chunk;             // query tokens of a chunk, at most
  std::int32_t num_groups;        // Hkv
  std::int32_t slots;             // of a (token, group)
  std::int32_t index_dim;         // Di, at most the instance's: what lies beyond reads as zeros and is not stored
  float scale_log2;               // index_scale * log2(e)
};

// The loss alone, or the gradients too.
template <typename T_, int kDim_, int kBlock_, bool kGradients_>
struct StudentTraits {
  using T = T_;
  static constexpr int kDim = kDim_, kBlock = kBlock_;
  static constexpr bool kGradients = kGradients_;
  static constexpr int kHalves = kDim / 64;
  static constexpr int kRows = 64, kConsumers = kBlock / 64;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56, kConsumerRegisters = kConsumers == 2 ? 232 : 240;
  static constexpr int kStages = 3;
  // 64 dims of d_q_idx at a time. Two warpgroups take a half of 128 dims each; of 64 dims they take whole stages in turn.
  static constexpr int kPassesQ = kConsumers == 1 ? kHalves : 1;
  static constexpr bool kInTurn = kConsumers == 2 && kHalves == 1;
  static constexpr int kBoxBytesKeys = kBlock * 128, kBoxBytesQ = kRows * 128;
  static constexpr int kKeyBytes = kHalves * kBoxBytesKeys;
  static constexpr int kTeacherPitch = kBlock * 4;  // bytes
  static constexpr int kStageBytes = kHalves * kBoxBytesQ + kRows * kTeacherPitch;
  static_assert(kStageBytes % 1024 == 0 && kRows * kTeacherPitch >= kHalves * kBoxBytesQ);
  static constexpr int kBytesD = kConsumers * kRows * 128;  // D of a stage
  static constexpr int kSmemBytes = kKeyBytes + kStages * kStageBytes + 2 * kBytesD + kStages * 3 * kRows * 4 + 256 + 1024;
};

// What the consumers are told of an item.
struct StudentItem {
  std::int32_t count;      // visits; 0: no more items
  std::int32_t index;      // among the items
  std::int32_t live_keys;  // of the block, before the sequence's end
  std::int32_t shared;     // slot of its partial, or -1: the block's only item
  std::int64_t key;        // row of its first key in key_grad
};

// What the consumers need of a stage beside the tiles.
struct StudentRows {
  float lse[64];
  std::int32_t limit[64];  // keys 0.. of the block that the visit sees
  std::int32_t visit[64];  // its slot, counted over all; -1: no visit
};

template <typename Traits>
__device__ inline void student_produce(const CUtensorMap& map_k, const StudentParams& params, unsigned char* smem_k,
                                       unsigned char* smem_stages, StudentRows* stage_rows, StudentItem* item_slot, ItemFeed* feed,
                                       std::uint64_t* full, std::uint64_t* empty, std::uint64_t* k_full, std::uint64_t* k_empty,
                                       int warp) {
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock;
  const int lane = threadIdx.x % 32;
  int stage_count = 0;
  for (int round = 0;; ++round) {
    AttendItem item;
    Sequence sequence;
    const int index = take_item(feed, params.batch, params.items, params.num_items, params.next_item, &item, &sequence);
    const int live_keys = min(sequence.seqlen_k - item.block * kBlock, kBlock);
    if (warp == kItemWarp) {
      if (lane == 0) {
        if (round > 0) ptx::mbarrier_wait(k_empty, (round - 1) & 1);
        if (item.count > 0) {
          const bool shared = item_shared(params.items, index, *params.num_items);
          const int key = sequence.key_begin + item.block * kBlock;
          *item_slot = {item.count, index, live_keys,
                        shared ? shared_slot(item.begin, params.max_item, !item_continues(params.items, index)) : -1,
                        std::int64_t{item.group} * params.batch.total_k + key};
          ptx::mbarrier_arrive_expect(k_full, Traits::kKeyBytes);
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_4d(smem_k + h * Traits::kBoxBytesKeys, &map_k, k_full, h * 64, key, 0, 0);
          }
        } else {
          item_slot->count = 0;
          ptx::mbarrier_arrive(k_full);
        }
      }
      __syncwarp();
    }
    if (item.count == 0) return;
    const int to_visible = params.chunk_begin - sequence.query_begin + sequence.first_position + 1 - item.block * kBlock;
    const int num_stages = (item.count + Traits::kRows - 1) / Traits::kRows;
    // Stages go round the warps across items, so that a stage's slot is always the same one's.
    const int first_stage = warp == kItemWarp ? num_stages : (warp + kStages - stage_count % kStages) % kStages;
    for (int n = first_stage; n < num_stages; n += kStages) {
      const int count = stage_count + n, first = n * Traits::kRows, num_visits = min(Traits::kRows, item.count - first);
      // Two visits a lane. Everything is fetched before the wait for the stage.
      int token[2], visit[2], limit[2];
      float lse[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = i * 32 + lane;
        token[i] = -1;
        visit[i] = -1;
        limit[i] = 0;
        lse[i] = 0.f;
        if (at >= num_visits) continue;
        const int2 taken = item_visit(params.entries, item, first + at);
        token[i] = taken.x;
        const int pair = token[i] * params.num_groups + item.group;
        visit[i] = pair * params.slots + taken.y;
        limit[i] = min(token[i] + to_visible, live_keys);
        lse[i] = params.lse[pair];
      }
      if (count >= kStages) ptx::mbarrier_wait(&empty[warp], (count / kStages - 1) & 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 32 + lane;
        stage_rows[warp].lse[row] = lse[i];
        stage_rows[warp].limit[row] = limit[i];
        stage_rows[warp].visit[row] = visit[i];
      }
      unsigned char* stage = smem_stages + warp * Traits::kStageBytes;
      if (lane == 0) {
        ptx::mbarrier_arrive_expect(&full[warp], num_visits * kBlock * 4);
        ptx::bulk_load(
            stage + kHalves * Traits::kBoxBytesQ,
            params.teacher + (std::int64_t{teacher_row(params.entries, item, params.slots, params.chunk)} + first) * kBlock,
            num_visits * kBlock * 4, &full[warp]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_index_rows<typename Traits::T, kHalves>(params.queries, item.group, token[i] < 0 ? -1 : params.chunk_begin + token[i],
                                                     stage + i * 32 * 128, Traits::kBoxBytesQ, lane);
      }
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&full[warp]);
    }
    stage_count += num_stages;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_student_kernel(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ StudentParams params) {
  using T = typename Traits::T;
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock, kDim = Traits::kDim;
  constexpr int kConsumers = Traits::kConsumers, kRows = Traits::kRows;
  unsigned char* smem_k = ptx::dynamic_smem();
  unsigned char* smem_stages = smem_k + Traits::kKeyBytes;
  unsigned char* smem_d = smem_stages + kStages * Traits::kStageBytes;
  auto* stage_rows = reinterpret_cast<StudentRows*>(smem_d + 2 * Traits::kBytesD);
  auto* full = reinterpret_cast<std::uint64_t*>(stage_rows + kStages);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* k_full = empty + kStages;
  std::uint64_t* k_empty = k_full + 1;
  auto* item_slot = reinterpret_cast<StudentItem*>(k_empty + 1);
  auto* feed = reinterpret_cast<ItemFeed*>(item_slot + 1);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 2);
      ptx::mbarrier_init(&empty[s], 4 * kConsumers);
    }
    ptx::mbarrier_init(k_full, 1);
    ptx::mbarrier_init(k_empty, 4 * kConsumers);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_index < 4) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    student_produce<Traits>(map_k, params, smem_k, smem_stages, stage_rows, item_slot, feed, full, empty, k_full, k_empty,
                            warp_index);
    return;
  }

  ptx::grow_registers<Traits::kConsumerRegisters>();
  const int consumer = warp_index / 4 - 1, warp = warp_index % 4, quad = lane % 4;
  const int key = consumer * 64 + warp * 16 + lane / 4;  // this thread's upper row of S^T
  const std::uint32_t address_k = ptx::warp_uniform(ptx::smem_address(smem_k));
  const std::uint64_t desc_k = ptx::smem_descriptor(ptx::warp_uniform(address_k + consumer * 64 * 128), 16, 1024);
  const std::uint64_t desc_q = ptx::smem_descriptor(address_k + Traits::kKeyBytes, 16, 1024);
  // The same tiles with rows as the depth of the product.
  const std::uint64_t desc_q_rows = ptx::smem_descriptor(address_k + Traits::kKeyBytes, Traits::kBoxBytesQ, 1024);
  const std::uint64_t desc_k_rows = ptx::smem_descriptor(address_k, Traits::kBoxBytesKeys, 1024);
  constexpr std::uint32_t kToD = kStages * Traits::kStageBytes / 16;  // from the first stage, descriptor units
  const std::uint32_t rows_address = ptx::smem_address(stage_rows) + quad * 8;
  // Of this thread's upper key; teacher_column() of the lower one, 8 on, is 8 on or 8 back.
  const std::uint32_t teacher_address = address_k + Traits::kKeyBytes + kHalves * Traits::kBoxBytesQ +
                                        quad * 2 * Traits::kTeacherPitch + teacher_column(2 * quad, key) * 4;
  const int teacher_lower = quad % 2 == 0 ? 32 : -32;
  // D is stored transposed, [visit][64 keys of this warpgroup]; matrices: keys 0-7 and 8-15 of this warp's 16 at visits 0-7, then at
  // 8-15.
  const std::uint32_t d_address = ptx::smem_address(smem_d) + consumer * kRows * 128 + (lane / 16 * 8 + lane % 8) * 128 +
                                  ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  // d_q_idx goes to this warp's own 16 rows; matrices: rows 0-7 and 8-15 of columns 16j .. 16j+7, then of 16j+8 .. 16j+15.
  const std::uint32_t staging_address =
      address_k + Traits::kKeyBytes + kHalves * Traits::kBoxBytesQ + (warp * 16 + lane % 16) * 128;
  const std::uint32_t staging_chunk = (lane / 16 ^ lane % 8) * 16;

  int stage_count = 0;
  for (int round = 0;; ++round) {
    ptx::mbarrier_wait(k_full, round & 1);
    const int num_stages = (item_slot->count + kRows - 1) / kRows;
    if (num_stages == 0) break;
    const int live_keys = item_slot->live_keys;
    if (Traits::kGradients && live_keys < kBlock) {
      // Rows past the sequence's end belong to others and may hold NaN, and 0 x NaN would reach d_q_idx.
      const int chunks = (kBlock - live_keys) * kHalves * 8;
      for (int c = ptx::not_hoisted(threadIdx.x) - 128; c < chunks; c += 128 * kConsumers) {
        const int row = live_keys + c / (kHalves * 8), h = c / 8 % kHalves;
        *reinterpret_cast<uint4*>(smem_k + h * Traits::kBoxBytesKeys + row * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
      }
      ptx::fence_async_proxy();
      ptx::named_barrier(1, 128 * kConsumers);
    }
    float d_k[kDim / 2], scores[kRows / 2], loss = 0.f;
    const auto issue_scores = [&](int count) {
      const int s = __shfl_sync(0xffffffffu, count % kStages, 0);
      const std::uint32_t stage_offset = s * Traits::kStageBytes / 16;
      ptx::mbarrier_wait(&full[s], (count / kStages) & 1);
      ptx::wgmma_fence_operands(scores);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const std::uint32_t column = (step % 4) * 32;
        ptx::WgmmaSS<T, kRows>::template run<ptx::Major::kK>(
            scores, desc_k + ((step / 4) * Traits::kBoxBytesKeys + column) / 16,
            desc_q + stage_offset + ((step / 4) * Traits::kBoxBytesQ + column) / 16, step > 0);
      }
      ptx::wgmma_commit();
    };
    if constexpr (Traits::kGradients) issue_scores(stage_count);
    for (int i = 0; i < num_stages; ++i, ++stage_count) {
      const int s = __shfl_sync(0xffffffffu, stage_count % kStages, 0);
      const std::uint32_t stage_offset = s * Traits::kStageBytes / 16;
      if constexpr (!Traits::kGradients) issue_scores(stage_count);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);

      const std::uint32_t rows = rows_address + s * static_cast<std::uint32_t>(sizeof(StudentRows));
      const std::uint32_t teacher = teacher_address + s * Traits::kStageBytes;
      std::uint32_t d[kRows / 16][4];
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const float2 lse = ptx::load_shared_float2(rows + offsetof(StudentRows, lse) + 32 * j);
        const int2 limit = ptx::load_shared_int2(rows + offsetof(StudentRows, limit) + 32 * j);
        float p[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          p[c] = __uint_as_float(ptx::load_shared(teacher + (c < 2 ? 0 : teacher_lower) + (8 * j + c % 2) * Traits::kTeacherPitch));
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const bool sees = key + 8 * (c / 2) < (c % 2 == 0 ? limit.x : limit.y);
          const float student = fmaf(scores[4 * j + c], params.scale_log2, c % 2 == 0 ? -lse.x : -lse.y);  // log2 of P_idx
          // log2_approx takes what is smaller for 0, and then 0 ln 0 = 0 holds. A NaN goes through.
          if (sees && !(p[c] < FLT_MIN)) loss = fmaf(p[c], log2_approx(p[c]) - student, loss);
          p[c] = sees ? exp2_approx(student) - p[c] : 0.f;
        }
        d[j / 2][j % 2 * 2] = pack2<T>(p[0], p[1]);
        d[j / 2][j % 2 * 2 + 1] = pack2<T>(p[2], p[3]);
      }
      if constexpr (Traits::kGradients) {
        const int parity = stage_count & 1;
        const bool last = i + 1 == num_stages;
#pragma unroll
        for (int step = 0; step < kRows / 16; ++step) {
          ptx::stmatrix_x4_trans(d_address + parity * Traits::kBytesD + step * 16 * 128, d[step][0], d[step][1], d[step][2],
                                 d[step][3]);
        }
        ptx::fence_async_proxy();
        ptx::named_barrier(1, 128 * kConsumers);

#pragma unroll
        for (int pass = 0; pass < Traits::kPassesQ; ++pass) {
          // Which 64 dims, or whether this stage's d_q_idx is this warpgroup's at all.
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
                  desc_q + kToD +
                      static_cast<std::uint32_t>(parity * Traits::kBytesD + (step / 4) * kRows * 128 + (step % 4) * 32) / 16,
                  desc_k_rows + static_cast<std::uint32_t>(half * Traits::kBoxBytesKeys + step * 16 * 128) / 16, step > 0);
            }
            ptx::wgmma_commit();
          }
          if (pass == 0) {
            ptx::wgmma_fence_operands(d_k);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < kRows / 16; ++step) {
              ptx::WgmmaRS<T, kDim>::template run<ptx::Major::kMN>(d_k, d[step], desc_q_rows + stage_offset + step * 16 * 128 / 16,
                                                                   i > 0 || step > 0);
            }
            ptx::wgmma_commit();
            // After the last stage its own scores once more, for nobody: products under a condition would be serialised.
            issue_scores(stage_count + (last ? 0 : 1));
            ptx::wgmma_wait<2>();
          } else {
            ptx::wgmma_wait<0>();
          }
          if (!mine) continue;
          ptx::wgmma_fence_operands(d_q);
          const std::uint32_t staging = s * Traits::kStageBytes + half * Traits::kBoxBytesQ;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            ptx::stmatrix_x4(staging_address + staging + (staging_chunk ^ (j * 32)), pack2<T>(d_q[8 * j], d_q[8 * j + 1]),
                             pack2<T>(d_q[8 * j + 2], d_q[8 * j + 3]), pack2<T>(d_q[8 * j + 4], d_q[8 * j + 5]),
                             pack2<T>(d_q[8 * j + 6], d_q[8 * j + 7]));
          }
          __syncwarp();
          // Eight lanes a row of 128 bytes.
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int row = warp * 16 + n * 4 + lane / 8, chunk = lane % 8;
            const int visit = stage_rows[s].visit[row];
            if (visit < 0 || half * 64 + chunk * 8 >= params.index_dim) continue;
            const uint4 value = *reinterpret_cast<const uint4*>(smem_stages + kHalves * Traits::kBoxBytesQ + staging + row * 128 +
                                                                (chunk ^ row % 8) * 16);
            *reinterpret_cast<uint4*>(static_cast<T*>(params.slots_out) + std::int64_t{visit} * params.index_dim + half * 64 +
                                      chunk * 8) = value;
          }
        }
        ptx::wgmma_wait<1>();
        ptx::wgmma_fence_operands(d_k);
        if (last) ptx::wgmma_wait<0>();
        ptx::fence_async_proxy();  // the copy engine writes next where d_q_idx went through
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&empty[s]);
    }
    if constexpr (Traits::kGradients) {
      ptx::wgmma_wait<0>();  // ptxas has not seen it under `last`
      ptx::wgmma_fence_operands(scores);
    }
    const StudentItem item = *item_slot;
    __syncwarp();  // read by all lanes before the slot is free
    if (lane == 0) ptx::mbarrier_arrive(k_empty);

#pragma unroll
    for (int o = 16; o > 0; o /= 2) loss += __shfl_xor_sync(0xffffffffu, loss, o);
    if (lane == 0) params.item_loss[item.index * 4 * kConsumers + consumer * 4 + warp] = loss;
    if constexpr (Traits::kGradients) {
      const int keys = min(max(item.live_keys - consumer * 64, 0), 64);
      const int thread = ptx::not_hoisted(warp * 32 + lane);
      if (item.shared >= 0) {
        store_key_rows<kDim, false>(d_k, params.shared + (std::int64_t{item.shared} * kBlock + consumer * 64) * params.index_dim,
                                    keys, params.index_dim, thread);
      } else {
        store_key_rows<kDim, true>(d_k, params.key_grad + (item.key + consumer * 64) * params.index_dim, keys, params.index_dim,
                                   thread);
      }
    }
  }
}

}  // namespace openmsa::cuda
