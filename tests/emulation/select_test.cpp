// select_blocks by both of its kernels, a CTA a row and a warp a row, against the reference backend on the same scores: exactly equal.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "orders.hpp"
#include "select_calls.hpp"
#include "support/cases.hpp"

namespace openmsa::test {
namespace {

class EmulatedSelect : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedSelect);

// One query token a sequence, which sees `blocks[i]` blocks, the last not to its end. Nobody reads keys, so there are none.
Problem rows_of(const MsaConfig& config, const std::vector<std::int32_t>& blocks, Rng& rng) {
  Layout layout;
  layout.seqlens_q.assign(blocks.size(), 1);
  layout.seqlens_k.assign(blocks.size(), 0);
  Problem problem(config, layout, DType::kBF16, rng);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::int32_t keys = blocks[i] * config.block_size - (blocks[i] > 0 ? static_cast<std::int32_t>(uniform(rng, 0, 40)) : 0);
    problem.layout.seqlens_k[i] = keys;
    problem.cu_seqlens_k[i + 1] = problem.cu_seqlens_k[i] + keys;
  }
  problem.total_k = problem.cu_seqlens_k.back();
  problem.max_num_blocks = *std::max_element(blocks.begin(), blocks.end());
  return problem;
}

enum class Scores {
  kRandom,
  kFew,
  kEqual,
  kSparse,
  kNaN,
  kMinusInfinity,
  kInfinities,
  kZeros,
  kFalling,
  kRising,
  kNegative,
  kLargest
};
constexpr int kNumScores = 12;

double score(Scores kind, std::int64_t block, std::int64_t count, Rng& rng) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  const double x = static_cast<double>(uniform(rng, -1'000'000, 1'000'000)) / 65536.0;
  switch (kind) {
    case Scores::kRandom: return x;
    case Scores::kFew: return static_cast<double>(uniform(rng, 0, 3));
    case Scores::kEqual: return -1.25;
    case Scores::kSparse: return uniform(rng, 0, 50) == 0 ? x : -kInf;
    case Scores::kNaN: return uniform(rng, 0, 3) == 0 ? x : kNaN;
    case Scores::kMinusInfinity: return uniform(rng, 0, 1) == 0 ? -kInf : kNaN;
    case Scores::kInfinities: return uniform(rng, 0, 9) == 0 ? kInf : x;
    case Scores::kZeros: return uniform(rng, 0, 1) == 0 ? -0.0 : 0.0;
    case Scores::kFalling: return static_cast<double>(count - block);
    case Scores::kRising: return static_cast<double>(block) - 100.0;
    case Scores::kNegative: return -std::exp(x / 4.0);
    case Scores::kLargest: return uniform(rng, 0, 1) == 0 ? 3.4e38 : std::copysign(1e-40 * std::fabs(x), x);
  }
  return 0;
}

// Scores of every kind by turns, from `first` on; what a query does not see stays NaN. Rows of `width` columns.
void expect_right(const Problem& problem, std::int64_t width, int first, Rng& rng) {
  SCOPED_TRACE(text(problem.config) + ", width " + std::to_string(width) + ", kinds from " + std::to_string(first));
  Tensor scores(DType::kF32, {problem.total_q, problem.config.num_kv_heads, width});
  std::vector<double> row(static_cast<std::size_t>(width));
  for (std::int64_t i = 0; i < scores.num_rows(); ++i) {
    const std::int64_t count = problem.query(i / problem.config.num_kv_heads).num_visible_blocks;
    const auto kind = static_cast<Scores>((first + i) % kNumScores);
    std::fill(row.begin(), row.end(), std::numeric_limits<double>::quiet_NaN());
    for (std::int64_t b = 0; b < count; ++b) row[static_cast<std::size_t>(b)] = score(kind, b, count, rng);
    scores.set_row(i, row.data());
  }
  const Tensor found = emulated_select_blocks(problem, scores);
  const Tensor right = run_select_blocks(problem, scores.to(DType::kF64), on(Backend::kReference));
  for (std::int64_t i = 0; i < found.numel(); ++i) {
    const std::int64_t row_index = i / problem.config.top_k;
    ASSERT_EQ(found.get(i), right.get(i)) << "row " << row_index << " of kind " << (first + row_index) % kNumScores << ", slot "
                                          << i % problem.config.top_k << ", of "
                                          << problem.query(row_index / problem.config.num_kv_heads).num_visible_blocks << " blocks";
  }
}

MsaConfig select_config(std::int32_t top_k, std::int32_t num_init, std::int32_t num_local, std::int32_t block_size = 64) {
  return make_config(2, 1, 64, 64, block_size, top_k, num_init, num_local);
}

// A CTA a row: up to 12 rows on 3 multiprocessors.
TEST_P(EmulatedSelect, FewRows) {
  Rng rng(1);
  const MsaConfig configs[] = {select_config(1, 0, 1), select_config(5, 2, 2), select_config(16, 0, 1), select_config(17, 4, 9),
                               select_config(32, 16, 16)};
  int first = 0;
  for (const MsaConfig& config : configs) {
    // Six rows of two groups; the width decides whether rows start on 16 bytes.
    expect_right(rows_of(config, {0, 1, 16, 33, 513, 1024}, rng), 1024, first, rng);
    expect_right(rows_of(config, {7, 40, 300, 512, 1023, 5}, rng), 1027, first + 5, rng);
    first += 3;
  }
}

TEST_P(EmulatedSelect, FewLongRows) {
  Rng rng(2);
  for (const std::int32_t top_k : {16, 32}) {
    expect_right(rows_of(select_config(top_k, 1, 2), {1025, 2500, 8192, 8193, 1024, 1100}, rng), 8196, top_k / 16, rng);
    expect_right(rows_of(select_config(top_k, 0, 1), {8193, 9001, 1030}, rng), 9001, 6 + top_k / 16, rng);
  }
}

// A warp a row, in chunks of 1,024.
TEST_P(EmulatedSelect, ManyRows) {
  Rng rng(3);
  emulation::options().num_multiprocessors = 1;
  const MsaConfig configs[] = {select_config(1, 0, 1), select_config(5, 2, 2, 48), select_config(16, 0, 1), select_config(17, 4, 9),
                               select_config(32, 16, 16)};
  int first = 0;
  for (const MsaConfig& config : configs) {
    std::vector<std::int32_t> blocks = {0, 1, 15, 31, 33, 1023, 1024, 1025, 2050, 3000};
    for (int i = 0; i < 40; ++i) blocks.push_back(static_cast<std::int32_t>(uniform(rng, 0, 200)));
    std::shuffle(blocks.begin(), blocks.end(), rng);
    expect_right(rows_of(config, blocks, rng), first % 2 == 0 ? 3000 : 3001, first, rng);
    ++first;
  }
}

}  // namespace
}  // namespace openmsa::test
