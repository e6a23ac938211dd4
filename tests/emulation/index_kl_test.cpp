// The index branch's KL loss and its gradients: the Hopper kernels under the emulator against the oracle, by SPEC.md's rule for
// gradients.
#include "cuda/index_kl.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "calls.hpp"
#include "cuda/cuda.hpp"
#include "engine.hpp"
#include "support/cases.hpp"
#include "support/plain_training.hpp"

namespace openmsa::test {
namespace {

using emulation::Timing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const EmulatedKernel<core::IndexKlParams> kKernel{cuda::index_kl_loss, cuda::index_kl_loss_reserve};
// Several chunks, and blocks that several items share.
constexpr cuda::VisitLimits kSmallCuts{.chunk_tokens = 96, .item_tokens = 32};
const EmulatedKernel<core::IndexKlParams> kCutKernel{
    [](const core::IndexKlParams& params) { cuda::index_kl_loss(params, kSmallCuts); },
    [](const core::IndexKlParams& params) { cuda::index_kl_loss_reserve(params, kSmallCuts); }};

class EmulatedIndexKl : public testing::TestWithParam<std::tuple<Timing, std::uint32_t>> {
 protected:
  void SetUp() override {
    emulation::options().timing = std::get<0>(GetParam());
    emulation::options().seed = std::get<1>(GetParam());
  }
  void TearDown() override { emulation::options() = {}; }
};
INSTANTIATE_TEST_SUITE_P(Orders, EmulatedIndexKl,
                         testing::Values(std::tuple(Timing::kEarly, 0u), std::tuple(Timing::kLate, 0u),
                                         std::tuple(Timing::kLate, 7u)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Timing::kEarly ? "Early" : "Late") +
                                  std::to_string(std::get<1>(info.param));
                         });

Tensor forward_lse(const Problem& problem, const Tensor* block_ids) {
  return run_attention(problem, block_ids, on(Backend::kCpu, 2)).lse;
}

void expect_right(const Problem& problem, const Tensor* block_ids, const EmulatedKernel<core::IndexKlParams>& kernel = kKernel) {
  SCOPED_TRACE(describe(problem) + (block_ids == nullptr ? ", every block" : ", sparse"));
  const Tensor lse = forward_lse(problem, block_ids);
  EXPECT_TRUE(index_kl_right(problem, block_ids, lse, emulated_index_kl(kernel, problem, block_ids, lse)));
}

void expect_both_right(const Problem& problem, Rng& rng, const EmulatedKernel<core::IndexKlParams>& kernel = kKernel) {
  const Tensor block_ids = random_block_ids(problem, rng);
  expect_right(problem, &block_ids, kernel);
  expect_right(problem, nullptr, kernel);
}

bool same_bits(const IndexKl& a, const IndexKl& b) {
  return a.loss.same_bits(b.loss) && a.d_q_idx.same_bits(b.d_q_idx) && a.d_k_idx.same_bits(b.d_k_idx);
}

bool all_zero(const Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    if (tensor.get(i) != 0.0) return false;
  }
  return true;
}

TEST_P(EmulatedIndexKl, EveryShape) {
  Rng rng(1);
  int n = 0;
  for (const std::int32_t group_size : {1, 2, 3, 5, 8, 16}) {
    for (const std::int32_t block_size : {64, 128}) {
      const std::int32_t dims[] = {64, 96, 128};
      const std::int32_t dim = dims[n % 3], index_dim = dims[(n / 3 + n) % 3];
      const DType dtype = n % 2 == 0 ? DType::kBF16 : DType::kF16;
      expect_both_right(Problem(make_config(2, group_size, dim, index_dim, block_size, 4), single(21, 300), dtype, rng), rng);
      ++n;
    }
  }
}

TEST_P(EmulatedIndexKl, Lengths) {
  Rng rng(2);
  for (const std::int32_t length : {1, 127, 128, 129}) {
    expect_both_right(Problem(make_config(1, 4, 64, 64, 128, 4), single(length, length), DType::kBF16, rng), rng);
    expect_both_right(Problem(make_config(2, 2, 64, 128, 64, 8), single(3, length + 2), DType::kF16, rng), rng);
  }
}

TEST_P(EmulatedIndexKl, Layouts) {
  Rng rng(3);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {127, 129, 1, 0, 2, 3, 5, 128};
  expect_both_right(Problem(make_config(1, 2, 64, 64, 128, 4), layout, DType::kBF16, rng), rng);
  layout.seqlens_q = {5, 0, 33, 1, 64, 2};
  layout.seqlens_k = {129, 50, 33, 257, 64, 0};
  layout.strided = true;
  const MsaConfig config = make_config(2, 3, 96, 96, 64, 4);
  expect_both_right(Problem(config, layout, DType::kF16, rng), rng);
  layout.q_start = {-2, 0, 0, 300, 5, 0};
  expect_both_right(Problem(config, layout, DType::kBF16, rng), rng);
}

