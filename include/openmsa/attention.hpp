// The main branch: exact softmax attention over the selected blocks, and over all keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "openmsa/batch.hpp"
#include "openmsa/config.hpp"
#include "openmsa/tensor.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa {

// For head h of group g = h / G, over the visible keys j of the blocks in block_ids[t,g,:]:
//   out[t,h] = sum_j softmax_j(softmax_scale * <q[t,h], k[j,g]>) * v[j,g]
//   lse[t,h] = ln sum_j exp(softmax_scale * <q[t,h], k[j,g]>)
// A row that sees no key gives out = 0 and lse = -inf. Keys outside the selected blocks, and key slots past a sequence's end,
// are never read into the result, so they may hold NaN.
struct SparseAttentionArgs {
  MsaConfig config{};
  Batch batch{};
  TensorView q{};          // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};          // in:  [S, Hkv, D], or paged [num_pages, Hkv, Bk, D]; dtype of q
  TensorView v{};          // in:  like k
  TensorView block_ids{};  // in:  [T, Hkv, k] int32: strictly ascending, -1 only in the tail, none beyond the query's own block
  TensorView out{};        // out: [T, Hq, D], dtype of q
  TensorView lse{};        // out: [T, Hq] f32; optional
  RunOptions options{};
};
// Prefill and training: many query tokens per sequence.
void sparse_attention(const SparseAttentionArgs& args);
// The same result for few query tokens per sequence (decode, speculative decode): bound by memory traffic, not by arithmetic.
void sparse_decode(const SparseAttentionArgs& args);
std::size_t workspace_bytes(const SparseAttentionArgs& args);  // enough for either

// index_select and attention over what it selects, in one call: a whole layer's prefill, or its decode step, which is one launch on a
// GPU. out and lse are those of the two single calls with the same lists, sparse_decode being the second up to 4 query tokens per
// sequence (16 on a GPU), else sparse_attention.
struct MsaAttentionArgs {
  MsaConfig config{};
  Batch batch{};
  TensorView q{};          // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};          // in:  [S, Hkv, D], or paged [num_pages, Hkv, Bk, D]; dtype of q
  TensorView v{};          // in:  like k
  TensorView q_idx{};      // in:  [T, Hkv, Di], dtype of q
  TensorView k_idx{};      // in:  [S, Di], or paged [num_pages, Bk, Di]; dtype of q
  TensorView out{};        // out: [T, Hq, D], dtype of q
  TensorView lse{};        // out: [T, Hq] f32; optional
  TensorView block_ids{};  // out: [T, Hkv, k] int32; optional
  RunOptions options{};
};
void msa_attention(const MsaAttentionArgs& args);
std::size_t workspace_bytes(const MsaAttentionArgs& args);

// Causal attention over every visible key; same formulas.
struct DenseAttentionArgs {
  MsaConfig config{};  // top_k and the index fields are not used
  Batch batch{};
  TensorView q{};          // in:  [T, Hq, D] f32 | bf16 | f16
  TensorView k{};          // in:  [S, Hkv, D], or paged [num_pages, Hkv, Bk, D]
  TensorView v{};          // in:  like k
  TensorView out{};        // out: [T, Hq, D], dtype of q
  TensorView lse{};        // out: [T, Hq] f32; optional
  TensorView block_max{};  // out: [T, Hq, num_blocks] f32; optional: max over the visible keys of each block of the scaled score
                           //      softmax_scale * <q, k>, -inf where nothing is visible (the 'proxy' pass some engines select by)
  RunOptions options{};
};
void dense_attention(const DenseAttentionArgs& args);
std::size_t workspace_bytes(const DenseAttentionArgs& args);

}  // namespace openmsa
