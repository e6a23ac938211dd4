// The oracle's gradients and index KL loss against finite differences, the textbook formula and numbers worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support/cases.hpp"
#include "support/training.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
const RunOptions kReference = on(Backend::kReference);

void fill(Tensor& tensor, double value) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value);
}

bool all_zero(const Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    if (tensor.get(i) != 0.0) return false;
  }
  return true;
}

bool row_is(const Tensor& tensor, std::int64_t row, double value) {
  for (std::int64_t d = 0; d < tensor.row_size(); ++d) {
    if (tensor.get(row * tensor.row_size() + d) != value) return false;
  }
  return true;
}

// A whole prefill, a chunk behind a prefix, no queries, no keys, one decode row, and three rows that see 0, 0 and 1 key.
Layout ragged_layout() {
  Layout layout;
  layout.seqlens_q = {5, 3, 0, 2, 1, 3};
  layout.seqlens_k = {5, 8, 4, 0, 7, 6};
  layout.q_start = {0, 5, 0, 0, 6, -2};
  return layout;
}

// A part of a longer document: query 0 stands at position 2 of 9 keys, the last one beyond the last key.
Layout fragment_layout() {
  Layout layout = single(9, 9);
  layout.q_start = {2};
  return layout;
}

struct Case {
  const char* name;
  MsaConfig config;
  Layout layout;
  bool sparse;
};

std::vector<Case> cases() {
  MsaConfig scaled = make_config(2, 2, 3, 2, 2, 2);
  scaled.softmax_scale = 0.9;
  scaled.index_scale = 1.3;
  return {{"one_head", make_config(1, 1, 4, 3, 2, 2), single(6, 6), true},
          {"ragged", make_config(2, 3, 3, 2, 2, 2), ragged_layout(), true},
          {"more_slots_than_blocks", make_config(2, 1, 3, 4, 3, 8), ragged_layout(), true},
          {"fragment_own_scales", scaled, fragment_layout(), true},
          {"dense_ragged", make_config(2, 2, 3, 2, 2, 2), ragged_layout(), false},
          {"dense_fragment_own_scales", scaled, fragment_layout(), false}};
}

class ReferenceTraining : public testing::TestWithParam<Case> {
 protected:
  ReferenceTraining()
      : rng_(91),
        problem_(GetParam().config, GetParam().layout, DType::kF64, rng_),
        lists_(random_block_ids(problem_, rng_)),
        block_ids_(GetParam().sparse ? &lists_ : nullptr) {}

  // d value() / d each element of `input`, which value() reads, against `gradient`.
  void expect_gradient(const char* name, const Tensor& gradient, Tensor& input, const std::function<double()>& value) {
    constexpr double kStep = 1e-4;  // error of the difference about kStep^2, of its rounding about 1e-16 / kStep
    ASSERT_EQ(gradient.numel(), input.numel());
    for (std::int64_t i = 0; i < input.numel(); ++i) {
      const double x = input.get(i);
      input.set(i, x + kStep);
      const double above = value();
      input.set(i, x - kStep);
      const double below = value();
      input.set(i, x);
      ASSERT_NEAR(gradient.get(i), (above - below) / (2 * kStep), 2e-7) << name << ", element " << i;
    }
  }

  Rng rng_;
  Problem problem_;
  Tensor lists_;
  const Tensor* block_ids_;
};

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceTraining, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

TEST_P(ReferenceTraining, AttentionGradientsMatchFiniteDifferences) {
  const Tensor d_out = random_d_out(problem_, rng_);
  const Attention forward = run_attention(problem_, block_ids_, kReference);
  const Gradients gradients = run_attention_backward(problem_, block_ids_, forward, d_out, kReference);
  const auto value = [&] {
    const Tensor out = run_attention(problem_, block_ids_, kReference).out;
    double sum = 0.0;
    for (std::int64_t i = 0; i < out.numel(); ++i) sum += out.get(i) * d_out.get(i);
    return sum;
  };
  expect_gradient("d_q", gradients.d_q, problem_.q, value);
  expect_gradient("d_k", gradients.d_k, problem_.k, value);
  expect_gradient("d_v", gradients.d_v, problem_.v, value);
}

