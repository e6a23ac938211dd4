// sparse_decode: attention of few query tokens over their selected blocks, split so that every SM has work.
//
// Roles     one CTA per (query token, group, selected block); rows are the group's heads, padded to 16. Each warp takes 16 keys for
//           Q K^T and an equal part of the dims (16 at least) for P V.
// Loads     K by 16-byte loads into registers (order trick of ptx/mma.cuh), V by cp.async into shared memory at the same time.
// Combine   every split leaves an fp32 partial with its max and sum; a second, dependent kernel merges them in slot order.
// Empty     splits without a visible key leave a sum of 0 and no partial; a row without any gives out = 0, lse = -inf.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"

namespace openmsa::cuda {

struct DecodeParams {
  BatchParams batch;
  const void* q;  // [T, Hq, D]
  const void* k;  // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  const void* v;
  std::int64_t stride_q_token, stride_q_head;  // elements
  std::int64_t stride_k_token, stride_k_head, stride_k_page;
  std::int64_t stride_v_token, stride_v_head, stride_v_page;
  const std::int32_t* block_ids;  // [T, Hkv, k]
  std::int64_t stride_id_token, stride_id_group;
  void* out;  // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;
  float* lse;  // [T, Hq] or null
  std::int64_t stride_lse_token;
  float* partial;            // [tokens of the launch, Hkv, k, 16, D]
  float2* partial_stats;     // [tokens of the launch, Hkv, k, 16]: max (in log2 units), sum
  std::int32_t token_begin;  // first packed token of this launch; partials count from it
  std::int32_t num_groups, group_size, top_k;
  float scale_log2;
};

template <typename T_, int kHeadDim_, int kBlock_>
struct DecodeTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr int kWarps = kBlock / 16, kThreads = 32 * kWarps;
  static constexpr int kSegments = kHeadDim / 32;
  static constexpr int kRowBytes = kHeadDim * 2 + 16;  // padded: rows of ldmatrix fall on different banks
  static constexpr int kDimsPerWarp = kHeadDim / kWarps < 16 ? 16 : kHeadDim / kWarps;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads) smxx_decode_kernel(const __grid_constant__ DecodeParams params) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim, kSegments = Traits::kSegments, kWarps = Traits::kWarps, kBlock = Traits::kBlock;
  constexpr int kTiles = Traits::kDimsPerWarp / 8;
  __shared__ __align__(16) unsigned char smem_v[kBlock * Traits::kRowBytes];
  __shared__ __align__(16) T smem_p[16][kBlock + 8];
  __shared__ float smem_max[kWarps][16], smem_sum[kWarps][16];

  const int split = blockIdx.x % params.top_k, pair = blockIdx.x / params.top_k;
  const int token = params.token_begin + pair / params.num_groups, group = pair % params.num_groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;

  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  const int seq = params.batch.sequence_of(token);
  Sequence sequence;
  params.batch.load(seq, &sequence);  // a broken one sees nothing
  const int visible = sequence.num_visible(sequence.first_position + token - sequence.query_begin);
  uint4 q[2][kSegments];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = r + 8 * h;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      q[h][s] =
          head < params.group_size
              ? *reinterpret_cast<const uint4*>(static_cast<const T*>(params.q) + std::int64_t{token} * params.stride_q_token +
                                                (group * params.group_size + head) * params.stride_q_head + s * 32 + c * 8)
              : uint4{0, 0, 0, 0};
    }
  }

  const std::int32_t* ids = params.block_ids + std::int64_t{token} * params.stride_id_token + group * params.stride_id_group;
  int block = ids[split];
  const int before = split > 0 ? ids[split - 1] : -1;
  if (block < -1 || block * std::int64_t{kBlock} >= visible) {
    if (threadIdx.x == 0)
      report(params.batch.fault, FaultCode::kBlockId, std::int64_t{token} * params.num_groups + group, split, block);
    block = -1;
  } else if (block >= 0 && split > 0 && (before < 0 || before >= block)) {
    if (threadIdx.x == 0)
      report(params.batch.fault, FaultCode::kBlockOrder, std::int64_t{token} * params.num_groups + group, split, block);
    block = -1;
  }
  const int page = block < 0 ? -1 : params.batch.page(sequence, seq, block);
  const int live_keys = page < 0 ? 0 : min(visible - block * kBlock, kBlock);
  float2* stats = params.partial_stats + (std::int64_t{pair} * params.top_k + split) * 16;

  if (live_keys > 0) {
    const std::int64_t row = sequence.pages ? 0 : sequence.key_begin + std::int64_t{block} * kBlock;
    const T* k =
        static_cast<const T*>(params.k) + page * params.stride_k_page + group * params.stride_k_head + row * params.stride_k_token;
    const T* v =
        static_cast<const T*>(params.v) + page * params.stride_v_page + group * params.stride_v_head + row * params.stride_v_token;
    uint4 b[2][kSegments];  // two n8 tiles of keys
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = warp * 16 + n * 8 + r;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        b[n][s] = key < live_keys ? ptx::load_stream(k + key * params.stride_k_token + s * 32 + c * 8) : uint4{0, 0, 0, 0};
      }
    }
    constexpr int kPieces = kHeadDim / 8;
    for (int i = threadIdx.x; i < kBlock * kPieces; i += Traits::kThreads) {
      const int key = i / kPieces, piece = i % kPieces;
      // Rows nobody sees become zero: their P is zero, and 0 x NaN must not leak.
      ptx::copy_async_16(ptx::smem_address(smem_v) + key * Traits::kRowBytes + piece * 16,
                         v + (key < live_keys ? key : 0) * params.stride_v_token + piece * 8, key < live_keys);
    }
    float s[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        ptx::mma_16816<T>(s[n], q[0][i].x, q[1][i].x, q[0][i].y, q[1][i].y, b[n][i].x, b[n][i].y);
        ptx::mma_16816<T>(s[n], q[0][i].z, q[1][i].z, q[0][i].w, q[1][i].w, b[n][i].z, b[n][i].w);
      }
    }
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (warp * 16 + n * 8 + c * 2 + j % 2 >= live_keys) s[n][j] = -INFINITY;
        row_max[j / 2] = fmaxf(row_max[j / 2], s[n][j]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffffffffu, row_max[h], 1));
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffffffffu, row_max[h], 2));
      if (c == 0) smem_max[warp][r + 8 * h] = row_max[h];
    }
    __syncthreads();
    float row_sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = r + 8 * h;
      row_max[h] = smem_max[0][head];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) row_max[h] = fmaxf(row_max[h], smem_max[w][head]);
      row_max[h] *= params.scale_log2;
      const float offset = row_max[h] == -INFINITY ? 0.f : row_max[h];
      row_sum[h] = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = exp2_approx(fmaf(s[n][2 * h], params.scale_log2, -offset));
        const float p1 = exp2_approx(fmaf(s[n][2 * h + 1], params.scale_log2, -offset));
        row_sum[h] += p0 + p1;
        *reinterpret_cast<std::uint32_t*>(&smem_p[head][warp * 16 + n * 8 + c * 2]) = pack2<T>(p0, p1);
      }
      row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 1);
      row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 2);
      if (c == 0) smem_sum[warp][head] = row_sum[h];
    }
    ptx::copy_async_wait_all();
    __syncthreads();
    if (warp * Traits::kDimsPerWarp < kHeadDim) {
      float o[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kBlock / 16; ++step) {
        const std::uint32_t a0 = *reinterpret_cast<const std::uint32_t*>(&smem_p[r][step * 16 + c * 2]);
        const std::uint32_t a1 = *reinterpret_cast<const std::uint32_t*>(&smem_p[r + 8][step * 16 + c * 2]);
        const std::uint32_t a2 = *reinterpret_cast<const std::uint32_t*>(&smem_p[r][step * 16 + 8 + c * 2]);
        const std::uint32_t a3 = *reinterpret_cast<const std::uint32_t*>(&smem_p[r + 8][step * 16 + 8 + c * 2]);
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          // Matrices: keys 0-7 and 8-15 of dim tile n, then of tile n + 1 (read twice where the count is odd).
          const int dim = warp * Traits::kDimsPerWarp + min(n + lane / 16, kTiles - 1) * 8;
          std::uint32_t w[4];
          ptx::ldmatrix_x4_trans(w, ptx::smem_address(smem_v) + (step * 16 + lane % 16) * Traits::kRowBytes + dim * 2);
          ptx::mma_16816<T>(o[n], a0, a1, a2, a3, w[0], w[1]);
          if (n + 1 < kTiles) ptx::mma_16816<T>(o[n + 1 < kTiles ? n + 1 : n], a0, a1, a2, a3, w[2], w[3]);
        }
      }
      float* partial = params.partial + (std::int64_t{pair} * params.top_k + split) * 16 * kHeadDim;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<float2*>(partial + (r + 8 * h) * kHeadDim + warp * Traits::kDimsPerWarp + n * 8 + c * 2) =
              float2{o[n][2 * h], o[n][2 * h + 1]};
        }
      }
    }
    if (threadIdx.x < 16) {
      float sum = 0.f, top = smem_max[0][threadIdx.x];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += smem_sum[w][threadIdx.x];
        top = fmaxf(top, smem_max[w][threadIdx.x]);
      }
      stats[threadIdx.x] = float2{top * params.scale_log2, sum};
    }
  } else if (threadIdx.x < 16) {
    stats[threadIdx.x] = float2{-INFINITY, 0.f};
  }
}

