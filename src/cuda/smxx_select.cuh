// select_blocks: the k best blocks of each (query token, group). Exact, ranks raw scores, reads each row once.
//
// Roles   prefill: one warp a row. few rows (decode): one CTA a row, each warp a part, the first warp merges.
// Work    a lane takes kCount scores of a chunk; the k-th largest lane maximum bounds the k-th best, so about 20 of 1,024
//         candidates reach the sort. Later chunks only pass what beats the running k-th best.
// Empty   a query that sees nothing gets -1 throughout.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/mma.cuh"
#include "cuda/topk.cuh"

namespace openmsa::cuda {

struct SelectParams {
  BatchParams batch;
  const float* scores;  // [num_tokens, Hkv, num_blocks], its first token being packed token `token_begin`
  std::int64_t stride_score_token, stride_score_group;
  std::int32_t* block_ids;  // [T, Hkv, k]
  std::int64_t stride_id_token, stride_id_group;
  std::int32_t token_begin, num_tokens;  // packed query tokens of this launch
  std::int32_t num_groups;               // Hkv
  std::int32_t top_k, num_init_blocks, num_local_blocks;
};

// What the rows of one query token have in common.
struct SelectToken {
  int packed, num_visible_blocks, own_block;
};

__device__ __forceinline__ SelectToken select_token(const SelectParams& params, int token) {
  const int packed = params.token_begin + token;
  Sequence sequence;
  params.batch.load(params.batch.sequence_of(packed), &sequence);  // a broken one sees nothing
  const int position = sequence.first_position + packed - sequence.query_begin;
  const int visible = sequence.num_visible(position), block_size = params.batch.block_size;
  return {packed, (visible + block_size - 1) / block_size, position < 0 ? -1 : position / block_size};
}

struct SelectRow {
  const float* scores;
  std::int32_t* ids;
  int num_visible_blocks, own_block;
};

__device__ __forceinline__ SelectRow select_row(const SelectParams& params, const SelectToken& token, int group) {
  return {params.scores + std::int64_t{token.packed - params.token_begin} * params.stride_score_token +
              group * params.stride_score_group,
          params.block_ids + std::int64_t{token.packed} * params.stride_id_token + group * params.stride_id_group,
          token.num_visible_blocks, token.own_block};
}

// Feeds blocks [begin, end) of a row to the warp's list, kCount a lane at a time. kRun: consecutive scores a lane loads at once.
template <int kCount, int kRun, int kItems>
__device__ __forceinline__ void select_scan(WarpTopK<kItems>& list, const SelectParams& params, const SelectRow& row, int begin,
                                            int end) {
  const int lane = threadIdx.x % 32;
  const auto forced = [&](int id) { return id < params.num_init_blocks || id > row.own_block - params.num_local_blocks; };
  for (int chunk = begin; chunk < end; chunk += 32 * kCount) {
    float scores[kCount];
#pragma unroll
    for (int i = 0; i < kCount / kRun; ++i) {
      const int id = chunk + (i * 32 + lane) * kRun;
      if (kRun == 4 && id + 3 < end) {
        const float4 x = *reinterpret_cast<const float4*>(row.scores + id);
        scores[kRun * i] = x.x, scores[kRun * i + (kRun > 1)] = x.y, scores[kRun * i + 2 * (kRun > 2)] = x.z,
                      scores[kRun * i + 3 * (kRun > 3)] = x.w;
      } else {
#pragma unroll
        for (int c = 0; c < kRun; ++c) scores[kRun * i + c] = id + c < end ? row.scores[id + c] : -INFINITY;
      }
    }
    // Forced blocks pass every bound. Only the chunks at the ends hold any.
    if (chunk < params.num_init_blocks || chunk + 32 * kCount > row.own_block - params.num_local_blocks) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int id = chunk + (i / kRun * 32 + lane) * kRun + i % kRun;
        if (id < end && forced(id)) scores[i] = INFINITY;
      }
    }
    list.template add<kCount, kRun>(scores, row.scores, chunk, end, params.top_k, forced);
  }
}

// Rows a warp takes one after the other: those of a token share the look-up of its sequence.
inline constexpr int kSelectRows = 4;

template <int kItems, int kRun>
__global__ void __launch_bounds__(128, kItems == 1 && kRun == 4 ? 6 : 4)
    smxx_select_kernel(const __grid_constant__ SelectParams params) {
  __shared__ __align__(16) std::uint64_t memory[4][WarpTopK<kItems>::kWords];
  const int warp = threadIdx.x / 32;
  const std::int64_t end = std::int64_t{params.num_tokens} * params.num_groups;
  std::int64_t index = (std::int64_t{blockIdx.x} * 4 + warp) * kSelectRows;
  int token = -1;
  SelectToken facts{};
  for (const std::int64_t last = min(index + kSelectRows, end); index < last; ++index) {
    const int row_token = static_cast<int>(index / params.num_groups);
    if (row_token != token) facts = select_token(params, token = row_token);
    const SelectRow row = select_row(params, facts, static_cast<int>(index % params.num_groups));
    WarpTopK<kItems> list(memory[warp]);
    select_scan<32, kRun>(list, params, row, 0, row.num_visible_blocks);
    list.store(row.ids, params.top_k);
    __syncwarp();  // the next row reuses the list
  }
}

inline constexpr int kSelectWarps = 16;

template <int kItems>
__global__ void __launch_bounds__(kSelectWarps * 32, 1) smxx_select_few_kernel(const __grid_constant__ SelectParams params) {
  __shared__ __align__(16) std::uint64_t memory[kSelectWarps][WarpTopK<kItems>::kWords];
  __shared__ std::uint64_t lists[kSelectWarps * 16 * kItems];
  __shared__ int counts[kSelectWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SelectRow row = select_row(params, select_token(params, blockIdx.x / params.num_groups), blockIdx.x % params.num_groups);
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  const int part = (row.num_visible_blocks + kSelectWarps - 1) / kSelectWarps;
  const int begin = min(warp * part, row.num_visible_blocks), end = min(begin + part, row.num_visible_blocks);
  WarpTopK<kItems> list(memory[warp]);
  select_scan<16, 1>(list, params, row, begin, end);
  if (lane == 0) counts[warp] = list.count;
  __syncthreads();
  int offset = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kSelectWarps; ++w) {
    offset += w < warp ? counts[w] : 0;
    total += counts[w];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * 32 + lane < list.count) lists[offset + i * 32 + lane] = list.keys[i * 32 + lane];
  }
  __syncthreads();
  // Every warp ranks its share of all candidates against all of them; the best k then rank by id.
  __shared__ std::uint64_t chosen[16 * kItems];
  __shared__ int num_chosen;
  if (threadIdx.x == 0) num_chosen = min(total, params.top_k);
  for (int i = threadIdx.x; i < total; i += kSelectWarps * 32) {
    const std::uint64_t mine = lists[i];
    int rank = 0;
#pragma unroll 8
    for (int j = 0; j < total; ++j) rank += lists[j] > mine;
    if (rank < params.top_k) chosen[rank] = mine;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= params.top_k) return;
  const int slot = threadIdx.x;
  if (slot >= num_chosen) {
    row.ids[slot] = -1;
    return;
  }
  const std::uint32_t mine = static_cast<std::uint32_t>(chosen[slot]);
  int rank = 0;
  for (int j = 0; j < num_chosen; ++j) rank += static_cast<std::uint32_t>(chosen[j]) > mine;
  row.ids[rank] = static_cast<int>(~mine);
}

}  // namespace openmsa::cuda
