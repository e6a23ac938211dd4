// The training calls on a Problem, and the oracle for each. In all of them a null `block_ids` means every visible key.
#pragma once

#include "support/run.hpp"

namespace openmsa::test {

struct Gradients {
  Tensor d_q, d_k, d_v;
};

struct IndexKl {
  Tensor loss, d_q_idx, d_k_idx;
};

// Which results a call of index_kl_loss asks for, and its scalars.
struct IndexKlOptions {
  bool with_loss = true, with_gradients = true;
  std::int64_t num_tokens = 0;
  bool deterministic = false;
};

// A gradient of `out` as the layers above would hand it down: [T, Hq, D], bell-shaped, in the problem's dtype.
Tensor random_d_out(const Problem& problem, Rng& rng);

// The forward pass that the backward pass belongs to.
Attention run_attention(const Problem& problem, const Tensor* block_ids, const RunOptions& options);

// With a null `options.workspace` the call uses scratch of exactly workspace_bytes(args), so a wrong answer there fails too.
Gradients run_attention_backward(const Problem& problem, const Tensor* block_ids, const Attention& forward, const Tensor& d_out,
                                 const RunOptions& options, bool deterministic = false);
IndexKl run_index_kl(const Problem& problem, const Tensor* block_ids, const Tensor& lse, const RunOptions& options,
                     const IndexKlOptions& kl = {});

// The reference backend on the same inputs in float64; answers in float64.
Gradients oracle_attention_backward(const Problem& problem, const Tensor* block_ids, const Tensor& d_out);
IndexKl oracle_index_kl(const Problem& problem, const Tensor* block_ids, std::int64_t num_tokens = 0);

}  // namespace openmsa::test
