// The oracle's sparse_attention and dense_attention against numbers worked out by hand and against the textbook formula.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/rows.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kReference = on(Backend::kReference);

void fill(Tensor& tensor, double value) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value);
}

// Every visible block of every query: k >= number of blocks.
Tensor all_blocks(const Problem& problem) {
  Tensor block_ids(DType::kI32, {problem.total_q, problem.config.num_kv_heads, problem.config.top_k});
  for (std::int64_t i = 0; i < block_ids.numel(); ++i) {
    const std::int64_t n = i % problem.config.top_k, t = i / problem.config.top_k / problem.config.num_kv_heads;
    block_ids.set(i, n < problem.query(t).num_visible_blocks ? static_cast<double>(n) : -1.0);
  }
  return block_ids;
}

TEST(ReferenceDense, EqualScoresAverageTheValues) {
  Rng rng(1);
  Problem problem(make_config(1, 2, 2, 2, 2, 4), single(3, 3), DType::kF64, rng);
  fill(problem.k, 0.0);
  for (std::int64_t j = 0; j < 3; ++j) problem.v.set(problem.v.at(j, 0, 0), static_cast<double>(6 * j));
  const Attention result = run_dense_attention(problem, kReference);
  for (std::int64_t h = 0; h < 2; ++h) {
    EXPECT_DOUBLE_EQ(result.out(0, h, 0), 0.0);
    EXPECT_DOUBLE_EQ(result.out(1, h, 0), 3.0);
    EXPECT_DOUBLE_EQ(result.out(2, h, 0), 6.0);
    EXPECT_DOUBLE_EQ(result.lse(0, h), 0.0);
    EXPECT_DOUBLE_EQ(result.lse(1, h), std::log(2.0));
    EXPECT_DOUBLE_EQ(result.lse(2, h), std::log(3.0));
  }
}

TEST(ReferenceDense, FollowsHandComputedValues) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 1, 1, 2, 4), single(1, 3), DType::kF64, rng);
  problem.config.softmax_scale = 0.5;
  problem.q.set(0, 2.0);
  for (std::int64_t j = 0; j < 3; ++j) problem.k.set(j, std::log(static_cast<double>(j + 1)));  // exp(scaled score) = j + 1
  for (std::int64_t j = 0; j < 3; ++j) problem.v.set(j, std::pow(10.0, static_cast<double>(j)));
  const Attention result = run_dense_attention(problem, kReference, true);
  EXPECT_NEAR(result.out.get(0), (1 * 1.0 + 2 * 10.0 + 3 * 100.0) / 6, 1e-12);
  EXPECT_NEAR(result.lse.get(0), std::log(6.0), 1e-12);
  EXPECT_NEAR(result.block_max(0, 0, 0), std::log(2.0), 1e-12);
  EXPECT_NEAR(result.block_max(0, 0, 1), std::log(3.0), 1e-12);
  EXPECT_EQ(result.block_max(0, 0, 2), -INFINITY);
}

TEST(ReferenceSparse, SeesVisibleKeysOfSelectedBlocksAlone) {
  Rng rng(1);
  Problem problem(make_config(2, 1, 1, 1, 2, 2), single(2, 7), DType::kF64, rng);  // positions 5 and 6
  fill(problem.k, 0.0);
  for (std::int64_t i = 0; i < problem.v.numel(); ++i) problem.v.set(i, std::pow(10.0, static_cast<double>(i / 2)));
  Tensor block_ids(DType::kI32, {2, 2, 2});
  const double ids[] = {0, 2, 1, -1, 0, 3, 3, -1};
  for (std::int64_t i = 0; i < 8; ++i) block_ids.set(i, ids[i]);
  const Attention result = run_sparse_attention(problem, block_ids, kReference);
  EXPECT_NEAR(result.out(0, 0, 0), (1e0 + 1e1 + 1e4 + 1e5) / 4, 1e-9);
  EXPECT_NEAR(result.out(0, 1, 0), (1e2 + 1e3) / 2, 1e-9);
  EXPECT_NEAR(result.out(1, 0, 0), (1e0 + 1e1 + 1e6) / 3, 1e-9) << "block 3 has one key";
  EXPECT_NEAR(result.out(1, 1, 0), 1e6, 1e-9);
  EXPECT_NEAR(result.lse(1, 0), std::log(3.0), 1e-12);
}

