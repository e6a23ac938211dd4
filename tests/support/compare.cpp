#include "support/compare.hpp"

#include <algorithm>
#include <cmath>

namespace openmsa::test {

namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

// Euclidean norms of the rows of the last axis; 0 for poisoned rows.
std::vector<double> row_norms(const Tensor& tensor) {
  std::vector<double> norms, values(static_cast<std::size_t>(tensor.row_size()));
  for (std::int64_t row = 0; row < tensor.num_rows(); ++row) {
    tensor.get_row(row, values.data());
    double sum = 0;
    for (const double x : values) sum += x * x;
    norms.push_back(std::isfinite(sum) ? std::sqrt(sum) : 0.0);
  }
  return norms;
}

// Bound on the error of <q, k> summed in fp32 in any order, per row of q: n u |q| |k| by Cauchy-Schwarz, two roundings to spare.
std::vector<double> dot_error_bounds(const Tensor& queries, const Tensor& keys) {
  const std::vector<double> key_norms = row_norms(keys);
  const double max_norm = key_norms.empty() ? 0.0 : *std::max_element(key_norms.begin(), key_norms.end());
  std::vector<double> bounds = row_norms(queries);
  for (double& bound : bounds) bound *= static_cast<double>(queries.row_size() + 2) * 0x1p-24 * max_norm;
  return bounds;
}

// |x - y| <= bound, infinities and NaNs only where both have them.
bool close(double x, double y, double bound) {
  if (std::isnan(y)) return std::isnan(x);
  return x == y || std::abs(x - y) <= bound;
}

AssertionResult rows_close(const Tensor& values, const Tensor& oracle, const std::vector<double>& bounds, double scale) {
  const std::int64_t n = values.view().shape[2];
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const double bound = bounds[static_cast<std::size_t>(i / n)] * scale;
    if (!close(values.get(i), oracle.get(i), bound)) {
      return AssertionFailure() << "row " << i / n << " block " << i % n << ": " << values.get(i) << ", fp64 has " << oracle.get(i)
                                << ", bound " << bound;
    }
  }
  return AssertionSuccess();
}

}  // namespace

AssertionResult scores_right(const Problem& problem, const Tensor& scores, const Tensor& oracle) {
  return rows_close(scores, oracle, dot_error_bounds(problem.q_idx, problem.k_idx), 1.0);
}

AssertionResult block_max_right(const Problem& problem, const Tensor& block_max, const Tensor& oracle) {
  return rows_close(block_max, oracle, dot_error_bounds(problem.q, problem.k), problem.config.effective_softmax_scale());
}

