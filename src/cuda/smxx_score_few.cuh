// block_scores for few query tokens per sequence (decode, speculative decode): every index key is read once.
//
// Roles     one CTA of 16 warps a multiprocessor; each of its four quads of warps takes an equal run of the batch's blocks,
//           whatever sequences they belong to; a warp takes a quarter of a block (32 or 16 keys) in m16 tiles. The query rows
//           (tokens x index heads, at most 64) are the n8 tiles.
// Loads     keys go from memory straight to registers as 16-byte pieces (see ptx/mma.cuh for the order trick); 8 KB a warp are in
//           flight. The queries sit in the quad's shared memory.
// Shared    block_begin 4 KB; a quad: queries 16 KB, maxima of its warps 2 KB.
// Barriers  named 1..4, one a quad, 128 threads.
// Registers at most 128 (512 threads a CTA).
// Empty     a sequence without queries or keys has no blocks. `fill` writes -inf past what its queries see; select does not look.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/barrier.cuh"
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

inline constexpr int kFewThreads = 512, kFewQuads = 4;
inline constexpr int kFewRows = 64;    // query rows a sequence at most
inline constexpr int kFewSeqs = 1024;  // sequences laid out at a time

template <typename T_, int kIndexDim_, int kBlock_>
struct ScoreFewTraits {
  using T = T_;
  static constexpr int kIndexDim = kIndexDim_, kBlock = kBlock_;
  static constexpr int kTiles = kFewRows / 8;       // n8 tiles of query rows at most
  static constexpr int kSegments = kIndexDim / 32;  // 32-element pieces of a row
  static constexpr int kKeyTiles = kBlock / 64;     // m16 tiles a warp
  static constexpr int kQueryBytes = kTiles * kSegments * 512;
  static constexpr int kQuadBytes = kQueryBytes + 2 * 4 * kTiles * 8 * 4;
  static constexpr int kBeginBytes = (kFewSeqs + 4 + 32) * 4;
  static constexpr int kSmemBytes = kBeginBytes + kFewQuads * kQuadBytes;
};

// begin[i], i = 0..count: number of blocks that the queries of sequences first .. first + i - 1 see. By the whole CTA.
__device__ __forceinline__ void few_block_begin(const BatchParams& batch, int first, int count, int* begin, int* sums) {
  int base = 0;
  for (int i0 = 0; i0 < count; i0 += kFewThreads) {
    const int i = i0 + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int blocks = 0;
    Sequence sequence;
    if (i < count && batch.load(first + i, &sequence) && sequence.seqlen_q > 0) {
      blocks = (sequence.num_visible(sequence.first_position + sequence.seqlen_q - 1) + batch.block_size - 1) / batch.block_size;
    }
    int sum = blocks;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += x;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = base, total = base;
#pragma unroll
    for (int w = 0; w < kFewThreads / 32; ++w) {
      before += w < warp ? sums[w] : 0;
      total += sums[w];
    }
    if (i < count) begin[i + 1] = before + sum;
    base = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) begin[0] = 0;
  __syncthreads();
}

// Blocks [begin, end) of one sequence, by one quad.
template <typename Traits>
__device__ __forceinline__ void few_score_run(const ScoreFewParams& params, int seq, int begin, int end, unsigned char* memory) {
  using T = typename Traits::T;
  constexpr int kSegments = Traits::kSegments, kTiles = Traits::kTiles, kKeyTiles = Traits::kKeyTiles, kBlock = Traits::kBlock;
  const int quad = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, r = lane / 4,
            c = lane % 4;
  uint4* smem_q = reinterpret_cast<uint4*>(memory);
  float* maxima = reinterpret_cast<float*>(memory + Traits::kQueryBytes);  // [2][4][kTiles * 8]
  Sequence sequence;
  params.batch.load<false>(seq, &sequence);
  const int num_rows = sequence.seqlen_q * params.num_groups, num_tiles = (num_rows + 7) / 8;
  const T* q_base = static_cast<const T*>(params.q_idx);
  auto load_q = [&](int tile, int segment) {
    const int row = tile * 8 + r;
    if (row >= num_rows) return uint4{0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(q_base +
                                           (std::int64_t{sequence.query_begin} + row / params.num_groups) * params.stride_q_token +
                                           row % params.num_groups * params.stride_q_group + segment * 32 + c * 8);
  };
  int page = params.batch.page(sequence, seq, begin);
  for (int i = warp; i < num_tiles * kSegments; i += 4) smem_q[i * 32 + lane] = load_q(i / kSegments, i % kSegments);
  ptx::named_barrier(1 + quad, 128);
  const int seen_by_all = sequence.num_visible(sequence.first_position);

  const T* k_base = static_cast<const T*>(params.k_idx);
  int turn = 0;
  for (int block = begin; block < end; ++block, turn ^= 1) {
    // Keys past the sequence's end are masked below, so any readable row does for them; a bad page reads queries instead of keys.
    const int last_key = page < 0 ? 0 : min(sequence.seqlen_k - block * kBlock, kBlock) - 1;
    const T* k = page < 0         ? q_base
                 : sequence.pages ? k_base + page * params.stride_k_page
                                  : k_base + (sequence.key_begin + std::int64_t{block} * kBlock) * params.stride_k_token;
    uint4 a[kKeyTiles][2][kSegments];
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const T* key = k + min((warp * kKeyTiles + m) * 16 + h * 8 + r, last_key) * params.stride_k_token + c * 8;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) a[m][h][s] = ptx::load_stream(key + s * 32);
      }
    }
    // The page of the next turn is looked up while this one's keys are on their way.
    page = block + 1 < end ? params.batch.page(sequence, seq, block + 1) : 0;
    const bool masked = (block + 1) * kBlock > seen_by_all;
    float* mine = maxima + turn * 4 * kTiles * 8;
