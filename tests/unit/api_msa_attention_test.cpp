// msa_attention is index_select followed by sparse_decode or, for many query tokens, sparse_attention, to the last bit, whichever of
// its results are asked for.
#include <algorithm>

#include "api_calls.hpp"
#include "support/cases.hpp"

namespace openmsa::test {
namespace {

class ApiMsaAttention : public testing::TestWithParam<Backend> {
 protected:
  static void expect_equals_two_steps(const Problem& problem, const RunOptions& options) {
    SCOPED_TRACE(describe(problem));
    const Tensor block_ids = run_index_select(problem, options);
    const auto& queries = problem.layout.seqlens_q;
    const bool few = std::all_of(queries.begin(), queries.end(), [](std::int32_t n) { return n <= 4; });
    const Attention attention = (few ? run_sparse_decode : run_sparse_attention)(problem, block_ids, options);
    const MsaResult step = run_msa_attention(problem, options), out_alone = run_msa_attention(problem, options, false);
    EXPECT_TRUE(step.block_ids.same_bits(block_ids));
    EXPECT_TRUE(step.attention.out.same_bits(attention.out));
    EXPECT_TRUE(step.attention.lse.same_bits(attention.lse));
    EXPECT_TRUE(out_alone.attention.out.same_bits(attention.out)) << "without lse and block_ids";
  }
};
INSTANTIATE_TEST_SUITE_P(, ApiMsaAttention, testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& info) { return backend_name(info.param); });

TEST_P(ApiMsaAttention, EqualsTheTwoCallsOnRandomLayouts) {
  int num_packed = 0, num_paged = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::uint64_t seed = 700; seed < 712; ++seed) {
      const Problem problem = random_problem(seed, dtype);
      ++(problem.layout.paged ? num_paged : num_packed);
      expect_equals_two_steps(problem, on(GetParam()));
    }
  }
  EXPECT_TRUE(num_packed > 0 && num_paged > 0);
}

// One token, a speculative step, a ragged batch with sequences that lack queries or keys; lists that do not fill and that overflow.
TEST_P(ApiMsaAttention, EqualsTheTwoCallsOnDecodeSteps) {
  struct Lengths {
    std::vector<std::int32_t> queries, keys;
  };
  const Lengths steps[] = {{{1}, {900}}, {{4}, {700}}, {{1, 0, 3, 1, 2}, {5, 700, 300, 0, 1}}, {{1, 1, 1, 1}, {129, 64, 1, 1000}}};
  for (const bool paged : {false, true}) {
    for (const Lengths& step : steps) {
      for (const std::int32_t top_k : {1, 4, 16}) {
        Layout layout;
        layout.seqlens_q = step.queries;
        layout.seqlens_k = step.keys;
        layout.paged = paged;
        Rng rng(41);
        const Problem problem(make_config(2, 4, 64, 32, 32, top_k), layout, DType::kBF16, rng);
        for (const std::int32_t num_threads : {1, 3}) expect_equals_two_steps(problem, on(GetParam(), num_threads));
      }
    }
  }
}

TEST_P(ApiMsaAttention, TakesTrustedIndices) {
  Rng rng(42);
  RunOptions options = on(GetParam());
  options.trust_indices = true;
  expect_equals_two_steps(Problem(make_config(2, 4, 64, 32, 32, 4), single(2, 500, true), DType::kF16, rng), options);
}

TEST(ApiMsaAttentionFloat64, EqualsTheTwoCallsOnTheReference) {
  Rng rng(43);
  const Problem problem = Problem(make_config(2, 2, 16, 16, 16, 3), calls_layout(true), DType::kF32, rng).widened();
  const Tensor block_ids = run_index_select(problem, on(Backend::kReference));
  const MsaResult step = run_msa_attention(problem, on(Backend::kReference));
  EXPECT_EQ(step.attention.lse.dtype(), DType::kF64);
  EXPECT_TRUE(step.block_ids.same_bits(block_ids));
  EXPECT_TRUE(step.attention.out.same_bits(run_sparse_decode(problem, block_ids, on(Backend::kReference)).out));
}

}  // namespace
}  // namespace openmsa::test
