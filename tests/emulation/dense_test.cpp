// dense_attention behind its real launch code: by single CTAs, with block_max, and by pairs of CTAs that share a tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "calls.hpp"
#include "cuda/dense_params.hpp"
#include "openmsa/error.hpp"
#include "orders.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

using cuda::DenseMode;

Attention run(const Problem& problem, DenseMode mode, bool with_lse = true) {
  emulation::largest_cluster = 0;
  const Attention result = emulated_dense_attention(problem, mode == DenseMode::kBlockMax, with_lse);
  EXPECT_EQ(emulation::largest_cluster, static_cast<unsigned>(cuda::dense_cluster(mode)));
  return result;
}

// In that mode, and for single CTAs also with block_max.
void expect_right(const Problem& problem, DenseMode mode = DenseMode::kPlain) {
  SCOPED_TRACE(describe(problem) + ", multiprocessors " + std::to_string(emulation::options().num_multiprocessors));
  const Attention oracle = oracle_dense_attention(problem);
  const std::vector<float> plain = plain_attention(problem, nullptr);
  EXPECT_TRUE(attention_right(problem, run(problem, mode), oracle, plain));
  if (mode != DenseMode::kPlain) return;
  const Attention with_max = run(problem, DenseMode::kBlockMax);
  EXPECT_TRUE(attention_right(problem, with_max, oracle, plain)) << "with block_max";
  EXPECT_TRUE(block_max_right(problem, with_max.block_max, oracle.block_max));
}

MsaConfig dense_config(std::int32_t groups, std::int32_t group_size, std::int32_t dim, std::int32_t block_size) {
  return make_config(groups, group_size, dim, 64, block_size, 4);
}

// NaN into the keys that no query sees and the values there. What else lies in the block of a key that is seen, too.
void poison_unseen(Problem& problem) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::int64_t> seen(static_cast<std::size_t>(problem.num_seqs()), 0);
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    const Problem::Query query = problem.query(t);
    std::int64_t& most = seen[static_cast<std::size_t>(query.seq)];
    most = std::max(most, query.num_visible);
  }
  const std::vector<double> row(static_cast<std::size_t>(problem.config.head_dim), kNaN);
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    const auto s = static_cast<std::size_t>(seq);
    for (std::int64_t j = seen[s]; j < problem.layout.seqlens_k[s]; ++j) {
      for (std::int32_t g = 0; g < problem.config.num_kv_heads; ++g) {
        problem.k.set_row(problem.key_row(seq, j, g), row.data());
        problem.v.set_row(problem.key_row(seq, j, g), row.data());
      }
    }
  }
}

class EmulatedDense : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedDense);

// Laps of the ring, tiles after one another in a CTA, of two groups and two documents.
TEST_P(EmulatedDense, EveryShape) {
  Rng rng(1);
  const std::int32_t group_sizes[] = {4, 16, 3, 11, 8, 6}, multiprocessors[] = {3, 1, 2, 4, 1, 20};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    emulation::options().num_multiprocessors = multiprocessors[i];
    const std::int32_t group_size = group_sizes[i];
    const std::int32_t tile = cuda::dense_tile_tokens(DenseMode::kPlain, group_size > 8 ? 4 : group_size > 4 ? 3 : 2);
    const Layout layout = ragged({tile + 3, 5}, {5 * block_size - 7, 90}, i % 2 == 0);
    expect_right(Problem(dense_config(2, group_size, dim, block_size), layout, i % 3 == 0 ? DType::kF16 : DType::kBF16, rng));
  });
}

TEST_P(EmulatedDense, Layouts) {
  Rng rng(2);
  Layout layout = ragged({5, 0, 33, 1, 64, 2}, {129, 50, 33, 257, 64, 0}, false);
  const MsaConfig config = dense_config(2, 4, 64, 64);
  expect_right(Problem(config, layout, DType::kBF16, rng));
  layout.q_start = {-2, 0, 0, 300, 5, 0};
  layout.strided = true;
  expect_right(Problem(config, layout, DType::kF16, rng));
  layout.q_start = {};
  layout.paged = true;
  expect_right(Problem(config, layout, DType::kBF16, rng));
}

// The first row of a tile sees all of a block, or all but one or two of its keys.
TEST_P(EmulatedDense, MasksBeginWhereTheFirstRowSaysSo) {
  Rng rng(16);
  Layout layout = ragged({4, 4, 4, 4, 4, 4}, {130, 66, 65, 67, 200, 128}, false);
  layout.q_start = {60, 61, 62, 63, 126, 127};
  for (const std::int32_t block_size : {64, 128}) {
    expect_right(Problem(dense_config(1, 16, 64, block_size), layout, DType::kBF16, rng));
  }
}

