// score[t,g,j] = <q_idx[t,g], k_idx[j]>;  M[t,g,b] = max over the visible keys j of block b, -inf if there is none.
#include "reference/score.hpp"

#include <algorithm>

#include "reference/reference.hpp"

namespace openmsa::reference {

void score_query(const core::Geometry& geo, const core::KeyBlocks& k_idx, const Query& query, const std::vector<double>& q_idx,
                 std::int64_t num_blocks, double* scores) {
  std::fill(scores, scores + num_blocks, -kInfinity);
  std::vector<double> key;
  for (std::int64_t j = 0; j < query.num_visible; ++j) {
    load_key(k_idx, geo, query.seq, j, 0, static_cast<std::int64_t>(q_idx.size()), key);
    double& best = scores[j / geo.block_size];
    best = max_or_nan(best, dot(q_idx, key));
  }
}

void block_scores(const core::BlockScoresParams& params) {
  const std::int64_t num_blocks = params.scores.shape[2];
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t) {
    std::vector<double> scores(static_cast<std::size_t>(num_blocks));
    for (std::int32_t g = 0; g < params.config.num_kv_heads; ++g) {
      const auto q_idx = load_row(address(params.q_idx, query.token, g), params.q_idx.dtype, params.config.index_dim);
      score_query(params.geo, params.k_idx, query, q_idx, num_blocks, scores.data());
      std::byte* row = address(params.scores, query.token, g);
      for (std::int64_t b = 0; b < num_blocks; ++b) store(row, params.scores.dtype, b, scores[static_cast<std::size_t>(b)]);
    }
  });
}

}  // namespace openmsa::reference
