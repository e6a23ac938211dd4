// A whole decode step in one launch, for msa_attention.
#pragma once

#include "core/params.hpp"

namespace openmsa::cuda {

// Index keys as wide as keys, and every sequence's queries fit the score stage.
bool can_fuse_decode(const core::MsaAttentionParams& params);
void fused_decode(const core::MsaAttentionParams& params);
void fused_decode_reserve(const core::MsaAttentionParams& params);

}  // namespace openmsa::cuda
