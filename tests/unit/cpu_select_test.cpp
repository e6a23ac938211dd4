// The CPU engine's select_blocks (equal to the oracle on the same scores, always) and index_select.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kCpu = on(Backend::kCpu);

enum class Scores { kNormal, kFewValues, kManyNaNs, kAllNaN, kRising, kFalling };

Tensor make_scores(const Problem& problem, Scores kind, Rng& rng) {
  Tensor scores(DType::kF32, {problem.total_q, problem.config.num_kv_heads, problem.max_num_blocks + 1},
                problem.layout.strided ? 16 : 0);
  for (std::int64_t i = 0; i < scores.numel(); ++i) {
    const double x = static_cast<double>(uniform(rng, -1'000'000, 1'000'000));
    const auto b = static_cast<double>(i % scores.row_size());
    switch (kind) {
      case Scores::kNormal: scores.set(i, x * 1e-5); break;
      case Scores::kFewValues: scores.set(i, pick(rng, {0.0, -0.0, 1.0, -1.0, -INFINITY * 1.0, 2.0})); break;
      case Scores::kManyNaNs:
        scores.set(i, pick(rng, {NAN * 1.0, -NAN * 1.0, NAN * 1.0, x, INFINITY * 1.0, -INFINITY * 1.0, 1e-42, -1e-42}));
        break;
      case Scores::kAllNaN: scores.set(i, NAN); break;
      case Scores::kRising: scores.set(i, b); break;
      case Scores::kFalling: scores.set(i, -b); break;
    }
  }
  return scores;
}

constexpr Scores kAllKinds[] = {Scores::kNormal, Scores::kFewValues, Scores::kManyNaNs,
                                Scores::kAllNaN, Scores::kRising,    Scores::kFalling};

void expect_equal_lists(const Problem& problem, const Tensor& scores) {
  SCOPED_TRACE(describe(problem));
  const Tensor block_ids = run_select_blocks(problem, scores, kCpu);
  const Tensor expected = run_select_blocks(problem, scores, on(Backend::kReference));
  EXPECT_TRUE(block_ids.same_bits(expected));
}

// Head and index dims play no part here, so they are small.
Problem select_problem(std::uint64_t seed) {
  Rng rng(seed);
  MsaConfig config = random_config(rng);
  config.head_dim = config.index_dim = 16;
  return Problem(config, random_layout(rng, 100'000), DType::kF32, rng);
}

TEST(CpuSelect, RandomLayoutsAndScores) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Rng rng(seed);
    const Problem problem = select_problem(seed);
    for (const Scores kind : kAllKinds) expect_equal_lists(problem, make_scores(problem, kind, rng));
  }
}

TEST(CpuSelect, EveryTopKAndEveryNumberOfBlocks) {
  Rng rng(1);
  for (std::int32_t top_k = 1; top_k <= 64; ++top_k) {
    MsaConfig config = make_config(2, 1, 16, 16, 16, top_k, top_k / 5, (top_k + 2) / 3);
    if (top_k % 7 == 0) config.num_init_blocks = config.num_local_blocks = 0;
    for (const std::int32_t num_blocks : {top_k - 1, top_k, top_k + 1, 2 * top_k + 3, 150, 300}) {
      const Problem problem(config, single(20, std::max(16 * num_blocks - 5, 20)), DType::kF32, rng);
      expect_equal_lists(problem, make_scores(problem, pick(rng, {Scores::kNormal, Scores::kFewValues, Scores::kManyNaNs}), rng));
    }
  }
}

TEST(CpuSelect, TheBestBlocksAtTheFarEndOfManyAreFound) {
  Rng rng(2);
  const Problem problem(make_config(1, 1, 16, 16, 16, 4), single(2, 16 * 8192), DType::kF32, rng);
  for (const Scores kind : kAllKinds) expect_equal_lists(problem, make_scores(problem, kind, rng));
  Tensor scores = make_scores(problem, Scores::kNormal, rng);
  for (const std::int64_t b : {3, 4096, 8000}) {
    for (std::int64_t t = 0; t < 2; ++t) scores.set(scores.at(t, 0, b), 1e6 + static_cast<double>(b));
  }
  const std::vector<double> expected{3, 4096, 8000, 8191, 3, 4096, 8000, 8191};
  EXPECT_EQ(run_select_blocks(problem, scores, kCpu).values(), expected);
}

