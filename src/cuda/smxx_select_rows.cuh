// select_blocks for many rows (prefill): the k best blocks of each (query token, group). Exact, ranks raw scores, reads each row once.
//
// Roles   a warp a row; persistent warps take rows in turn. A row is a stream of chunks of 1,024 scores.
// Ring    two chunks a warp in shared memory, filled by cp.async: the next chunk, of this row or of the next, is on its way while this
//         one is ranked.
// Work    a lane holds 32 scores of a chunk; the k-th largest of the 32 lane maxima bounds the k-th best from below, so about 20 of
//         1,024 scores become candidates. A candidate's rank is the number of larger ones, counted through broadcast reads of shared
//         memory. Later chunks only pass what beats the running k-th best.
// Empty   a query that sees nothing gets -1 throughout.
#pragma once

#include <cuda_bf16.h>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/smxx_select.cuh"

namespace openmsa::cuda {

inline constexpr int kSelectChunk = 1024;
inline constexpr int kSelectRowWarps = 4;  // a CTA
inline constexpr int kSelectRowCtas = 5;   // a multiprocessor, persistent

// The best k of a row so far, in shared memory owned by one warp. kItems = 1 holds k <= 16, kItems = 2 k <= 32.
template <int kItems>
struct RowTopK {
  static constexpr int kCapacity = 32 * kItems, kMaxTopK = 16 * kItems;
  struct alignas(16) Memory {
    std::uint32_t orders[kCapacity];  // rank_order of the first `count`, in no sequence; 0 behind them when ranks are counted
    std::int32_t ids[kCapacity];
    std::uint16_t lane_maxima[32];  // bf16
  };
  Memory& memory;
  int count = 0;
  std::uint32_t threshold = 0;  // order of the k-th best so far; 0 until k were seen

  __device__ __forceinline__ explicit RowTopK(Memory& m) : memory(m) {}

