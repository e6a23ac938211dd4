// The CPU engine's sparse_attention and sparse_decode against the oracle, by SPEC.md's rule.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kCpu = on(Backend::kCpu);

// Both kernels on one problem. Keys that nobody selected hold NaN, so reading one shows.
void expect_both_right(Problem problem, const Tensor& block_ids) {
  SCOPED_TRACE(describe(problem));
  poison_unselected(problem, block_ids);
  const Attention oracle = oracle_sparse_attention(problem, block_ids);
  const std::vector<float> plain = plain_attention(problem, &block_ids);
  EXPECT_TRUE(attention_right(problem, run_sparse_attention(problem, block_ids, kCpu), oracle, plain)) << "sparse_attention";
  EXPECT_TRUE(attention_right(problem, run_sparse_decode(problem, block_ids, kCpu), oracle, plain)) << "sparse_decode";
}

void expect_both_right(const Problem& problem, Rng& rng) { expect_both_right(problem, random_block_ids(problem, rng)); }

class CpuAttend : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuAttend);

TEST_P(CpuAttend, RandomLayoutsOfSelectedBlocks) {
  for (std::uint64_t seed = 0; seed < 25; ++seed) {
    const Problem problem = random_problem(seed, GetParam());
    expect_both_right(problem, run_index_select(problem, kCpu));
  }
}

TEST_P(CpuAttend, RandomLayoutsOfAnyBlocks) {
  for (std::uint64_t seed = 300; seed < 325; ++seed) {
    Rng rng(seed);
    expect_both_right(random_problem(seed, GetParam()), rng);
  }
}

TEST_P(CpuAttend, EveryHeadDim) {
  Rng rng(1);
  for (std::int32_t dim = 16; dim <= 256; dim += 16) {
    expect_both_right(Problem(make_config(2, 2, dim, 16, 32, 4), single(50, 179), GetParam(), rng), rng);
    expect_both_right(Problem(make_config(2, 4, dim, 16, 32, 4), single(2, 200, true), GetParam(), rng), rng);
  }
}

TEST_P(CpuAttend, EveryGroupSize) {
  Rng rng(2);
  for (const std::int32_t group_size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 32}) {
    expect_both_right(Problem(make_config(2, group_size, 32, 16, 16, 8), single(60, 150, true), GetParam(), rng), rng);
    expect_both_right(Problem(make_config(3, group_size, 64, 16, 16, 8), single(1, 150), GetParam(), rng), rng);
  }
}

TEST_P(CpuAttend, EveryBlockSize) {
  Rng rng(3);
  for (std::int32_t block_size = 16; block_size <= 256; block_size += 16) {
    expect_both_right(Problem(make_config(2, 4, 32, 16, block_size, 3), single(40, 900, true), GetParam(), rng), rng);
  }
}

TEST_P(CpuAttend, EveryTopK) {
  Rng rng(4);
  for (const std::int32_t top_k : kTopKs) {
    expect_both_right(Problem(make_config(1, 4, 32, 16, 16, top_k), single(30, 1500), GetParam(), rng), rng);
  }
}

TEST_P(CpuAttend, LengthsAroundBlocks) {
  Rng rng(5);
  for (const std::int32_t seqlen_k : {1, 127, 128, 129, 2047, 2048, 2049, 2175}) {
    for (const std::int32_t seqlen_q : {1, 4, 33}) {
      if (seqlen_q > seqlen_k) continue;
      expect_both_right(Problem(make_config(2, 4, 64, 16, 128, 16), single(seqlen_q, seqlen_k, seqlen_q == 4), GetParam(), rng),
                        rng);
    }
  }
}

// T == Hkv: a list read head-major cannot be told by its shape. Every (token, group) has a list of its own here.
TEST_P(CpuAttend, TokenMajorLists) {
  Rng rng(6);
  const Problem problem(make_config(4, 2, 32, 16, 16, 3), single(4, 16 * 16), GetParam(), rng);
  Tensor block_ids(DType::kI32, {4, 4, 3});
  for (std::int64_t t = 0; t < 4; ++t) {
    for (std::int64_t g = 0; g < 4; ++g) {
      const double row[] = {static_cast<double>(t), static_cast<double>(4 + 2 * g), static_cast<double>(5 + 2 * g + t % 2)};
      block_ids.set_row(t * 4 + g, row);
    }
  }
  expect_both_right(problem, block_ids);
}

// Every second list of a larger tensor, as big[:, ::2] gives it; 1 and 5 queries took another path in one engine.
TEST_P(CpuAttend, ListsThatAreStridedViews) {
  Rng rng(7);
  for (const std::int32_t seqlen_q : {1, 5, 50}) {
    const Problem problem(make_config(2, 2, 32, 16, 16, 4), single(seqlen_q, 300), GetParam(), rng);
    const Tensor dense = random_block_ids(problem, rng);
    Tensor big(DType::kI32, {seqlen_q, 4, 4});
    for (std::int64_t t = 0; t < seqlen_q; ++t) {
      for (std::int64_t g = 0; g < 2; ++g) {
        std::vector<double> row(4);
        dense.get_row(t * 2 + g, row.data());
        big.set_row(t * 4 + 2 * g, row.data());
      }
    }
    TensorView view = big.view();
    view.shape[1] = 2;
    view.stride[1] *= 2;
    for (auto* function : {&sparse_attention, &sparse_decode}) {
      Tensor out(problem.dtype, {seqlen_q, 4, 32}), expected(problem.dtype, {seqlen_q, 4, 32});
      SparseAttentionArgs args{.config = problem.config,
                               .batch = problem.batch(),
                               .q = problem.q.view(),
                               .k = problem.k.view(),
                               .v = problem.v.view(),
                               .block_ids = dense.view(),
                               .out = expected.view(),
                               .lse = {},
                               .options = kCpu};
      function(args);
      args.block_ids = view;
      args.out = out.view();
      function(args);
      EXPECT_TRUE(out.same_bits(expected));
    }
  }
}

