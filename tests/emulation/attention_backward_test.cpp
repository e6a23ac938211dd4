// Gradients of sparse and dense attention: the Hopper kernels under the emulator against the oracle, by SPEC.md's rule for gradients.
#include "cuda/attention_backward.hpp"

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
using Kernel = EmulatedKernel<core::AttentionBackwardParams>;

const RunOptions kCpu = on(Backend::kCpu, 2);
const Kernel kSparse{cuda::sparse_attention_backward, cuda::sparse_attention_backward_reserve};
const Kernel kDense{cuda::dense_attention_backward, cuda::dense_attention_backward_reserve};
// Several chunks, and blocks that several items share.
constexpr cuda::VisitLimits kSmallCuts{.chunk_tokens = 96, .item_tokens = 24};
const Kernel kCut{[](const core::AttentionBackwardParams& params) { cuda::attention_backward(params, kSmallCuts); },
                  [](const core::AttentionBackwardParams& params) { cuda::attention_backward_reserve(params, kSmallCuts); }};

class EmulatedBackward : public testing::TestWithParam<std::tuple<Timing, std::uint32_t>> {
 protected:
  void SetUp() override {
    emulation::options().timing = std::get<0>(GetParam());
    emulation::options().seed = std::get<1>(GetParam());
  }
  void TearDown() override { emulation::options() = {}; }
};
INSTANTIATE_TEST_SUITE_P(Orders, EmulatedBackward,
                         testing::Values(std::tuple(Timing::kEarly, 0u), std::tuple(Timing::kLate, 0u),
                                         std::tuple(Timing::kLate, 7u)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Timing::kEarly ? "Early" : "Late") +
                                  std::to_string(std::get<1>(info.param));
                         });

struct Training {
  Attention forward;
  Tensor d_out;
  Gradients gradients;
};

Training train(const Problem& problem, const Tensor* block_ids, const Kernel* kernel = nullptr) {
  Rng rng(17);
  Training result;
  result.forward = run_attention(problem, block_ids, kCpu);
  result.d_out = random_d_out(problem, rng);
  if (kernel == nullptr) kernel = block_ids != nullptr ? &kSparse : &kDense;
  result.gradients = emulated_attention_backward(*kernel, problem, block_ids, result.forward, result.d_out);
  return result;
}

Gradients expect_right(const Problem& problem, const Tensor* block_ids, const Kernel* kernel = nullptr) {
  SCOPED_TRACE(describe(problem) + (block_ids == nullptr ? ", dense" : ", sparse"));
  Training result = train(problem, block_ids, kernel);
  EXPECT_TRUE(gradients_right(problem, block_ids, result.forward, result.d_out, result.gradients));
  return result.gradients;
}

void expect_both_right(const Problem& problem, Rng& rng, const Kernel* kernel = nullptr) {
  const Tensor block_ids = random_block_ids(problem, rng);
  expect_right(problem, &block_ids, kernel);
  expect_right(problem, nullptr, kernel);
}

bool all_zero(const Tensor& tensor, std::int64_t row_begin, std::int64_t row_end) {
  for (std::int64_t i = row_begin * tensor.row_size(); i < row_end * tensor.row_size(); ++i) {
    if (tensor.get(i) != 0.0) return false;
  }
  return true;
}

bool same_bits(const Gradients& a, const Gradients& b) {
  return a.d_q.same_bits(b.d_q) && a.d_k.same_bits(b.d_k) && a.d_v.same_bits(b.d_v);
}

TEST_P(EmulatedBackward, EveryShape) {
  Rng rng(1);
  int number = 0;
  for (const std::int32_t group_size : {1, 2, 3, 5, 8, 16}) {
    for (const std::int32_t dim : {64, 96, 128}) {
      const DType dtype = number % 2 == 0 ? DType::kBF16 : DType::kF16;
      const std::int32_t block_size = number++ / 2 % 2 == 0 ? 128 : 64;
      expect_both_right(Problem(make_config(2, group_size, dim, 64, block_size, 4), single(21, 2 * block_size + 9), dtype, rng),
                        rng);
    }
  }
}

