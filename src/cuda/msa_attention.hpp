// msa_attention's way for prompts, whose stages overlap, in chunks of a size that tests choose.
#pragma once

#include "core/params.hpp"

namespace openmsa::cuda {

void prefill(const core::MsaAttentionParams& params, std::int64_t max_chunk);
void prefill_reserve(const core::MsaAttentionParams& params, std::int64_t max_chunk);

}  // namespace openmsa::cuda
