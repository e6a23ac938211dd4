// out[t,h] = softmax over the visible keys of the selected blocks of (softmax_scale * <q[t,h], k[j,g]>), times v[j,g].
#include "reference/attend.hpp"

#include <algorithm>
#include <numeric>

#include "reference/reference.hpp"

namespace openmsa::reference {

std::vector<std::int64_t> attended_keys(const core::Geometry& geo, const TensorView& block_ids, const Query& query,
                                        std::int32_t g) {
  std::vector<std::int64_t> keys;
  if (!block_ids.given()) {
    keys.resize(static_cast<std::size_t>(query.num_visible));
    std::iota(keys.begin(), keys.end(), 0);
    return keys;
  }
  const auto* ids = reinterpret_cast<const std::int32_t*>(address(block_ids, query.token, g));
  for (std::int64_t n = 0; n < block_ids.shape[2] && ids[n] >= 0; ++n) {
    const std::int64_t begin = std::int64_t{ids[n]} * geo.block_size;
    const std::int64_t end = std::min(begin + geo.block_size, query.num_visible);
    for (std::int64_t j = begin; j < end; ++j) keys.push_back(j);
  }
  return keys;
}

std::vector<double> scaled_scores(const HeadRows& k, const std::vector<double>& q, double scale,
                                  std::span<const std::int64_t> keys) {
  std::vector<double> scores;
  scores.reserve(keys.size());
  for (const std::int64_t j : keys) scores.push_back(scale * dot(q, k.row(j, static_cast<std::int64_t>(q.size()))));
  return scores;
}

Softmax softmax(const std::vector<double>& scores) {
  Softmax result;
  if (scores.empty()) return result;
  double max = -kInfinity;
  for (const double score : scores) max = max_or_nan(max, score);
  double sum = 0.0;
  for (const double score : scores) sum += std::exp(score - max);
  result.lse = max + std::log(sum);
  for (const double score : scores) result.probabilities.push_back(std::exp(score - max) / sum);
  return result;
}

std::vector<double> weighted_sum(const HeadRows& v, const std::vector<double>& probabilities, std::span<const std::int64_t> keys,
                                 std::int64_t head_dim) {
  std::vector<double> out(static_cast<std::size_t>(head_dim), 0.0);
  for (std::size_t n = 0; n < keys.size(); ++n) add_scaled(out, probabilities[n], v.row(keys[n], head_dim));
  return out;
}

void store_result(const std::vector<double>& row, double row_lse, const TensorView& out, const TensorView& lse, std::int64_t t,
                  std::int64_t h) {
  store_row(address(out, t, h), out.dtype, row);
  if (lse.given()) store(address(lse, t, h), lse.dtype, 0, row_lse);
}

void sparse_attention(const core::SparseAttentionParams& params) {
  const MsaConfig& config = params.config;
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t) {
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      const auto keys = attended_keys(params.geo, params.block_ids, query, g);
      const HeadRows k{params.geo, params.k, query.seq, g}, v{params.geo, params.v, query.seq, g};
      for (std::int32_t h = g * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
        const auto q = load_row(address(params.q, query.token, h), params.q.dtype, config.head_dim);
        const Softmax weights = softmax(scaled_scores(k, q, config.effective_softmax_scale(), keys));
        store_result(weighted_sum(v, weights.probabilities, keys, config.head_dim), weights.lse, params.out, params.lse,
                     query.token, h);
      }
    }
  });
}

}  // namespace openmsa::reference
