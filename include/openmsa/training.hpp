// Training: gradients of the main branch, and the loss that teaches the index branch. Packed keys only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "openmsa/batch.hpp"
#include "openmsa/config.hpp"
#include "openmsa/tensor.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa {

// Gradients of sparse_attention, exact attention on the selected keys; block_ids carry none. With
//   P[t,h,j] = exp(softmax_scale * <q[t,h], k[j,g]> - lse[t,h])      over the visible keys j of the blocks in block_ids[t,g,:]
//   dS[t,h,j] = P * (<d_out[t,h], v[j,g]> - <d_out[t,h], out[t,h]>)
// it is d_q[t,h] = softmax_scale * sum_j dS k[j,g], and summed over the queries t and the heads h of group g
//   d_k[j,g] = softmax_scale * sum dS q[t,h],  d_v[j,g] = sum P d_out[t,h].
// Keys that nobody chose get 0, and so does d_q of a row that sees no key. A gradient of lse is not taken.
struct SparseAttentionBackwardArgs {
  MsaConfig config{};
  Batch batch{};               // packed keys
  TensorView q{};              // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};              // in:  [S, Hkv, D]; dtype of q, as all tensors but block_ids and lse
  TensorView v{};              // in:  [S, Hkv, D]
  TensorView block_ids{};      // in:  [T, Hkv, k] int32, as given to sparse_attention
  TensorView out{};            // in:  [T, Hq, D], what sparse_attention returned
  TensorView lse{};            // in:  [T, Hq] f32, likewise
  TensorView d_out{};          // in:  [T, Hq, D]
  TensorView d_q{};            // out: [T, Hq, D]
  TensorView d_k{};            // out: [S, Hkv, D]
  TensorView d_v{};            // out: [S, Hkv, D]
  bool deterministic = false;  // the same bits in every run, where the fastest way would not give them
  RunOptions options{};
};
void sparse_attention_backward(const SparseAttentionBackwardArgs& args);
std::size_t workspace_bytes(const SparseAttentionBackwardArgs& args);

// The same for dense_attention, over every visible key.
struct DenseAttentionBackwardArgs {
  MsaConfig config{};  // top_k and the index fields are not used
  Batch batch{};       // packed keys
  TensorView q{};      // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};      // in:  [S, Hkv, D]
  TensorView v{};      // in:  [S, Hkv, D]
  TensorView out{};    // in:  [T, Hq, D], what dense_attention returned
  TensorView lse{};    // in:  [T, Hq] f32, likewise
  TensorView d_out{};  // in:  [T, Hq, D]
  TensorView d_q{};    // out: [T, Hq, D]
  TensorView d_k{};    // out: [S, Hkv, D]
  TensorView d_v{};    // out: [S, Hkv, D]
  bool deterministic = false;
  RunOptions options{};
};
void dense_attention_backward(const DenseAttentionBackwardArgs& args);
std::size_t workspace_bytes(const DenseAttentionBackwardArgs& args);

// The index branch learns to score keys as the main branch attends to them. Over a support A(t,g) - the visible keys of the selected
// blocks, or every visible key where block_ids is not given (warm-up) -
//   student P_idx[t,g,j] = softmax over A of index_scale * <q_idx[t,g], k_idx[j]>          (token level, no pooling)
//   teacher P[t,g,j]     = mean over the group's heads h of exp(softmax_scale * <q[t,h], k[j,g]> - lse[t,h])
//   loss                 = 1 / (T * Hkv) * sum over t, g of sum over j in A of P * ln(P / P_idx)
// The teacher is a constant: gradients reach q_idx and k_idx alone, from d loss / d (index_scale * score) = (P_idx - P) / (T * Hkv).
// A (t,g) that sees no key adds nothing.
struct IndexKlLossArgs {
  MsaConfig config{};
  Batch batch{};                // packed keys
  TensorView q{};               // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};               // in:  [S, Hkv, D]
  TensorView lse{};             // in:  [T, Hq] f32 over the same support: of sparse_attention, or of dense_attention in warm-up
  TensorView q_idx{};           // in:  [T, Hkv, Di]
  TensorView k_idx{};           // in:  [S, Di]
  TensorView block_ids{};       // in:  [T, Hkv, k] int32; optional: all visible keys
  TensorView loss{};            // out: [1] f32; optional
  TensorView d_q_idx{};         // out: [T, Hkv, Di]; optional, together with d_k_idx
  TensorView d_k_idx{};         // out: [S, Di]
  std::int64_t num_tokens = 0;  // T of the mean; 0: the tokens of this call. A rank that holds a part passes the whole.
  bool deterministic = false;
  RunOptions options{};
};
void index_kl_loss(const IndexKlLossArgs& args);
std::size_t workspace_bytes(const IndexKlLossArgs& args);

}  // namespace openmsa
