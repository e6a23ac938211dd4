// The Hopper backend's entry points, as listed in the registry. Work goes to context.stream of the device of the tensors; nothing
// waits for the device, nothing is allocated, so a call can be captured in a CUDA graph.
#pragma once

#include "core/params.hpp"

namespace openmsa::cuda {

void block_scores(const core::BlockScoresParams& params);
void block_scores_reserve(const core::BlockScoresParams& params);
void select_blocks(const core::SelectBlocksParams& params);
void index_select(const core::IndexSelectParams& params);
void index_select_reserve(const core::IndexSelectParams& params);
void sparse_attention(const core::SparseAttentionParams& params);
void sparse_attention_reserve(const core::SparseAttentionParams& params);
void sparse_decode(const core::SparseAttentionParams& params);
void sparse_decode_reserve(const core::SparseAttentionParams& params);
void msa_attention(const core::MsaAttentionParams& params);
void msa_attention_reserve(const core::MsaAttentionParams& params);
void dense_attention(const core::DenseAttentionParams& params);
void dense_attention_reserve(const core::DenseAttentionParams& params);
void sparse_attention_backward(const core::AttentionBackwardParams& params);
void sparse_attention_backward_reserve(const core::AttentionBackwardParams& params);
void dense_attention_backward(const core::AttentionBackwardParams& params);
void dense_attention_backward_reserve(const core::AttentionBackwardParams& params);
void index_kl_loss(const core::IndexKlParams& params);
void index_kl_loss_reserve(const core::IndexKlParams& params);
void write_pages(const core::WritePagesParams& params);

}  // namespace openmsa::cuda