  // Cuts `count` candidates down to the best k. Each lane brings the orders of its places, which are in memory as well. Uniform over
  // the warp, like all that follows.
  __device__ __forceinline__ void shrink(const std::uint32_t (&mine)[kItems], const std::int32_t (&id)[kItems], int k) {
    const int lane = threadIdx.x % 32;
    int rank[kItems] = {};
#pragma unroll
    for (int first = 0; first < kCapacity; first += 8) {
      if (first >= 16 && first >= count) break;
#pragma unroll
      for (int j = first; j < first + 8; j += 4) {
        const uint4 other = *reinterpret_cast<const uint4*>(memory.orders + j);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          ptx::count_if_greater(rank[i], other.x, mine[i]);
          ptx::count_if_greater(rank[i], other.y, mine[i]);
          ptx::count_if_greater(rank[i], other.z, mine[i]);
          ptx::count_if_greater(rank[i], other.w, mine[i]);
        }
      }
    }
    std::uint32_t chosen[kItems];
    int kept = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      chosen[i] = __ballot_sync(0xffffffffu, mine[i] != 0 && rank[i] < k);
      kept += __popc(chosen[i]);
    }
    if (kept > k) {  // equal scores straddle the k-th place: the smaller ids win
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        const std::uint32_t order = memory.orders[j];
        const std::int32_t other = memory.ids[j];
#pragma unroll
        for (int i = 0; i < kItems; ++i) rank[i] += order == mine[i] && other < id[i];
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) chosen[i] = __ballot_sync(0xffffffffu, mine[i] != 0 && rank[i] < k);
      kept = k;
    }
    __syncwarp();
    std::uint32_t least = 0xffffffffu;
    int before = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (chosen[i] >> lane & 1) {
        const int place = before + __popc(chosen[i] & ((1u << lane) - 1));
        memory.orders[place] = mine[i];
        memory.ids[place] = id[i];
        least = min(least, mine[i]);
      }
      before += __popc(chosen[i]);
    }
    count = kept;
    if (kept == k) threshold = __reduce_min_sync(0xffffffffu, least);
    __syncwarp();
  }

  // A bound that the k largest of the lanes' values reach, tight to a bf16 step; -inf if one of them is. Two compares an instruction.
  __device__ __forceinline__ float kth_of_lanes(float value, int k) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
    memory.lane_maxima[threadIdx.x % 32] = __bfloat16_as_ushort(rounded);
    const __nv_bfloat162 mine{rounded, rounded};
    __nv_bfloat162 at_least[2] = {};
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 32; j += 8) {
      const uint4 others = *reinterpret_cast<const uint4*>(memory.lane_maxima + j);
      const std::uint32_t words[4] = {others.x, others.y, others.z, others.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 other = *reinterpret_cast<const __nv_bfloat162*>(&words[i]);
        at_least[i % 2] = __hadd2(at_least[i % 2], __hge2(other, mine));
      }
    }
    const float2 sum = __bfloat1622float2(__hadd2(at_least[0], at_least[1]));
    const float number = __bfloat162float(rounded);
    const std::uint32_t order = sum.x + sum.y >= static_cast<float>(k) ? rank_order(number, false) : 0u;
    const float bound = order_score(__reduce_max_sync(0xffffffffu, order));
    // Rounding to nearest may have raised a value by half a step of 2^-8 relative (above the smallest normal), or to infinity.
    return bound > 0.f ? fminf(bound, 3.3895e38f) * 0.9921875f - 1e-37f : bound * 1.0078125f - 1e-37f;
  }

  // Adds a chunk: places [0, live) of `chunk` hold the scores of ids first_id ..., forced blocks +inf; the places behind them -inf.
  // Chunks come by ascending id, so that an equal score never replaces an older one.
  template <typename Forced>
  __device__ __forceinline__ void add(const float* chunk, int first_id, int live, int k, Forced forced) {
    const int lane = threadIdx.x % 32;
    float scores[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(chunk + (i * 32 + lane) * 4);
      scores[4 * i] = x.x, scores[4 * i + 1] = x.y, scores[4 * i + 2] = x.z, scores[4 * i + 3] = x.w;
    }
    // Plain float arithmetic does the bulk of the work. Where too few ordinary scores exist to bound the k-th best (short rows, rows
    // of NaN or -inf) everything passes and the orders decide.
    float lane_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) lane_max = fmaxf(lane_max, scores[i]);
    float bound;
    if (threshold == 0) {
      // k different scores reach the k-th largest of the lanes' maxima, so it bounds the k-th best from below.
      bound = kth_of_lanes(lane_max, k);
    } else {
      bound = order_score(threshold);
      // A forced block beats a score of +inf, so that +inf alone is no reason to stop.
      if (bound > -INFINITY && bound < INFINITY && !__any_sync(0xffffffffu, lane_max > bound)) return;
    }
    // Bit 31 - i: score i passed. The sign of a difference is collected by a funnel shift, half the arithmetic units' work of compares;
    // NaN passes and loses later.
    std::uint32_t passed = 0;
    if (bound > -INFINITY) {
      std::uint32_t below[2] = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) below[i / 16] = __funnelshift_l(__float_as_uint(scores[i] - bound), below[i / 16], 1);
      passed = ~__byte_perm(below[1], below[0], 0x5410);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) passed |= (i / 4 * 32 + lane) * 4 + i % 4 < live ? 0x80000000u >> i : 0u;
    }
    int total;
    int position = count + warp_prefix(__popc(passed), &total);
    // As many rounds as it takes to pass all candidates through the free places; nearly always one.
    while (total > 0) {
      const int room = min(kCapacity - count, total), end = count + room;
      while (passed != 0 && position < end) {
        const int i = __clz(passed);
        passed ^= 0x80000000u >> i;
        memory.ids[position++] = (i / 4 * 32 + lane) * 4 + i % 4;
      }
      __syncwarp();
      std::uint32_t mine[kItems];
      std::int32_t id[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int place = i * 32 + lane;
        mine[i] = 0;
        id[i] = memory.ids[place];
        if (place < count) {
          mine[i] = memory.orders[place];
        } else {
          if (place < end) {
            const float score = chunk[id[i]];
            id[i] += first_id;
            mine[i] = rank_order(score, forced(id[i]));
            memory.ids[place] = id[i];
          }
          memory.orders[place] = mine[i];
        }
      }
      __syncwarp();
      total -= room;
      count = end;
      shrink(mine, id, k);
      position += count - end;
    }
  }

  // Writes the ids in ascending order, -1 in the tail.
  __device__ __forceinline__ void store(std::int32_t* ids, int k) {
    const int lane = threadIdx.x % 32;
    if (count < kMaxTopK) {
      if (lane < kMaxTopK && lane >= count) memory.ids[lane] = 0x7fffffff;
      __syncwarp();
    }
    if (lane >= k) return;
    const std::uint32_t mine = memory.ids[lane];
    int rank = 0;
#pragma unroll
    for (int j = 0; j < kMaxTopK; j += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(memory.ids + j);
      ptx::count_if_greater(rank, mine, other.x);
      ptx::count_if_greater(rank, mine, other.y);
      ptx::count_if_greater(rank, mine, other.z);
      ptx::count_if_greater(rank, mine, other.w);
    }
    ids[lane < count ? rank : lane] = lane < count ? static_cast<std::int32_t>(mine) : -1;
  }
};

// Walks the chunks of the rows of one warp: rows first, first + step, ... of [num_tokens, num_groups].
struct SelectCursor {
  int token, group;  // token < 0: past the end
  int chunk, end;    // first id of the chunk; number of visible blocks
  int own_block;