TEST_P(ReferenceTraining, IndexKlGradientsMatchFiniteDifferences) {
  const Tensor lse = run_attention(problem_, block_ids_, kReference).lse;
  const IndexKl kl = run_index_kl(problem_, block_ids_, lse, kReference);
  const auto value = [&] { return run_index_kl(problem_, block_ids_, lse, kReference, {.with_gradients = false}).loss.get(0); };
  expect_gradient("d_q_idx", kl.d_q_idx, problem_.q_idx, value);
  expect_gradient("d_k_idx", kl.d_k_idx, problem_.k_idx, value);
}

// Straight from SPEC.md in long double, exponentials without the maximum taken out.
TEST_P(ReferenceTraining, IndexKlLossMatchesTheTextbookFormula) {
  const MsaConfig& config = problem_.config;
  const auto index_scale = static_cast<long double>(config.effective_index_scale());
  const auto softmax_scale = static_cast<long double>(config.effective_softmax_scale());
  long double loss = 0;
  for (std::int64_t t = 0; t < problem_.total_q; ++t) {
    const Problem::Query query = problem_.query(t);
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      std::vector<std::int64_t> keys;
      for (std::int64_t j = 0; j < query.num_visible; ++j) {
        bool attended = block_ids_ == nullptr;
        for (std::int64_t n = 0; !attended && n < config.top_k; ++n) {
          attended = lists_(t, g, n) == static_cast<double>(j / config.block_size);
        }
        if (attended) keys.push_back(j);
      }
      const auto probabilities = [&](const auto& score) {
        std::vector<long double> weights;
        long double sum = 0;
        for (const std::int64_t j : keys) sum += weights.emplace_back(std::exp(score(j)));
        for (long double& weight : weights) weight /= sum;
        return weights;
      };
      const auto student = probabilities([&](std::int64_t j) {
        long double dot = 0;
        for (std::int64_t d = 0; d < config.index_dim; ++d) {
          dot += problem_.q_idx(t, g, d) * problem_.k_idx(problem_.index_key_row(query.seq, j), d);
        }
        return index_scale * dot;
      });
      std::vector<long double> teacher(keys.size(), 0);
      for (std::int32_t h = g * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
        const auto head = probabilities([&](std::int64_t j) {
          long double dot = 0;
          for (std::int64_t d = 0; d < config.head_dim; ++d) {
            dot += problem_.q(t, h, d) * problem_.k.get(problem_.key_row(query.seq, j, g) * config.head_dim + d);
          }
          return softmax_scale * dot;
        });
        for (std::size_t n = 0; n < keys.size(); ++n) teacher[n] += head[n] / config.group_size();
      }
      for (std::size_t n = 0; n < keys.size(); ++n) loss += teacher[n] * std::log(teacher[n] / student[n]);
    }
  }
  loss /= static_cast<long double>(problem_.total_q * config.num_kv_heads);
  const IndexKl kl = oracle_index_kl(problem_, block_ids_);
  EXPECT_NEAR(kl.loss.get(0), static_cast<double>(loss), 1e-13);
  EXPECT_GT(kl.loss.get(0), 0.01) << "the case tests nothing";
}

// The forward pass's results are inputs for the engines' sake. An oracle that believed them would pass their errors on.
TEST_P(ReferenceTraining, OutAndLseAreNotRead) {
  const Tensor d_out = random_d_out(problem_, rng_);
  Attention forward = run_attention(problem_, block_ids_, kReference);
  const Gradients gradients = run_attention_backward(problem_, block_ids_, forward, d_out, kReference);
  const IndexKl kl = run_index_kl(problem_, block_ids_, forward.lse, kReference);
  fill(forward.out, kNaN);
  fill(forward.lse, kNaN);
  const Gradients blind = run_attention_backward(problem_, block_ids_, forward, d_out, kReference);
  const IndexKl blind_kl = run_index_kl(problem_, block_ids_, forward.lse, kReference);
  EXPECT_TRUE(blind.d_q.same_bits(gradients.d_q) && blind.d_k.same_bits(gradients.d_k) && blind.d_v.same_bits(gradients.d_v));
  EXPECT_TRUE(blind_kl.loss.same_bits(kl.loss));
  EXPECT_TRUE(blind_kl.d_q_idx.same_bits(kl.d_q_idx) && blind_kl.d_k_idx.same_bits(kl.d_k_idx));
}

