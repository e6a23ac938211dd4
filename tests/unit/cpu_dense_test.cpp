// The CPU engine's dense_attention and its per-block maxima against the oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kCpu = on(Backend::kCpu);

void expect_right(const Problem& problem) {
  SCOPED_TRACE(describe(problem));
  const Attention result = run_dense_attention(problem, kCpu, true);
  EXPECT_TRUE(attention_right(problem, result, nullptr));
  EXPECT_TRUE(run_dense_attention(problem, kCpu, false).out.same_bits(result.out)) << "block_max changes the output";
}

class CpuDense : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuDense);

TEST_P(CpuDense, RandomLayouts) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) expect_right(random_problem(seed, GetParam()));
}

TEST_P(CpuDense, SpecialsAreWhereTheOracleHasThem) {
  for (std::uint64_t seed = 50; seed < 65; ++seed) {
    Rng rng(seed);
    Problem problem = random_problem(seed, GetParam());
    inject_specials(problem, rng);
    expect_right(problem);
  }
}

TEST_P(CpuDense, EveryHeadDim) {
  Rng rng(1);
  for (std::int32_t dim = 16; dim <= 256; dim += 16) {
    expect_right(Problem(make_config(2, 2, dim, 16, 32, 4), single(50, 179), GetParam(), rng));
    expect_right(Problem(make_config(1, 4, dim, 16, 32, 4), single(2, 200, true), GetParam(), rng));
  }
}

TEST_P(CpuDense, EveryGroupSize) {
  Rng rng(2);
  for (const std::int32_t group_size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17}) {
    expect_right(Problem(make_config(2, group_size, 32, 16, 16, 8), single(40, 100, true), GetParam(), rng));
    expect_right(Problem(make_config(2, group_size, 32, 16, 16, 8), single(1, 150), GetParam(), rng));
  }
}

TEST_P(CpuDense, EveryBlockSize) {
  Rng rng(3);
  for (std::int32_t block_size = 16; block_size <= 256; block_size += 16) {
    expect_right(Problem(make_config(2, 2, 32, 16, block_size, 4), single(30, 700, true), GetParam(), rng));
  }
}

TEST_P(CpuDense, LongRow) {
  Rng rng(4);
  expect_right(Problem(make_config(1, 2, 64, 16, 128, 16), single(3, 9000, true), GetParam(), rng));
}

TEST_P(CpuDense, TheFutureDoesNotLeak) {
  Rng rng(5);
  Problem problem(make_config(2, 2, 48, 16, 64, 4), single(100, 150), GetParam(), rng);
  const Attention before = run_dense_attention(problem, kCpu, true);
  for (std::int32_t g = 0; g < 2; ++g) {
    problem.k.set(problem.k.at(120, g, 5), std::numeric_limits<double>::quiet_NaN());
    problem.v.set(problem.v.at(121, g, 6), INFINITY);
  }
  const Attention after = run_dense_attention(problem, kCpu, true);
  for (std::int64_t t = 0; t < 70; ++t) {  // query 70 stands at position 120
    for (std::int64_t h = 0; h < 4; ++h) {
      ASSERT_EQ(before.lse(t, h), after.lse(t, h)) << "query " << t;
      for (std::int64_t d = 0; d < 48; ++d) ASSERT_EQ(before.out(t, h, d), after.out(t, h, d)) << "query " << t;
      for (std::int64_t b = 0; b < 3; ++b) ASSERT_EQ(before.block_max(t, h, b), after.block_max(t, h, b)) << "query " << t;
    }
  }
  ASSERT_TRUE(std::isnan(after.out(70, 0, 0)));
  ASSERT_TRUE(std::isnan(after.block_max(70, 0, 1)));
  ASSERT_EQ(after.block_max(70, 0, 0), before.block_max(70, 0, 0));
}

// Sparse attention over every block is dense attention, each within the rule of the same oracle.
TEST_P(CpuDense, EqualsSparseWhenEveryBlockFits) {
  Rng rng(6);
  const Problem problem(make_config(2, 4, 64, 32, 128, 16), single(300, 2048), GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  const Attention dense = run_dense_attention(problem, kCpu);
  const Attention sparse = run_sparse_attention(problem, block_ids, kCpu);
  double difference = 0.0;
  for (std::int64_t i = 0; i < dense.out.numel(); ++i) {
    difference = std::max(difference, std::abs(dense.out.get(i) - sparse.out.get(i)));
  }
  // Values of about 1 averaged over hundreds of keys: below 1/4, where a bf16 ulp is 2^-10 and an f16 ulp 2^-13.
  EXPECT_LE(difference, GetParam() == DType::kF32 ? 2e-6 : GetParam() == DType::kBF16 ? 0x1p-9 : 0x1p-12);
}

}  // namespace
}  // namespace openmsa::test
