#include "cuda/invert.hpp"

#include "cuda/smxx_invert.cuh"

namespace openmsa::cuda {

void launch_invert(const InvertParams& params, void* stream) {
  const std::int64_t group_slots = std::int64_t{params.chunk_tokens} * params.top_k;
  const dim3 grid(blocks_for(group_slots * params.num_groups, kInvertThreads));
  if (params.max_blocks <= kMaxSharedBlocks) {
    launch(smxx_invert_count_shared_kernel,
           dim3(blocks_for(group_slots, kCountThreads * kCountSlots), static_cast<unsigned>(params.num_groups)), kCountThreads,
           static_cast<std::size_t>(params.max_blocks) * sizeof(std::int32_t), stream, Order::kAfter, params);
  } else {
    launch(smxx_invert_count_kernel, grid, kInvertThreads, 0, stream, Order::kAfter, params);
  }
  launch(smxx_invert_scan_kernel, dim3(1), kScanThreads, 0, stream, Order::kAfter, params);
  launch(smxx_invert_fill_kernel, grid, kInvertThreads, 0, stream, Order::kAfter, params);
}

}  // namespace openmsa::cuda
