// The CPU engine's gradients and index KL loss against the oracle, by SPEC.md's rule for gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/targets.hpp"
#include "hwy/highway.h"
#include "support/cases.hpp"
#include "support/plain_training.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kCpu = on(Backend::kCpu, 2);

// random_problem's kind, smaller and with packed keys: the oracle's five products cost more than the forward's two.
Problem training_problem(std::uint64_t seed, DType dtype, std::int64_t cost = 4'000'000) {
  Rng rng(seed);
  const MsaConfig config = random_config(rng);
  Layout layout =
      random_layout(rng, std::clamp<std::int64_t>(cost / (std::int64_t{config.num_q_heads} * config.head_dim), 1000, 10'000));
  layout.paged = false;
  return {config, layout, dtype, rng};
}

struct Training {
  Attention forward;
  Tensor d_out;
  Gradients gradients;
  IndexKl kl;
};

Training train(const Problem& problem, const Tensor* block_ids, std::uint64_t seed, const RunOptions& options = kCpu) {
  Rng rng(seed);
  Training result;
  result.forward = run_attention(problem, block_ids, options);
  result.d_out = random_d_out(problem, rng);
  result.gradients = run_attention_backward(problem, block_ids, result.forward, result.d_out, options);
  result.kl = run_index_kl(problem, block_ids, result.forward.lse, options);
  return result;
}

void expect_right(const Problem& problem, const Tensor* block_ids) {
  SCOPED_TRACE(describe(problem) + (block_ids == nullptr ? ", dense" : ", sparse"));
  const Training result = train(problem, block_ids, 17);
  EXPECT_TRUE(gradients_right(problem, block_ids, result.forward, result.d_out, result.gradients));
  EXPECT_TRUE(index_kl_right(problem, block_ids, result.forward.lse, result.kl));
}

void expect_both_right(const Problem& problem, Rng& rng) {
  const Tensor block_ids = random_block_ids(problem, rng);
  expect_right(problem, &block_ids);
  expect_right(problem, nullptr);
}

bool all_zero(const Tensor& tensor, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t i = row_begin * tensor.row_size(); i < row_end * tensor.row_size(); ++i) {
    if (tensor.get(i) != 0.0) return false;
  }
  return true;
}

bool same_rows(const Tensor& a, const Tensor& b, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t i = row_begin * a.row_size(); i < row_end * a.row_size(); ++i) {
    if (a.get(i) != b.get(i)) return false;
  }
  return true;
}

class CpuTraining : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuTraining);

TEST_P(CpuTraining, RandomLayouts) {
  for (std::uint64_t seed = 700; seed < 712; ++seed) {
    Rng rng(seed);
    expect_both_right(training_problem(seed, GetParam()), rng);
  }
}

TEST_P(CpuTraining, EveryShape) {
  Rng rng(1);
  for (const std::int32_t group_size : {1, 3, 8, 16, 17}) {
    for (const std::int32_t dim : {16, 64, 96, 128}) {
      const std::int32_t block_size = dim == 64 ? 128 : dim == 96 ? 16 : 64, index_dim = dim == 128 ? 64 : 128;
      expect_both_right(Problem(make_config(2, group_size, dim, index_dim, block_size, 3), single(13, 200), GetParam(), rng), rng);
    }
  }
  for (const std::int32_t dim : {32, 48, 80, 112, 256}) {
    expect_both_right(Problem(make_config(1, 4, dim, dim, 48, 3), single(50, 179), GetParam(), rng), rng);
  }
}

TEST_P(CpuTraining, LengthsAroundBlocks) {
  Rng rng(2);
  for (const std::int32_t seqlen_k : {1, 127, 128, 129, 2047, 2048, 2049, 2175, 8300}) {
    for (const std::int32_t seqlen_q : {1, 4, 17}) {
      if (seqlen_q > seqlen_k || (seqlen_k > 2175 && seqlen_q > 4)) continue;
      expect_both_right(Problem(make_config(1, 3, 64, 32, 128, 16), single(seqlen_q, seqlen_k), GetParam(), rng), rng);
    }
  }
}

TEST_P(CpuTraining, PackedDocuments) {
  Rng rng(3);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {127, 129, 1, 0, 2, 3, 5, 128};
  expect_both_right(Problem(make_config(2, 2, 64, 32, 128, 2), layout, GetParam(), rng), rng);
  expect_both_right(Problem(make_config(1, 3, 16, 16, 16, 4), layout, GetParam(), rng), rng);
}