TEST_P(EmulatedIndexKl, RandomLayouts) {
  for (std::uint64_t seed = 800; seed < 808; ++seed) {
    Rng rng(seed);
    const auto groups = pick<std::int32_t>(rng, {1, 2, 4}), group_size = pick<std::int32_t>(rng, {1, 2, 3, 4, 6, 7, 8, 16});
    const auto dim = pick<std::int32_t>(rng, {64, 96, 128}), index_dim = pick<std::int32_t>(rng, {64, 96, 128});
    const MsaConfig config = make_config(groups, group_size, dim, index_dim, pick<std::int32_t>(rng, {64, 128}),
                                         pick<std::int32_t>(rng, {4, 8, 16, 32}));
    Layout layout = random_layout(rng, 8'000'000 / (groups * group_size * dim));
    layout.paged = false;
    expect_both_right(Problem(config, layout, pick(rng, {DType::kBF16, DType::kF16}), rng), rng,
                      seed % 2 == 0 ? kKernel : kCutKernel);
  }
}

TEST_P(EmulatedIndexKl, ManyChunksAndSharedBlocks) {
  Rng rng(4);
  for (const std::int32_t block_size : {64, 128}) {
    expect_both_right(Problem(make_config(2, 2, 64, 128, block_size, 4), single(230, 500), DType::kBF16, rng), rng, kCutKernel);
  }
  Layout layout;
  layout.seqlens_q = {70, 5, 41, 90};
  layout.seqlens_k = {200, 64, 41, 130};
  expect_both_right(Problem(make_config(1, 8, 64, 64, 64, 4), layout, DType::kF16, rng), rng, kCutKernel);
}

TEST_P(EmulatedIndexKl, ItemsOfManyStages) {
  Rng rng(12);
  expect_both_right(Problem(make_config(2, 1, 64, 128, 128, 4), single(300, 500), DType::kBF16, rng), rng);
  expect_both_right(Problem(make_config(1, 2, 64, 64, 128, 4), single(420, 420), DType::kF16, rng), rng);
  expect_both_right(Problem(make_config(1, 4, 64, 96, 64, 4), single(250, 250), DType::kBF16, rng), rng);
}

TEST_P(EmulatedIndexKl, MoreSlotsThanBlocks) {
  Rng rng(5);
  expect_both_right(Problem(make_config(1, 16, 128, 128, 128, 32), single(70, 300), DType::kBF16, rng), rng);
}

// Keys of a sequence without queries, which share tiles with the one before, and of blocks that nobody chose.
TEST_P(EmulatedIndexKl, UnreachableKeysMayBeNaN) {
  Rng rng(6);
  Layout layout;
  layout.seqlens_q = {40, 0, 30};
  layout.seqlens_k = {300, 90, 100};
  for (const std::int32_t block_size : {64, 128}) {
    Problem problem(make_config(2, 3, 64, 128, block_size, 4), layout, DType::kBF16, rng);
    const std::int64_t key_values = 2 * 64, index_values = 128;
    for (std::int64_t i = 300; i < 390; ++i) {
      for (std::int64_t d = 0; d < key_values; ++d) problem.k.set(i * key_values + d, kNaN);
      for (std::int64_t d = 0; d < index_values; ++d) problem.k_idx.set(i * index_values + d, kNaN);
    }
    expect_right(problem, nullptr);
    const Tensor block_ids = random_block_ids(problem, rng);
    poison_unselected(problem, block_ids);
    expect_right(problem, &block_ids);
  }
}

