// The CPU engine's results are the same bits for any number of threads, any split of a prompt into chunks, and every run.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

struct Results {
  Tensor scores, block_ids, index_ids;
  Attention sparse, decode, dense;
  MsaResult step;
};

Results run_all(const Problem& problem, std::int32_t num_threads) {
  const RunOptions options = on(Backend::kCpu, num_threads);
  Results results;
  results.scores = run_block_scores(problem, options);
  results.block_ids = run_select_blocks(problem, results.scores, options);
  results.index_ids = run_index_select(problem, options);
  results.sparse = run_sparse_attention(problem, results.block_ids, options);
  results.decode = run_sparse_decode(problem, results.block_ids, options);
  results.step = run_msa_attention(problem, options);
  results.dense = run_dense_attention(problem, options, true);
  return results;
}

using Pairs = std::vector<std::tuple<const char*, const Tensor*, const Tensor*>>;
Pairs pairs(const Results& a, const Results& b) {
  return {{"scores", &a.scores, &b.scores},
          {"block_ids", &a.block_ids, &b.block_ids},
          {"index_select", &a.index_ids, &b.index_ids},
          {"sparse out", &a.sparse.out, &b.sparse.out},
          {"sparse lse", &a.sparse.lse, &b.sparse.lse},
          {"decode out", &a.decode.out, &b.decode.out},
          {"decode lse", &a.decode.lse, &b.decode.lse},
          {"msa_attention out", &a.step.attention.out, &b.step.attention.out},
          {"msa_attention lse", &a.step.attention.lse, &b.step.attention.lse},
          {"msa_attention block_ids", &a.step.block_ids, &b.step.block_ids},
          {"dense out", &a.dense.out, &b.dense.out},
          {"dense lse", &a.dense.lse, &b.dense.lse},
          {"block_max", &a.dense.block_max, &b.dense.block_max}};
}

class CpuInvariance : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuInvariance);

TEST_P(CpuInvariance, ThreadsAndRuns) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const Problem problem = random_problem(400 + seed, GetParam());
    SCOPED_TRACE(describe(problem));
    const Results one = run_all(problem, 1);
    for (const std::int32_t num_threads : {1, 2, 3, 7}) {
      const Results again = run_all(problem, num_threads);
      for (const auto& [name, a, b] : pairs(one, again)) {
        EXPECT_TRUE(a->same_bits(*b)) << name << " with " << num_threads << " threads";
      }
    }
  }
}

TEST_P(CpuInvariance, LongProblemOverThreads) {
  Rng rng(1);
  const Problem problem(make_config(2, 4, 64, 64, 32, 8), single(600, 1500, true), GetParam(), rng);
  const Results one = run_all(problem, 1);
  for (const std::int32_t num_threads : {2, 5}) {
    const Results again = run_all(problem, num_threads);
    for (const auto& [name, a, b] : pairs(one, again)) {
      EXPECT_TRUE(a->same_bits(*b)) << name << " with " << num_threads << " threads";
    }
  }
}

// Whether msa_attention takes sparse_decode for it.
bool is_decode_step(const Problem& problem) {
  const auto& queries = problem.layout.seqlens_q;
  return std::all_of(queries.begin(), queries.end(), [](std::int32_t n) { return n <= 4; });
}

void expect_chunks_equal_one_pass(const Problem& problem, std::int64_t chunk_size) {
  SCOPED_TRACE(describe(problem) + ", chunks of " + std::to_string(chunk_size));
  const Results whole = run_all(problem, 2);
  std::int64_t longest = 0;
  for (const std::int32_t n : problem.layout.seqlens_q) longest = std::max<std::int64_t>(longest, n);
  for (std::int64_t first = 0; first < longest; first += chunk_size) {
    const Problem chunk = problem.query_chunk(first, chunk_size);
    const Results part = run_all(chunk, 2);
    const bool same_way = is_decode_step(chunk) == is_decode_step(problem);
    for (const auto& [name, a, b] : pairs(part, whole)) {
      if (!same_way && (a == &part.step.attention.out || a == &part.step.attention.lse)) continue;  // another second step
      const std::int64_t size = a->numel() / std::max<std::int64_t>(a->view().shape[0], 1);         // elements per token
      for (std::int64_t i = 0; i < a->numel(); ++i) {
        const std::int64_t t = problem.chunk_token(first, chunk_size, i / size);
        ASSERT_EQ(a->get(i), b->get(t * size + i % size)) << name << ", token " << t << ", element " << i % size;
      }
    }
  }
}

// The keys of the whole prompt are there from the start, the queries come in chunks; a chunk of one query is a decode step.
TEST_P(CpuInvariance, ChunkedPrefillEqualsOnePass) {
  Rng rng(2);
  for (const std::int64_t chunk_size : {1, 4, 17, 64, 100}) {
    const std::int32_t seqlen_q = chunk_size < 5 ? 24 : 230;
    expect_chunks_equal_one_pass(
        Problem(make_config(2, 4, 48, 80, 32, 4), single(seqlen_q, 400, chunk_size == 17), GetParam(), rng), chunk_size);
  }
  Layout layout;
  layout.seqlens_q = {40, 3, 0, 65};
  layout.seqlens_k = {200, 3, 77, 65};
  expect_chunks_equal_one_pass(Problem(make_config(3, 1, 64, 64, 16, 8, 1, 2), layout, GetParam(), rng), 16);
}

}  // namespace
}  // namespace openmsa::test