// exp(scaled score) is 1 and 2, hence P = 1/3 and 2/3; <d_out, v> is 10 and 40, mean 30.
TEST(ReferenceBackward, FollowsHandComputedValues) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 1, 1, 2, 4), single(1, 2), DType::kF64, rng);
  problem.config.softmax_scale = 0.5;
  problem.q.set(0, 2.0);
  problem.k.set(0, 0.0);
  problem.k.set(1, std::log(2.0));
  problem.v.set(0, 1.0);
  problem.v.set(1, 4.0);
  Tensor d_out(DType::kF64, {1, 1, 1});
  d_out.set(0, 10.0);
  const Gradients gradients = oracle_attention_backward(problem, nullptr, d_out);
  const double d_s = 1.0 / 3 * (10 - 30);  // and 2/3 * (40 - 30), its negative
  EXPECT_NEAR(gradients.d_q.get(0), 0.5 * -d_s * std::log(2.0), 1e-13);
  EXPECT_NEAR(gradients.d_k.get(0), 0.5 * d_s * 2, 1e-13);
  EXPECT_NEAR(gradients.d_k.get(1), 0.5 * -d_s * 2, 1e-13);
  EXPECT_NEAR(gradients.d_v.get(0), 10.0 / 3, 1e-13);
  EXPECT_NEAR(gradients.d_v.get(1), 20.0 / 3, 1e-13);
}

TEST(ReferenceBackward, RowsWithOneKeyPassDOutToItsValueAlone) {
  Rng rng(2);
  Problem problem(make_config(1, 2, 4, 4, 2, 2), single(3, 4), DType::kF64, rng);
  problem.layout.q_start = {-2};  // positions -2, -1, 0
  const Tensor d_out = random_d_out(problem, rng);
  const Gradients gradients = oracle_attention_backward(problem, nullptr, d_out);
  EXPECT_TRUE(all_zero(gradients.d_q)) << "a softmax over one key is constant";
  EXPECT_TRUE(all_zero(gradients.d_k));
  for (std::int64_t d = 0; d < 4; ++d) {
    EXPECT_DOUBLE_EQ(gradients.d_v(0, 0, d), d_out(2, 0, d) + d_out(2, 1, d));
    for (std::int64_t j = 1; j < 4; ++j) EXPECT_EQ(gradients.d_v(j, 0, d), 0.0) << "nobody sees key " << j;
  }
}

TEST(ReferenceBackward, KeysNobodyChoseGetExactlyZeroAndAreNotRead) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Rng rng(seed);
    Layout layout = random_layout(rng, 4000);
    layout.paged = false;
    Problem problem(make_config(2, 2, 4, 4, 16, 2), layout, DType::kF64, rng);
    SCOPED_TRACE(layout.text());
    const Tensor block_ids = random_block_ids(problem, rng);
    const Tensor d_out = random_d_out(problem, rng);
    const Gradients before = oracle_attention_backward(problem, &block_ids, d_out);
    poison_unselected(problem, block_ids);
    const Gradients after = oracle_attention_backward(problem, &block_ids, d_out);
    EXPECT_TRUE(after.d_q.same_bits(before.d_q) && after.d_k.same_bits(before.d_k) && after.d_v.same_bits(before.d_v));
    for (std::int64_t row = 0; row < problem.k.num_rows(); ++row) {
      if (!std::isnan(problem.k.get(row * 4))) continue;
      ASSERT_TRUE(row_is(after.d_k, row, 0.0) && row_is(after.d_v, row, 0.0)) << "key row " << row;
    }
  }
}

TEST(ReferenceBackward, EqualsDenseWhenEveryBlockFits) {
  Rng rng(5);
  Layout layout = ragged_layout();
  const Problem problem(make_config(2, 2, 8, 8, 2, 4), layout, DType::kF64, rng);
  const Tensor block_ids = run_index_select(problem, kReference);
  const Tensor d_out = random_d_out(problem, rng);
  const Gradients sparse = oracle_attention_backward(problem, &block_ids, d_out);
  const Gradients dense = oracle_attention_backward(problem, nullptr, d_out);
  EXPECT_TRUE(sparse.d_q.same_bits(dense.d_q) && sparse.d_k.same_bits(dense.d_k) && sparse.d_v.same_bits(dense.d_v));
  const IndexKl over_selected = oracle_index_kl(problem, &block_ids), over_all = oracle_index_kl(problem, nullptr);
  EXPECT_TRUE(over_selected.loss.same_bits(over_all.loss));
  EXPECT_TRUE(over_selected.d_q_idx.same_bits(over_all.d_q_idx) && over_selected.d_k_idx.same_bits(over_all.d_k_idx));
}

