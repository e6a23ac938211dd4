#include "cuda/select.hpp"

#include <algorithm>
#include <bit>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/smxx_select.cuh"
#include "cuda/smxx_select_few.cuh"
#include "cuda/smxx_select_rows.cuh"

namespace openmsa::cuda {

SelectParams select_params(const SelectCall& call) {
  SelectParams params{};
  params.batch = batch_params(*call.geo);
  params.scores = call.scores;
  params.stride_score_token = call.stride_token;
  params.stride_score_group = call.stride_group;
  params.block_ids = static_cast<std::int32_t*>(call.block_ids.data);
  params.stride_id_token = call.block_ids.stride[0];
  params.stride_id_group = call.block_ids.stride[1];
  params.token_begin = static_cast<std::int32_t>(call.token_begin);
  params.num_tokens = static_cast<std::int32_t>(call.token_end - call.token_begin);
  params.num_groups = call.config->num_kv_heads;
  params.top_k = call.config->top_k;
  params.num_init_blocks = call.config->num_init_blocks;
  params.num_local_blocks = call.config->num_local_blocks;
  const auto block_size = static_cast<unsigned>(params.batch.block_size);
  params.log_block = std::has_single_bit(block_size) ? std::countr_zero(block_size) : -1;
  return params;
}

void launch_select(const SelectCall& call) {
  const SelectParams params = select_params(call);
  const std::int64_t rows = std::int64_t{params.num_tokens} * params.num_groups;
  if (rows == 0) return;
  // 16-byte loads need every row to start on 16 bytes.
  const bool vector =
      reinterpret_cast<std::uintptr_t>(call.scores) % 16 == 0 && call.stride_token % 4 == 0 && call.stride_group % 4 == 0;
  // A CTA a row while rows are fewer than warps that fill the chip.
  const bool few = rows <= 4 * num_multiprocessors();
  const Order order = call.dependent ? Order::kDependent : Order::kAfter;
  const dim3 rows_grid(static_cast<unsigned>(
      std::min<std::int64_t>((rows + kSelectRowWarps - 1) / kSelectRowWarps, kSelectRowCtas * num_multiprocessors())));
  with_bound<16, 32>(params.top_k, [&](auto bound) {
    constexpr int kItems = bound.value / 16;
    if (few && vector) {
      launch(smxx_select_few_kernel<kItems, 4>, dim3(static_cast<unsigned>(rows)), kFewThreads, 0, call.stream, order, params);
    } else if (few) {
      launch(smxx_select_few_kernel<kItems, 1>, dim3(static_cast<unsigned>(rows)), kFewThreads, 0, call.stream, order, params);
    } else if (vector) {
      launch(smxx_select_rows_kernel<kItems, true>, rows_grid, 32 * kSelectRowWarps, kSelectRowsSmemBytes<kItems>, call.stream,
             Order::kAfter, params);
    } else {
      launch(smxx_select_rows_kernel<kItems, false>, rows_grid, 32 * kSelectRowWarps, kSelectRowsSmemBytes<kItems>, call.stream,
             Order::kAfter, params);
    }
  });
}

void select_blocks(const core::SelectBlocksParams& params) {
  const DeviceGuard guard(params.scores.device.index);
  launch_select({&params.geo, &params.config, static_cast<const float*>(params.scores.data), params.scores.stride[0],
                 params.scores.stride[1], params.block_ids, 0, params.geo.total_q, false, params.context.stream});
}

}  // namespace openmsa::cuda