// More blocks than kNumRanges, so that ranges hold several, and more than one tile of queries.
TEST_P(CpuTraining, ManyBlocks) {
  Rng rng(4);
  expect_both_right(Problem(make_config(1, 2, 32, 16, 16, 32), single(90, 1500), GetParam(), rng), rng);
  const Problem problem(make_config(2, 16, 16, 16, 16, 4), single(300, 1100), GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  expect_right(problem, &block_ids);
}

// One query token that sees one key: P is 1, so d_q and d_k are 0 and d_v is the sum of the group's d_out.
TEST_P(CpuTraining, RowsWithOneKey) {
  Rng rng(5);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = std::vector<std::int32_t>(9, 1);
  const Problem problem(make_config(2, 3, 32, 16, 16, 4), layout, GetParam(), rng);
  const Tensor block_ids = run_index_select(problem, kCpu);
  expect_right(problem, &block_ids);
  const Training result = train(problem, &block_ids, 5);
  EXPECT_TRUE(all_zero(result.gradients.d_q, 0, 9 * 6));
  EXPECT_TRUE(all_zero(result.gradients.d_k, 0, 9 * 2));
  EXPECT_FALSE(all_zero(result.gradients.d_v, 0, 1));
  EXPECT_NEAR(result.kl.loss.get(0), 0.0, 1e-6);
}

// Every query chooses block 0 and its own; nobody chooses another block, which holds NaN.
TEST_P(CpuTraining, HotAndUnchosenBlocks) {
  Rng rng(6);
  Problem problem(make_config(2, 4, 64, 32, 16, 2), single(40, 200), GetParam(), rng);
  Tensor block_ids(DType::kI32, {40, 2, 2});
  for (std::int64_t t = 0; t < 40; ++t) {
    const double row[] = {0.0, static_cast<double>((160 + t) / 16)};
    for (std::int64_t g = 0; g < 2; ++g) block_ids.set_row(t * 2 + g, row);
  }
  poison_unselected(problem, block_ids);
  expect_right(problem, &block_ids);
  const Training result = train(problem, &block_ids, 6);
  for (const Tensor* tensor : {&result.gradients.d_k, &result.gradients.d_v}) {
    EXPECT_TRUE(all_zero(*tensor, 16 * 2, 160 * 2));
    EXPECT_FALSE(all_zero(*tensor, 0, 2));
  }
  EXPECT_TRUE(all_zero(result.kl.d_k_idx, 16, 160));
}

TEST_P(CpuTraining, RowsWithoutKeys) {
  Rng rng(7);
  Layout layout;
  layout.seqlens_q = {5, 3, 0, 2, 4};
  layout.seqlens_k = {40, 0, 20, 6, 9};
  layout.q_start = {-3, 0, 0, 100, 5};
  const Problem problem(make_config(2, 2, 32, 16, 16, 4), layout, GetParam(), rng);
  expect_both_right(problem, rng);
  const Training result = train(problem, nullptr, 7);
  EXPECT_TRUE(all_zero(result.gradients.d_q, 0, 3 * 4)) << "positions -3 .. -1";
  EXPECT_TRUE(all_zero(result.gradients.d_q, 5 * 4, 8 * 4)) << "no keys";
  EXPECT_TRUE(all_zero(result.gradients.d_v, 40 * 2, 60 * 2)) << "no queries";

  Layout no_queries;
  no_queries.seqlens_q = {0};
  no_queries.seqlens_k = {20};
  expect_right(Problem(problem.config, no_queries, GetParam(), rng), nullptr);
  Layout no_keys;
  no_keys.seqlens_q = {20};
  no_keys.seqlens_k = {0};
  expect_right(Problem(problem.config, no_keys, GetParam(), rng), nullptr);
}

// A NaN key moves no row before it, and a NaN query no key after it, although both share blocks and panels.
TEST_P(CpuTraining, InvisiblePairsDoNotLeak) {
  Rng rng(8);
  const Problem problem(make_config(1, 4, 48, 32, 64, 4), single(100, 100), GetParam(), rng);
  const Tensor lists = run_index_select(problem, kCpu);
  for (const Tensor* block_ids : {&lists, static_cast<const Tensor*>(nullptr)}) {
    const Training before = train(problem, block_ids, 8);
    Problem bad_keys = problem;
    for (const std::int64_t j : {70, 71, 99}) {
      bad_keys.k.set(j * 48 + 7, kNaN);
      bad_keys.v.set(j * 48 + 40, INFINITY);
      bad_keys.k_idx.set(j * 32, kNaN);
    }
    const Training keys = train(bad_keys, block_ids, 8);
    EXPECT_TRUE(same_rows(before.gradients.d_q, keys.gradients.d_q, 0, 70 * 4));
    EXPECT_TRUE(same_rows(before.kl.d_q_idx, keys.kl.d_q_idx, 0, 70));
    EXPECT_TRUE(std::isnan(keys.gradients.d_q(99, 0, 0)));

    Problem bad_query = problem;
    bad_query.q.set(30 * 4 * 48 + 5, kNaN);
    bad_query.q_idx.set(30 * 32 + 5, kNaN);
    const Training query = train(bad_query, block_ids, 8);
    for (const auto& [a, b] : {std::pair{&before.gradients.d_k, &query.gradients.d_k},
                               {&before.gradients.d_v, &query.gradients.d_v},
                               {&before.kl.d_k_idx, &query.kl.d_k_idx}}) {
      EXPECT_TRUE(same_rows(*a, *b, 31, 100));
      EXPECT_TRUE(std::isnan(b->get(30 * b->row_size()))) << "it sees itself";
    }
  }
}

TEST_P(CpuTraining, ThreadsAndRuns) {
  for (std::uint64_t seed = 720; seed < 728; ++seed) {
    const bool large = seed % 4 == 0;
    Rng rng(seed);
    const Problem problem =
        large ? Problem(make_config(2, 4, 32, 48, 16, 8), single(500, 1300), GetParam(), rng) : training_problem(seed, GetParam());
    SCOPED_TRACE(describe(problem));
    const Tensor lists = random_block_ids(problem, rng);
    for (const Tensor* block_ids : {&lists, static_cast<const Tensor*>(nullptr)}) {
      const Training one = train(problem, block_ids, seed, on(Backend::kCpu, 1));
      for (const std::int32_t num_threads : {1, 2, 3, 7}) {
        const Training again = train(problem, block_ids, seed, on(Backend::kCpu, num_threads));
        EXPECT_TRUE(again.gradients.d_q.same_bits(one.gradients.d_q)) << num_threads;
        EXPECT_TRUE(again.gradients.d_k.same_bits(one.gradients.d_k)) << num_threads;
        EXPECT_TRUE(again.gradients.d_v.same_bits(one.gradients.d_v)) << num_threads;
        EXPECT_TRUE(again.kl.loss.same_bits(one.kl.loss)) << num_threads;
        EXPECT_TRUE(again.kl.d_q_idx.same_bits(one.kl.d_q_idx)) << num_threads;
        EXPECT_TRUE(again.kl.d_k_idx.same_bits(one.kl.d_k_idx)) << num_threads;
      }
    }
  }
}

TEST_P(CpuTraining, LossAndGradientsOfTheKlAreOptional) {
  Rng rng(9);
  const Problem problem(make_config(2, 3, 32, 16, 16, 4), single(60, 90), GetParam(), rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  const Training all = train(problem, &block_ids, 9);
  const IndexKl loss = run_index_kl(problem, &block_ids, all.forward.lse, kCpu, {.with_gradients = false});
  const IndexKl gradients = run_index_kl(problem, &block_ids, all.forward.lse, kCpu, {.with_loss = false});
  EXPECT_TRUE(loss.loss.same_bits(all.kl.loss));
  EXPECT_TRUE(gradients.d_q_idx.same_bits(all.kl.d_q_idx));
  EXPECT_TRUE(gradients.d_k_idx.same_bits(all.kl.d_k_idx));
  // The mean over another number of tokens only rescales.
  const IndexKl half = run_index_kl(problem, &block_ids, all.forward.lse, kCpu, {.num_tokens = 120});
  EXPECT_NEAR(half.loss.get(0), all.kl.loss.get(0) / 2, 1e-6);
}

TEST_P(CpuTraining, NothingIsReadBesideTheInputs) {
  for (std::uint64_t seed = 740; seed < 748; ++seed) {
    const Problem problem = training_problem(seed, GetParam(), 1'000'000);
    SCOPED_TRACE(describe(problem));
    Rng rng(seed);
    const Tensor block_ids = random_block_ids(problem, rng);
    const Training expected = train(problem, &block_ids, seed);
    for (const Tensor::Fence side : {Tensor::Fence::kBefore, Tensor::Fence::kAfter}) {
      Problem fenced = problem;
      Tensor ids = block_ids, d_out = expected.d_out;
      Attention forward = expected.forward;
      for (Tensor* tensor :
           {&fenced.q, &fenced.k, &fenced.v, &fenced.q_idx, &fenced.k_idx, &ids, &d_out, &forward.out, &forward.lse}) {
        tensor->fence(side);
      }
      const Gradients gradients = run_attention_backward(fenced, &ids, forward, d_out, kCpu);
      EXPECT_TRUE(gradients.d_q.same_bits(expected.gradients.d_q));
      EXPECT_TRUE(gradients.d_k.same_bits(expected.gradients.d_k));
      EXPECT_TRUE(gradients.d_v.same_bits(expected.gradients.d_v));
      const IndexKl kl = run_index_kl(fenced, &ids, forward.lse, kCpu);
      EXPECT_TRUE(kl.loss.same_bits(expected.kl.loss));
      EXPECT_TRUE(kl.d_q_idx.same_bits(expected.kl.d_q_idx));
      EXPECT_TRUE(kl.d_k_idx.same_bits(expected.kl.d_k_idx));
    }
  }
}

// Every SIMD target that the engine is compiled for and this machine can run.
class CpuTrainingTargets : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};
INSTANTIATE_TEST_SUITE_P(Simd, CpuTrainingTargets, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const testing::TestParamInfo<std::int64_t>& info) { return std::string(hwy::TargetName(info.param)); });

TEST_P(CpuTrainingTargets, AreRight) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::uint64_t seed = 750; seed < 753; ++seed) {
      Rng rng(seed);
      expect_both_right(training_problem(seed, dtype, 1'000'000), rng);
    }
  }
}

}  // namespace
}  // namespace openmsa::test
