// Causal attention over every visible key, and the largest scaled score of each block.
#include "reference/attend.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

void dense_attention(const core::DenseAttentionParams& params) {
  const MsaConfig& config = params.config;
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t) {
    for (std::int32_t h = 0; h < config.num_q_heads; ++h) {
      const std::int32_t g = h / config.group_size();
      const auto keys = attended_keys(params.geo, {}, query, g);
      const HeadRows k{params.geo, params.k, query.seq, g}, v{params.geo, params.v, query.seq, g};
      const auto q = load_row(address(params.q, query.token, h), params.q.dtype, config.head_dim);
      const auto scores = scaled_scores(k, q, config.effective_softmax_scale(), keys);
      const Softmax weights = softmax(scores);
      store_result(weighted_sum(v, weights.probabilities, keys, config.head_dim), weights.lse, params.out, params.lse, query.token,
                   h);

      if (!params.block_max.given()) continue;
      std::vector<double> block_max(static_cast<std::size_t>(params.block_max.shape[2]), -kInfinity);
      for (const std::int64_t j : keys) {
        double& max = block_max[static_cast<std::size_t>(j / params.geo.block_size)];
        max = max_or_nan(max, scores[static_cast<std::size_t>(j)]);
      }
      std::byte* const row = address(params.block_max, query.token, h);
      for (std::size_t b = 0; b < block_max.size(); ++b) {
        store(row, params.block_max.dtype, static_cast<std::int64_t>(b), block_max[b]);
      }
    }
  });
}

}  // namespace openmsa::reference
