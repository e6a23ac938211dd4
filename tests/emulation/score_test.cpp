// block_scores by both of its kernels, for few query rows a sequence (smxx_score_few) and for tiles of them (sm90_score, by
// single CTAs and in pairs), behind the real launch code; and index_select around them.
#include <gtest/gtest.h>

#include <cmath>

#include "orders.hpp"
#include "select_calls.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

class EmulatedScore : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedScore);

// With NaN between the rows, and where nothing is visible -inf to the end of the columns. `exact`: every sum is.
void expect_right(const Problem& problem, bool exact = false) {
  SCOPED_TRACE(describe(problem));
  const Tensor scores = emulated_block_scores(problem), oracle = oracle_scores(problem);
  EXPECT_TRUE(scores_right(problem, scores, oracle));
  for (std::int64_t i = 0; exact && i < scores.numel(); ++i) ASSERT_EQ(scores.get(i), oracle.get(i)) << "score " << i;
}

MsaConfig score_config(std::int32_t groups, std::int32_t dim, std::int32_t block_size) {
  return make_config(groups, 1, 64, dim, block_size, 4);
}

TEST_P(EmulatedScore, EveryTile) {
  Rng rng(1);
  const std::int32_t groups[] = {4, 1, 3, 8, 2, 16}, multiprocessors[] = {1, 3, 5, 7, 2, 20};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    emulation::options().num_multiprocessors = multiprocessors[i];
    // Two tiles, and one of few tokens.
    const std::int32_t tile = 256 / groups[i];
    const Layout layout = ragged({tile + 5, 3}, {900, 300 + 64 * i}, i % 2 == 0);
    expect_right(Problem(score_config(groups[i], dim, block_size), layout, i % 3 == 0 ? DType::kF16 : DType::kBF16, rng));
  });
}

TEST_P(EmulatedScore, LayoutsOfTiles) {
  Rng rng(2);
  Layout layout = ragged({70, 0, 33, 5, 64, 2}, {129, 50, 33, 700, 64, 0}, false);
  expect_right(Problem(score_config(4, 64, 64), layout, DType::kBF16, rng));
  layout.q_start = {-20, 0, 0, 900, 5, 0};
  layout.strided = layout.paged = true;
  expect_right(Problem(score_config(5, 64, 64), layout, DType::kF16, rng));
  // A token a tile's quarter.
  expect_right(Problem(score_config(64, 64, 128), ragged({6, 2}, {600, 2}, true), DType::kBF16, rng));
}

// Few tiles and long sequences: a tile's keys are cut into segments.
TEST_P(EmulatedScore, SegmentsOfKeys) {
  Rng rng(3);
  emulation::options().num_multiprocessors = 9;
  expect_right(Problem(score_config(4, 64, 64), ragged({20, 1}, {4000, 90}, true), DType::kBF16, rng));
}

// Above 65,536 keys clusters take the same segment side by side. In one order, for the time it takes.
TEST(EmulatedLongScore, SegmentsSideBySide) {
  Rng rng(8);
  emulation::options() = {emulation::Timing::kLate, 2};
  expect_right(long_sequence(score_config(64, 64, 128), 5, 20, 515, Values::kGaussian, rng));
  emulation::options() = {};
}

TEST_P(EmulatedScore, FewQueries) {
  Rng rng(4);
  constexpr std::int32_t kGroups[] = {4, 1, 16, 3, 8, 2};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    Layout layout = ragged({1, 0, 4, 2, 1}, {1000, 50, 3, 130, 0}, i % 2 == 0);
    layout.strided = i % 3 == 0;
    if (i % 4 == 1) layout.q_start = {40, 0, -2, 200, 0};
    const std::int32_t groups = kGroups[i];
    expect_right(Problem(score_config(groups, dim, block_size), layout, i % 3 == 0 ? DType::kF16 : DType::kBF16, rng));
  });
}

// A NaN product makes its block's score NaN for those who see it; rows of negative scores order their bits the other way round.
TEST_P(EmulatedScore, SpecialValues) {
  Rng rng(5);
  for (const std::int32_t seqlen_q : {2, 70}) {
    for (const std::int32_t block_size : {64, 128}) {
      const Layout layout = ragged({seqlen_q, seqlen_q}, {500, 300}, true);
      Problem problem(score_config(4, 64, block_size), layout, DType::kBF16, rng);
      inject_specials(problem, rng);
      expect_right(problem);
      Problem negative(score_config(2, 64, block_size), layout, DType::kF16, rng, Values::kIntegers);
      for (std::int64_t i = 0; i < negative.q_idx.numel(); ++i) negative.q_idx.set(i, std::fabs(negative.q_idx.get(i)) + 1.0);
      for (std::int64_t i = 0; i < negative.k_idx.numel(); ++i) negative.k_idx.set(i, -std::fabs(negative.k_idx.get(i)) - 1.0);
      expect_right(negative, true);
    }
  }
}

TEST_P(EmulatedScore, IndexSelect) {
  Rng rng(6);
  const MsaConfig config = make_config(4, 1, 64, 64, 64, 5, 1, 2);
  for (const std::int32_t seqlen_q : {3, 100}) {
    for (const Values values : {Values::kGaussian, Values::kIntegers}) {
      const Problem problem(config, ragged({seqlen_q, 1}, {1500, 200}, seqlen_q == 3), DType::kBF16, rng, values);
      EXPECT_TRUE(selection_right(problem, emulated_index_select(problem), oracle_scores(problem), values == Values::kIntegers));
    }
  }
}

// Sequences long enough for pairs of CTAs.
class EmulatedScorePairs : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedScorePairs);

void expect_right_in_pairs(const Problem& problem) {
  emulation::largest_cluster = 0;
  expect_right(problem);
  EXPECT_EQ(emulation::largest_cluster, 2u);
}

TEST_P(EmulatedScorePairs, EveryTile) {
  Rng rng(9);
  const std::int32_t groups[] = {64, 32, 40, 64, 64, 32}, multiprocessors[] = {2, 3, 5, 16, 4, 1};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    emulation::options().num_multiprocessors = multiprocessors[i];
    // The last pair half empty, or its second CTA all but.
    const std::int32_t tile = 256 / groups[i];
    const Layout layout = single(16 * tile + (i % 2 == 0 ? 1 : tile + 1), 300 + 64 * i, i % 2 == 0);
    expect_right_in_pairs(Problem(score_config(groups[i], dim, block_size), layout, i % 3 == 0 ? DType::kF16 : DType::kBF16, rng));
  });
}

TEST_P(EmulatedScorePairs, Layouts) {
  Rng rng(10);
  Layout layout = ragged({205, 0, 3, 65}, {300, 50, 1, 129}, false);
  layout.q_start = {-20, 0, 0, 100};
  layout.strided = true;
  expect_right_in_pairs(Problem(score_config(64, 64, 64), layout, DType::kBF16, rng));
  // Segments of keys.
  emulation::options().num_multiprocessors = 40;
  expect_right_in_pairs(Problem(score_config(64, 64, 128), single(64, 2000, true), DType::kF16, rng));
}

}  // namespace
}  // namespace openmsa::test
