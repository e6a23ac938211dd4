// Scores of every visit for Hopper, keys outermost, for the index branch's KL loss. Of the main branch: the teacher, the mean of the
// group's heads' probabilities, a row of Bk fp32 a visit. Of the index branch: the student's log-sum-exp of the block, a value a visit.
//
// Roles       warps 0-2 producers of a stage each in turn (lists, TMA; the index branch's rows, too small for TMA, by cp.async),
//             warp 3 takes items and loads their keys, warps 4-15 three consumer warpgroups; a stage of 64/Gp tokens x Gp heads = 64
//             rows goes to one warpgroup (Gp: G rounded up to a power of two; the index branch: one row a token).
// Pipeline    K of this item's block and of the next one's; Q in a ring of kStages tiles, free again once its product is done. Heads are
//             averaged inside a warp, which owns 16 rows: lanes exchange halves of what they hold until each has its own columns.
// Shared      K 2 x halves x kBlock x 128 B | Q kStages x halves x 64 x 128 B | tokens and visits of each stage, items, barriers
// Barriers    k_full[2] 1 (TMA), k_empty[2] 12 (a warp each); full[s] 1 (TMA), empty[s] 4 (a warp each)
// Registers   producers 32, consumers 160 (student: 40, 152): S 64, which becomes P and then sums. exp2 takes as long as the product:
//             three warpgroups keep both busy
// Empty       an item of count 0 ends the walk; rows of absent tokens compute on stale Q and store nothing; heads beyond G and rows
//             without keys have lse = +inf and see no key, so that their NaN stays out of the mean.
#pragma once

#include "cuda/index_rows.cuh"
#include "cuda/items.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/teacher_rows.cuh"

