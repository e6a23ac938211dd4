// sparse_decode and msa_attention behind their real launch code. Their CTAs wait for each other, so the grid is one CTA; where rows are to
// be cut into units, the host is told of more multiprocessors and the one CTA does all their work (Options::fold_together).
#include <gtest/gtest.h>

#include <cmath>

#include "openmsa/error.hpp"
#include "orders.hpp"
#include "select_calls.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

// Above 1 rows are cut into units, as for a grid of that many CTAs.
void use_multiprocessors(int count) {
  emulation::options().num_multiprocessors = count;
  emulation::options().fold_together = count > 1;
}

class EmulatedDecode : public emulation::InOrders {
 protected:
  void SetUp() override {
    InOrders::SetUp();
    use_multiprocessors(1);
  }
};
OPENMSA_IN_TWO_ORDERS(EmulatedDecode);

constexpr std::int32_t kMultiprocessors[] = {1, 7, 100};

// A whole step, and sparse_decode alone over the step's lists while every key that none of them selects is NaN (if pages are not
// shared). `exact`: as in selection_right.
void expect_right(const Problem& problem, bool exact = false, bool pages_shared = false) {
  SCOPED_TRACE(describe(problem) + ", multiprocessors " + std::to_string(emulation::options().num_multiprocessors));
  const MsaResult step = emulated_msa_attention(problem);
  EXPECT_TRUE(selection_right(problem, step.block_ids, oracle_scores(problem), exact));
  EXPECT_TRUE(attention_right(problem, step.attention, &step.block_ids));
  Problem poisoned = problem;
  if (!pages_shared) poison_unselected(poisoned, step.block_ids);
  const Attention alone = emulated_sparse_decode(poisoned, step.block_ids);
  EXPECT_TRUE(alone.out.same_bits(step.attention.out)) << "sparse_decode has something else than the whole step";
  EXPECT_TRUE(alone.lse.same_bits(step.attention.lse));
}

TEST_P(EmulatedDecode, EveryShape) {
  Rng rng(1);
  constexpr std::int32_t kTopK[] = {1, 2, 5, 16, 17, 32};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    use_multiprocessors(kMultiprocessors[i % 3]);
    const std::int32_t group_size = pick(rng, {1, 3, 5, 8, 16}), top_k = kTopK[i];
    const DType dtype = i % 2 == 0 ? DType::kBF16 : DType::kF16;
    const Layout layout = ragged({1, 1}, {40 * 64 + 5, 700}, i % 2 == 1);
    expect_right(Problem(make_config(2, group_size, dim, dim, block_size, top_k), layout, dtype, rng));
  });
}

// Index keys of another width than keys, and more query rows than the score stage takes: two steps.
TEST_P(EmulatedDecode, InTwoSteps) {
  Rng rng(2);
  expect_right(Problem(make_config(1, 2, 128, 64, 64, 4), ragged({1, 1}, {1000, 300}, true), DType::kBF16, rng));
  use_multiprocessors(20);
  expect_right(Problem(make_config(5, 1, 64, 64, 64, 4), ragged({14}, {900}, false), DType::kF16, rng));
}

TEST_P(EmulatedDecode, QueriesOfEveryLength) {
  Rng rng(3);
  Layout layout = ragged({3, 0, 16, 1, 2}, {129, 50, 1033, 0, 1}, true);
  layout.strided = true;
  const MsaConfig config = make_config(4, 2, 64, 64, 64, 4, 1, 2);
  expect_right(Problem(config, layout, DType::kBF16, rng));
  layout.seqlens_q = {4, 0, 2, 1, 1};
  layout.q_start = {-2, 0, 1000, 900, 5};
  layout.paged = false;
  use_multiprocessors(500);
  expect_right(Problem(config, layout, DType::kBF16, rng));
}

// Equal scores everywhere: the lowest ids win, forced blocks aside.
TEST_P(EmulatedDecode, TiesAndForcedBlocks) {
  Rng rng(4);
  for (const std::int32_t top_k : {7, 20}) {
    const MsaConfig config = make_config(2, 2, 64, 64, 64, top_k, 2, 3);
    expect_right(Problem(config, ragged({2, 1}, {64 * 70 - 1, 64 * 9}, true), DType::kBF16, rng, Values::kIntegers), true);
    Problem zeros(config, single(1, 64 * 300), DType::kBF16, rng);
    for (std::int64_t i = 0; i < zeros.k_idx.numel(); ++i) zeros.k_idx.set(i, 0.0);
    expect_right(zeros, true);
  }
}

// Queries in one sequence of `every`. A batch is laid out by each warp up to 32 sequences, by the CTA above, and 1,024 at a time.
Problem many_sequences(std::size_t count, std::size_t every, std::int32_t max_keys, bool paged, Rng& rng) {
  std::vector<std::int32_t> seqlens_q(count, 0), seqlens_k(count, 3);
  for (std::size_t i = 0; i < count; i += 9) seqlens_k[i] = static_cast<std::int32_t>(uniform(rng, 0, max_keys));
  for (std::size_t i = 0; i < count; i += every) seqlens_q[i] = 1;
  seqlens_k.back() = 200, seqlens_q.back() = 1;
  return Problem(make_config(1, 1, 64, 64, 64, 2), ragged(seqlens_q, seqlens_k, paged), DType::kBF16, rng);
}

