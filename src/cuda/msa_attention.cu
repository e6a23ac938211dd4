#include "cuda/msa_attention.hpp"

#include <algorithm>

#include "core/two_steps.hpp"
#include "cuda/attend.hpp"
#include "cuda/cuda.hpp"
#include "cuda/decode.hpp"
#include "cuda/repair.hpp"
#include "cuda/score.hpp"
#include "cuda/select.hpp"

namespace openmsa::cuda {
namespace {

// A sequence's, up to which the decode kernels are made for it; Python's MAX_DECODE_QUERIES_CUDA.
constexpr std::int64_t kDecodeQueries = 16;

struct Prefill {
  core::SparseAttentionParams attention;
  AttendScratch scratch;
  std::int64_t width, stride_token;  // of a chunk's scores
  float* scores;
  Plan plan;
};

Prefill reserve_prefill(const core::MsaAttentionParams& params, std::int64_t max_chunk) {
  core::Arena& arena = *params.context.arena;
  Prefill p{core::attend_step(params, core::two_step_ids(params)), {}, score_width(params.geo), 0, nullptr, {}};
  p.scratch = reserve_attend(p.attention, max_chunk);
  p.stride_token = p.width * params.config.num_kv_heads;
  p.scores = arena.take<float>(static_cast<std::size_t>(p.scratch.chunk * p.stride_token));
  p.plan = reserve_score(arena, params.geo, params.config, p.scratch.chunk);
  return p;
}

enum class Way { kFusedDecode, kDecode, kPrefill, kTwoSteps };

Way way_of(const core::MsaAttentionParams& params) {
  if (params.geo.max_seqlen_q <= kDecodeQueries) return can_fuse_decode(params) ? Way::kFusedDecode : Way::kDecode;
  // Scores of few queries come from whole sequences, those of very long contexts in smaller chunks.
  const std::int64_t token_bytes = score_width(params.geo) * params.config.num_kv_heads * 4;
  const bool fits = std::min(params.geo.total_q, kAttendChunk) * token_bytes <= kMaxScoreBytes;
  return score_is_few(params.geo, params.config) || !fits ? Way::kTwoSteps : Way::kPrefill;
}

}  // namespace

void prefill_reserve(const core::MsaAttentionParams& params, std::int64_t max_chunk) { reserve_prefill(params, max_chunk); }

// A chunk at a time. The merge of one is bound by memory, the scores of the next by the tensor cores, so they run side by side: score
// says how many multiprocessors it leaves to the merge, which is launched behind it and begins there (programmatic dependent launch).
void prefill(const core::MsaAttentionParams& params, std::int64_t max_chunk) {
  const Prefill p = reserve_prefill(params, max_chunk);
  const std::int64_t total = params.geo.total_q, chunk = p.scratch.chunk;
  for (std::int64_t begin = 0; begin < total; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, total);
    ScoreCall score{&params.geo,  &params.config,
                    params.q_idx, params.k_idx,
                    p.scores,     p.stride_token,
                    p.width,      static_cast<std::int32_t>(p.width),
                    begin,        end,
                    false,        params.context.stream};
    if (begin > 0) score.beside = {p.scratch.num_rest, combine_us(params.config)};
    launch_score(score, p.plan);
    if (begin > 0) combine_chunk(p.attention, p.scratch, begin - chunk, begin, Order::kDependent);
    launch_select({&params.geo, &params.config, p.scores, p.stride_token, p.width, p.attention.block_ids, begin, end, false,
                   params.context.stream});
    attend_chunk(p.attention, p.scratch, begin, end);
  }
  combine_chunk(p.attention, p.scratch, (total - 1) / chunk * chunk, total, Order::kAfter);
  launch_repair(p.attention);
}

void msa_attention_reserve(const core::MsaAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  switch (way_of(params)) {
    case Way::kFusedDecode: return fused_decode_reserve(params);
    case Way::kDecode: return core::two_steps(params, index_select_reserve, sparse_decode_reserve);
    case Way::kPrefill: return prefill_reserve(params, kAttendChunk);
    case Way::kTwoSteps: return core::two_steps(params, index_select_reserve, sparse_attention_reserve);
  }
}

void msa_attention(const core::MsaAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  switch (way_of(params)) {
    case Way::kFusedDecode: return fused_decode(params);
    case Way::kDecode: return core::two_steps(params, index_select, sparse_decode);
    case Way::kPrefill: return prefill(params, kAttendChunk);
    case Way::kTwoSteps: return core::two_steps(params, index_select, sparse_attention);
  }
}

}  // namespace openmsa::cuda
