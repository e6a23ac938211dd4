// The CPU engine on every SIMD target that it is compiled for and this machine can run, not only on the best one.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/cpu.hpp"
#include "cpu/targets.hpp"
#include "hwy/highway.h"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kCpu = on(Backend::kCpu, 2);

class CpuTargets : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    ASSERT_EQ(cpu::simd_target(), hwy::TargetName(GetParam()));
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

INSTANTIATE_TEST_SUITE_P(Simd, CpuTargets, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const testing::TestParamInfo<std::int64_t>& info) { return std::string(hwy::TargetName(info.param)); });

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

TEST_P(CpuTargets, IntegersGiveTheOraclesScoresAndLists) {
  for (const DType dtype : kDTypes) {
    for (std::uint64_t seed = 500; seed < 510; ++seed) {
      const Problem problem = random_problem(seed, dtype, Values::kIntegers);
      SCOPED_TRACE(describe(problem));
      const Tensor oracle = oracle_scores(problem);
      EXPECT_TRUE(run_block_scores(problem, kCpu).same_bits(oracle.to(DType::kF32)));
      EXPECT_TRUE(run_index_select(problem, kCpu).same_bits(run_select_blocks(problem.widened(), oracle, on(Backend::kReference))));
    }
  }
}

void expect_attention_right(const Problem& problem, Rng& rng, bool with_dense) {
  SCOPED_TRACE(describe(problem));
  const Tensor block_ids = random_block_ids(problem, rng);
  const Attention oracle = oracle_sparse_attention(problem, block_ids);
  const std::vector<float> plain = plain_attention(problem, &block_ids);
  EXPECT_TRUE(attention_right(problem, run_sparse_attention(problem, block_ids, kCpu), oracle, plain)) << "sparse_attention";
  EXPECT_TRUE(attention_right(problem, run_sparse_decode(problem, block_ids, kCpu), oracle, plain)) << "sparse_decode";
  if (with_dense) {
    EXPECT_TRUE(attention_right(problem, run_dense_attention(problem, kCpu, true), nullptr)) << "dense_attention";
  }
}

TEST_P(CpuTargets, AttentionIsRight) {
  for (const DType dtype : kDTypes) {
    for (std::uint64_t seed = 520; seed < 532; ++seed) {
      Rng rng(seed);
      expect_attention_right(random_problem(seed, dtype), rng, seed % 3 == 0);
    }
  }
}

// Attention over a single key returns its value, so every 16-bit pattern goes through load and store once.
TEST_P(CpuTargets, EveryHalfPatternIsLoadedAndStored) {
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = std::vector<std::int32_t>(256, 1);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Rng rng(1);
    Problem problem(make_config(1, 1, 256, 16, 16, 1), layout, dtype, rng, Values::kIntegers);
    auto* patterns = static_cast<std::uint16_t*>(problem.v.view().data);
    for (std::int32_t i = 0; i < 65536; ++i) patterns[i] = static_cast<std::uint16_t>(i);
    const Tensor block_ids = run_index_select(problem, kCpu);
    const Tensor outs[] = {run_dense_attention(problem, kCpu).out, run_sparse_attention(problem, block_ids, kCpu).out,
                           run_sparse_decode(problem, block_ids, kCpu).out};
    for (const Tensor& out : outs) {
      for (std::int64_t i = 0; i < 65536; ++i) {
        const double value = problem.v.get(i), found = out.get(i);
        ASSERT_TRUE(found == value || (std::isnan(value) && std::isnan(found)))
            << dtype_name(dtype) << " pattern " << std::hex << i << ": " << found << " from " << value;
      }
    }
  }
}

// What a maximum does with a NaN differs from target to target.
TEST_P(CpuTargets, SpecialsAreWhereTheOracleHasThem) {
  for (const DType dtype : kDTypes) {
    for (std::uint64_t seed = 540; seed < 548; ++seed) {
      Rng rng(seed);
      Problem problem = random_problem(seed, dtype);
      inject_specials(problem, rng);
      const Tensor scores = run_block_scores(problem, kCpu);
      EXPECT_TRUE(scores_right(problem, scores, oracle_scores(problem))) << describe(problem);
      EXPECT_TRUE(run_index_select(problem, kCpu).same_bits(run_select_blocks(problem, scores, on(Backend::kReference))));
      expect_attention_right(problem, rng, seed % 2 == 0);
    }
  }
}

}  // namespace
}  // namespace openmsa::test