// Lengths [129, 0] and graph-padding rows: sequences without keys or queries give exact zeros and disturb nobody.
TEST_P(CpuAttend, SequencesWithoutKeys) {
  Rng rng(8);
  Layout layout;
  layout.seqlens_q = {1, 1, 3, 0, 2};
  layout.seqlens_k = {129, 0, 0, 64, 5};
  layout.paged = true;
  const Problem problem(make_config(2, 4, 64, 16, 64, 4), layout, GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  expect_both_right(problem, block_ids);
  const Attention decode = run_sparse_decode(problem, block_ids, kCpu);
  for (std::int64_t h = 0; h < 8; ++h) {
    EXPECT_EQ(decode.lse(1, h), -INFINITY);
    EXPECT_EQ(decode.out(2, h, 63), 0.0);
  }
}

// NaN in the keys and infinity in the values of the future, in the same block: no earlier row may move by a bit.
TEST_P(CpuAttend, TheFutureDoesNotLeak) {
  for (const std::int32_t prefix : {0, 128}) {
    Rng rng(9);
    Problem problem(make_config(2, 4, 48, 16, 64, 4), single(100, prefix + 100), GetParam(), rng);
    const Tensor block_ids = run_index_select(problem, kCpu);
    for (auto* run : {&run_sparse_attention, &run_sparse_decode}) {
      const Attention before = run(problem, block_ids, kCpu);
      Problem changed = problem;
      for (const std::int64_t j : {70, 71, 99}) {
        for (std::int32_t g = 0; g < 2; ++g) {
          changed.k.set(changed.key_row(0, prefix + j, g) * 48 + 7, kNaN);
          changed.v.set(changed.key_row(0, prefix + j, g) * 48 + 40, INFINITY);
        }
      }
      const Attention after = run(changed, block_ids, kCpu);
      for (std::int64_t row = 0; row < 100 * 8; ++row) {
        if (row / 8 < 70) {
          ASSERT_EQ(before.lse.get(row), after.lse.get(row)) << "row " << row;
          for (std::int64_t d = 0; d < 48; ++d)
            ASSERT_EQ(before.out.get(row * 48 + d), after.out.get(row * 48 + d)) << "row " << row;
        }
      }
      ASSERT_TRUE(std::isnan(after.out(99, 0, 0))) << "the last row sees itself";
      ASSERT_TRUE(std::isnan(after.lse(99, 0)));
    }
  }
}

TEST_P(CpuAttend, SpecialsAreWhereTheOracleHasThem) {
  for (std::uint64_t seed = 350; seed < 370; ++seed) {
    Rng rng(seed);
    Problem problem = random_problem(seed, GetParam());
    inject_specials(problem, rng);
    expect_both_right(problem, rng);
  }
}

TEST_P(CpuAttend, LargeScoresAreExact) {
  Rng rng(10);
  Problem problem(make_config(1, 4, 32, 16, 16, 4), single(20, 120), GetParam(), rng);
  problem.config.softmax_scale = 40.0;  // scores of some thousands: nearly one-hot rows
  const Tensor block_ids = random_block_ids(problem, rng);
  const Attention oracle = oracle_sparse_attention(problem, block_ids);
  for (auto* run : {&run_sparse_attention, &run_sparse_decode}) {
    const Attention result = run(problem, block_ids, kCpu);
    for (std::int64_t i = 0; i < result.lse.numel(); ++i) {
      if (oracle.lse.get(i) == -INFINITY) continue;
      ASSERT_NEAR(result.lse.get(i), oracle.lse.get(i), 1e-6 * std::abs(oracle.lse.get(i)) + 1e-3);
    }
    for (std::int64_t i = 0; i < result.out.numel(); ++i) ASSERT_TRUE(std::isfinite(result.out.get(i)));
  }
}

TEST_P(CpuAttend, LseIsOptional) {
  Rng rng(11);
  const Problem problem(make_config(2, 2, 32, 16, 16, 4), single(30, 90), GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  Tensor out(problem.dtype, {30, 4, 32});
  sparse_attention({.config = problem.config,
                    .batch = problem.batch(),
                    .q = problem.q.view(),
                    .k = problem.k.view(),
                    .v = problem.v.view(),
                    .block_ids = block_ids.view(),
                    .out = out.view(),
                    .lse = {},
                    .options = kCpu});
  EXPECT_TRUE(out.same_bits(run_sparse_attention(problem, block_ids, kCpu).out));
}

// Four rows of one speculative step against four single steps.
TEST_P(CpuAttend, SpeculativeRowsEqualSingleSteps) {
  Rng rng(12);
  const Problem problem(make_config(2, 8, 64, 64, 32, 4), single(4, 700, true), GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  const Attention all = run_sparse_decode(problem, block_ids, kCpu);
  for (std::int64_t i = 0; i < 4; ++i) {
    const Problem step = problem.query_chunk(i, 1);
    const Tensor step_ids = run_index_select(step, kCpu);
    const Attention one = run_sparse_decode(step, step_ids, kCpu);
    for (std::int64_t n = 0; n < step_ids.numel(); ++n) ASSERT_EQ(step_ids.get(n), block_ids.get(i * step_ids.numel() + n));
    for (std::int64_t n = 0; n < one.out.numel(); ++n) ASSERT_EQ(one.out.get(n), all.out.get(i * one.out.numel() + n));
  }
}

}  // namespace
}  // namespace openmsa::test
