#include "core/two_step_decode.hpp"
#include "cpu/cpu.hpp"

namespace openmsa::cpu {

void msa_decode(const core::MsaDecodeParams& params) { core::two_step_decode(params, index_select, sparse_decode); }
void msa_decode_reserve(const core::MsaDecodeParams& params) {
  core::two_step_decode(params, index_select_reserve, sparse_decode_reserve);
}

}  // namespace openmsa::cpu
