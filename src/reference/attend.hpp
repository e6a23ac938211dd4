// Attention of one query row over a list of keys: what sparse_attention, dense_attention and their gradients share.
#pragma once

#include <span>

#include "reference/rows.hpp"

namespace openmsa::reference {

// The keys (values, index keys) of one head of one sequence. For one thread.
struct HeadRows {
  const core::Geometry& geo;
  const core::KeyBlocks& keys;
  std::int32_t seq;
  std::int32_t head;

  // Stays what it is until the next call: an allocation for each key would cost more than its arithmetic.
  const std::vector<double>& row(std::int64_t j, std::int64_t n) const {
    load_key(keys, geo, seq, j, head, n, values);
    return values;
  }

  mutable std::vector<double> values{};
};

// What query t attends to for KV head g, ascending: the visible keys of the blocks in block_ids[t,g,:], or all visible keys where
// block_ids is not given.
std::vector<std::int64_t> attended_keys(const core::Geometry& geo, const TensorView& block_ids, const Query& query, std::int32_t g);

// s_j = scale * <q, k_j> for each listed key j.
std::vector<double> scaled_scores(const HeadRows& k, const std::vector<double>& q, double scale,
                                  std::span<const std::int64_t> keys);

struct Softmax {
  std::vector<double> probabilities;  // exp(s_j - lse)
  double lse = -kInfinity;            // ln sum_j exp(s_j); -inf without scores
};
Softmax softmax(const std::vector<double>& scores);

// sum_j p_j * v_j; 0 without keys.
std::vector<double> weighted_sum(const HeadRows& v, const std::vector<double>& probabilities, std::span<const std::int64_t> keys,
                                 std::int64_t head_dim);

// Rounds a result into out[t,h,:] and, if it was given, lse[t,h].
void store_result(const std::vector<double>& row, double row_lse, const TensorView& out, const TensorView& lse, std::int64_t t,
                  std::int64_t h);

}  // namespace openmsa::reference