// Merges the splits of every (token, head) by their maxima and sums. Roles: 32 threads a head, 4 heads a CTA.
template <typename Traits>
__global__ void __launch_bounds__(128) smxx_decode_combine_kernel(const __grid_constant__ DecodeParams params) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, quarters = (params.group_size + 3) / 4;
  const int pair = blockIdx.x / quarters, head = blockIdx.x % quarters * 4 + threadIdx.x / 32;
  ptx::grid_dependency_wait();
  if (head >= params.group_size) return;
  const int token = params.token_begin + pair / params.num_groups, out_head = pair % params.num_groups * params.group_size + head;
  const float2* stats = params.partial_stats + std::int64_t{pair} * params.top_k * 16 + head;
  const float2 mine = lane < params.top_k ? stats[lane * 16] : float2{-INFINITY, 0.f};  // k is at most 32
  float best = mine.y != 0.f ? mine.x : -INFINITY;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, o));
  const float offset = best == -INFINITY ? 0.f : best;
  // 0 for splits that saw nothing, which also wrote no partial.
  const float weight = mine.y == 0.f ? 0.f : exp2_approx(mine.x - offset);
  float sum = 0.f;
  float4 acc = {0.f, 0.f, 0.f, 0.f};
  const float* partial = params.partial + (std::int64_t{pair} * params.top_k * 16 + head) * kHeadDim + lane * 4;
