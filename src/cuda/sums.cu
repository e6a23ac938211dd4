#include "cuda/sums.hpp"

#include "cuda/instances.hpp"
#include "cuda/smxx_backward_rows.cuh"
#include "cuda/smxx_key_sum.cuh"
#include "cuda/smxx_slot_sum.cuh"

namespace openmsa::cuda {
namespace {

template <typename F>
void with_instance(DType dtype, std::int32_t dim, F&& f) {
  with_dtype(dtype, [&](auto element) { with_size<64, 96, 128>(dim, [&](auto size) { f(element, size); }); });
}

}  // namespace

void launch_backward_rows(const RowsParams& params, DType dtype, std::int32_t dim, void* stream) {
  const std::int64_t rows = (std::int64_t{params.chunk_tokens + 1} * params.num_groups) << params.log_group;
  with_instance(dtype, dim, [&](auto element, auto size) {
    launch(smxx_backward_rows_kernel<decltype(element), size.value>, dim3(blocks_for(rows * kRowLanes, kRowsThreads)), kRowsThreads,
           0, stream, Order::kAfter, params);
  });
}

void launch_slot_sum(const SlotSumParams& params, DType dtype, std::int32_t dim, void* stream) {
  const std::int64_t rows = (std::int64_t{params.lists.chunk_tokens} * params.lists.num_groups) << params.log_group;
  with_instance(dtype, dim, [&](auto element, auto size) {
    launch(smxx_slot_sum_kernel<decltype(element), size.value>, dim3(blocks_for(rows * (dim / 8), kSlotSumThreads)),
           kSlotSumThreads, 0, stream, Order::kAfter, params);
  });
}

void launch_key_share(const KeyShareParams& params, std::int64_t max_items, std::int64_t num_shared, void* stream) {
  if (num_shared == 0) return;
  launch(smxx_key_share_kernel, dim3(blocks_for(max_items, kShareItems), kShareParts), kShareThreads, 0, stream, Order::kAfter,
         params);
}

void launch_key_sum(const KeySumParams& params, DType dtype, void* stream) {
  if (params.total_k == 0) return;
  const dim3 grid(blocks_for(std::int64_t{params.total_k} * (params.dim / 8), kKeySumThreads),
                  params.over_groups ? 1u : static_cast<unsigned>(params.num_groups));
  with_instance(dtype, params.dim, [&](auto element, auto size) {
    launch(smxx_key_sum_kernel<decltype(element), size.value>, grid, kKeySumThreads, 0, stream, Order::kAfter, params);
  });
}

}  // namespace openmsa::cuda