TEST_P(EmulatedBackward, RandomLayouts) {
  for (std::uint64_t seed = 800; seed < 808; ++seed) {
    Rng rng(seed);
    const MsaConfig config = make_config(pick<std::int32_t>(rng, {1, 2, 3}), pick<std::int32_t>(rng, {1, 2, 3, 4, 7, 8, 16}),
                                         pick<std::int32_t>(rng, {64, 96, 128}), 64, pick<std::int32_t>(rng, {64, 128}),
                                         pick<std::int32_t>(rng, {1, 4, 16, 32}));
    Layout layout = random_layout(rng, 60'000 / config.num_q_heads);
    layout.paged = false;
    const Problem problem(config, layout, seed % 2 == 0 ? DType::kBF16 : DType::kF16, rng);
    expect_both_right(problem, rng, seed % 4 < 2 ? nullptr : &kCut);
  }
}

TEST_P(EmulatedBackward, LengthsAroundBlocks) {
  Rng rng(2);
  for (const std::int32_t seqlen : {1, 127, 128, 129}) {
    const DType dtype = seqlen % 2 == 0 ? DType::kF16 : DType::kBF16;
    expect_both_right(Problem(make_config(1, 2, 64, 64, 128, 4), single(std::min(seqlen, 40), seqlen), dtype, rng), rng);
    expect_both_right(Problem(make_config(1, 3, 128, 64, 64, 4), single(seqlen, seqlen), dtype, rng), rng);
  }
}

TEST_P(EmulatedBackward, PackedDocuments) {
  Rng rng(3);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {127, 129, 1, 0, 2, 3, 5};
  expect_both_right(Problem(make_config(2, 2, 64, 64, 128, 2), layout, DType::kBF16, rng), rng);
  layout.strided = true;
  expect_both_right(Problem(make_config(1, 3, 128, 64, 64, 4), layout, DType::kF16, rng), rng);
}

TEST_P(EmulatedBackward, ManyChunksAndItems) {
  Rng rng(4);
  expect_both_right(Problem(make_config(2, 2, 64, 64, 64, 4), single(200, 400), DType::kBF16, rng), rng, &kCut);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {90, 3, 129};
  expect_both_right(Problem(make_config(1, 16, 128, 64, 128, 2), layout, DType::kBF16, rng), rng, &kCut);
}

// Everybody chooses block 0; most blocks are chosen by nobody, and hold NaN.
TEST_P(EmulatedBackward, HotAndUnchosenBlocks) {
  Rng rng(5);
  Problem problem(make_config(2, 4, 64, 64, 64, 2), single(100, 400), DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {100, 2, 2});
  for (std::int64_t t = 0; t < 100; ++t) {
    const double row[] = {0.0, static_cast<double>((300 + t) / 64)};
    for (std::int64_t g = 0; g < 2; ++g) block_ids.set_row(t * 2 + g, row);
  }
  poison_unselected(problem, block_ids);
  for (const Kernel* kernel : {&kSparse, &kCut}) {
    const Gradients gradients = expect_right(problem, &block_ids, kernel);
    for (const Tensor* tensor : {&gradients.d_k, &gradients.d_v}) {
      EXPECT_TRUE(all_zero(*tensor, 64 * 2, 256 * 2));
      EXPECT_FALSE(all_zero(*tensor, 0, 2));
    }
  }
}

TEST_P(EmulatedBackward, RowsWithoutKeys) {
  Rng rng(6);
  Layout layout;
  layout.seqlens_q = {5, 3, 0, 2, 4};
  layout.seqlens_k = {40, 0, 20, 6, 9};
  layout.q_start = {-3, 0, 0, 100, 5};
  const Problem problem(make_config(2, 2, 64, 64, 64, 4), layout, DType::kBF16, rng);
  expect_both_right(problem, rng);
  const Gradients gradients = train(problem, nullptr).gradients;
  EXPECT_TRUE(all_zero(gradients.d_q, 0, 3 * 4)) << "positions -3 .. -1";
  EXPECT_TRUE(all_zero(gradients.d_q, 5 * 4, 8 * 4)) << "no keys";
  EXPECT_TRUE(all_zero(gradients.d_k, 40 * 2, 60 * 2)) << "no queries";
  EXPECT_TRUE(all_zero(gradients.d_v, 40 * 2, 60 * 2)) << "no queries";
}

TEST_P(EmulatedBackward, NoQueriesOrNoKeys) {
  Rng rng(7);
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{0, 20}, {20, 0}}) {
    expect_both_right(Problem(make_config(2, 2, 64, 64, 64, 4), single(seqlen_q, seqlen_k), DType::kF16, rng), rng);
  }
}

