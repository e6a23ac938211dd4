// block_scores for few query tokens per sequence (decode, speculative decode): every index key is read once.
//
// Roles     CTA of 4 warps; a CTA takes whole blocks of keys, a warp a quarter of the block (32 or 16 keys) in m16 tiles; the
//           query rows (tokens x index heads, at most 64) are the n8 tiles.
// Loads     keys go from memory straight to registers as 16-byte pieces (see ptx/mma.cuh for the order trick); 8 KB a warp are in
//           flight, a dozen warps an SM cover the latency. The queries sit in registers (one or two n8 tiles) or shared memory.
// Empty     a sequence without queries or keys exits at once. `fill` writes -inf past what its queries see; select does not look.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/register.cuh"

namespace openmsa::cuda {

struct ScoreFewParams {
  BatchParams batch;
  const void* q_idx;                                                           // [T, Hkv, Di]
  const void* k_idx;                                                           // [S, Di] or [num_pages, Bk, Di]
  std::int64_t stride_q_token, stride_q_group, stride_k_token, stride_k_page;  // elements
  float* scores;                                                               // [T, Hkv, num_blocks]
  std::int64_t stride_token, stride_group;
  std::int32_t num_blocks;  // width of scores
  std::int32_t num_groups;  // Hkv
  bool fill;
};

template <typename T_, int kIndexDim_, int kBlock_, int kTiles_>
struct ScoreFewTraits {
  using T = T_;
  static constexpr int kIndexDim = kIndexDim_, kBlock = kBlock_;
  static constexpr int kTiles = kTiles_;            // n8 tiles of query rows
  static constexpr int kSegments = kIndexDim / 32;  // 32-element pieces of a row
  static constexpr int kKeyTiles = kBlock / 64;     // m16 tiles a warp
  static constexpr bool kInRegisters = kTiles <= 2;
};

template <typename Traits>
__global__ void __launch_bounds__(128, Traits::kTiles == 1 ? 4 : 3)
    smxx_score_few_kernel(const __grid_constant__ ScoreFewParams params) {
  using T = typename Traits::T;
  constexpr int kSegments = Traits::kSegments, kTiles = Traits::kTiles, kKeyTiles = Traits::kKeyTiles, kBlock = Traits::kBlock;
  __shared__ uint4 smem_q[Traits::kInRegisters ? 1 : kTiles * kSegments * 32];
  __shared__ float partial[2][4][kTiles * 8];

  const int seq = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  ptx::grid_dependency_launch();
  Sequence sequence;
  if (!params.batch.load(seq, &sequence)) return;
  const int num_tokens = sequence.seqlen_q, seqlen_k = sequence.seqlen_k, query_begin = sequence.query_begin;
  const int num_rows = num_tokens * params.num_groups;
  const int num_blocks = (sequence.num_visible(sequence.first_position + num_tokens - 1) + kBlock - 1) / kBlock;
  if (params.fill) {
    const std::int64_t width = params.num_blocks - num_blocks;
    for (std::int64_t i = blockIdx.x * 128 + threadIdx.x; i < num_rows * width; i += gridDim.x * 128) {
      const int row = static_cast<int>(i / width);
      params.scores[(std::int64_t{query_begin} + row / params.num_groups) * params.stride_token +
                    row % params.num_groups * params.stride_group + num_blocks + i % width] = -INFINITY;
    }
  }
  if (num_rows == 0 || static_cast<int>(blockIdx.x) >= num_blocks) return;

  const T* q_base = static_cast<const T*>(params.q_idx);
  auto load_q = [&](int tile, int segment) {
    const int row = tile * 8 + r;
    if (row >= num_rows) return uint4{0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(q_base + (std::int64_t{query_begin} + row / params.num_groups) * params.stride_q_token +
                                           row % params.num_groups * params.stride_q_group + segment * 32 + c * 8);
  };
  uint4 q[Traits::kInRegisters ? kTiles : 1][kSegments];
  if constexpr (Traits::kInRegisters) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int s = 0; s < kSegments; ++s) q[n][s] = load_q(n, s);
    }
  } else {
    for (int i = warp; i < kTiles * kSegments; i += 4) smem_q[i * 32 + lane] = load_q(i / kSegments, i % kSegments);
    __syncthreads();
  }

  const T* k_base = static_cast<const T*>(params.k_idx);
  int turn = 0, page = params.batch.page(sequence, seq, blockIdx.x);
  for (int block = blockIdx.x; block < num_blocks; block += gridDim.x, turn ^= 1) {
    const int live_keys = page < 0 ? 0 : min(seqlen_k - block * kBlock, kBlock);
    const T* k = sequence.pages ? k_base + max(page, 0) * params.stride_k_page
                                : k_base + (sequence.key_begin + std::int64_t{block} * kBlock) * params.stride_k_token;
    // The page of the next turn is looked up while this one's keys are on their way.
    const int next = block + gridDim.x;
    page = next < num_blocks ? params.batch.page(sequence, seq, next) : 0;
    uint4 a[kKeyTiles][2][kSegments];
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = (warp * kKeyTiles + m) * 16 + h * 8 + r;
        const bool live = key < live_keys;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          a[m][h][s] = live ? ptx::load_stream(k + key * params.stride_k_token + s * 32 + c * 8) : uint4{0, 0, 0, 0};
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          const uint4 b = Traits::kInRegisters ? q[Traits::kInRegisters ? n : 0][s] : smem_q[(n * kSegments + s) * 32 + lane];
          ptx::mma_16816<T>(d, a[m][0][s].x, a[m][1][s].x, a[m][0][s].y, a[m][1][s].y, b.x, b.y);
          ptx::mma_16816<T>(d, a[m][0][s].z, a[m][1][s].z, a[m][0][s].w, a[m][1][s].w, b.z, b.w);
        }
        const int key = block * kBlock + (warp * kKeyTiles + m) * 16 + r;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = n * 8 + c * 2 + j % 2;
          const int visible = sequence.num_visible(sequence.first_position + row / params.num_groups);
          if (key + j / 2 * 8 < visible) best[j % 2] = ptx::max_nan(best[j % 2], d[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) best[j] = ptx::max_nan(best[j], __shfl_xor_sync(0xffffffffu, best[j], o));
        if (r == 0) partial[turn][warp][n * 8 + c * 2 + j] = best[j];
      }
    }
    __syncthreads();
    for (int row = threadIdx.x; row < num_rows; row += 128) {
      const float m = ptx::max_nan(ptx::max_nan(partial[turn][0][row], partial[turn][1][row]),
                                   ptx::max_nan(partial[turn][2][row], partial[turn][3][row]));
      params.scores[(std::int64_t{query_begin} + row / params.num_groups) * params.stride_token +
                    row % params.num_groups * params.stride_group + block] = m;
    }
  }
}

}  // namespace openmsa::cuda
