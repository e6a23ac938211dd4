// block_scores for few query tokens per sequence (decode, speculative decode): every index key is read once.
//
// Roles     one CTA of 16 warps a multiprocessor; each of its four quads of warps takes an equal run of the batch's blocks,
//           whatever sequences they belong to; a warp takes a quarter of a block (32 or 16 keys) in m16 tiles. The query rows
//           (tokens x index heads, at most 64) are the n8 tiles.
// Prelude   up to 32 sequences, every warp lays out the batch by itself, a lane a sequence: nothing is in flight until that is done.
// Loads     keys go from memory straight to registers as 16-byte pieces (see ptx/mma.cuh for the order trick); 8 KB a warp are in
//           flight, the next block's from the moment the last products of this one are issued. The first block's start before the
//           queries are there, which sit in the quad's shared memory.
// Shared    the layout 16 KB; a quad: queries 16 KB, maxima of its warps 2 KB.
// Barriers  named 1..4, one a quad, 128 threads.
// Registers at most 128 (512 threads a CTA).
// Empty     a sequence without queries or keys has no blocks. `fill` writes -inf past what its queries see; select does not look.
#pragma once

#include <climits>

#include "cuda/divisor.hpp"
#include "cuda/params.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"

namespace openmsa::cuda {

struct ScoreFewParams {
  BatchParams batch;
  const void* q_idx;                                                           // [T, Hkv, Di]
  const void* k_idx;                                                           // [S, Di] or [num_pages, Bk, Di]
  std::int64_t stride_q_token, stride_q_group, stride_k_token, stride_k_page;  // elements
  float* scores;                                                               // [T, Hkv, num_blocks]
  std::int64_t stride_token, stride_group;
  std::int32_t num_blocks;  // width of scores
  Divisor groups;           // Hkv
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
  static constexpr int kBeginBytes = kFewThreads * sizeof(Sequence);
  static_assert((kFewSeqs + 4 + 32) * 4 <= kBeginBytes);
  static constexpr int kSmemBytes = kBeginBytes + kFewQuads * kQuadBytes;
};

// Sequence `seq`, whose queries see blocks [begin, end) of those numbered through a batch.
struct FewPlace {
  Sequence sequence;
  int seq, begin, end;
};

// The blocks that the queries of sequences first .. first + count - 1 see, numbered through. By whole warps.
template <typename Traits>
struct FewBlocks {
  const BatchParams& batch;
  int first, count;
  int* begin;       // shared memory; more than 32 sequences: [count + 1], and room for the warps' sums behind
  Sequence* table;  // the same memory; up to 32: this warp's own copy of them
  int end;          // up to 32: where the blocks of this lane's one end

  __device__ __forceinline__ FewBlocks(const BatchParams& batch, int first, int count, int* memory)
      : batch(batch),
        first(first),
        count(count),
        begin(memory),
        table(reinterpret_cast<Sequence*>(memory) + threadIdx.x / 32 * 32) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sequence sequence{};
    if (count <= 32) {
      end = scan(lane < count ? load(first + lane, &sequence) : 0, count);
      if (lane >= count) end = INT_MAX;
      if (lane < count) table[lane] = sequence;
      __syncwarp();
      return;
    }
    int* sums = begin + kFewSeqs + 4;
    int base = 0;
    for (int i0 = 0; i0 < count; i0 += kFewThreads) {
      const int i = i0 + threadIdx.x, sum = scan(i < count ? load(first + i, &sequence) : 0, 32);
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

  __device__ __forceinline__ int total() const { return count <= 32 ? __shfl_sync(0xffffffffu, end, count - 1) : begin[count]; }

  // The sequence, counted from `first`, that holds a block.
  __device__ __forceinline__ int find(int block) const {
    if (count <= 32) return __popc(__ballot_sync(0xffffffffu, end <= block));
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (begin[middle] <= block ? low : high) = middle;
    }
    return low;
  }

  __device__ __forceinline__ FewPlace at(int i) const {
    FewPlace place;
    place.seq = first + i;
    if (count > 32) {
      batch.load<false>(place.seq, &place.sequence);
      place.begin = begin[i], place.end = begin[i + 1];
      return place;
    }
    place.sequence = table[i];
    place.begin = i == 0 ? 0 : __shfl_sync(0xffffffffu, end, i - 1), place.end = __shfl_sync(0xffffffffu, end, i);
    return place;
  }

 private:
  __device__ __forceinline__ int load(int seq, Sequence* sequence) {  // and how many blocks its queries see
    if (!batch.load(seq, sequence) || sequence->seqlen_q == 0) return 0;
    return (sequence->num_visible(sequence->first_position + sequence->seqlen_q - 1) + Traits::kBlock - 1) / Traits::kBlock;
  }
  static __device__ __forceinline__ int scan(int sum, int lanes) {  // of the first `lanes`
#pragma unroll 1
    for (int o = 1; o < lanes; o *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, sum, o);
      if (static_cast<int>(threadIdx.x % 32) >= o) sum += x;
    }
    return sum;
  }
};

