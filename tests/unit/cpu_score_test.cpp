// The CPU engine's block_scores against the oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kCpu = on(Backend::kCpu);

// Dot products of small integers are exact in any order: the scores must be equal, not near.
void expect_exact(const Problem& problem) {
  SCOPED_TRACE(describe(problem));
  const Tensor scores = run_block_scores(problem, kCpu);
  EXPECT_TRUE(scores.same_bits(oracle_scores(problem).to(DType::kF32)));
}

class CpuScore : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuScore);

TEST_P(CpuScore, RandomLayouts) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Problem problem = random_problem(seed, GetParam());
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(scores_right(problem, run_block_scores(problem, kCpu), oracle_scores(problem)));
  }
}

TEST_P(CpuScore, RandomLayoutsOfIntegersAreExact) {
  for (std::uint64_t seed = 100; seed < 120; ++seed) expect_exact(random_problem(seed, GetParam(), Values::kIntegers));
}

// Every size that the registry promises, for many queries and for few, packed and paged.
TEST_P(CpuScore, EveryIndexDim) {
  Rng rng(1);
  for (std::int32_t dim = 16; dim <= 256; dim += 16) {
    expect_exact(Problem(make_config(2, 1, 16, dim, 32, 4), single(150, 179), GetParam(), rng, Values::kIntegers));
    expect_exact(Problem(make_config(3, 1, 16, dim, 32, 4), single(2, 200, true), GetParam(), rng, Values::kIntegers));
  }
}

TEST_P(CpuScore, EveryBlockSize) {
  Rng rng(2);
  for (std::int32_t block_size = 16; block_size <= 256; block_size += 16) {
    const MsaConfig config = make_config(2, 1, 16, 48, block_size, 4);
    expect_exact(Problem(config, single(130, 700, true), GetParam(), rng, Values::kIntegers));
    expect_exact(Problem(config, single(3, 2 * block_size + 1), GetParam(), rng, Values::kIntegers));
  }
}

TEST_P(CpuScore, EveryNumberOfGroups) {
  Rng rng(3);
  for (std::int32_t num_groups = 1; num_groups <= 9; ++num_groups) {
    for (const std::int32_t seqlen_q : {1, 4, 70}) {  // T == Hkv at 4: a layout mix-up could not be told by the shape
      expect_exact(Problem(make_config(num_groups, 1, 16, 32, 16, 4), single(seqlen_q, 100), GetParam(), rng, Values::kIntegers));
    }
  }
}

TEST_P(CpuScore, LengthsAroundBlocks) {
  Rng rng(4);
  for (const std::int32_t seqlen_k : {1, 127, 128, 129, 2047, 2048, 2049, 2175}) {
    for (const std::int32_t seqlen_q : {1, 5, 40}) {
      if (seqlen_q > seqlen_k) continue;
      expect_exact(Problem(make_config(2, 1, 16, 64, 128, 16), single(seqlen_q, seqlen_k, seqlen_q == 5), GetParam(), rng,
                           Values::kIntegers));
    }
  }
}

TEST_P(CpuScore, PackOfShortDocuments) {
  Rng rng(5);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {127, 129, 1, 2, 0, 3, 5, 128};
  for (const bool paged : {false, true}) {
    layout.paged = paged;
    expect_exact(Problem(make_config(2, 1, 16, 128, 64, 16), layout, GetParam(), rng, Values::kIntegers));
  }
}

// NaN in a key: its block's score is NaN for the queries that see the key, and every other number stays what it was.
TEST_P(CpuScore, NaNStaysWithTheQueriesThatSeeIt) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const std::int32_t seqlen_q : {5, 200}) {
    Rng rng(6);
    Problem problem(make_config(2, 1, 16, 64, 64, 4), single(seqlen_q, 200), GetParam(), rng);
    const Tensor before = run_block_scores(problem, kCpu);
    problem.k_idx.set(problem.k_idx.at(198, 13), kNaN);  // in the own block of the last queries, future to most of them
    problem.k_idx.set(problem.k_idx.at(3, 63), kNaN);
    const Tensor after = run_block_scores(problem, kCpu);
    for (std::int64_t t = 0; t < seqlen_q; ++t) {
      const std::int64_t position = 200 - seqlen_q + t;
      for (std::int64_t g = 0; g < 2; ++g) {
        for (std::int64_t b = 0; b < 4; ++b) {
          const bool sees_nan = (b == 0 && position >= 3) || (b == 3 && position >= 198);
          if (sees_nan) {
            ASSERT_TRUE(std::isnan(after(t, g, b))) << "position " << position << " block " << b << " is " << after(t, g, b);
          } else {
            ASSERT_EQ(after(t, g, b), before(t, g, b)) << "position " << position << " block " << b;
          }
        }
      }
    }
  }
}

TEST_P(CpuScore, SpecialsAreWhereTheOracleHasThem) {
  for (std::uint64_t seed = 150; seed < 170; ++seed) {
    Rng rng(seed);
    Problem problem = random_problem(seed, GetParam());
    inject_specials(problem, rng);
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(scores_right(problem, run_block_scores(problem, kCpu), oracle_scores(problem)));
  }
}

TEST_P(CpuScore, NaNQueriesStayInTheirRow) {
  for (const std::int32_t seqlen_q : {3, 100}) {
    Rng rng(7);
    Problem problem(make_config(2, 1, 16, 32, 16, 4), single(seqlen_q, 100), GetParam(), rng);
    const Tensor before = run_block_scores(problem, kCpu);
    problem.q_idx.set(problem.q_idx.at(1, 1, 31), std::numeric_limits<double>::quiet_NaN());
    const Tensor after = run_block_scores(problem, kCpu);
    for (std::int64_t i = 0; i < after.numel(); ++i) {
      const bool poisoned = i / after.row_size() == 3;  // token 1, group 1
      if (poisoned && before.get(i) != -INFINITY) {
        ASSERT_TRUE(std::isnan(after.get(i))) << i;
      } else {
        ASSERT_EQ(after.get(i), before.get(i)) << i;
      }
    }
  }
}

TEST_P(CpuScore, MoreThanFourThousandBlocks) {
  Rng rng(8);
  for (const std::int32_t seqlen_q : {1, 20}) {
    expect_exact(Problem(make_config(1, 1, 16, 16, 16, 4), single(seqlen_q, 16 * 8192 - 3, seqlen_q == 1), GetParam(), rng,
                         Values::kIntegers));
  }
}

}  // namespace
}  // namespace openmsa::test
