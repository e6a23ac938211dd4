#include "cuda/invert.hpp"

#include "cuda/smxx_invert.cuh"

namespace openmsa::cuda {

void launch_invert(const InvertParams& params, void* stream) {
  const dim3 grid(blocks_for(std::int64_t{params.chunk_tokens} * params.num_groups * params.top_k, 256));
  launch(smxx_invert_count_kernel, grid, 256, 0, stream, Order::kAfter, params);
  launch(smxx_invert_items_kernel, dim3(1), kScanThreads, 0, stream, Order::kAfter, params);
  launch(smxx_invert_fill_kernel, grid, 256, 0, stream, Order::kAfter, params);
}

}  // namespace openmsa::cuda