// More queries than keys, and queries that stop short of the last keys; the memory of those is NaN.
TEST_P(EmulatedDense, QueriesBeforeTheKeysAndKeysThatNobodySees) {
  Rng rng(3);
  for (const bool paged : {false, true}) {
    Layout layout = ragged({50, 40, 3}, {7, 300, 200}, paged);
    layout.q_start = {-43, 20, -3};
    Problem problem(dense_config(1, 5, 64, paged ? 64 : 128), layout, DType::kBF16, rng);
    poison_unseen(problem);
    expect_right(problem);
  }
}

// NaN and infinities reach the rows that see them and no others.
TEST_P(EmulatedDense, SpecialValues) {
  Rng rng(4);
  for (const bool paged : {false, true}) {
    Problem problem(dense_config(2, 4, 64, 64), ragged({70, 9}, {200, 90}, paged), paged ? DType::kF16 : DType::kBF16, rng);
    inject_specials(problem, rng);
    expect_right(problem);
  }
}

// 0/0 where a row's scores are all -inf, and 0 where it sees no key.
TEST_P(EmulatedDense, RowsOfNothingButMinusInfinity) {
  Rng rng(17);
  for (const bool paged : {false, true}) {
    Layout layout = ragged({70, 9}, {200, 90}, paged);
    layout.q_start = {-6, 81};
    Problem problem(dense_config(2, 4, 64, 64), layout, paged ? DType::kF16 : DType::kBF16, rng);
    inject_minus_infinities(problem, rng);
    expect_right(problem);
  }
}

// The older a key the larger its scores, so that rows exceed their offset in every step.
void grow_towards_older(Problem& problem) {
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    const std::int64_t num_keys = problem.layout.seqlens_k[static_cast<std::size_t>(seq)];
    for (std::int64_t j = 0; j < num_keys; ++j) {
      const double scale = 0.2 + static_cast<double>((num_keys - 1 - j) / problem.config.block_size * 8);
      for (std::int32_t g = 0; g < problem.config.num_kv_heads; ++g) {
        std::vector<double> row(static_cast<std::size_t>(problem.config.head_dim));
        problem.k.get_row(problem.key_row(seq, j, g), row.data());
        for (double& x : row) x *= scale;
        problem.k.set_row(problem.key_row(seq, j, g), row.data());
      }
    }
  }
}

TEST_P(EmulatedDense, MaximaThatGrow) {
  Rng rng(5);
  Problem problem(dense_config(1, 8, 64, 64), single(20, 400), DType::kBF16, rng);
  grow_towards_older(problem);
  expect_right(problem);
}

TEST_P(EmulatedDense, WithoutLse) {
  Rng rng(6);
  const Problem problem(dense_config(2, 7, 64, 64), ragged({20, 5}, {150, 3}, true), DType::kBF16, rng);
  for (const DenseMode mode : {DenseMode::kPlain, DenseMode::kBlockMax}) {
    EXPECT_TRUE(run(problem, mode, false).out.same_bits(run(problem, mode).out));
  }
}

TEST_P(EmulatedDense, BrokenIndexDataAreReported) {
  Rng rng(7);
  Problem problem(dense_config(1, 16, 64, 64), single(20, 256, true), DType::kBF16, rng);
  for (const std::int32_t page : {1 << 20, -3}) {
    problem.page_table[1] = page;
    EXPECT_THROW(run(problem, DenseMode::kPlain), Error);
  }
  EXPECT_THROW(run(overlapping_sequences(64, rng).problem, DenseMode::kPlain), Error);
}

// Rows of a tile are tokens times heads, padded to a power of two.
class EmulatedDenseGroups : public emulation::InOrders {};
OPENMSA_IN_TWO_ORDERS(EmulatedDenseGroups);

TEST_P(EmulatedDenseGroups, EveryGroupSize) {
  Rng rng(8);
  for (std::int32_t group_size = 1; group_size <= 16; ++group_size) {
    const DType dtype = group_size % 2 == 0 ? DType::kF16 : DType::kBF16;
    expect_right(Problem(dense_config(2, group_size, 64, 64), single(140 / group_size, 150, group_size % 3 == 0), dtype, rng));
  }
}

// Sequences long enough for pairs of CTAs, which load each other's keys.
class EmulatedDensePairs : public emulation::InOrders {};
OPENMSA_IN_TWO_ORDERS(EmulatedDensePairs);

