// The oracle: SPEC semantics as plain fp64 loops, one file per stage, meant to be read against docs/numerics.md in ten minutes.
// Inputs in any storage dtype or float64; results are computed in float64 and rounded once on store.
#pragma once

#include "core/params.hpp"

namespace openmsa::reference {

void block_scores(const core::BlockScoresParams& params);
void select_blocks(const core::SelectBlocksParams& params);
void index_select(const core::IndexSelectParams& params);
void index_select_reserve(const core::IndexSelectParams& params);
void sparse_attention(const core::SparseAttentionParams& params);
void msa_attention(const core::MsaAttentionParams& params);
void msa_attention_reserve(const core::MsaAttentionParams& params);
void dense_attention(const core::DenseAttentionParams& params);
void attention_backward(const core::AttentionBackwardParams& params);  // sparse or dense
void index_kl_loss(const core::IndexKlParams& params);
void write_pages(const core::WritePagesParams& params);

}  // namespace openmsa::reference
