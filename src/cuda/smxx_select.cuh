// select_blocks: what its kernels for many rows (smxx_select_rows.cuh) and few rows (smxx_select_few.cuh) share.
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
  std::int32_t log_block;  // log2 of the block size, -1 if it is no power of two
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

}  // namespace openmsa::cuda
