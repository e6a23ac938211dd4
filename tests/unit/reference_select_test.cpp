// The oracle's select_blocks: order, ties, NaN, forced blocks, rows without keys; and index_select as the two single steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/compare.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kReference = on(Backend::kReference);
using Ids = std::vector<double>;

// The list of the only query of one sequence of scores.size() blocks of two keys, standing at its last key.
Ids select(std::vector<double> row, std::int32_t top_k, std::int32_t num_init = 0, std::int32_t num_local = 0) {
  Rng rng(1);
  const auto seqlen_k = static_cast<std::int32_t>(2 * row.size());
  const Problem problem(make_config(1, 1, 2, 2, 2, top_k, num_init, num_local), single(1, seqlen_k), DType::kF64, rng);
  Tensor scores(DType::kF64, {1, 1, static_cast<std::int64_t>(row.size())});
  for (std::size_t b = 0; b < row.size(); ++b) scores.set(static_cast<std::int64_t>(b), row[b]);
  return run_select_blocks(problem, scores, kReference).values();
}

TEST(ReferenceSelect, TakesTheBestAndSortsThemById) {
  EXPECT_EQ(select({1, 9, 3, 7, 5}, 3), (Ids{1, 3, 4}));
  EXPECT_EQ(select({-5, -1, -3}, 1), (Ids{1}));
}

TEST(ReferenceSelect, TiesGoToTheLowerId) {
  EXPECT_EQ(select({2, 2, 2, 2}, 2), (Ids{0, 1}));
  EXPECT_EQ(select({1, 2, 1, 2, 1}, 3), (Ids{0, 1, 3}));
  EXPECT_EQ(select({0.0, -0.0, 0.0}, 1), (Ids{0})) << "the two zeros are equal";
  EXPECT_EQ(select({-0.0, 0.0, 0.0}, 1), (Ids{0})) << "the two zeros are equal";
}

TEST(ReferenceSelect, NaNRanksBelowMinusInfinity) {
  EXPECT_EQ(select({kNaN, -INFINITY, 1, kNaN}, 2), (Ids{1, 2}));
  EXPECT_EQ(select({kNaN, -INFINITY, kNaN, 1}, 3), (Ids{0, 1, 3})) << "of two NaNs the lower id";
  EXPECT_EQ(select({kNaN, INFINITY, -kNaN}, 1), (Ids{1}));
}

TEST(ReferenceSelect, ForcedBlocksTakeSlots) {
  EXPECT_EQ(select({1, 9, 8, 7, 0}, 3, 0, 1), (Ids{1, 2, 4}));
  EXPECT_EQ(select({1, 9, 8, 7, 0}, 3, 1, 1), (Ids{0, 1, 4}));
  EXPECT_EQ(select({1, 9, 8, 7, 0}, 3, 1, 2), (Ids{0, 3, 4}));
  EXPECT_EQ(select({kNaN, 9, 8, 7, kNaN}, 2, 1, 1), (Ids{0, 4})) << "forced whatever they score";
}

TEST(ReferenceSelect, FillsTheTailWithMinusOne) {
  EXPECT_EQ(select({1, 2}, 5), (Ids{0, 1, -1, -1, -1}));
  EXPECT_EQ(select({1}, 2, 1, 1), (Ids{0, -1})) << "the same block forced twice counts once";
}

TEST(ReferenceSelect, LooksAtVisibleBlocksAlone) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 2, 2, 2, 2, 0, 1), single(3, 8), DType::kF64, rng);
  problem.layout.q_start = {-1};  // positions -1, 0, 1
  Tensor scores(DType::kF64, {3, 1, 4});
  for (std::int64_t i = 0; i < scores.numel(); ++i) scores.set(i, static_cast<double>(i % 4));
  EXPECT_EQ(run_select_blocks(problem, scores, kReference).values(), (Ids{-1, -1, 0, -1, 0, -1}));
}