// Blocks [begin, end) of one sequence, by one quad.
template <typename Traits>
__device__ __forceinline__ void few_score_run(const ScoreFewParams& params, const FewPlace& place, int begin, int end,
                                              unsigned char* memory) {
  using T = typename Traits::T;
  constexpr int kSegments = Traits::kSegments, kTiles = Traits::kTiles, kKeyTiles = Traits::kKeyTiles, kBlock = Traits::kBlock;
  const int quad = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, r = lane / 4,
            c = lane % 4;
  uint4* smem_q = reinterpret_cast<uint4*>(memory);
  float* maxima = reinterpret_cast<float*>(memory + Traits::kQueryBytes);  // [2][4][kTiles * 8]
  const Sequence& sequence = place.sequence;
  // Pages of 32 blocks at a time, a lane each: a load of its own beside the keys would hold up all but the first of them.
  const auto list = [&](int block) { return sequence.pages && block + lane < end ? sequence.pages[block + lane] : 0; };
  int listed = list(begin);
  const int num_rows = sequence.seqlen_q * params.groups.value, num_tiles = (num_rows + 7) / 8;
  const T *q_base = static_cast<const T*>(params.q_idx), *k_base = static_cast<const T*>(params.k_idx);
  auto load_q = [&](int tile, int segment) {
    const int row = tile * 8 + r;
    if (row >= num_rows) return uint4{0, 0, 0, 0};
    const int token = params.groups.quotient(row);
    return *reinterpret_cast<const uint4*>(q_base + (std::int64_t{sequence.query_begin} + token) * params.stride_q_token +
                                           (row - token * params.groups.value) * params.stride_q_group + segment * 32 + c * 8);
  };
  uint4 a[kKeyTiles][2][kSegments];
  const auto load_keys = [&](int block) {
    const int at = (block - begin) % 32;
    if (at == 0 && block > begin) listed = list(block);
    const int id = __shfl_sync(0xffffffffu, listed, at),
              page = sequence.pages ? params.batch.checked_page(place.seq, block, id) : 0;
    // Keys past the sequence's end are masked below, so any readable row does for them; a bad page reads queries instead of keys.
    const int last_key = page < 0 ? 0 : min(sequence.seqlen_k - block * kBlock, kBlock) - 1;
    const T* k = page < 0         ? q_base
                 : sequence.pages ? k_base + page * params.stride_k_page
                                  : k_base + (sequence.key_begin + std::int64_t{block} * kBlock) * params.stride_k_token;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const T* key = k + min((warp * kKeyTiles + m) * 16 + h * 8 + r, last_key) * params.stride_k_token + c * 8;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) a[m][h][s] = ptx::load_stream(key + s * 32);
      }
    }
  };
  load_keys(begin);
  for (int i = warp; i < num_tiles * kSegments; i += 4) smem_q[i * 32 + lane] = load_q(i / kSegments, i % kSegments);
  ptx::named_barrier(1 + quad, 128);
  const int seen_by_all = sequence.num_visible(sequence.first_position);

  int turn = 0;
  for (int block = begin; block < end; ++block, turn ^= 1) {
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
            if (key + j / 2 * 8 >= sequence.num_visible(sequence.first_position + params.groups.quotient(row))) d[j] = -INFINITY;
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) best[j % 2] = ptx::max_nan(best[j % 2], d[j]);
      }
      if (n + 1 == num_tiles && block + 1 < end) load_keys(block + 1);
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
      const int token = params.groups.quotient(thread), group = thread - token * params.groups.value;
      params.scores[(std::int64_t{sequence.query_begin} + token) * params.stride_token + group * params.stride_group + block] = m;
    }
  }
  ptx::named_barrier(1 + quad, 128);  // the next run's queries and maxima take this one's place
}

// The scores of the whole batch, by the whole grid.
template <typename Traits>
__device__ __forceinline__ void few_score(const ScoreFewParams& params, unsigned char* smem) {
  const int quad = threadIdx.x / 128, unit = quad * gridDim.x + blockIdx.x, num_units = gridDim.x * kFewQuads;
  unsigned char* memory = smem + Traits::kBeginBytes + quad * Traits::kQuadBytes;
  for (int first = 0; first < params.batch.num_seqs; first += kFewSeqs) {
    const int count = min(params.batch.num_seqs - first, kFewSeqs);
    const FewBlocks<Traits> blocks(params.batch, first, count, reinterpret_cast<int*>(smem));
    const int total = blocks.total(), each = static_cast<unsigned>(total) / num_units, longer = total - each * num_units;
    int block = each * unit + min(unit, longer);
    const int end = block + each + (unit < longer ? 1 : 0);
    while (block < end) {
      const FewPlace place = blocks.at(blocks.find(block));
      const int stop = min(end, place.end);
      few_score_run<Traits>(params, place, block - place.begin, stop - place.begin, memory);
      block = stop;
    }
    if (params.fill) {
      for (int i = 0; i < count; ++i) {
        const FewPlace place = blocks.at(i);
        const int seen = place.end - place.begin, width = params.num_blocks - seen;
        if (width <= 0) continue;
        const std::int64_t cells = std::int64_t{place.sequence.seqlen_q} * params.groups.value * width;
        for (std::int64_t cell = blockIdx.x * kFewThreads + threadIdx.x; cell < cells; cell += gridDim.x * kFewThreads) {
          const int row = static_cast<int>(cell / width);
          const int token = params.groups.quotient(row), group = row - token * params.groups.value;
          params.scores[(std::int64_t{place.sequence.query_begin} + token) * params.stride_token + group * params.stride_group +
                        seen + cell % width] = -INFINITY;
        }
      }
    }
    if (first + kFewSeqs < params.batch.num_seqs) __syncthreads();  // the layout has been read
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kFewThreads, 1) smxx_score_few_kernel(const __grid_constant__ ScoreFewParams params) {
  OPENMSA_DYNAMIC_SMEM(smem);
  ptx::grid_dependency_launch();
  few_score<Traits>(params, smem);
}

}  // namespace openmsa::cuda