// The teacher is (1/2, 1/2); the student scores ln 3 and 0 after scaling, hence (3/4, 1/4).
TEST(ReferenceIndexKl, FollowsHandComputedValues) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 1, 1, 2, 4), single(1, 2), DType::kF64, rng);
  problem.config.index_scale = 0.5;
  fill(problem.k, 0.0);
  problem.q_idx.set(0, 2.0);
  problem.k_idx.set(0, std::log(3.0));
  problem.k_idx.set(1, 0.0);
  const IndexKl kl = oracle_index_kl(problem, nullptr);
  EXPECT_NEAR(kl.loss.get(0), 0.5 * std::log(4.0 / 3), 1e-14);
  EXPECT_NEAR(kl.d_q_idx.get(0), 0.5 * (0.75 - 0.5) * std::log(3.0), 1e-14);
  EXPECT_NEAR(kl.d_k_idx.get(0), 0.5 * (0.75 - 0.5) * 2, 1e-14);
  EXPECT_NEAR(kl.d_k_idx.get(1), 0.5 * (0.25 - 0.5) * 2, 1e-14);
}

// Heads at (1, 0), (0, 1) and (1, 0): their probabilities' mean is (2/3, 1/3); that of their scores would give (1, 0).
TEST(ReferenceIndexKl, TheTeacherAveragesProbabilitiesNotScores) {
  Rng rng(1);
  Problem problem(make_config(1, 3, 1, 1, 2, 4), single(1, 2), DType::kF64, rng);
  problem.config.softmax_scale = 1.0;
  for (std::int64_t h = 0; h < 3; ++h) problem.q.set(h, h == 1 ? -1.0 : 1.0);
  problem.k.set(0, 2000.0);
  problem.k.set(1, 0.0);
  fill(problem.q_idx, 0.0);
  const IndexKl kl = oracle_index_kl(problem, nullptr);
  EXPECT_NEAR(kl.loss.get(0), 2.0 / 3 * std::log(4.0 / 3) + 1.0 / 3 * std::log(2.0 / 3), 1e-14);
}

TEST(ReferenceIndexKl, ProbabilitiesTooSmallForADoubleAreHandled) {
  Rng rng(1);
  Problem problem(make_config(1, 1, 1, 1, 2, 4), single(1, 2), DType::kF64, rng);
  problem.config.softmax_scale = problem.config.index_scale = 1.0;
  problem.q.set(0, 1.0);
  problem.q_idx.set(0, 1.0);
  problem.k.set(0, 0.0);
  problem.k.set(1, -2000.0);  // the teacher's P is 1 and 0
  problem.k_idx.set(0, -3000.0);
  problem.k_idx.set(1, 0.0);  // the student's 0 and 1
  const IndexKl kl = oracle_index_kl(problem, nullptr);
  EXPECT_EQ(kl.loss.get(0), 3000.0);
  EXPECT_EQ(kl.d_k_idx.get(0), -1.0);
  EXPECT_EQ(kl.d_k_idx.get(1), 1.0);
}

TEST(ReferenceIndexKl, OneKeyOrNoneTeachesNothing) {
  Rng rng(2);
  Problem problem(make_config(2, 2, 4, 4, 2, 2), single(3, 4), DType::kF64, rng);
  problem.layout.q_start = {-2};
  const IndexKl kl = oracle_index_kl(problem, nullptr);
  EXPECT_EQ(kl.loss.get(0), 0.0);
  EXPECT_TRUE(all_zero(kl.d_q_idx));
  EXPECT_TRUE(all_zero(kl.d_k_idx));
}

TEST(ReferenceIndexKl, IsZeroWhereTheStudentEqualsTheTeacher) {
  Rng rng(3);
  Problem problem(make_config(1, 1, 8, 8, 4, 2), single(9, 12), DType::kF64, rng);
  for (std::int64_t i = 0; i < problem.q.numel(); ++i) problem.q_idx.set(i, problem.q.get(i));
  for (std::int64_t i = 0; i < problem.k.numel(); ++i) problem.k_idx.set(i, problem.k.get(i));
  const IndexKl kl = oracle_index_kl(problem, nullptr);
  EXPECT_NEAR(kl.loss.get(0), 0.0, 1e-15);
  for (std::int64_t i = 0; i < kl.d_q_idx.numel(); ++i) ASSERT_NEAR(kl.d_q_idx.get(i), 0.0, 1e-15);
}