AssertionResult selection_right(const Problem& problem, const Tensor& block_ids, const Tensor& oracle_scores, bool exact) {
  const MsaConfig& config = problem.config;
  const std::vector<double> bounds = dot_error_bounds(problem.q_idx, problem.k_idx);
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    const Problem::Query query = problem.query(t);
    for (std::int64_t g = 0; g < config.num_kv_heads; ++g) {
      const auto fail = [&] { return AssertionFailure() << "token " << t << " group " << g << ": "; };
      std::vector<bool> chosen(static_cast<std::size_t>(query.num_visible_blocks), false);
      const std::int64_t count = std::min<std::int64_t>(config.top_k, query.num_visible_blocks);
      std::int64_t last = -1;
      for (std::int64_t n = 0; n < config.top_k; ++n) {
        const auto b = static_cast<std::int64_t>(block_ids(t, g, n));
        if (n >= count) {
          if (b != -1) return fail() << "slot " << n << " holds " << b << ", but only " << count << " blocks can be chosen";
          continue;
        }
        if (b <= last) return fail() << "slot " << n << " holds " << b << " after " << last;
        if (b >= query.num_visible_blocks) return fail() << "block " << b << " has no visible key";
        chosen[static_cast<std::size_t>(b)] = true;
        last = b;
      }

      double worst_chosen = INFINITY, best_left = -INFINITY;
      std::int64_t worst_chosen_id = -1, best_left_id = -1;
      for (std::int64_t b = 0; b < query.num_visible_blocks; ++b) {
        const bool forced = b < config.num_init_blocks || (b > query.own_block - config.num_local_blocks && b <= query.own_block);
        // NaN ranks last of all; nothing here tells it from -inf, which the tests of ties and NaNs do.
        const double raw = oracle_scores(t, g, b);
        const double score = std::isnan(raw) ? -INFINITY : raw;
        if (chosen[static_cast<std::size_t>(b)]) {
          // Of equal scores the highest id is the worst.
          if (!forced && score <= worst_chosen) worst_chosen = score, worst_chosen_id = b;
        } else {
          if (forced) return fail() << "forced block " << b << " is missing";
          if (best_left_id < 0 || score > best_left) best_left = score, best_left_id = b;
        }
      }
      if (worst_chosen_id < 0 || best_left_id < 0) continue;
      const double bound = exact ? 0.0 : bounds[static_cast<std::size_t>(t * config.num_kv_heads + g)];
      const bool wrong_tie = exact && worst_chosen == best_left && best_left_id < worst_chosen_id;
      if (worst_chosen < best_left - 2 * bound || wrong_tie) {
        return fail() << "block " << worst_chosen_id << " of score " << worst_chosen << " was chosen, block " << best_left_id
                      << " of score " << best_left << " was left out; bound " << bound;
      }
    }
  }
  return AssertionSuccess();
}

AssertionResult attention_right(const Problem& problem, const Attention& result, const Attention& oracle,
                                const std::vector<float>& plain) {
  const double absolute = problem.dtype == DType::kF32 ? 2e-6 : 1e-5;
  double plain_error = 0.0, error = 0.0;
  std::int64_t worst = 0;
  for (std::int64_t i = 0; i < result.out.numel(); ++i) {
    const double exact = oracle.out.get(i), found = result.out.get(i);
    if (!std::isfinite(exact) || !std::isfinite(found)) {
      if (!close(found, exact, 0.0)) return AssertionFailure() << "out element " << i << " is " << found << ", fp64 has " << exact;
      continue;
    }
    if (const double e = std::abs(plain[static_cast<std::size_t>(i)] - exact); std::isfinite(e))
      plain_error = std::max(plain_error, e);
    const double e = std::abs(found - exact);
    if (e > error) error = e, worst = i;
  }
  if (!(error <= 2 * plain_error + absolute)) {
    return AssertionFailure() << "out element " << worst << " is " << result.out.get(worst) << ", fp64 has "
                              << oracle.out.get(worst) << ": error " << error << ", plain computation's " << plain_error;
  }
  for (std::int64_t i = 0; i < result.lse.numel(); ++i) {
    if (!close(result.lse.get(i), oracle.lse.get(i), 1e-3)) {
      return AssertionFailure() << "lse element " << i << " is " << result.lse.get(i) << ", fp64 has " << oracle.lse.get(i);
    }
    if (oracle.lse.get(i) != -INFINITY) continue;
    for (std::int64_t d = 0; d < problem.config.head_dim; ++d) {
      if (result.out.get(i * problem.config.head_dim + d) != 0.0) {
        return AssertionFailure() << "row " << i << " sees no key, but out is " << result.out.get(i * problem.config.head_dim + d);
      }
    }
  }
  return AssertionSuccess();
}

AssertionResult attention_right(const Problem& problem, const Attention& result, const Tensor* block_ids) {
  const Attention oracle = block_ids != nullptr ? oracle_sparse_attention(problem, *block_ids) : oracle_dense_attention(problem);
  const AssertionResult right = attention_right(problem, result, oracle, plain_attention(problem, block_ids));
  if (!right || block_ids != nullptr || !result.block_max.given()) return right;
  return block_max_right(problem, result.block_max, oracle.block_max);
}

}  // namespace openmsa::test