// A NaN head of the next group lies in the padding of this one's rows.
TEST_P(EmulatedIndexKl, NaNOfAnotherGroupDoesNotLeak) {
  Rng rng(7);
  Problem problem(make_config(2, 3, 64, 64, 64, 4), single(20, 200), DType::kBF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  const IndexKl before = emulated_index_kl(kKernel, problem, &block_ids, forward_lse(problem, &block_ids));
  problem.q.set((7 * 6 + 3) * 64 + 5, kNaN);
  const IndexKl after = emulated_index_kl(kKernel, problem, &block_ids, forward_lse(problem, &block_ids));
  for (std::int64_t row = 0; row < 20 * 2; ++row) {
    for (std::int64_t d = 0; d < 64; ++d) {
      const double value = after.d_q_idx.get(row * 64 + d);
      if (row == 7 * 2 + 1) {
        EXPECT_TRUE(std::isnan(value));
      } else {
        EXPECT_EQ(value, before.d_q_idx.get(row * 64 + d)) << "row " << row;
      }
    }
  }
  EXPECT_TRUE(std::isnan(after.loss.get(0)));
}

// Rows all of whose scores are -inf have no teacher: NaN.
TEST_P(EmulatedIndexKl, RowsOfNothingButMinusInfinity) {
  Rng rng(13);
  Problem problem(make_config(2, 3, 64, 64, 64, 4), single(40, 200), DType::kBF16, rng);
  inject_minus_infinities(problem, rng);
  expect_both_right(problem, rng);
}

TEST_P(EmulatedIndexKl, NothingToSee) {
  Rng rng(8);
  const MsaConfig config = make_config(2, 2, 64, 64, 64, 4);
  for (const Layout& layout :
       {single(0, 70), single(5, 0), Layout{.seqlens_q = {3, 2}, .seqlens_k = {70, 9}, .q_start = {-3, -9}}}) {
    const Problem problem(config, layout, DType::kBF16, rng);
    const Tensor block_ids = random_block_ids(problem, rng);
    for (const Tensor* ids : {&block_ids, static_cast<const Tensor*>(nullptr)}) {
      SCOPED_TRACE(describe(problem) + (ids == nullptr ? ", every block" : ", sparse"));
      Tensor lse(DType::kF32, {problem.total_q, 4});
      for (std::int64_t i = 0; i < lse.numel(); ++i) lse.set(i, -std::numeric_limits<double>::infinity());
      const IndexKl kl = emulated_index_kl(kKernel, problem, ids, lse);
      EXPECT_TRUE(all_zero(kl.loss) && all_zero(kl.d_q_idx) && all_zero(kl.d_k_idx));
    }
  }
}

// One head that scores as the index branch does: student and teacher are the same.
TEST_P(EmulatedIndexKl, EqualsHaveNoDivergence) {
  Rng rng(9);
  Problem problem(make_config(1, 1, 64, 64, 64, 4), single(40, 300), DType::kBF16, rng);
  for (std::int64_t i = 0; i < problem.q.numel(); ++i) problem.q_idx.set(i, problem.q.get(i));
  for (std::int64_t i = 0; i < problem.k.numel(); ++i) problem.k_idx.set(i, problem.k.get(i));
  const IndexKl kl = emulated_index_kl(kKernel, problem, nullptr, forward_lse(problem, nullptr));
  EXPECT_NEAR(kl.loss.get(0), 0.0, 1e-6);
  for (const Tensor* tensor : {&kl.d_q_idx, &kl.d_k_idx}) {
    for (std::int64_t i = 0; i < tensor->numel(); ++i) EXPECT_NEAR(tensor->get(i), 0.0, 1e-7);
  }
}

TEST_P(EmulatedIndexKl, ResultsOneByOneAndMeans) {
  Rng rng(10);
  const Problem problem(make_config(2, 4, 64, 64, 64, 4), single(40, 300), DType::kF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  for (const Tensor* ids : {&block_ids, static_cast<const Tensor*>(nullptr)}) {
    const Tensor lse = forward_lse(problem, ids);
    const IndexKl all = emulated_index_kl(kKernel, problem, ids, lse, {.num_tokens = 80});
    const IndexKl loss = emulated_index_kl(kKernel, problem, ids, lse, {.with_gradients = false, .num_tokens = 80});
    const IndexKl gradients = emulated_index_kl(kKernel, problem, ids, lse, {.with_loss = false, .num_tokens = 80});
    EXPECT_TRUE(loss.loss.same_bits(all.loss));
    EXPECT_TRUE(gradients.d_q_idx.same_bits(all.d_q_idx));
    EXPECT_TRUE(gradients.d_k_idx.same_bits(all.d_k_idx));
    const IndexKl whole = emulated_index_kl(kKernel, problem, ids, lse);
    EXPECT_EQ(whole.loss.get(0), 2 * all.loss.get(0)) << "the mean over half of the tokens";
  }
}

TEST(EmulatedIndexKlRuns, HaveTheSameBits) {
  Rng rng(11);
  const Problem problem(make_config(2, 4, 64, 128, 64, 4), single(200, 500), DType::kBF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  for (const Tensor* ids : {&block_ids, static_cast<const Tensor*>(nullptr)}) {
    const Tensor lse = forward_lse(problem, ids);
    const IndexKl first = emulated_index_kl(kCutKernel, problem, ids, lse);
    for (const int num_multiprocessors : {1, 2, 7}) {
      emulation::options() = {Timing::kLate, 5u, num_multiprocessors};
      EXPECT_TRUE(same_bits(first, emulated_index_kl(kCutKernel, problem, ids, lse))) << num_multiprocessors;
      emulation::options() = {};
    }
  }
}

}  // namespace
}  // namespace openmsa::test