TEST(ReferenceIndexKl, TheMeanIsOverNumTokens) {
  Rng rng(4);
  const Problem problem(make_config(2, 2, 4, 4, 2, 2), ragged_layout(), DType::kF64, rng);
  const IndexKl own = oracle_index_kl(problem, nullptr), whole = oracle_index_kl(problem, nullptr, 2 * problem.total_q);
  EXPECT_DOUBLE_EQ(own.loss.get(0), 2 * whole.loss.get(0));
  for (std::int64_t i = 0; i < own.d_q_idx.numel(); ++i) ASSERT_DOUBLE_EQ(own.d_q_idx.get(i), 2 * whole.d_q_idx.get(i));
  for (std::int64_t i = 0; i < own.d_k_idx.numel(); ++i) ASSERT_DOUBLE_EQ(own.d_k_idx.get(i), 2 * whole.d_k_idx.get(i));
}

// What a rank of context parallelism holds: some of the queries, all of the keys, the mean over the whole.
TEST(ReferenceIndexKl, PartsOfTheQueriesAddUpToTheWhole) {
  Rng rng(6);
  const Problem problem(make_config(2, 2, 4, 4, 3, 2), single(11, 14), DType::kF64, rng);
  const Tensor d_out = random_d_out(problem, rng);
  const IndexKl whole = oracle_index_kl(problem, nullptr);
  const Gradients gradients = oracle_attention_backward(problem, nullptr, d_out);
  double loss = 0.0;
  std::vector<double> d_k_idx(static_cast<std::size_t>(whole.d_k_idx.numel())), d_k(static_cast<std::size_t>(problem.k.numel()));
  for (const auto& [first, count] : {std::pair{0, 4}, {4, 6}, {10, 4}}) {
    const Problem part = problem.query_chunk(first, count);
    const IndexKl kl = oracle_index_kl(part, nullptr, problem.total_q);
    Tensor part_d_out(DType::kF64, {part.total_q, 4, 4});
    for (std::int64_t i = 0; i < part_d_out.numel(); ++i) part_d_out.set(i, d_out.get(first * 16 + i));
    const Gradients part_gradients = oracle_attention_backward(part, nullptr, part_d_out);
    loss += kl.loss.get(0);
    for (std::size_t i = 0; i < d_k_idx.size(); ++i) d_k_idx[i] += kl.d_k_idx.get(static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < d_k.size(); ++i) d_k[i] += part_gradients.d_k.get(static_cast<std::int64_t>(i));
  }
  EXPECT_NEAR(loss, whole.loss.get(0), 1e-14);
  for (std::size_t i = 0; i < d_k_idx.size(); ++i) ASSERT_NEAR(d_k_idx[i], whole.d_k_idx.get(static_cast<std::int64_t>(i)), 1e-14);
  for (std::size_t i = 0; i < d_k.size(); ++i) ASSERT_NEAR(d_k[i], gradients.d_k.get(static_cast<std::int64_t>(i)), 1e-12);
}

TEST(ReferenceIndexKl, GivesWhatWasAskedForAndTheSameNumbers) {
  Rng rng(7);
  const Problem problem(make_config(2, 2, 4, 4, 2, 2), ragged_layout(), DType::kF64, rng);
  const Tensor lse = run_attention(problem, nullptr, kReference).lse;
  const IndexKl both = run_index_kl(problem, nullptr, lse, kReference);
  const IndexKl loss = run_index_kl(problem, nullptr, lse, kReference, {.with_gradients = false});
  const IndexKl gradients = run_index_kl(problem, nullptr, lse, kReference, {.with_loss = false});
  EXPECT_TRUE(loss.loss.same_bits(both.loss));
  EXPECT_TRUE(gradients.d_q_idx.same_bits(both.d_q_idx) && gradients.d_k_idx.same_bits(both.d_k_idx));
}

TEST(ReferenceTrainingRuns, ThreadsChangeNoBit) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Rng rng(seed);
    Layout layout = random_layout(rng, 4000);
    layout.paged = false;
    const Problem problem(make_config(3, 2, 4, 4, 16, 2), layout, DType::kF32, rng);
    SCOPED_TRACE(layout.text());
    const Tensor block_ids = random_block_ids(problem, rng), d_out = random_d_out(problem, rng);
    const Attention forward = run_attention(problem, &block_ids, kReference);
    const Gradients one = run_attention_backward(problem, &block_ids, forward, d_out, on(Backend::kReference, 1));
    const Gradients many = run_attention_backward(problem, &block_ids, forward, d_out, on(Backend::kReference, 5));
    EXPECT_TRUE(one.d_q.same_bits(many.d_q) && one.d_k.same_bits(many.d_k) && one.d_v.same_bits(many.d_v));
    const IndexKl kl = run_index_kl(problem, &block_ids, forward.lse, on(Backend::kReference, 1));
    const IndexKl kl_many = run_index_kl(problem, &block_ids, forward.lse, on(Backend::kReference, 5));
    EXPECT_TRUE(kl.loss.same_bits(kl_many.loss));
    EXPECT_TRUE(kl.d_q_idx.same_bits(kl_many.d_q_idx) && kl.d_k_idx.same_bits(kl_many.d_k_idx));
  }
}

