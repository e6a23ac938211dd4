// The oracle's block_scores against numbers worked out by hand and against the formula written another way.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/compare.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kReference = on(Backend::kReference);

void set_all(Tensor& tensor, std::initializer_list<double> values) {
  ASSERT_EQ(static_cast<std::int64_t>(values.size()), tensor.numel());
  std::int64_t i = 0;
  for (const double value : values) tensor.set(i++, value);
}

// Five keys in blocks of two, three queries at positions 2, 3, 4, one group, index dim 2.
Problem five_keys() {
  Rng rng(1);
  Problem problem(make_config(1, 1, 2, 2, 2, 2), single(3, 5), DType::kF64, rng);
  set_all(problem.q_idx, {1, 0, 0, 1, -1, 2});
  set_all(problem.k_idx, {1, 4, 3, -1, 2, 5, 7, -2, 0, 1});
  return problem;
}

TEST(ReferenceScore, FollowsHandComputedValues) {
  const Tensor scores = run_block_scores(five_keys(), kReference);
  // q0 = (1,0) sees keys 0..2: 1 3 | 2;  q1 = (0,1) sees 0..3: 4 -1 | 5 -2;  q2 = (-1,2) sees 0..4: 7 -5 | 8 -11 | 2.
  const double expected[3][3] = {{3, 2, -INFINITY}, {4, 5, -INFINITY}, {7, 8, 2}};
  for (int t = 0; t < 3; ++t) {
    for (int b = 0; b < 3; ++b) EXPECT_EQ(scores(t, 0, b), expected[t][b]) << "query " << t << " block " << b;
    EXPECT_EQ(scores(t, 0, 3), -INFINITY) << "a block past the sequence's end";
  }
}

TEST(ReferenceScore, NaNProductsStayInTheirBlockAndMaskedKeysDoNotCount) {
  Problem problem = five_keys();
  problem.k_idx.set(problem.k_idx.at(0, 0), kNaN);
  problem.k_idx.set(problem.k_idx.at(3, 1), kNaN);
  const Tensor scores = run_block_scores(problem, kReference);
  EXPECT_TRUE(std::isnan(scores(0, 0, 0)));
  EXPECT_EQ(scores(0, 0, 1), 2) << "key 3 is in the future of query 0";
  EXPECT_TRUE(std::isnan(scores(1, 0, 1)));
  EXPECT_EQ(scores(2, 0, 2), 2);
}

TEST(ReferenceScore, NegativePositionsSeeNothing) {
  Problem problem = five_keys();
  problem.layout.q_start = {-2};
  const Tensor scores = run_block_scores(problem, kReference);
  for (int b = 0; b < 3; ++b) {
    EXPECT_EQ(scores(0, 0, b), -INFINITY);
    EXPECT_EQ(scores(1, 0, b), -INFINITY);
  }
  EXPECT_EQ(scores(2, 0, 0), 7) << "position 0 sees key 0 alone";
  EXPECT_EQ(scores(2, 0, 1), -INFINITY);
}

// The formula the other way round: every (query, block) pair looks through its sequence's keys for its own.
TEST(ReferenceScore, MatchesTheFormulaOverRandomLayouts) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Rng rng(seed);
    const Problem problem(make_config(2, 1, 2, 5, pick(rng, {1, 3, 16, 64}), 4), random_layout(rng, 6000), DType::kF64, rng,
                          Values::kIntegers);
    SCOPED_TRACE(problem.layout.text());
    const Tensor scores = run_block_scores(problem, on(Backend::kReference, 1 + static_cast<std::int32_t>(seed % 3)));
    const std::int64_t width = scores.view().shape[2];
    for (std::int64_t t = 0; t < problem.total_q; ++t) {
      const Problem::Query query = problem.query(t);
      for (std::int64_t g = 0; g < 2; ++g) {
        std::vector<double> expected(static_cast<std::size_t>(width), -INFINITY);
        for (std::int64_t j = problem.layout.seqlens_k[static_cast<std::size_t>(query.seq)] - 1; j >= 0; --j) {
          if (j > query.position) continue;
          double sum = 0;
          for (std::int64_t i = 4; i >= 0; --i) {
            sum += problem.k_idx.get(problem.index_key_row(query.seq, j) * 5 + i) * problem.q_idx(t, g, i);
          }
          double& best = expected[static_cast<std::size_t>(j / problem.config.block_size)];
          best = std::fmax(best, sum);
        }
        for (std::int64_t b = 0; b < width; ++b) ASSERT_EQ(scores(t, g, b), expected[static_cast<std::size_t>(b)]);
      }
    }
  }
}

}  // namespace
}  // namespace openmsa::test
