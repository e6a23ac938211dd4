#include "core/two_steps.hpp"
#include "cpu/cpu.hpp"

namespace openmsa::cpu {
namespace {

// Measured where Python's MAX_DECODE_QUERIES tells of it.
constexpr std::int64_t kDecodeQueries = 4;

bool is_decode(const core::MsaAttentionParams& params) { return params.geo.max_seqlen_q <= kDecodeQueries; }

}  // namespace

void msa_attention(const core::MsaAttentionParams& params) {
  core::two_steps(params, index_select, is_decode(params) ? sparse_decode : sparse_attention);
}
void msa_attention_reserve(const core::MsaAttentionParams& params) {
  core::two_steps(params, index_select_reserve, is_decode(params) ? sparse_decode_reserve : sparse_attention_reserve);
}

}  // namespace openmsa::cpu
