// Attention of one query row over a list of keys: shared by sparse_attention and dense_attention.
#pragma once

#include <span>

#include "reference/rows.hpp"

namespace openmsa::reference {

struct KeysAndValues {
  const core::Geometry& geo;
  const core::KeyBlocks& k;
  const core::KeyBlocks& v;
  std::int32_t seq;
  std::int32_t head;  // KV head g
};

// s_j = scale * <q, k_j> for each listed key j.
std::vector<double> scaled_scores(const KeysAndValues& kv, const std::vector<double>& q, double scale,
                                  std::span<const std::int64_t> keys);

struct AttendResult {
  std::vector<double> out;  // sum_j exp(s_j - lse) * v_j; 0 without keys
  double lse;               // ln sum_j exp(s_j); -inf without keys
};
AttendResult attend(const KeysAndValues& kv, const std::vector<double>& scores, std::span<const std::int64_t> keys,
                    std::int64_t head_dim);

// Rounds a result into out[t,h,:] and, if it was given, lse[t,h].
void store_result(const AttendResult& result, const TensorView& out, const TensorView& lse, std::int64_t t, std::int64_t h);

}  // namespace openmsa::reference
