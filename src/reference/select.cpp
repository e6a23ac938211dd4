// select(t,g) = the k best visible blocks by (M descending, b ascending), the forced blocks always among them.
#include <algorithm>
#include <numeric>

#include "reference/reference.hpp"
#include "reference/score.hpp"

namespace openmsa::reference {

namespace {

// Block a before block b: forced blocks first, then the higher score (NaN below -inf), then the lower id.
struct RanksBefore {
  const MsaConfig& config;
  std::int64_t own_block;
  const double* scores;

  bool forced(std::int64_t b) const {
    return b < config.num_init_blocks || (b > own_block - config.num_local_blocks && b <= own_block);
  }
  bool operator()(std::int64_t a, std::int64_t b) const {
    if (forced(a) != forced(b)) return forced(a);
    const bool a_is_nan = std::isnan(scores[a]), b_is_nan = std::isnan(scores[b]);
    if (a_is_nan != b_is_nan) return b_is_nan;
    if (!a_is_nan && scores[a] != scores[b]) return scores[a] > scores[b];
    return a < b;
  }
};

// Blocks without a visible key are no candidates, so num_visible_blocks scores are read.
void select_query(const MsaConfig& config, std::int32_t block_size, const Query& query, const double* scores,
                  std::int32_t* block_ids) {
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(query.num_visible_blocks));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::sort(blocks.begin(), blocks.end(), RanksBefore{config, query.position / block_size, scores});
  blocks.resize(std::min(blocks.size(), static_cast<std::size_t>(config.top_k)));
  std::sort(blocks.begin(), blocks.end());
  std::fill(block_ids, block_ids + config.top_k, -1);
  std::copy(blocks.begin(), blocks.end(), block_ids);
}

double* take_scores(const core::IndexSelectParams& params) {
  return params.context.arena->take<double>(core::checked_mul<std::size_t>(static_cast<std::size_t>(params.context.num_threads),
                                                                           static_cast<std::size_t>(params.geo.max_num_blocks())));
}

}  // namespace

void select_blocks(const core::SelectBlocksParams& params) {
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t) {
    for (std::int32_t g = 0; g < params.config.num_kv_heads; ++g) {
      const auto scores = load_row(address(params.scores, query.token, g), params.scores.dtype, query.num_visible_blocks);
      select_query(params.config, params.geo.block_size, query, scores.data(),
                   reinterpret_cast<std::int32_t*>(address(params.block_ids, query.token, g)));
    }
  });
}

// Equals block_scores into float64 followed by select_blocks; the scratch is one row of scores per thread.
void index_select(const core::IndexSelectParams& params) {
  double* const scratch = take_scores(params);
  const std::int64_t max_num_blocks = params.geo.max_num_blocks();
  for_each_query(params.geo, params.context, [&](const Query& query, std::int32_t worker) {
    double* const scores = scratch + worker * max_num_blocks;
    for (std::int32_t g = 0; g < params.config.num_kv_heads; ++g) {
      const auto q_idx = load_row(address(params.q_idx, query.token, g), params.q_idx.dtype, params.config.index_dim);
      score_query(params.geo, params.k_idx, query, q_idx, query.num_visible_blocks, scores);
      select_query(params.config, params.geo.block_size, query, scores,
                   reinterpret_cast<std::int32_t*>(address(params.block_ids, query.token, g)));
    }
  });
}

void index_select_reserve(const core::IndexSelectParams& params) { take_scores(params); }

}  // namespace openmsa::reference