TEST(ReferenceSparse, OwnBlockIsCausal) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 2, 2, 8, 1), single(8, 8), DType::kF64, rng);
  const Tensor block_ids = all_blocks(problem);
  const Attention before = run_sparse_attention(problem, block_ids, kReference);
  for (std::int64_t d = 0; d < 2; ++d) problem.v.set(problem.v.at(6, 0, d), 1e4);
  const Attention after = run_sparse_attention(problem, block_ids, kReference);
  for (std::int64_t t = 0; t < 8; ++t) {
    EXPECT_EQ(before.out(t, 0, 0) == after.out(t, 0, 0), t < 6) << "query " << t << ", value 6 changed";
  }
}

TEST(ReferenceSparse, RowsWithoutKeysAreZero) {
  Rng rng(1);
  Problem problem(make_config(1, 2, 4, 4, 2, 2), single(3, 4), DType::kF64, rng);
  problem.layout.q_start = {-2};  // positions -2, -1, 0
  const Attention sparse = run_sparse_attention(problem, all_blocks(problem), kReference);
  const Attention dense = run_dense_attention(problem, kReference, true);
  for (const Attention* result : {&sparse, &dense}) {
    for (std::int64_t row = 0; row < 4; ++row) {
      EXPECT_EQ(result->lse.get(row), -INFINITY);
      for (std::int64_t d = 0; d < 4; ++d) EXPECT_EQ(result->out.get(row * 4 + d), 0.0);
    }
    EXPECT_EQ(result->out(2, 0, 0), problem.v(0, 0, 0)) << "position 0 sees key 0 alone";
  }
  EXPECT_EQ(dense.block_max(1, 0, 0), -INFINITY);
}

TEST(ReferenceSparse, LargeScoresDoNotOverflow) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 1, 1, 2, 1), single(1, 2), DType::kF64, rng);
  problem.q.set(0, 1.0);
  problem.k.set(0, 1e4);
  problem.k.set(1, 1e4 - std::log(3.0));
  problem.v.set(0, 4.0);
  problem.v.set(1, 0.0);
  const Attention result = run_sparse_attention(problem, all_blocks(problem), kReference);
  EXPECT_NEAR(result.out.get(0), 3.0, 1e-9);
  EXPECT_NEAR(result.lse.get(0), 1e4 + std::log(4.0 / 3.0), 1e-9);
}

TEST(ReferenceSparse, NaNInDataPropagatesToTheRowsThatSeeIt) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 2, 2, 2, 2), single(4, 4), DType::kF64, rng);
  problem.k.set(problem.k.at(2, 0, 1), kNaN);
  const Attention result = run_sparse_attention(problem, all_blocks(problem), kReference);
  EXPECT_FALSE(std::isnan(result.out(1, 0, 0)));
  EXPECT_TRUE(std::isnan(result.out(2, 0, 0)));
  EXPECT_TRUE(std::isnan(result.lse(3, 0)));
}

// exp without the maximum taken out, summed from the far end: same numbers, other code.
TEST(ReferenceSparse, MatchesTheTextbookFormulaOverRandomLayouts) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Rng rng(seed);
    const MsaConfig config = make_config(pick(rng, {1, 2}), pick(rng, {1, 3}), 4, 4, pick(rng, {3, 16, 64}), 4, 0, 1);
    const Problem problem(config, random_layout(rng, 4000), DType::kF64, rng);
    SCOPED_TRACE(problem.layout.text() + " " + text(config));
    const Tensor block_ids = run_index_select(problem, kReference);
    const Attention result = run_sparse_attention(problem, block_ids, on(Backend::kReference, 1 + seed % 3));
    for (std::int64_t t = 0; t < problem.total_q; ++t) {
      const Problem::Query query = problem.query(t);
      for (std::int64_t h = 0; h < config.num_q_heads; ++h) {
        const auto g = static_cast<std::int32_t>(h / config.group_size());
        long double sum = 0, out[4] = {};
        for (std::int64_t j = query.num_visible - 1; j >= 0; --j) {
          bool selected = false;
          for (std::int64_t n = 0; n < 4; ++n) selected |= block_ids(t, g, n) == static_cast<double>(j / config.block_size);
          if (!selected) continue;
          const std::int64_t row = problem.key_row(query.seq, j, g) * 4;
          long double score = 0;
          for (std::int64_t d = 0; d < 4; ++d) score += problem.q(t, h, d) * problem.k.get(row + d);
          const long double weight = std::exp(score / 2);  // 1 / sqrt(4)
          sum += weight;
          for (std::int64_t d = 0; d < 4; ++d) out[d] += weight * problem.v.get(row + d);
        }
        if (sum == 0) {
          ASSERT_EQ(result.lse(t, h), -INFINITY);
          continue;
        }
        ASSERT_NEAR(result.lse(t, h), static_cast<double>(std::log(sum)), 1e-10);
        for (std::int64_t d = 0; d < 4; ++d) ASSERT_NEAR(result.out(t, h, d), static_cast<double>(out[d] / sum), 1e-10);
      }
    }
  }
}

