// The first of every sequence's blocks when those of all sequences are counted through.
//
// Roles   one CTA, a thread a sequence; every sequence is looked at, so that a broken one is reported though no token asks for it.
// Empty   sequences without keys, or broken ones. Sequences that overlap by broken offsets (reported) may have more blocks than
//         there is room for; then all begin at 0, as if there were no blocks, and whoever counts from there stays in bounds.
#pragma once

#include <climits>

#include "cuda/params.hpp"
#include "cuda/scan.cuh"

namespace openmsa::cuda {

struct BlockBeginParams {
  BatchParams batch;
  std::int32_t max_blocks;
  std::int32_t* block_begin;  // [B+1]
};

__global__ void __launch_bounds__(kScanThreads) smxx_block_begin_kernel(const __grid_constant__ BlockBeginParams params) {
  __shared__ int sums[32];
  const int num_seqs = params.batch.num_seqs, block_size = params.batch.block_size, thread = threadIdx.x;
  std::int64_t num_blocks = 0;
  for (int base = 0; base < num_seqs; base += kScanThreads) {
    const int seq = base + thread;
    Sequence sequence;
    int blocks = 0;
    if (seq < num_seqs && params.batch.load(seq, &sequence)) blocks = (sequence.seqlen_k + block_size - 1) / block_size;
    int total;
    const int before = scan_prefix(min(blocks, INT_MAX / kScanThreads), sums, &total);
    if (seq < num_seqs) params.block_begin[seq] = static_cast<std::int32_t>(num_blocks + before);
    num_blocks += total;
  }
  if (num_blocks > params.max_blocks) {
    num_blocks = 0;
    for (int seq = thread; seq < num_seqs; seq += kScanThreads) params.block_begin[seq] = 0;
  }
  if (thread == 0) params.block_begin[num_seqs] = static_cast<std::int32_t>(num_blocks);
}

}  // namespace openmsa::cuda
