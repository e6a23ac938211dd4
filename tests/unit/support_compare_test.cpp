// The comparison rules themselves: each must turn down what it exists to catch.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kReference = on(Backend::kReference);

Problem small_problem(DType dtype = DType::kF32) {
  Rng rng(1);
  return Problem(make_config(2, 2, 16, 16, 16, 4), single(20, 200, true), dtype, rng);
}

TEST(CompareScores, TurnsDownAWrongScoreAndAMissingMask) {
  const Problem problem = small_problem();
  const Tensor oracle = oracle_scores(problem);
  Tensor scores = oracle.to(DType::kF32);
  EXPECT_TRUE(scores_right(problem, scores, oracle));
  const double score = scores(5, 1, 2);
  scores.set(scores.at(5, 1, 2), score + 0.01);
  EXPECT_FALSE(scores_right(problem, scores, oracle));
  scores.set(scores.at(5, 1, 2), std::numeric_limits<double>::quiet_NaN());
  EXPECT_FALSE(scores_right(problem, scores, oracle));
  scores.set(scores.at(5, 1, 2), score);
  scores.set(scores.at(5, 1, 13), 0.0);
  EXPECT_FALSE(scores_right(problem, scores, oracle)) << "nothing of block 13 is visible";
}

TEST(CompareSelection, TurnsDownWrongLists) {
  const Problem problem = small_problem();
  const Tensor oracle = oracle_scores(problem);
  const Tensor right = run_select_blocks(problem, oracle, kReference);
  EXPECT_TRUE(selection_right(problem, right, oracle, true));
  const auto with_row = [&](std::vector<double> row) {
    Tensor changed = right;
    changed.set_row(7, row.data());
    return changed;
  };
  std::vector<double> row(4);
  right.get_row(7, row.data());
  EXPECT_FALSE(selection_right(problem, with_row({row[0], row[1], row[2], -1}), oracle)) << "one block short";
  EXPECT_FALSE(selection_right(problem, with_row({row[1], row[0], row[2], row[3]}), oracle)) << "not ascending";
  EXPECT_FALSE(selection_right(problem, with_row({row[0], row[0], row[2], row[3]}), oracle)) << "a block twice";
  EXPECT_FALSE(selection_right(problem, with_row({row[0], row[1], row[2], row[3] + 1}), oracle)) << "no visible key";
  std::int64_t worst = -1;
  for (std::int64_t b = 0; b < 11; ++b) {
    const bool chosen = row[0] == b || row[1] == b || row[2] == b || row[3] == b;
    if (!chosen && (worst < 0 || oracle(3, 1, b) < oracle(3, 1, worst))) worst = b;
  }
  std::vector<double> worse{static_cast<double>(worst), row[1], row[2], row[3]};
  std::sort(worse.begin(), worse.end());
  EXPECT_FALSE(selection_right(problem, with_row(worse), oracle)) << "a better block left out";
  std::vector<double> without_own{row[0], row[1], row[2], static_cast<double>(worst)};
  std::sort(without_own.begin(), without_own.end());
  EXPECT_FALSE(selection_right(problem, with_row(without_own), oracle)) << "the own block left out";
}

TEST(CompareSelection, ExactModeWantsTiesAtTheLowerId) {
  Rng rng(2);
  const Problem problem(make_config(1, 1, 16, 16, 16, 2, 0, 0), single(1, 64), DType::kF32, rng);
  Tensor scores(DType::kF64, {1, 1, 4});
  for (std::int64_t b = 0; b < 4; ++b) scores.set(b, 1.0);
  Tensor block_ids(DType::kI32, {1, 1, 2});
  const double lowest[] = {0, 1}, other[] = {0, 2};
  block_ids.set_row(0, lowest);
  EXPECT_TRUE(selection_right(problem, block_ids, scores, true));
  block_ids.set_row(0, other);
  EXPECT_FALSE(selection_right(problem, block_ids, scores, true));
  EXPECT_TRUE(selection_right(problem, block_ids, scores, false)) << "without exactness a tie may go either way";
}

TEST(CompareAttention, TurnsDownWrongRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const Problem problem = small_problem(dtype);
    Rng rng(3);
    const Tensor block_ids = random_block_ids(problem, rng);
    const Attention right = run_sparse_attention(problem, block_ids, kReference);
    EXPECT_TRUE(attention_right(problem, right, &block_ids));
    Attention wrong = right;
    wrong.out.set(100, right.out.get(100) + (dtype == DType::kF32 ? 1e-5 : 0.05));
    EXPECT_FALSE(attention_right(problem, wrong, &block_ids));
    wrong.out.set(100, std::numeric_limits<double>::quiet_NaN());
    EXPECT_FALSE(attention_right(problem, wrong, &block_ids));
    wrong = right;
    wrong.lse.set(7, right.lse.get(7) + 2e-3);
    EXPECT_FALSE(attention_right(problem, wrong, &block_ids));
    EXPECT_FALSE(attention_right(problem, right, nullptr)) << "a sparse result is not the dense one";
  }
}

// Dropping a single key out of a block, or seeing one too many, must not pass as rounding.
TEST(CompareAttention, NoticesOneKey) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const Problem problem = small_problem(dtype);
    Tensor block_ids = run_index_select(problem, kReference);
    Problem shifted = problem;
    shifted.layout.q_start = {179};
    EXPECT_TRUE(attention_right(problem, run_sparse_attention(problem, block_ids, kReference), &block_ids));
    EXPECT_FALSE(attention_right(problem, run_dense_attention(shifted, kReference), nullptr));
  }
}

TEST(CompareTensor, GuardsAndFillShowStrayWrites) {
  Tensor tensor(DType::kBF16, {3, 5}, 16);
  EXPECT_TRUE(tensor.untouched());
  for (std::int64_t i = 0; i < 15; ++i) tensor.set(i, static_cast<double>(i));
  EXPECT_FALSE(tensor.untouched());
  EXPECT_TRUE(tensor.guards_intact());
  auto* data = static_cast<BFloat16*>(tensor.view().data);
  for (const std::int64_t at : {-1, 5, 3 * 21 + 2}) {
    Tensor changed = tensor;
    static_cast<BFloat16*>(changed.view().data)[at] = BFloat16(1.0f);
    EXPECT_FALSE(changed.guards_intact()) << at;
    EXPECT_NE(changed.view().data, static_cast<void*>(data));
  }
  EXPECT_TRUE(tensor.to(DType::kF32).to(DType::kBF16).same_bits(tensor));
}

TEST(RandomLayout, CoversTheKindsItPromises) {
  bool empty = false, no_queries = false, negative = false, beyond = false, paged = false, packed = false, prefix = false;
  Rng rng(4);
  for (int i = 0; i < 200; ++i) {
    const Layout layout = random_layout(rng, 10'000);
    (layout.paged ? paged : packed) = true;
    for (std::size_t s = 0; s < layout.seqlens_q.size(); ++s) {
      const std::int32_t n_q = layout.seqlens_q[s], n_k = layout.seqlens_k[s];
      const std::int32_t start = layout.q_start.empty() ? n_k - n_q : layout.q_start[s];
      empty |= n_k == 0 && n_q > 0;
      no_queries |= n_q == 0 && n_k > 0;
      negative |= start < 0 && n_q > 0;
      beyond |= start >= n_k && n_q > 0 && n_k > 0;
      prefix |= start > 0 && n_q > 1 && start + n_q == n_k;
    }
  }
  EXPECT_TRUE(empty && no_queries && negative && beyond && paged && packed && prefix);
}

}  // namespace
}  // namespace openmsa::test