TEST_P(EmulatedDensePairs, EveryShape) {
  Rng rng(9);
  const std::int32_t group_sizes[] = {16, 11, 8, 16, 9, 13}, multiprocessors[] = {2, 5, 3, 40, 4, 2};
  for_each_shape([&](std::int32_t dim, std::int32_t block_size, int i) {
    emulation::options().num_multiprocessors = multiprocessors[i];
    const std::int32_t group_size = group_sizes[i];
    const std::int32_t pair = cuda::dense_tile_tokens(DenseMode::kPaired, group_size > 8 ? 4 : 3);
    // Of the last pair the second CTA has no token, or one.
    const Layout layout = single(8 * pair + (i % 2 == 0 ? 1 : pair / 2 + 1), 2 * block_size + 60 * i, i % 2 == 1);
    expect_right(Problem(dense_config(1, group_size, dim, block_size), layout, i % 3 == 0 ? DType::kF16 : DType::kBF16, rng),
                 DenseMode::kPaired);
  });
}

TEST_P(EmulatedDensePairs, Layouts) {
  Rng rng(10);
  Layout layout = ragged({130, 0, 300}, {260, 5, 150}, false);
  expect_right(Problem(dense_config(2, 13, 64, 64), layout, DType::kBF16, rng), DenseMode::kPaired);
  layout.q_start = {-100, 0, 22};  // the second CTA of a pair begins two keys before the end of a block, among others
  layout.strided = layout.paged = true;
  Problem problem(dense_config(1, 16, 64, 64), layout, DType::kF16, rng);
  poison_unseen(problem);
  expect_right(problem, DenseMode::kPaired);
}

TEST_P(EmulatedDensePairs, ValuesOfAllKinds) {
  Rng rng(11);
  Problem specials(dense_config(1, 16, 64, 128), single(130, 260, true), DType::kBF16, rng);
  inject_specials(specials, rng);
  expect_right(specials, DenseMode::kPaired);
  Problem infinities(dense_config(1, 16, 64, 64), single(130, 210), DType::kBF16, rng);
  inject_minus_infinities(infinities, rng);
  expect_right(infinities, DenseMode::kPaired);
  Problem growing(dense_config(1, 16, 64, 64), single(130, 320), DType::kBF16, rng);
  grow_towards_older(growing);
  expect_right(growing, DenseMode::kPaired);
}

TEST_P(EmulatedDensePairs, BrokenPagesAreReported) {
  Rng rng(12);
  Problem problem(dense_config(1, 16, 64, 64), single(128, 256, true), DType::kBF16, rng);
  problem.page_table[1] = 1 << 20;
  EXPECT_THROW(run(problem, DenseMode::kPaired), Error);
}

// One head a group: 256 tokens a pair. Nearly all of them see no key, so that they cost little.
TEST_P(EmulatedDensePairs, GroupsOfOneHead) {
  Rng rng(13);
  expect_right(Problem(dense_config(1, 1, 64, 64), single(8 * 256 + 130, 230), DType::kBF16, rng), DenseMode::kPaired);
}

TEST(EmulatedDenseModes, PairsFromEightTilesASequenceOn) {
  Rng rng(14);
  const MsaConfig config = dense_config(1, 16, 64, 64);
  run(Problem(config, single(127, 20), DType::kBF16, rng), DenseMode::kPlain);
  run(Problem(config, single(128, 20), DType::kBF16, rng), DenseMode::kPaired);
  run(Problem(config, ragged({128, 1}, {20, 1}), DType::kBF16, rng), DenseMode::kPlain);
}

// Which CTA takes a tile, and when, is nothing to the result; nor is the mode to a row's.
TEST(EmulatedDenseOrder, ResultsRepeatBitwise) {
  Rng rng(15);
  const Problem problem(dense_config(2, 16, 64, 64), single(140, 300), DType::kBF16, rng);
  const Attention once = run(problem, DenseMode::kPaired), with_max = run(problem, DenseMode::kBlockMax);
  EXPECT_TRUE(once.out.same_bits(with_max.out) && once.lse.same_bits(with_max.lse)) << "with block_max";
  for (const int num_multiprocessors : {2, 7}) {
    emulation::options() = {emulation::Timing::kLate, static_cast<std::uint32_t>(num_multiprocessors), num_multiprocessors};
    const Attention again = run(problem, DenseMode::kPaired), max_again = run(problem, DenseMode::kBlockMax);
    EXPECT_TRUE(once.out.same_bits(again.out) && once.lse.same_bits(again.lse)) << num_multiprocessors;
    EXPECT_TRUE(with_max.block_max.same_bits(max_again.block_max) && once.out.same_bits(max_again.out)) << num_multiprocessors;
  }
  emulation::options() = {};
}

}  // namespace
}  // namespace openmsa::test