namespace openmsa::cuda {

struct TeacherParams {
  BatchParams batch;
  const AttendItem* items;        // [num_items]
  const std::int32_t* num_items;  // [1]
  std::int32_t* next_item;        // [1], zero at launch
  const std::uint32_t* entries;   // as Visits has them; null: every block
  const float* rows;              // [chunk tokens, Hkv, 2, Gp]: lse in log2 units first. Teacher
  IndexQueries queries;           // student
  float* out;                     // teacher: rows of Bk as teacher_row() and teacher_column() have them; student: [chunk tokens,
                                  // Hkv, slots], log-sum-exp in log2 units
  std::int32_t chunk;             // query tokens of a chunk, at most
  std::int32_t chunk_begin;       // first packed token of the chunk
  std::int32_t num_groups;        // Hkv
  std::int32_t slots;             // of a (token, group)
  std::int32_t group_size, log_group;  // rows of a (token, group), and log2 of those in a stage
  float scale_log2;                    // scale of the scores * log2(e)
  float mean;                          // 1 / G. Teacher
};

// Of the index branch where kStudent.
template <typename T_, int kDim_, int kBlock_, bool kStudent_>
struct TeacherTraits {
  using T = T_;
  static constexpr int kDim = kDim_, kBlock = kBlock_;
  static constexpr bool kStudent = kStudent_;
  static constexpr int kHalves = kDim / 64;
  static constexpr int kRows = 64;  // per stage
  // A multiple of the warpgroups: a stage is always the same one's, which waits for every one of its phases. Another could come a lap
  // early, find the parity of the phase before, and take it for its own.
  static constexpr int kConsumers = 3, kStages = 3 * kConsumers;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kStudent ? 40 : 32, kConsumerRegisters = kStudent ? 152 : 160;
  static constexpr int kBoxBytesKeys = kBlock * 128, kBoxBytesQ = kRows * 128;
  static constexpr int kKeyBytes = kHalves * kBoxBytesKeys, kStageBytes = kHalves * kBoxBytesQ;
  static constexpr int kSmemBytes = 2 * kKeyBytes + kStages * kStageBytes + kStages * kRows * 8 + 256 + 1024;
};

// What the consumers are told of an item.
struct TeacherItem {
  std::int32_t count;  // tokens; 0: no more items
  std::int32_t group;
  std::int32_t to_visible;  // token of the chunk + this = keys of the block that it sees, before the sequence's end
  std::int32_t live_keys;   // of the block, before the sequence's end
  std::int32_t first_row;   // of its teacher
};

template <typename Traits>
__device__ inline void teacher_produce(const CUtensorMap& map_q, const CUtensorMap& map_k, const TeacherParams& params,
                                       unsigned char* smem_k, unsigned char* smem_q, int2* stage_visits, TeacherItem* item_slots,
                                       ItemFeed* feed, std::uint64_t* full, std::uint64_t* empty, std::uint64_t* k_full,
                                       std::uint64_t* k_empty, int warp) {
  constexpr int kHalves = Traits::kHalves, kStages = Traits::kStages, kBlock = Traits::kBlock, kConsumers = Traits::kConsumers;
  const int lane = threadIdx.x % 32;
  const int tokens = Traits::kRows >> params.log_group, token_bytes = 128 << params.log_group;  // per stage; per half tile
  int stage_count = 0;
  for (int round = 0;; ++round) {
    AttendItem item;
    Sequence sequence;
    take_item(feed, params.batch, params.items, params.num_items, params.next_item, &item, &sequence);
    if (warp == kItemWarp) {
      if (lane == 0) {
        const int k = round % 2;
        if (round >= 2) ptx::mbarrier_wait(&k_empty[k], (round / 2 - 1) & 1);
        item_slots[k] = {
            item.count, item.group, params.chunk_begin - sequence.query_begin + sequence.first_position + 1 - item.block * kBlock,
            min(sequence.seqlen_k - item.block * kBlock, kBlock), teacher_row(params.entries, item, params.slots, params.chunk)};
        if (item.count == 0) {
          ptx::mbarrier_arrive(&k_full[k]);
        } else {
          ptx::mbarrier_arrive_expect(&k_full[k], Traits::kKeyBytes);
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_4d(smem_k + k * Traits::kKeyBytes + h * Traits::kBoxBytesKeys, &map_k, &k_full[k], h * 64,
                             sequence.key_begin + item.block * kBlock, Traits::kStudent ? 0 : item.group, 0);
          }
        }
      }
      __syncwarp();
    }
    if (item.count == 0) return;
    const int num_stages = (item.count + tokens - 1) / tokens;
    // As the consumers: stages go round the warps across items, so that a stage's slot is always the same one's.
    const int first_stage = warp == kItemWarp ? num_stages : (warp + kConsumers - stage_count % kConsumers) % kConsumers;
    for (int n = first_stage; n < num_stages; n += kConsumers) {
      const int count = stage_count + n, s = count % kStages, num_tokens = min(tokens, item.count - n * tokens);
      int2 visit[2];  // token of the chunk or -1, and its slot counted over all
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = i * 32 + lane;
        visit[i] = int2{-1, -1};
        if (at >= num_tokens) continue;
        visit[i] = item_visit(params.entries, item, n * tokens + at);
        visit[i].y += (visit[i].x * params.num_groups + item.group) * params.slots;
      }
      if (count >= kStages) ptx::mbarrier_wait(&empty[s], (count / kStages - 1) & 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i * 32 + lane < tokens) stage_visits[s * Traits::kRows + i * 32 + lane] = visit[i];
      }
      unsigned char* stage = smem_q + s * Traits::kStageBytes;
      if constexpr (Traits::kStudent) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          copy_index_rows<typename Traits::T, kHalves>(params.queries, item.group,
                                                       visit[i].x < 0 ? -1 : params.chunk_begin + visit[i].x, stage + i * 32 * 128,
                                                       Traits::kBoxBytesQ, lane);
        }
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&full[s]);
      } else {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive_expect(&full[s], num_tokens * kHalves * token_bytes);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (visit[i].x < 0) continue;
          for (int h = 0; h < kHalves; ++h) {
            ptx::tma_load_3d(stage + h * Traits::kBoxBytesQ + (i * 32 + lane) * token_bytes, &map_q, &full[s], h * 64,
                             item.group * params.group_size, params.chunk_begin + visit[i].x);
          }
        }
      }
    }
    stage_count += num_stages;
  }
}