// A position past the last key (a fragment that holds only a sequence's first keys): its own block is not here, and no other
// block becomes local in its place.
TEST(ReferenceSelect, OwnBlockFollowsThePositionNotTheLastKey) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 2, 2, 2, 2, 0, 2), single(2, 8), DType::kF64, rng);
  problem.layout.q_start = {9};  // positions 9 and 10: own blocks 4 and 5, keys end with block 3
  Tensor scores(DType::kF64, {2, 1, 4});
  for (std::int64_t i = 0; i < scores.numel(); ++i) scores.set(i, -static_cast<double>(i % 4));
  EXPECT_EQ(run_select_blocks(problem, scores, kReference).values(), (Ids{0, 3, 0, 1}));
}

// One list per group: a merged selection (max over the heads) would give all four the same.
TEST(ReferenceSelect, GroupsAreIndependent) {
  Rng rng(1);
  const Problem problem(make_config(4, 1, 2, 2, 2, 2), single(1, 10), DType::kF64, rng);
  Tensor scores(DType::kF64, {1, 4, 5});
  for (std::int64_t g = 0; g < 4; ++g) {
    for (std::int64_t b = 0; b < 5; ++b) scores.set(scores.at(0, g, b), g == b ? 100 : 0);
  }
  EXPECT_EQ(run_select_blocks(problem, scores, kReference).values(), (Ids{0, 4, 1, 4, 2, 4, 3, 4}));
}

// Against taking the argmax k times, over random layouts with many ties.
TEST(ReferenceSelect, MatchesRepeatedArgmax) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    MsaConfig config = random_config(rng);
    config.head_dim = config.index_dim = 4;
    config.block_size = pick(rng, {2, 7, 16, 64});
    const Problem problem(config, random_layout(rng, 20000), DType::kF64, rng, Values::kIntegers);
    SCOPED_TRACE(problem.layout.text() + " " + text(config));
    const Tensor scores = run_block_scores(problem, kReference);
    const Tensor block_ids = run_select_blocks(problem, scores, kReference);
    EXPECT_TRUE(selection_right(problem, block_ids, scores, true));
    for (std::int64_t t = 0; t < problem.total_q; ++t) {
      const Problem::Query query = problem.query(t);
      for (std::int64_t g = 0; g < config.num_kv_heads; ++g) {
        std::vector<double> left;
        for (std::int64_t b = 0; b < query.num_visible_blocks; ++b) {
          const bool forced = b < config.num_init_blocks || (b <= query.own_block && b > query.own_block - config.num_local_blocks);
          left.push_back(forced ? INFINITY : scores(t, g, b));
        }
        std::vector<bool> chosen(left.size(), false);
        for (std::int64_t n = 0; n < std::min<std::int64_t>(config.top_k, query.num_visible_blocks); ++n) {
          const auto best = std::max_element(left.begin(), left.end());
          chosen[static_cast<std::size_t>(best - left.begin())] = true;
          *best = -INFINITY;
        }
        std::int64_t slot = 0;
        for (std::size_t b = 0; b < chosen.size(); ++b) {
          if (!chosen[b]) continue;
          ASSERT_EQ(block_ids(t, g, slot++), static_cast<double>(b));
        }
        while (slot < config.top_k) ASSERT_EQ(block_ids(t, g, slot++), -1);
      }
    }
  }
}

TEST(ReferenceIndexSelect, EqualsScoreThenSelect) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Rng rng(100 + seed);
    MsaConfig config = random_config(rng);
    const Problem problem(config, random_layout(rng, 10000), DType::kF64, rng);
    SCOPED_TRACE(problem.layout.text() + " " + text(config));
    const RunOptions options = on(Backend::kReference, 1 + static_cast<std::int32_t>(seed % 4));
    const Tensor expected = run_select_blocks(problem, run_block_scores(problem, options), options);
    EXPECT_TRUE(run_index_select(problem, options).same_bits(expected));
  }
}

}  // namespace
}  // namespace openmsa::test