TEST_P(EmulatedDecode, ManySequences) {
  Rng rng(5);
  expect_right(many_sequences(32, 2, 500, true, rng));
  use_multiprocessors(100);
  expect_right(many_sequences(33, 2, 500, false, rng));
}

// Long rows, and those of equal scores, have ways of their own to be ranked. Not in every order, for the time it takes.
class EmulatedLongDecode : public testing::Test {
 protected:
  void SetUp() override {
    emulation::options() = {emulation::Timing::kLate, 2};
    use_multiprocessors(16);
  }
  void TearDown() override { emulation::options() = {}; }
};

TEST_F(EmulatedLongDecode, ThousandsOfSequences) {
  Rng rng(12);
  use_multiprocessors(1);
  expect_right(many_sequences(1030, 7, 130, true, rng));
}

TEST_F(EmulatedLongDecode, LongRows) {
  Rng rng(6);
  const auto config = [](std::int32_t top_k) { return make_config(1, 1, 64, 64, 64, top_k); };
  expect_right(long_sequence(config(16), 1, 700, 1030, Values::kGaussian, rng), false, true);
  expect_right(long_sequence(config(5), 1, 9, 1030, Values::kIntegers, rng), true, true);
  expect_right(long_sequence(config(20), 1, 300, 8200, Values::kIntegers, rng), true, true);
}

TEST_P(EmulatedDecode, OptionalOutputsAndRepeats) {
  Rng rng(7);
  use_multiprocessors(50);
  const Problem problem(make_config(2, 4, 128, 128, 128, 16), ragged({1, 3}, {3000, 500}, true), DType::kBF16, rng);
  const MsaResult first = emulated_msa_attention(problem), second = emulated_msa_attention(problem);
  const MsaResult bare = emulated_msa_attention(problem, false);
  EXPECT_TRUE(first.attention.out.same_bits(second.attention.out));
  EXPECT_TRUE(first.attention.lse.same_bits(second.attention.lse));
  EXPECT_TRUE(first.block_ids.same_bits(second.block_ids));
  EXPECT_TRUE(first.attention.out.same_bits(bare.attention.out));
}

// Any lists that obey the contract, empty ones included.
TEST_P(EmulatedDecode, AnyLists) {
  Rng rng(8);
  for (const std::int32_t multiprocessors : kMultiprocessors) {
    use_multiprocessors(multiprocessors);
    Problem problem(make_config(2, 3, 64, 64, 64, 8), ragged({3, 1, 4}, {600, 2000, 0}, true), DType::kBF16, rng);
    const Tensor block_ids = random_block_ids(problem, rng);
    poison_unselected(problem, block_ids);
    EXPECT_TRUE(attention_right(problem, emulated_sparse_decode(problem, block_ids), &block_ids));
  }
}

// 0/0 where all scores of a row are -inf, in one unit or in several; the units of a row that has others as well have no weight.
TEST_P(EmulatedDecode, RowsOfNothingButMinusInfinity) {
  Rng rng(11);
  for (const std::int32_t multiprocessors : kMultiprocessors) {
    use_multiprocessors(multiprocessors);
    Layout layout = ragged({3, 1, 4}, {400, 900, 30}, multiprocessors == 7);
    layout.q_start = {396, 899, -2};
    Problem problem(make_config(2, 3, 64, 64, 64, 8), layout, DType::kBF16, rng);
    inject_minus_infinities(problem, rng);
    expect_right(problem);
    const Tensor block_ids = random_block_ids(problem, rng);
    EXPECT_TRUE(attention_right(problem, emulated_sparse_decode(problem, block_ids), &block_ids));
  }
}

std::string fault_of(const Problem& problem, const Tensor* block_ids) {
  try {
    if (block_ids != nullptr)
      emulated_sparse_decode(problem, *block_ids);
    else
      emulated_msa_attention(problem);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_P(EmulatedDecode, WhatBreaksTheRulesIsReported) {
  Rng rng(9);
  const Problem problem(make_config(1, 2, 64, 64, 64, 4), ragged({1, 2}, {600, 300}, true), DType::kBF16, rng);
  const std::vector<std::vector<double>> broken = {{0, 99, -1, -1}, {0, -1, 2, -1}, {3, 1, -1, -1}, {1, 1, -1, -1}, {-2, 1, 2, 3}};
  for (const std::int32_t multiprocessors : kMultiprocessors) {
    use_multiprocessors(multiprocessors);
    for (const std::vector<double>& row : broken) {
      Tensor block_ids = random_block_ids(problem, rng);
      block_ids.set_row(1, row.data());
      EXPECT_NE(fault_of(problem, &block_ids).find("block"), std::string::npos) << row[0] << ", " << row[1];
    }
    Problem bad_page = problem;
    bad_page.page_table[1] = 1 << 20;
    EXPECT_NE(fault_of(bad_page, nullptr).find("page"), std::string::npos);
    Problem bad_offsets = problem;
    bad_offsets.cu_seqlens_q[1] = 9;
    EXPECT_NE(fault_of(bad_offsets, nullptr), "");
  }
}

TEST(EmulatedDecodeGrid, OfSeveralCtasFailsByName) {
  Rng rng(10);
  const Problem problem(make_config(1, 1, 64, 64, 64, 2), single(1, 300), DType::kBF16, rng);
  try {
    emulated_msa_attention(problem);
    FAIL();
  } catch (const emulation::Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("smxx_msa_decode_kernel"), std::string::npos) << failure.what();
  }
}

}  // namespace
}  // namespace openmsa::test