TEST(CpuSelect, TheTwoZerosTie) {
  Rng rng(3);
  const Problem problem(make_config(1, 1, 16, 16, 16, 4, 0, 0), single(1, 16 * 200), DType::kF32, rng);
  Tensor scores(DType::kF32, {1, 1, 200});
  for (std::int64_t b = 0; b < 200; ++b) scores.set(b, b % 2 == 0 ? -0.0 : 0.0);
  EXPECT_EQ(run_select_blocks(problem, scores, kCpu).values(), (std::vector<double>{0, 1, 2, 3}));
}

class CpuIndexSelect : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuIndexSelect);

TEST_P(CpuIndexSelect, EqualsScoreThenSelectAndIsRight) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Problem problem = random_problem(seed, GetParam());
    SCOPED_TRACE(describe(problem));
    const Tensor block_ids = run_index_select(problem, kCpu);
    EXPECT_TRUE(block_ids.same_bits(run_select_blocks(problem, run_block_scores(problem, kCpu), kCpu)));
    EXPECT_TRUE(selection_right(problem, block_ids, oracle_scores(problem)));
  }
}

TEST_P(CpuIndexSelect, IntegersGiveTheOraclesLists) {
  for (std::uint64_t seed = 200; seed < 225; ++seed) {
    const Problem problem = random_problem(seed, GetParam(), Values::kIntegers);
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(run_index_select(problem, kCpu).same_bits(run_index_select(problem.widened(), on(Backend::kReference))));
  }
}

// More queries than one chunk of bounded memory holds, so that chunk borders are crossed.
TEST_P(CpuIndexSelect, LongPrefill) {
  Rng rng(4);
  for (const bool paged : {false, true}) {
    const Problem problem(make_config(2, 1, 16, 16, 16, 8), single(3000, 9000, paged), GetParam(), rng, Values::kIntegers);
    const Tensor scores = run_block_scores(problem, kCpu);
    EXPECT_TRUE(run_index_select(problem, kCpu).same_bits(run_select_blocks(problem, scores, on(Backend::kReference))));
  }
}

TEST_P(CpuIndexSelect, FindsTheBestOfMoreThanFourThousandBlocks) {
  for (const std::int32_t seqlen_q : {1, 40}) {
    Rng rng(5);
    Problem problem(make_config(1, 1, 16, 16, 16, 2), single(seqlen_q, 16 * 8192), GetParam(), rng, Values::kIntegers);
    const std::vector<double> large(16, 30.0);
    problem.k_idx.set_row(8000 * 16 + 5, large.data());
    for (std::int64_t t = 0; t < seqlen_q; ++t) problem.q_idx.set_row(t, large.data());
    const Tensor block_ids = run_index_select(problem, kCpu);
    for (std::int64_t t = 0; t < seqlen_q; ++t) {
      EXPECT_EQ(block_ids(t, 0, 0), 8000);
      EXPECT_EQ(block_ids(t, 0, 1), static_cast<double>(problem.query(t).own_block));
    }
  }
}

// The scratch is bounded: it follows neither the number of queries nor (T x blocks), and stays below the bar of 256 MiB at the
// reference model's sizes and 131,072 tokens.
TEST(CpuIndexSelectMemory, DoesNotGrowWithTheQueries) {
  const auto bytes = [](std::int32_t seqlen_q, std::int32_t seqlen_k) {
    const std::vector<std::int32_t> cu_seqlens_q{0, seqlen_q}, cu_seqlens_k{0, seqlen_k};
    Batch batch;
    batch.cu_seqlens_q = make_view(cu_seqlens_q.data(), {2});
    batch.cu_seqlens_k = make_view(cu_seqlens_k.data(), {2});
    const IndexSelectArgs args{.config = make_config(4, 16, 128, 128, 128, 16),
                               .batch = batch,
                               .q_idx = make_view(nullptr, DType::kBF16, {seqlen_q, 4, 128}),
                               .k_idx = make_view(nullptr, DType::kBF16, {seqlen_k, 128}),
                               .block_ids = make_view(nullptr, DType::kI32, {seqlen_q, 4, 16}),
                               .options = on(Backend::kCpu, 2)};
    return workspace_bytes(args);
  };
  EXPECT_LE(bytes(131072, 131072), std::size_t{256} << 20);
  EXPECT_LE(bytes(1 << 20, 1 << 20), std::size_t{256} << 20);
  EXPECT_EQ(bytes(1 << 20, 1 << 20), bytes(1 << 18, 1 << 20));
}

}  // namespace
}  // namespace openmsa::test
