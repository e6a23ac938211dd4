// What stands around the kernels of the backward passes: rows before them, sums of their partials after them.
#pragma once

#include "cuda/items.hpp"
#include "cuda/launch.hpp"

namespace openmsa::cuda {

// Row statistics of a chunk, as the kernels read them: rows[token of the chunk][group][0] = lse in log2 units, [1] = delta, the sum
// over d of d_out * out. No probability comes from a row of lse +inf: heads beyond G, rows without keys (-inf in the forward pass),
// and the row after the last token, which is that of absent tokens.
struct RowsParams {
  const float* lse;  // [T, Hq]
  std::int64_t stride_lse_token;
  const void *out, *d_out;  // [T, Hq, D] of T; both null: delta is 0
  std::int64_t stride_out_token, stride_out_head, stride_d_out_token, stride_d_out_head;
  float* rows;  // [chunk_tokens + 1, Hkv, 2, Gp]
  std::int32_t chunk_begin, chunk_tokens, num_groups, group_size, log_group;
};
inline std::int64_t num_row_values(std::int64_t chunk, std::int64_t num_groups, int log_group) {
  return ((chunk + 1) * num_groups * 2) << log_group;
}
void launch_backward_rows(const RowsParams& params, DType dtype, std::int32_t dim, void* stream);

// out[t, g * group_size + h] = scale * sum of slots[t, g, slot, h] over the visits of (t, g), by ascending slot; 0 without any.
struct SlotSumParams {
  SlotLists lists;
  const void* partial;  // [chunk_tokens, Hkv, slots, 1 << log_group, dim] of T
  void* out;            // [T, Hkv * group_size, dim] of T
  std::int64_t stride_out_token, stride_out_head;
  std::int32_t group_size, log_group;  // rows of a (token, group): used, and log2 of those stored
  float scale;
};
void launch_slot_sum(const SlotSumParams& params, DType dtype, std::int32_t dim, void* stream);

// Adds the partials of items that share a block to the block's rows of each accumulator, in the items' order.
struct KeyShareParams {
  BatchParams batch;
  const AttendItem* items;
  const std::int32_t* num_items;
  const float* shared;  // [num_shared, num_sums, Bk, dim]
  float* sums[2];       // [Hkv, S, dim] each; num_sums of them
  std::int32_t num_sums, max_item, total_k, dim;
};
// Nothing where the visits share no block.
void launch_key_share(const KeyShareParams& params, std::int64_t max_items, std::int64_t num_shared, void* stream);

// out[s, g] = scale * sum[g, s]; with over_groups out[s] = scale * the sum of sum[g, s] over g, ascending.
struct KeySumParams {
  const float* sum;  // [Hkv, S, dim]
  void* out;         // [S, Hkv, dim] or [S, dim] of T
  std::int64_t stride_out_token, stride_out_head;
  std::int32_t num_groups, total_k, dim;
  bool over_groups;
  float scale;
};
void launch_key_sum(const KeySumParams& params, DType dtype, void* stream);

}  // namespace openmsa::cuda
