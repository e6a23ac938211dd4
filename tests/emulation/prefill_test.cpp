// msa_attention's way for prompts, whose chunks overlap on a GPU: here one kernel runs after the other, so what is held is what each
// leaves to the next, and that the clusters that score take over the work of those that leave.
#include <gtest/gtest.h>

#include "orders.hpp"
#include "select_calls.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

class EmulatedPrefill : public emulation::InOrders {};
OPENMSA_IN_TWO_ORDERS(EmulatedPrefill);

void expect_right(const Problem& problem, std::int64_t max_chunk) {
  SCOPED_TRACE(describe(problem) + ", chunks of " + std::to_string(max_chunk));
  const MsaResult step = emulated_prefill(problem, max_chunk);
  EXPECT_TRUE(selection_right(problem, step.block_ids, oracle_scores(problem)));
  EXPECT_TRUE(attention_right(problem, step.attention, &step.block_ids));
}

// Lists are scattered, so merges have all to do and score leaves them most of its clusters.
TEST_P(EmulatedPrefill, Chunks) {
  Rng rng(1);
  emulation::options().num_multiprocessors = 7;
  const Problem problem(make_config(2, 16, 64, 64, 64, 4), single(130, 900, true), DType::kBF16, rng);
  for (const std::int64_t max_chunk : {40, 65, 130}) expect_right(problem, max_chunk);
}

TEST_P(EmulatedPrefill, GroupsThatNoUnionServes) {
  Rng rng(2);
  emulation::options().num_multiprocessors = 5;
  expect_right(Problem(make_config(2, 3, 64, 96, 64, 4), ragged({70, 0, 3, 40}, {70, 9, 700, 300}), DType::kF16, rng), 50);
}

// More queries than the decode kernels are for, whose scores still come from the kernel for few: the two steps, to the bit.
TEST_P(EmulatedPrefill, FewRowsOfManyQueries) {
  Rng rng(3);
  const Problem problem(make_config(1, 16, 64, 64, 64, 4), single(40, 700, true), DType::kBF16, rng);
  const MsaResult result = emulated_msa_attention(problem);
  EXPECT_TRUE(result.block_ids.same_bits(emulated_index_select(problem)));
  const Attention attention = emulated_sparse_attention(problem, result.block_ids);
  EXPECT_TRUE(result.attention.out.same_bits(attention.out));
  EXPECT_TRUE(result.attention.lse.same_bits(attention.lse));
}

}  // namespace
}  // namespace openmsa::test
