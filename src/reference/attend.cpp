// out[t,h] = softmax over the visible keys of the selected blocks of (softmax_scale * <q[t,h], k[j,g]>), times v[j,g].
#include "reference/attend.hpp"

#include <algorithm>

#include "reference/reference.hpp"

namespace openmsa::reference {

std::vector<double> scaled_scores(const KeysAndValues& kv, const std::vector<double>& q, double scale,
                                  std::span<const std::int64_t> keys) {
  std::vector<double> scores;
  scores.reserve(keys.size());
  for (const std::int64_t j : keys) {
    scores.push_back(scale * dot(q, load_key(kv.k, kv.geo, kv.seq, j, kv.head, static_cast<std::int64_t>(q.size()))));
  }
  return scores;
}

AttendResult attend(const KeysAndValues& kv, const std::vector<double>& scores, std::span<const std::int64_t> keys,
                    std::int64_t head_dim) {
  AttendResult result{std::vector<double>(static_cast<std::size_t>(head_dim), 0.0), -kInfinity};
  if (keys.empty()) return result;

  double max = -kInfinity;
  for (const double score : scores) max = max_or_nan(max, score);
  double sum = 0.0;
  for (const double score : scores) sum += std::exp(score - max);
  result.lse = max + std::log(sum);

  for (std::size_t n = 0; n < keys.size(); ++n) {
    const double probability = std::exp(scores[n] - max) / sum;
    const auto value = load_key(kv.v, kv.geo, kv.seq, keys[n], kv.head, head_dim);
    for (std::size_t d = 0; d < value.size(); ++d) result.out[d] += probability * value[d];
  }
  return result;
}

void store_result(const AttendResult& result, const TensorView& out, const TensorView& lse, std::int64_t t, std::int64_t h) {
  std::byte* const row = address(out, t, h);
  for (std::size_t d = 0; d < result.out.size(); ++d) store(row, out.dtype, static_cast<std::int64_t>(d), result.out[d]);
  if (lse.given()) store(address(lse, t, h), lse.dtype, 0, result.lse);
}

void sparse_attention(const core::SparseAttentionParams& params) {
  const MsaConfig& config = params.config;
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t) {
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      std::vector<std::int64_t> keys;
      const auto* block_ids = reinterpret_cast<const std::int32_t*>(address(params.block_ids, query.token, g));
      for (std::int32_t n = 0; n < config.top_k && block_ids[n] >= 0; ++n) {
        const std::int64_t begin = std::int64_t{block_ids[n]} * params.geo.block_size;
        const std::int64_t end = std::min(begin + params.geo.block_size, query.num_visible);
        for (std::int64_t j = begin; j < end; ++j) keys.push_back(j);
      }

      const KeysAndValues kv{params.geo, params.k, params.v, query.seq, g};
      for (std::int32_t h = g * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
        const auto q = load_row(address(params.q, query.token, h), params.q.dtype, config.head_dim);
        const auto scores = scaled_scores(kv, q, config.effective_softmax_scale(), keys);
        store_result(attend(kv, scores, keys, config.head_dim), params.out, params.lse, query.token, h);
      }
    }
  });
}

}  // namespace openmsa::reference
