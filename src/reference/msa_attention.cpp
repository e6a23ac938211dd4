// msa_attention is nothing but its two steps.
#include "core/two_steps.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

void msa_attention(const core::MsaAttentionParams& params) { core::two_steps(params, index_select, sparse_attention); }
void msa_attention_reserve(const core::MsaAttentionParams& params) {
  core::two_steps(params, index_select_reserve, [](const core::SparseAttentionParams&) {});
}

}  // namespace openmsa::reference
