#include "support/run.hpp"

namespace openmsa::test {

namespace {

Attention attention_outputs(const Problem& problem) {
  return {Tensor(problem.dtype, {problem.total_q, problem.config.num_q_heads, problem.config.head_dim}, output_padding(problem)),
          Tensor(result_dtype(problem), {problem.total_q, problem.config.num_q_heads}), Tensor()};
}

Attention run_sparse(void (*function)(const SparseAttentionArgs&), const Problem& problem, const Tensor& block_ids,
                     const RunOptions& options) {
  Attention result = attention_outputs(problem);
  call(function,
       SparseAttentionArgs{.config = problem.config,
                           .batch = problem.batch(),
                           .q = problem.q.view(),
                           .k = problem.k.view(),
                           .v = problem.v.view(),
                           .block_ids = block_ids.view(),
                           .out = result.out.view(),
                           .lse = result.lse.view(),
                           .options = options},
       {&result.out, &result.lse});
  return result;
}

}  // namespace

RunOptions on(Backend backend, std::int32_t num_threads) { return {.backend = backend, .num_threads = num_threads}; }

Tensor run_block_scores(const Problem& problem, const RunOptions& options) {
  Tensor scores(result_dtype(problem), {problem.total_q, problem.config.num_kv_heads, problem.max_num_blocks + 1},
                output_padding(problem));
  call<BlockScoresArgs>(block_scores,
                        {.config = problem.config,
                         .batch = problem.batch(),
                         .q_idx = problem.q_idx.view(),
                         .k_idx = problem.k_idx.view(),
                         .scores = scores.view(),
                         .options = options},
                        {&scores});
  return scores;
}

Tensor run_select_blocks(const Problem& problem, const Tensor& scores, const RunOptions& options) {
  Tensor block_ids(DType::kI32, {problem.total_q, problem.config.num_kv_heads, problem.config.top_k}, output_padding(problem));
  call<SelectBlocksArgs>(select_blocks,
                         {.config = problem.config,
                          .batch = problem.batch(),
                          .scores = scores.view(),
                          .block_ids = block_ids.view(),
                          .options = options},
                         {&block_ids});
  return block_ids;
}

Tensor run_index_select(const Problem& problem, const RunOptions& options) {
  Tensor block_ids(DType::kI32, {problem.total_q, problem.config.num_kv_heads, problem.config.top_k});
  call<IndexSelectArgs>(index_select,
                        {.config = problem.config,
                         .batch = problem.batch(),
                         .q_idx = problem.q_idx.view(),
                         .k_idx = problem.k_idx.view(),
                         .block_ids = block_ids.view(),
                         .options = options},
                        {&block_ids});
  return block_ids;
}

Attention run_sparse_attention(const Problem& problem, const Tensor& block_ids, const RunOptions& options) {
  return run_sparse(sparse_attention, problem, block_ids, options);
}

Attention run_sparse_decode(const Problem& problem, const Tensor& block_ids, const RunOptions& options) {
  return run_sparse(sparse_decode, problem, block_ids, options);
}

MsaResult run_msa_attention(const Problem& problem, const RunOptions& options, bool optional_outputs) {
  MsaResult result{attention_outputs(problem), Tensor()};
  Attention& attention = result.attention;
  if (optional_outputs) {
    result.block_ids =
        Tensor(DType::kI32, {problem.total_q, problem.config.num_kv_heads, problem.config.top_k}, output_padding(problem));
  } else {
    attention.lse = Tensor();
  }
  call<MsaAttentionArgs>(msa_attention,
                         {.config = problem.config,
                          .batch = problem.batch(),
                          .q = problem.q.view(),
                          .k = problem.k.view(),
                          .v = problem.v.view(),
                          .q_idx = problem.q_idx.view(),
                          .k_idx = problem.k_idx.view(),
                          .out = attention.out.view(),
                          .lse = attention.lse.view(),
                          .block_ids = result.block_ids.view(),
                          .options = options},
                         {&attention.out});
  if (optional_outputs) {
    EXPECT_TRUE(attention.lse.guards_intact()) << "wrote beside lse";
    EXPECT_TRUE(result.block_ids.guards_intact()) << "wrote beside block_ids";
  }
  return result;
}

Attention run_dense_attention(const Problem& problem, const RunOptions& options, bool with_block_max) {
  Attention result = attention_outputs(problem);
  if (with_block_max) {
    result.block_max = Tensor(result_dtype(problem), {problem.total_q, problem.config.num_q_heads, problem.max_num_blocks + 1},
                              output_padding(problem));
  }
  call<DenseAttentionArgs>(dense_attention,
                           {.config = problem.config,
                            .batch = problem.batch(),
                            .q = problem.q.view(),
                            .k = problem.k.view(),
                            .v = problem.v.view(),
                            .out = result.out.view(),
                            .lse = result.lse.view(),
                            .block_max = result.block_max.view(),
                            .options = options},
                           {&result.out, &result.lse});
  if (with_block_max) {
    EXPECT_TRUE(result.block_max.guards_intact()) << "wrote beside block_max";
  }
  return result;
}

}  // namespace openmsa::test
