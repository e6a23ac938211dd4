// The CPU engine's entry points, as listed in the registry. Storage f32, bf16 or f16; arithmetic in fp32; every result is the
// same for any number of threads and for any split of a prompt into chunks (rows never share an accumulation).
#pragma once

#include <string>

#include "core/params.hpp"

namespace openmsa::cpu {

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
void attention_backward(const core::AttentionBackwardParams& params);  // sparse or dense
void attention_backward_reserve(const core::AttentionBackwardParams& params);
void index_kl_loss(const core::IndexKlParams& params);
void index_kl_loss_reserve(const core::IndexKlParams& params);
void write_pages(const core::WritePagesParams& params);

// The SIMD target that run-time dispatch chose on this machine: "AVX3_DL", "AVX2", "NEON", ...
std::string simd_target();

// Keeps run-time dispatch at "avx2", or sets it free again with "best". For benchmarks and tests; not while a call is running.
void limit_simd_target(const std::string& name);

}  // namespace openmsa::cpu
