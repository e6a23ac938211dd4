#include "support/training.hpp"

namespace openmsa::test {

namespace {

const RunOptions kOracle = on(Backend::kReference);

template <typename Args>
Gradients run_backward(void (*function)(const Args&), Args args, const Problem& problem, const Attention& forward,
                       const Tensor& d_out) {
  const MsaConfig& config = problem.config;
  const std::vector<std::int64_t> key_shape{problem.total_k, config.num_kv_heads, config.head_dim};
  Gradients result{Tensor(problem.dtype, {problem.total_q, config.num_q_heads, config.head_dim}, output_padding(problem)),
                   Tensor(problem.dtype, key_shape, output_padding(problem)),
                   Tensor(problem.dtype, key_shape, output_padding(problem))};
  args.config = config;
  args.batch = problem.batch();
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.v = problem.v.view();
  args.out = forward.out.view();
  args.lse = forward.lse.view();
  args.d_out = d_out.view();
  args.d_q = result.d_q.view();
  args.d_k = result.d_k.view();
  args.d_v = result.d_v.view();
  call(function, args, {&result.d_q, &result.d_k, &result.d_v});
  return result;
}

}  // namespace

Tensor random_d_out(const Problem& problem, Rng& rng) {
  std::normal_distribution<double> normal;
  Tensor d_out(problem.dtype, {problem.total_q, problem.config.num_q_heads, problem.config.head_dim},
               problem.layout.strided ? 24 : 0);
  for (std::int64_t i = 0; i < d_out.numel(); ++i) d_out.set(i, normal(rng));
  return d_out;
}

Attention run_attention(const Problem& problem, const Tensor* block_ids, const RunOptions& options) {
  return block_ids != nullptr ? run_sparse_attention(problem, *block_ids, options) : run_dense_attention(problem, options);
}

Gradients run_attention_backward(const Problem& problem, const Tensor* block_ids, const Attention& forward, const Tensor& d_out,
                                 const RunOptions& options, bool deterministic) {
  if (block_ids != nullptr) {
    SparseAttentionBackwardArgs args{.block_ids = block_ids->view(), .deterministic = deterministic, .options = options};
    return run_backward(sparse_attention_backward, args, problem, forward, d_out);
  }
  DenseAttentionBackwardArgs args{.deterministic = deterministic, .options = options};
  return run_backward(dense_attention_backward, args, problem, forward, d_out);
}

IndexKl run_index_kl(const Problem& problem, const Tensor* block_ids, const Tensor& lse, const RunOptions& options,
                     const IndexKlOptions& kl) {
  const MsaConfig& config = problem.config;
  IndexKl result;
  if (kl.with_loss) result.loss = Tensor(result_dtype(problem), {1});
  if (kl.with_gradients) {
    result.d_q_idx = Tensor(problem.dtype, {problem.total_q, config.num_kv_heads, config.index_dim}, output_padding(problem));
    result.d_k_idx = Tensor(problem.dtype, {problem.total_k, config.index_dim}, output_padding(problem));
  }
  call<IndexKlLossArgs>(index_kl_loss,
                        {.config = config,
                         .batch = problem.batch(),
                         .q = problem.q.view(),
                         .k = problem.k.view(),
                         .lse = lse.view(),
                         .q_idx = problem.q_idx.view(),
                         .k_idx = problem.k_idx.view(),
                         .block_ids = block_ids != nullptr ? block_ids->view() : TensorView{},
                         .loss = result.loss.view(),
                         .d_q_idx = result.d_q_idx.view(),
                         .d_k_idx = result.d_k_idx.view(),
                         .num_tokens = kl.num_tokens,
                         .deterministic = kl.deterministic,
                         .options = options},
                        {&result.loss, &result.d_q_idx, &result.d_k_idx});
  return result;
}

Gradients oracle_attention_backward(const Problem& problem, const Tensor* block_ids, const Tensor& d_out) {
  const Problem wide = problem.widened();
  return run_attention_backward(wide, block_ids, run_attention(wide, block_ids, kOracle), d_out.to(DType::kF64), kOracle);
}

IndexKl oracle_index_kl(const Problem& problem, const Tensor* block_ids, std::int64_t num_tokens) {
  const Problem wide = problem.widened();
  return run_index_kl(wide, block_ids, run_attention(wide, block_ids, kOracle).lse, kOracle, {.num_tokens = num_tokens});
}

}  // namespace openmsa::test