TEST(ReferenceSparse, EqualsDenseWhenEveryBlockFits) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Rng rng(50 + seed);
    MsaConfig config = make_config(2, 2, 8, 8, 128, 24, 0, 1);
    const Problem problem(config, random_layout(rng, 6000), DType::kF64, rng);
    SCOPED_TRACE(problem.layout.text());
    const Attention sparse = run_sparse_attention(problem, run_index_select(problem, kReference), kReference);
    const Attention dense = run_dense_attention(problem, kReference);
    EXPECT_TRUE(sparse.out.same_bits(dense.out));
    EXPECT_TRUE(sparse.lse.same_bits(dense.lse));
  }
}

TEST(ReferenceSparse, StoresEachDTypeRoundedOnce) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Rng rng(7);
    const Problem problem(make_config(2, 2, 16, 16, 16, 4), single(40, 100, true), dtype, rng);
    const Tensor block_ids = run_index_select(problem, kReference);
    const Attention result = run_sparse_attention(problem, block_ids, kReference);
    const Attention exact = oracle_sparse_attention(problem, block_ids);
    EXPECT_EQ(result.lse.dtype(), DType::kF32);
    for (std::int64_t i = 0; i < result.out.numel(); ++i) {
      const double x = exact.out.get(i), stored = result.out.get(i);
      // No neighbour of the stored value is nearer.
      const double ulp = std::ldexp(1.0, std::ilogb(x) - (dtype == DType::kF32 ? 23 : dtype == DType::kF16 ? 10 : 7));
      ASSERT_LE(std::abs(stored - x), ulp / 2) << x;
    }
  }
}

// 1 + 2^-8 + 2^-40 lies above the tie between two bf16 values, but fp32 rounds it onto the tie, whose even side is below.
TEST(ReferenceRows, StoreRoundsOnceToSixteenBits) {
  const auto stored = [](DType dtype, double value) {
    Tensor tensor(dtype, {1});
    reference::store(static_cast<std::byte*>(tensor.view().data), dtype, 0, value);
    return tensor.get(0);
  };
  EXPECT_EQ(stored(DType::kBF16, 1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-7);
  EXPECT_EQ(stored(DType::kBF16, 1 + 0x1p-8), 1.0);
  EXPECT_EQ(stored(DType::kBF16, 1 + 0x1.8p-7 - 0x1p-40), 1 + 0x1p-7);
  EXPECT_EQ(stored(DType::kF16, -(1 + 0x1p-11 + 0x1p-40)), -(1 + 0x1p-10));
  EXPECT_EQ(stored(DType::kF16, 65519.999), 65504.0);
  EXPECT_EQ(stored(DType::kF16, 65520.0), INFINITY);
  EXPECT_EQ(stored(DType::kF16, 1e300), INFINITY);
  EXPECT_EQ(stored(DType::kBF16, -INFINITY), -INFINITY);
  EXPECT_EQ(stored(DType::kF16, 0x1p-25 + 0x1p-60), 0x1p-24) << "just above half the smallest subnormal";
  EXPECT_EQ(stored(DType::kF16, 0x1p-25), 0.0);
  EXPECT_TRUE(std::isnan(stored(DType::kF16, kNaN)));
  EXPECT_TRUE(std::isnan(stored(DType::kBF16, -kNaN)));
}

}  // namespace
}  // namespace openmsa::test