// The keys past the end of a sequence are another one's, and what they hold does not matter.
TEST_P(EmulatedBackward, KeysOfOthersDoNotLeak) {
  Rng rng(8);
  Layout layout;
  layout.seqlens_q = {30, 40};
  layout.seqlens_k = {70, 40};
  const Problem problem(make_config(1, 3, 64, 64, 64, 4), layout, DType::kBF16, rng);
  const Tensor lists = random_block_ids(problem, rng);
  for (const Tensor* block_ids : {&lists, static_cast<const Tensor*>(nullptr)}) {
    const Training before = train(problem, block_ids);
    Problem bad = problem;
    // Both in the second block of the first one.
    bad.k.set(problem.key_row(1, 30, 0) * 64 + 7, std::numeric_limits<double>::quiet_NaN());
    bad.v.set(problem.key_row(1, 2, 0) * 64 + 40, INFINITY);
    const Gradients after =
        emulated_attention_backward(block_ids != nullptr ? kSparse : kDense, bad, block_ids, before.forward, before.d_out);
    for (std::int64_t i = 0; i < 30 * 3 * 64; ++i) ASSERT_EQ(after.d_q.get(i), before.gradients.d_q.get(i)) << i;
    for (std::int64_t i = 0; i < 70 * 64; ++i) ASSERT_EQ(after.d_k.get(i), before.gradients.d_k.get(i)) << i;
    for (std::int64_t i = 0; i < 70 * 64; ++i) ASSERT_EQ(after.d_v.get(i), before.gradients.d_v.get(i)) << i;
  }
}

// Rows all of whose scores are -inf have gradients of NaN, as the keys that they see; keys behind them get what others give.
TEST_P(EmulatedBackward, RowsOfNothingButMinusInfinity) {
  Rng rng(11);
  Layout layout = ragged({12, 20}, {90, 64});
  layout.q_start = {10, 44};
  Problem problem(make_config(1, 3, 64, 64, 64, 4), layout, DType::kBF16, rng);
  for (std::int64_t row = 0; row < problem.q.num_rows(); ++row) problem.q.set(row * 64, 1.0);
  for (std::int64_t j = 0; j < 22; ++j) problem.k.set(problem.key_row(0, j, 0) * 64, -INFINITY);
  expect_both_right(problem, rng);
}

// How many CTAs there are, and in which order their threads come, changes no bit.
TEST(EmulatedBackwardOrder, ChangesNothing) {
  Rng rng(9);
  const Problem problem(make_config(2, 4, 64, 64, 64, 4), single(150, 300), DType::kBF16, rng);
  const Tensor lists = random_block_ids(problem, rng);
  for (const Tensor* block_ids : {&lists, static_cast<const Tensor*>(nullptr)}) {
    for (const Kernel* kernel : {block_ids != nullptr ? &kSparse : &kDense, &kCut}) {
      const Gradients once = train(problem, block_ids, kernel).gradients;
      for (const int num_multiprocessors : {1, 7}) {
        emulation::options().num_multiprocessors = num_multiprocessors;
        emulation::options().seed = static_cast<std::uint32_t>(num_multiprocessors);
        EXPECT_TRUE(same_bits(once, train(problem, block_ids, kernel).gradients)) << num_multiprocessors;
        emulation::options() = {};
      }
    }
  }
}

TEST(EmulatedBackwardFaults, BrokenListsAreReported) {
  Rng rng(10);
  const Problem problem(make_config(1, 2, 64, 64, 64, 4), single(20, 300), DType::kBF16, rng);
  const Tensor good = random_block_ids(problem, rng);
  const Training before = train(problem, &good);
  Tensor block_ids = good;
  const double row[] = {0, 99, -1, -1};
  block_ids.set_row(7, row);
  EXPECT_THROW(emulated_attention_backward(kSparse, problem, &block_ids, before.forward, before.d_out), Error);
}

}  // namespace
}  // namespace openmsa::test