// Sums probabilities over the rows of each token and stores their means. In every step a lane gives away the half of the columns that
// its partner keeps, so that 2^kSteps lanes share a token's columns in the end: lane a of them has 8-column groups a, a + 2^kSteps, ...
// `at`: the visit of each of the thread's two rows, counted in the item; -1: none.
template <int kLogGroup, int kBlock>
__device__ inline void store_teacher(const float (&p)[kBlock / 2], const int (&at)[2], float mean, float* out, int lane) {
  constexpr int kSteps = kLogGroup < 3 ? kLogGroup : 3, kGroups = kBlock / 8;
#pragma unroll
  for (int r = 0; r < (kLogGroup == 4 ? 1 : 2); ++r) {
    float sum[kGroups][2];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[j][c] = kLogGroup == 4 ? p[4 * j + c] + p[4 * j + 2 + c] : p[4 * j + 2 * r + c];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool odd = (lane >> (2 + step)) % 2 != 0;
#pragma unroll
      for (int j = 0; j < kGroups / 2; ++j) {
        if (j >= kGroups >> (step + 1)) continue;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float keep = odd ? sum[2 * j + 1][c] : sum[2 * j][c], give = odd ? sum[2 * j][c] : sum[2 * j + 1][c];
          sum[j][c] = keep + __shfl_xor_sync(0xffffffffu, give, 4 << step);
        }
      }
    }
    if (at[r] < 0) continue;
    float* row = out + std::int64_t{at[r]} * kBlock;
    const int key = (lane / 4 % (1 << kSteps)) * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kGroups >> kSteps; ++j) {
      *reinterpret_cast<float2*>(row + teacher_column(at[r], key + (j << (3 + kSteps)))) =
          float2{sum[j][0] * mean, sum[j][1] * mean};
    }
  }
}