  // The next row; `sequence` caches the last one met.
  __device__ __forceinline__ void enter(const SelectParams& params, Sequence& sequence) {
    const auto blocks_below = [&](unsigned keys) {
      return static_cast<int>(params.log_block >= 0 ? keys >> params.log_block : keys / params.batch.block_size);
    };
    const int packed = params.token_begin + token;
    if (packed < sequence.query_begin || packed >= sequence.query_begin + sequence.seqlen_q) {
      params.batch.load(params.batch.sequence_of(packed), &sequence);  // a broken one is empty: it sees nothing, and is met again
    }
    const int position = sequence.first_position + packed - sequence.query_begin;
    chunk = 0;
    end = blocks_below(static_cast<unsigned>(sequence.num_visible(position)) + params.batch.block_size - 1);
    own_block = position < 0 ? -1 : blocks_below(position);
  }
  __device__ __forceinline__ void next(const SelectParams& params, Sequence& sequence, int step_tokens, int step_groups) {
    chunk += kSelectChunk;
    if (chunk < end) return;
    token += step_tokens;
    group += step_groups;
    if (group >= params.num_groups) group -= params.num_groups, ++token;
    if (token >= params.num_tokens) {
      token = -1;
    } else {
      enter(params, sequence);
    }
  }
};

template <int kItems>
inline constexpr int kSelectRowsSmemBytes = kSelectRowWarps*(2 * kSelectChunk * 4 +
                                                             static_cast<int>(sizeof(typename RowTopK<kItems>::Memory)));

// kAligned: every row starts on 16 bytes.
template <int kItems, bool kAligned>
__global__ void __launch_bounds__(32 * kSelectRowWarps, kSelectRowCtas)
    smxx_select_rows_kernel(const __grid_constant__ SelectParams params) {
  OPENMSA_DYNAMIC_SMEM(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* ring = reinterpret_cast<float*>(smem) + warp * 2 * kSelectChunk;
  RowTopK<kItems> list(reinterpret_cast<typename RowTopK<kItems>::Memory*>(smem + kSelectRowWarps * 2 * kSelectChunk * 4)[warp]);

  const unsigned num_warps = gridDim.x * kSelectRowWarps, groups = params.num_groups;
  const int step_tokens = static_cast<int>(num_warps / groups), step_groups = static_cast<int>(num_warps % groups);
  const unsigned first = blockIdx.x * kSelectRowWarps + warp;
  Sequence sequence{};
  SelectCursor ahead{static_cast<int>(first / groups), static_cast<int>(first % groups), 0, 0, -1};
  if (ahead.token >= params.num_tokens) return;
  ahead.enter(params, sequence);

  const auto fetch = [&](int slot) {
    if (ahead.token >= 0) {
      const float* source =
          params.scores + ahead.token * params.stride_score_token + ahead.group * params.stride_score_group + ahead.chunk;
      const std::uint32_t target = ptx::smem_address(ring + slot * kSelectChunk);
      const int live = ahead.end - ahead.chunk;
      if (kAligned && live >= kSelectChunk) {
#pragma unroll
        for (int i = 0; i < kSelectChunk / 128; ++i) {
          const int place = (i * 32 + lane) * 4;
          ptx::copy_async<16>(target + place * 4, source + place, 16);
        }
      } else if (kAligned) {
#pragma unroll 2
        for (int i = 0; i < kSelectChunk / 128; ++i) {
          const int place = (i * 32 + lane) * 4;
          if (place < live) ptx::copy_async<16>(target + place * 4, source + place, min(live - place, 4) * 4);
        }
      } else {
        for (int place = lane; place < min(live, kSelectChunk); place += 32) {
          ptx::copy_async<4>(target + place * 4, source + place, 4);
        }
      }
    }
    ptx::copy_async_commit();
  };

  fetch(0);
  for (int slot = 0;; slot ^= 1) {
    const SelectCursor row = ahead;
    ahead.next(params, sequence, step_tokens, step_groups);
    fetch(slot ^ 1);
    ptx::copy_async_wait<1>();
    __syncwarp();
    float* chunk = ring + slot * kSelectChunk;
    const int live = min(row.end - row.chunk, kSelectChunk);
    // What the row does not have reads as -inf, forced blocks as +inf: they pass every bound.
    if (live < kSelectChunk) {
      const int whole = (live + 3) / 4;
      if (lane < whole * 4 - live) chunk[live + lane] = -INFINITY;
#pragma unroll 1
      for (int i = whole + lane; i < kSelectChunk / 4; i += 32) {
        reinterpret_cast<float4*>(chunk)[i] = float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      }
    }
#pragma unroll 1
    for (int place = lane; place < min(params.num_init_blocks - row.chunk, live); place += 32) chunk[place] = INFINITY;
    const int first_local = row.own_block - params.num_local_blocks + 1;
#pragma unroll 1
    for (int place = max(first_local - row.chunk, 0) + lane; place < live; place += 32) chunk[place] = INFINITY;
    __syncwarp();
    list.add(chunk, row.chunk, live, params.top_k, [&](int id) { return id < params.num_init_blocks || id >= first_local; });
    if (row.chunk + kSelectChunk >= row.end) {
      list.store(params.block_ids + std::int64_t{params.token_begin + row.token} * params.stride_id_token +
                     row.group * params.stride_id_group,
                 params.top_k);
      list.count = 0;
      list.threshold = 0;
      if (ahead.token < 0) break;
    }
    __syncwarp();  // the slot and the list are free for what comes next
  }
  ptx::copy_async_wait<0>();
}

}  // namespace openmsa::cuda
