// msa_attention as two calls, for backends and sizes without a kernel that does both at once.
#pragma once

#include "core/params.hpp"

namespace openmsa::core {

// The lists between the two steps: the caller's, or scratch where the caller does not want them.
inline TensorView two_step_ids(const MsaAttentionParams& params) {
  if (params.block_ids.given()) return params.block_ids;
  const std::int64_t row = params.config.top_k, token = row * params.config.num_kv_heads;
  TensorView ids = make_view(nullptr, DType::kI32, {params.geo.total_q, params.config.num_kv_heads, row}, params.q.device);
  ids.data = params.context.arena->take<std::int32_t>(static_cast<std::size_t>(params.geo.total_q * token));
  return ids;
}

inline SparseAttentionParams attend_step(const MsaAttentionParams& params, const TensorView& ids) {
  return {params.config, params.geo, params.q, params.k, params.v, ids, params.out, params.lse, params.context};
}

// Runs (or reserves for) both steps; they use the arena one after the other, so their scratch adds up.
template <typename Select, typename Attend>
void two_steps(const MsaAttentionParams& params, Select select, Attend attend) {
  const TensorView ids = two_step_ids(params);
  select(IndexSelectParams{params.config, params.geo, params.q_idx, params.k_idx, ids, params.context});
  attend(attend_step(params, ids));
}

}  // namespace openmsa::core