#pragma unroll 16
  for (int i = 0; i < params.top_k; ++i) {
    const float w = __shfl_sync(0xffffffffu, weight, i);
    sum = fmaf(w, __shfl_sync(0xffffffffu, mine.y, i), sum);
    float4 x = {0.f, 0.f, 0.f, 0.f};
    if (w != 0.f && lane * 4 < kHeadDim) x = __ldcg(reinterpret_cast<const float4*>(partial + std::int64_t{i} * 16 * kHeadDim));
    acc.x = fmaf(w, x.x, acc.x), acc.y = fmaf(w, x.y, acc.y), acc.z = fmaf(w, x.z, acc.z), acc.w = fmaf(w, x.w, acc.w);
  }
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  if (lane * 4 < kHeadDim) {
    *reinterpret_cast<uint2*>(static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
                              out_head * params.stride_out_head + lane * 4) =
        uint2{pack2<T>(acc.x * inverse, acc.y * inverse), pack2<T>(acc.z * inverse, acc.w * inverse)};
  }
  if (lane == 0 && params.lse) {
    params.lse[std::int64_t{token} * params.stride_lse_token + out_head] =
        sum == 0.f ? -INFINITY : (offset + log2f(sum)) * 0.6931471805599453f;
  }
}

}  // namespace openmsa::cuda
