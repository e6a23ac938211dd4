// New rows of k, v and k_idx into the pages that their slots name.
//
// Roles   a warp takes 32 units of a token (32 x 16 bytes of k, v or k_idx, where strides allow), a lane one of them, a CTA eight tokens.
//         The row is asked for before the slot is looked at: one round trip to memory, not two.
// Bytes   twice the rows: bound by memory for a prompt, by the launch for a decode step.
// Skipped rows with a negative slot, silently; rows with a slot beyond the pool, reported.
#pragma once

#include "cuda/write_pages.hpp"

namespace openmsa::cuda {

inline constexpr int kWriteTokens = 8, kWriteThreads = 32 * kWriteTokens;

template <typename Unit>
__global__ void __launch_bounds__(kWriteThreads) smxx_write_pages_kernel(const __grid_constant__ WritePagesParams params) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int token = static_cast<int>(blockIdx.x) * kWriteTokens + static_cast<int>(threadIdx.x / 32);
  if (token >= params.num_tokens) return;
  const int num_chunks = params.chunks[0] + params.chunks[1] + params.chunks[2];
  for (int i = static_cast<int>(blockIdx.y); i < num_chunks; i += static_cast<int>(gridDim.y)) {
    int part = 0, chunk = i;
    while (chunk >= params.chunks[part]) chunk -= params.chunks[part++];
    const PageRowsParams& rows = params.parts[part];
    const int unit = chunk * 32 + lane, head = unit / rows.width, at = unit - head * rows.width;
    Unit value{};
    if (head < rows.heads) {
      value = __ldcs(static_cast<const Unit*>(rows.rows) + token * rows.stride_token + head * rows.stride_head + at);
    }
    const std::int64_t slot = __ldg(params.slots + token);
    if (slot < 0) return;
    if (slot >= std::int64_t{params.num_pages} * params.block_size) {
      if (i == 0 && lane == 0) report(params.fault, FaultCode::kSlot, slot, token, params.num_pages);
      return;
    }
    const int page = static_cast<int>(slot) / params.block_size, place = static_cast<int>(slot) - page * params.block_size;
    if (head < rows.heads) {
      static_cast<Unit*>(rows.pages)[page * rows.stride_page + head * rows.stride_page_head + place * rows.stride_page_token + at] =
          value;
    }
  }
}

}  // namespace openmsa::cuda
