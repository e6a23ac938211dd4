// Work items of attention over every visible block: a block of a group and the tokens of the chunk that see it, which are the last
// ones of its sequence.
//
// Roles   one CTA. A thread a sequence counts the blocks that its last token of the chunk sees; then all threads write the items,
//         ordered by (sequence, block, group), so that the short ones of the diagonal come last.
// Empty   sequences without tokens in the chunk, without keys, or broken ones. The first chunk looks at every sequence, so that a
//         broken one is reported though no token asks for it.
#pragma once

#include <climits>

#include "cuda/lists.hpp"
#include "cuda/params.hpp"
#include "cuda/scan.cuh"

namespace openmsa::cuda {

struct EveryBlockParams {
  BatchParams batch;
  std::int32_t chunk_begin, chunk_tokens, num_groups;
  std::int32_t max_items;   // capacity; sequences that overlap (reported) would need more
  AttendItem* items;        // [max_items]
  std::int32_t* num_items;  // [1]
};

// Tokens of a sequence that lie in the chunk, relative to its first query.
__device__ inline void chunk_range(const EveryBlockParams& params, const Sequence& sequence, int* first, int* end) {
  *first = min(max(params.chunk_begin - sequence.query_begin, 0), sequence.seqlen_q);
  *end = max(min(params.chunk_begin + params.chunk_tokens - sequence.query_begin, sequence.seqlen_q), *first);
}

__global__ void __launch_bounds__(kScanThreads) smxx_every_block_kernel(const __grid_constant__ EveryBlockParams params) {
  __shared__ int sums[32];
  __shared__ int block_begin[kScanThreads];  // of the sequences at hand
  const BatchParams& batch = params.batch;
  const int thread = threadIdx.x;
  if (params.chunk_begin == 0) {
    Sequence sequence;
    for (int seq = thread; seq < batch.num_seqs; seq += kScanThreads) batch.load(seq, &sequence);
  }
  const int end_seq = batch.sequence_of(params.chunk_begin + params.chunk_tokens - 1) + 1;
  int num_items = 0;
  for (int base = batch.sequence_of(params.chunk_begin); base < end_seq; base += kScanThreads) {
    const int seq = base + thread;
    int blocks = 0;
    Sequence sequence;
    if (seq < end_seq && batch.load<false>(seq, &sequence)) {
      int first, end;
      chunk_range(params, sequence, &first, &end);
      const int visible = end > first ? sequence.num_visible(sequence.first_position + end - 1) : 0;
      // Lengths that overlap by broken offsets could add up past 31 bits.
      blocks = min((visible + batch.block_size - 1) / batch.block_size, INT_MAX / kScanThreads);
    }
    int num_blocks;
    const int begin = scan_prefix(blocks, sums, &num_blocks);
    block_begin[thread] = begin;
    __syncthreads();
    const std::int64_t wanted = std::int64_t{num_blocks} * params.num_groups;
    const int count = static_cast<int>(wanted < params.max_items - num_items ? wanted : params.max_items - num_items);
    for (int i = thread; i < count; i += kScanThreads) {
      const int at = i / params.num_groups, group = i % params.num_groups;
      int low = 0, high = kScanThreads;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (block_begin[middle] <= at)
          low = middle;
        else
          high = middle;
      }
      Sequence owner;
      batch.load<false>(base + low, &owner);
      int first, end;
      chunk_range(params, owner, &first, &end);
      const int block = at - block_begin[low];
      first = max(first, block * batch.block_size - owner.first_position);
      params.items[num_items + i] = {base + low, block, group, owner.query_begin + first - params.chunk_begin, end - first};
    }
    num_items += count;
    __syncthreads();  // block_begin has been read
  }
  if (thread == 0) *params.num_items = num_items;
}

}  // namespace openmsa::cuda