#pragma unroll 1
    for (int n = 0; n < num_tiles; ++n) {
      float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          const uint4 b = smem_q[(n * kSegments + s) * 32 + lane];
          ptx::mma_16816<T>(d, a[m][0][s].x, a[m][1][s].x, a[m][0][s].y, a[m][1][s].y, b.x, b.y);
          ptx::mma_16816<T>(d, a[m][0][s].z, a[m][1][s].z, a[m][0][s].w, a[m][1][s].w, b.z, b.w);
        }
        if (masked) {
          const int key = block * kBlock + (warp * kKeyTiles + m) * 16 + r;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = n * 8 + c * 2 + j % 2;
            if (key + j / 2 * 8 >= sequence.num_visible(sequence.first_position + row / params.num_groups)) d[j] = -INFINITY;
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) best[j % 2] = ptx::max_nan(best[j % 2], d[j]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) best[j] = ptx::max_nan(best[j], __shfl_xor_sync(0xffffffffu, best[j], o));
        if (r == 0) mine[warp * kTiles * 8 + n * 8 + c * 2 + j] = best[j];
      }
    }
    ptx::named_barrier(1 + quad, 128);
    if (thread < num_rows) {
      const float m = ptx::max_nan(ptx::max_nan(mine[thread], mine[kTiles * 8 + thread]),
                                   ptx::max_nan(mine[2 * kTiles * 8 + thread], mine[3 * kTiles * 8 + thread]));
      params.scores[(std::int64_t{sequence.query_begin} + thread / params.num_groups) * params.stride_token +
                    thread % params.num_groups * params.stride_group + block] = m;
    }
  }
  ptx::named_barrier(1 + quad, 128);  // the next run's queries and maxima take this one's place
}

// The scores of the whole batch, by the whole grid.
template <typename Traits>
__device__ __forceinline__ void few_score(const ScoreFewParams& params, unsigned char* smem) {
  int* block_begin = reinterpret_cast<int*>(smem);
  int* sums = block_begin + kFewSeqs + 4;
  const int quad = threadIdx.x / 128, unit = blockIdx.x * kFewQuads + quad, num_units = gridDim.x * kFewQuads;
  unsigned char* memory = smem + Traits::kBeginBytes + quad * Traits::kQuadBytes;
  for (int first = 0; first < params.batch.num_seqs; first += kFewSeqs) {
    const int count = min(params.batch.num_seqs - first, kFewSeqs);
    few_block_begin(params.batch, first, count, block_begin, sums);
    const std::int64_t total = block_begin[count];
    int begin = static_cast<int>(total * unit / num_units);
    const int end = static_cast<int>(total * (unit + 1) / num_units);
    int low = 0, high = count;  // the sequence that holds block `begin`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (block_begin[middle] <= begin ? low : high) = middle;
    }
    for (int i = low; begin < end; ++i) {
      const int stop = min(end, block_begin[i + 1]);
      if (begin < stop) few_score_run<Traits>(params, first + i, begin - block_begin[i], stop - block_begin[i], memory);
      begin = max(begin, stop);
    }
    if (params.fill) {
      for (int i = 0; i < count; ++i) {
        Sequence sequence;
        const int seen = block_begin[i + 1] - block_begin[i], width = params.num_blocks - seen;
        if (width <= 0 || !params.batch.load<false>(first + i, &sequence)) continue;
        const std::int64_t cells = std::int64_t{sequence.seqlen_q} * params.num_groups * width;
        for (std::int64_t cell = blockIdx.x * kFewThreads + threadIdx.x; cell < cells; cell += gridDim.x * kFewThreads) {
          const int row = static_cast<int>(cell / width);
          params.scores[(std::int64_t{sequence.query_begin} + row / params.num_groups) * params.stride_token +
                        row % params.num_groups * params.stride_group + seen + cell % width] = -INFINITY;
        }
      }
    }
    __syncthreads();
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kFewThreads, 1) smxx_score_few_kernel(const __grid_constant__ ScoreFewParams params) {
  extern __shared__ __align__(16) unsigned char smem[];
  ptx::grid_dependency_launch();
  few_score<Traits>(params, smem);
}

}  // namespace openmsa::cuda