TEST(ReferenceTrainingRuns, StoresEachDTypeRoundedOnce) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Rng rng(8);
    Layout layout = ragged_layout();
    layout.strided = true;
    const Problem problem(make_config(2, 2, 8, 8, 2, 2), layout, dtype, rng);
    const Tensor d_out = random_d_out(problem, rng);
    const Attention forward = run_attention(problem, nullptr, kReference);
    const Gradients stored = run_attention_backward(problem, nullptr, forward, d_out, kReference);
    const Gradients exact = oracle_attention_backward(problem, nullptr, d_out);
    const IndexKl kl = run_index_kl(problem, nullptr, forward.lse, kReference), exact_kl = oracle_index_kl(problem, nullptr);
    EXPECT_EQ(kl.loss.dtype(), DType::kF32);
    EXPECT_EQ(kl.loss.get(0), static_cast<float>(exact_kl.loss.get(0)));
    const std::pair<const Tensor*, const Tensor*> pairs[] = {{&stored.d_q, &exact.d_q},
                                                             {&stored.d_k, &exact.d_k},
                                                             {&stored.d_v, &exact.d_v},
                                                             {&kl.d_q_idx, &exact_kl.d_q_idx},
                                                             {&kl.d_k_idx, &exact_kl.d_k_idx}};
    const double half_ulp = dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    for (const auto& [rounded, full] : pairs) {
      ASSERT_EQ(rounded->dtype(), dtype);
      for (std::int64_t i = 0; i < full->numel(); ++i) {
        const double x = full->get(i);  // the second term: the smallest fp16 numbers are 2^-24 apart
        ASSERT_LE(std::abs(rounded->get(i) - x), std::max(half_ulp * std::abs(x), dtype == DType::kF16 ? 0x1p-25 : 0.0)) << x;
      }
    }
  }
}

// Without queries the keys still have gradients, all zero, and without keys there is still a loss.
TEST(ReferenceTrainingRuns, EmptyBatchesWriteZeros) {
  for (const Layout& layout : {single(0, 5), single(3, 0), single(0, 0), Layout{}}) {
    SCOPED_TRACE(layout.text());
    Rng rng(9);
    const Problem problem(make_config(2, 2, 4, 4, 2, 2), layout, DType::kF32, rng);
    const Tensor block_ids = random_block_ids(problem, rng), d_out = random_d_out(problem, rng);
    for (const Tensor* lists : {&block_ids, static_cast<const Tensor*>(nullptr)}) {
      const Attention forward = run_attention(problem, lists, kReference);
      const Gradients gradients = run_attention_backward(problem, lists, forward, d_out, kReference);
      EXPECT_TRUE(all_zero(gradients.d_q) && all_zero(gradients.d_k) && all_zero(gradients.d_v));
      const IndexKl kl = run_index_kl(problem, lists, forward.lse, kReference);
      EXPECT_EQ(kl.loss.get(0), 0.0);
      EXPECT_TRUE(all_zero(kl.d_q_idx) && all_zero(kl.d_k_idx));
    }
  }
}

// A NaN in one key reaches the gradients that depend on it and no others.
TEST(ReferenceTrainingRuns, NaNStaysWithTheRowsThatSeeIt) {
  Rng rng(10);
  Problem problem(make_config(1, 1, 2, 2, 2, 2), single(4, 4), DType::kF64, rng);
  problem.k.set(problem.k.at(2, 0, 1), kNaN);
  const Gradients gradients = oracle_attention_backward(problem, nullptr, random_d_out(problem, rng));
  EXPECT_FALSE(std::isnan(gradients.d_q(1, 0, 0)));
  EXPECT_TRUE(std::isnan(gradients.d_q(2, 0, 0)));
  EXPECT_TRUE(std::isnan(gradients.d_k(0, 0, 0))) << "query 2 sees key 0 too";
}

}  // namespace
}  // namespace openmsa::test