// log2 of the sum of exp2 over each row.
template <int kBlock>
__device__ inline void store_row_lse(const float (&scores)[kBlock / 2], const int (&visit)[2], float scale_log2, float* out,
                                     int lane) {
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f}, offset[2];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) row_max[i % 4 / 2] = fmaxf(row_max[i % 4 / 2], scores[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 1));
    row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 2));
    offset[r] = row_max[r] == -INFINITY ? 0.f : row_max[r] * scale_log2;
  }
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) row_sum[i % 4 / 2] += exp2_approx(fmaf(scores[i], scale_log2, -offset[i % 4 / 2]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
    if (lane % 4 == 0 && visit[r] >= 0) out[visit[r]] = offset[r] + log2_approx(row_sum[r]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_teacher_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                        const __grid_constant__ TeacherParams params) {
  using T = typename Traits::T;
  constexpr int kStages = Traits::kStages, kBlock = Traits::kBlock, kConsumers = Traits::kConsumers;
  unsigned char* smem_k = ptx::dynamic_smem();
  unsigned char* smem_q = smem_k + 2 * Traits::kKeyBytes;
  auto* stage_visits = reinterpret_cast<int2*>(smem_q + kStages * Traits::kStageBytes);  // [kStages][kRows]
  auto* full = reinterpret_cast<std::uint64_t*>(stage_visits + kStages * Traits::kRows);
  std::uint64_t* empty = full + kStages;
  std::uint64_t* k_full = empty + kStages;
  std::uint64_t* k_empty = k_full + 2;
  auto* item_slots = reinterpret_cast<TeacherItem*>(k_empty + 2);
  auto* feed = reinterpret_cast<ItemFeed*>(item_slots + 2);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 4);
    }
    for (int k = 0; k < 2; ++k) {
      ptx::mbarrier_init(&k_full[k], 1);
      ptx::mbarrier_init(&k_empty[k], 4 * kConsumers);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_index < 4) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    teacher_produce<Traits>(map_q, map_k, params, smem_k, smem_q, stage_visits, item_slots, feed, full, empty, k_full, k_empty,
                            warp_index);
    return;
  }

  ptx::grow_registers<Traits::kConsumerRegisters>();
  const int consumer = warp_index / 4 - 1, warp = warp_index % 4, quad = lane % 4;
  const std::uint64_t desc_q = ptx::smem_descriptor(ptx::smem_address(smem_q), 16, 1024);
  const std::uint64_t desc_k = ptx::smem_descriptor(ptx::smem_address(smem_k), 16, 1024);
  const std::uint32_t visits_address = ptx::smem_address(stage_visits);
  int stage_count = 0;
  for (int round = 0;; ++round) {
    const int k = round % 2;
    ptx::mbarrier_wait(&k_full[k], (round / 2) & 1);
    const TeacherItem item = item_slots[k];
    __syncwarp();  // read by all lanes before lane 0 frees the slot with k_empty
    if (item.count == 0) break;
    const std::uint64_t item_k = desc_k + static_cast<std::uint32_t>(k * Traits::kKeyBytes / 16);
    const int tokens = Traits::kRows >> params.log_group;
    const int num_stages = (item.count + tokens - 1) / tokens;

    // Stages go round the warpgroups across items, so that all stay equally loaded.
    const int first_stage = (consumer + kConsumers - stage_count % kConsumers) % kConsumers;
    for (int i = first_stage; i < num_stages; i += kConsumers) {
      const int s = __shfl_sync(0xffffffffu, (stage_count + i) % kStages, 0);
      const std::uint64_t stage_q = desc_q + static_cast<std::uint32_t>(s * Traits::kStageBytes / 16);
      ptx::mbarrier_wait(&full[s], ((stage_count + i) / kStages) & 1);
      // Of this thread's two rows; with 16 heads a group both are the warp's one token.
      int token[2], visit[2];
      float lse[2] = {0.f, 0.f};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp * 16 + lane / 4 + 8 * r, head = row & ((1 << params.log_group) - 1);
        const int2 at = ptx::load_shared_int2(visits_address + (s * Traits::kRows + (row >> params.log_group)) * 8);
        token[r] = at.x;
        visit[r] = at.y;
        if (!Traits::kStudent && token[r] >= 0) {
          lse[r] =
              __ldg(params.rows + (((std::int64_t{token[r]} * params.num_groups + item.group) * 2) << params.log_group) + head);
        }
      }
      float scores[kBlock / 2];
      ptx::wgmma_fence_operands(scores);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Traits::kDim / 16; ++step) {
        const std::uint32_t column = (step % 4) * 32;
        ptx::WgmmaSS<T, kBlock>::template run<ptx::Major::kK>(scores, stage_q + ((step / 4) * Traits::kBoxBytesQ + column) / 16,
                                                              item_k + ((step / 4) * Traits::kBoxBytesKeys + column) / 16,
                                                              step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operands(scores);
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(&empty[s]);
        if (i + kConsumers >= num_stages) ptx::mbarrier_arrive(&k_empty[k]);
      }

      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        limit[r] = token[r] < 0 ? kBlock : lse[r] == INFINITY ? 0 : min(token[r] + item.to_visible, item.live_keys);
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
      if constexpr (Traits::kStudent) {
        store_row_lse<kBlock>(scores, visit, params.scale_log2, params.out, lane);
      } else {
#pragma unroll
        for (int c = 0; c < kBlock / 2; ++c) scores[c] = exp2_approx(fmaf(scores[c], params.scale_log2, -lse[c % 4 / 2]));
        float* out = params.out + std::int64_t{item.first_row} * kBlock;
        int at[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          at[r] = token[r] < 0 ? -1 : i * tokens + ((warp * 16 + lane / 4 + 8 * r) >> params.log_group);
        }
        switch (params.log_group) {
          case 0: store_teacher<0, kBlock>(scores, at, params.mean, out, lane); break;
          case 1: store_teacher<1, kBlock>(scores, at, params.mean, out, lane); break;
          case 2: store_teacher<2, kBlock>(scores, at, params.mean, out, lane); break;
          case 3: store_teacher<3, kBlock>(scores, at, params.mean, out, lane); break;
          default: store_teacher<4, kBlock>(scores, at, params.mean, out, lane);
        }
      }
    }
    // A warpgroup without a stage in this item still gives the keys back.
    if (first_stage >= num_stages && lane == 0) ptx::mbarrier_arrive(&k_empty[k]);
    stage_count += num_stages;
  }
}

}  // namespace openmsa::cuda
