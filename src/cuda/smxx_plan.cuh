// Work lists of a batch, made on the device: query tiles (longest first), what they add up to, and the first global block of every
// sequence.
//
// Roles   one CTA. Tiles are counted a sequence at a time, bucketed by how many blocks they see (a counting sort in shared memory),
//         and written; entries past the last tile get seq = -1. Order inside a bucket is arbitrary and no result depends on it.
#pragma once

#include <climits>

#include "cuda/params.hpp"
#include "cuda/scan.cuh"

namespace openmsa::cuda {

struct PlanParams {
  BatchParams batch;
  std::int32_t token_begin, token_end;  // packed query tokens to cover
  std::int32_t tile_tokens;
  std::int32_t capacity;      // entries of tiles
  QueryTile* tiles;           // [capacity]
  std::int32_t* tile_begin;   // [B+1] scratch: first tile of every sequence
  std::int32_t* block_begin;  // [B+1] first global block of every sequence, or null
  PlanSum* sum;               // [1]
};

inline constexpr int kPlanThreads = kScanThreads, kPlanBuckets = 1024;
static_assert(kPlanBuckets == kScanThreads);

// Tokens of a sequence that lie in the range, relative to its first query.
__device__ inline void plan_range(const PlanParams& params, const Sequence& sequence, int* first, int* end) {
  *first = min(max(params.token_begin - sequence.query_begin, 0), sequence.seqlen_q);
  *end = max(min(params.token_end - sequence.query_begin, sequence.seqlen_q), *first);
}

__global__ void __launch_bounds__(kPlanThreads) smxx_plan_kernel(const __grid_constant__ PlanParams params) {
  __shared__ int sums[32];
  __shared__ int buckets[kPlanBuckets];
  __shared__ PlanSum sum;
  const int block_size = params.batch.block_size, thread = threadIdx.x;

  int num_tiles = 0;
  std::int64_t num_blocks = 0;
  for (int base = 0; base < params.batch.num_seqs; base += kPlanThreads) {
    const int seq = base + thread;
    int tiles = 0, blocks = 0;
    Sequence sequence;
    if (seq < params.batch.num_seqs && params.batch.load(seq, &sequence)) {
      int first, end;
      plan_range(params, sequence, &first, &end);
      tiles = (end - first + params.tile_tokens - 1) / params.tile_tokens;
      blocks = (sequence.seqlen_k + block_size - 1) / block_size;
    }
    int total_tiles, total_blocks;
    const int tile = scan_prefix(tiles, sums, &total_tiles);
    const int block = scan_prefix(min(blocks, INT_MAX / kPlanThreads), sums, &total_blocks);
    if (seq < params.batch.num_seqs) {
      params.tile_begin[seq] = num_tiles + tile;
      if (params.block_begin) params.block_begin[seq] = static_cast<std::int32_t>(num_blocks + block);
    }
    num_tiles += total_tiles;
    num_blocks += total_blocks;
  }
  // Sequences that overlap by broken offsets (reported) may have more blocks than anybody has room for; then all begin at 0, as if
  // there were none, and whoever counts from there stays in bounds.
  const bool overlap = params.batch.cu_seqlens_k && params.batch.total_k >= 0 &&
                       num_blocks > std::int64_t{params.batch.total_k} / block_size + params.batch.num_seqs;
  if (params.block_begin && overlap) {
    num_blocks = 0;
    for (int seq = thread; seq < params.batch.num_seqs; seq += kPlanThreads) params.block_begin[seq] = 0;
  }
  if (thread == 0) {
    params.tile_begin[params.batch.num_seqs] = num_tiles;
    if (params.block_begin) params.block_begin[params.batch.num_seqs] = static_cast<std::int32_t>(num_blocks);
  }
  for (int i = thread; i < kPlanBuckets; i += kPlanThreads) buckets[i] = 0;
  if (thread == 0) sum = {min(num_tiles, params.capacity), 0, 0};
  __syncthreads();

  // Two passes over all tiles: count the buckets, then place. Bucket 0 holds the longest.
  const float scale = float(kPlanBuckets) / float(params.batch.max_seqlen_k / block_size + 2);
  int longest = 0, total_seen = 0;  // blocks, of this thread's tiles
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = thread; i < min(num_tiles, params.capacity); i += kPlanThreads) {
      int low = 0, high = params.batch.num_seqs;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (params.tile_begin[middle] <= i)
          low = middle;
        else
          high = middle;
      }
      Sequence sequence;
      if (!params.batch.load(low, &sequence)) continue;
      int first, end;
      plan_range(params, sequence, &first, &end);
      const int begin = first + (i - params.tile_begin[low]) * params.tile_tokens, last = min(begin + params.tile_tokens, end);
      const int blocks = (sequence.num_visible(sequence.first_position + last - 1) + block_size - 1) / block_size;
      const int bucket = max(kPlanBuckets - 1 - static_cast<int>(blocks * scale), 0);
      const int place = atomicAdd(&buckets[bucket], 1);
      if (pass == 1) {
        params.tiles[place] = {low, begin, last};
      } else {
        longest = max(longest, blocks);
        total_seen += blocks;
      }
    }
    __syncthreads();
    if (pass == 0) {
      // One atomic a warp: those on 64 bits of shared memory are loops.
#pragma unroll
      for (int o = 16; o > 0; o /= 2) {
        longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, o));
        total_seen += __shfl_xor_sync(0xffffffffu, total_seen, o);
      }
      if (thread % 32 == 0) {
        atomicMax(&sum.longest, longest);
        atomicAdd(&sum.total, static_cast<unsigned long long>(total_seen));
      }
      int total;
      const int begin = scan_prefix(buckets[thread], sums, &total);
      buckets[thread] = begin;
      __syncthreads();
    }
  }
  if (thread == 0) *params.sum = sum;
  for (int i = num_tiles + thread; i < params.capacity; i += kPlanThreads) params.tiles[i] = {-1, 0, 0};
}

}  // namespace openmsa::cuda
