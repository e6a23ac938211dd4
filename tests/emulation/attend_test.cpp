// sparse_attention's kernels, which are known to be right on an H200, under the emulator: they vouch for it.
#include <gtest/gtest.h>

#include <limits>

#include "calls.hpp"
#include "orders.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

class EmulatedAttend : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedAttend);

void expect_right(const Problem& problem, Rng& rng) {
  SCOPED_TRACE(describe(problem));
  const Tensor block_ids = random_block_ids(problem, rng);
  EXPECT_TRUE(attention_right(problem, emulated_sparse_attention(problem, block_ids), &block_ids));
}

TEST_P(EmulatedAttend, EveryShape) {
  Rng rng(1);
  for (const std::int32_t group_size : {1, 3, 8}) {
    for (const std::int32_t dim : {64, 96, 128}) {
      const DType dtype = dim == 96 || group_size == 3 ? DType::kF16 : DType::kBF16;
      const std::int32_t block_size = dim == 64 ? 128 : 64 << (group_size == 3);
      expect_right(Problem(make_config(2, group_size, dim, 64, block_size, 4), single(40, 300), dtype, rng), rng);
    }
  }
}

TEST_P(EmulatedAttend, Layouts) {
  Rng rng(2);
  Layout layout;
  layout.seqlens_q = {5, 0, 33, 1, 64, 2};
  layout.seqlens_k = {129, 50, 33, 257, 64, 0};
  const MsaConfig config = make_config(2, 4, 64, 64, 64, 4);
  expect_right(Problem(config, layout, DType::kBF16, rng), rng);
  layout.q_start = {-2, 0, 0, 300, 5, 0};
  layout.strided = true;
  expect_right(Problem(config, layout, DType::kF16, rng), rng);
  layout.q_start = {};
  layout.paged = true;
  expect_right(Problem(config, layout, DType::kBF16, rng), rng);
}

// 0/0 where all scores of a row are -inf. Where those of one block are, it has no weight, but its values count: 0 x NaN.
TEST_P(EmulatedAttend, RowsAndBlocksOfNothingButMinusInfinity) {
  Rng rng(5);
  for (const std::int32_t top_k : {4, 20}) {
    for (const bool paged : {false, true}) {
      Layout layout = ragged({40, 12}, {300, 150}, paged);
      layout.q_start = {260, -4};
      Problem problem(make_config(2, 3, 64, 64, 64, top_k), layout, paged ? DType::kF16 : DType::kBF16, rng);
      inject_minus_infinities(problem, rng);
      expect_right(problem, rng);
      problem.v.set(problem.key_row(0, 5, 0) * 64 + 3, std::numeric_limits<double>::quiet_NaN());
      expect_right(problem, rng);
    }
  }
}

TEST_P(EmulatedAttend, InvertedListsThatBreakTheRulesAreReported) {
  Rng rng(3);
  const Problem problem(make_config(1, 2, 64, 64, 64, 4), single(20, 300), DType::kBF16, rng);
  Tensor block_ids = random_block_ids(problem, rng);
  const double row[] = {0, 99, -1, -1};
  block_ids.set_row(7, row);
  EXPECT_THROW(emulated_sparse_attention(problem, block_ids), Error);
}

// Sequences that overlap by broken offsets would have more blocks than the scratch has room for.
TEST_P(EmulatedAttend, OverlappingSequencesStayInBounds) {
  Rng rng(4);
  const auto [problem, block_ids] = overlapping_sequences(64, rng);
  EXPECT_THROW(emulated_sparse_attention(problem, block_ids), Error);
}

}  // namespace
}  // namespace openmsa::test
