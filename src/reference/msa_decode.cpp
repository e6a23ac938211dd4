// msa_decode is nothing but its two steps.
#include "core/two_step_decode.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

void msa_decode(const core::MsaDecodeParams& params) { core::two_step_decode(params, index_select, sparse_attention); }
void msa_decode_reserve(const core::MsaDecodeParams& params) {
  core::two_step_decode(params, index_select_reserve, [](const core::SparseAttentionParams&) {});
}

}  // namespace openmsa::reference
