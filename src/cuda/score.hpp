// The score stage as block_scores and index_select share it.
#pragma once

#include "cuda/plan.hpp"

namespace openmsa::cuda {

// Packed query tokens [token_begin, token_end), their scores going to `scores`, whose first token is token_begin.
struct ScoreCall {
  const core::Geometry* geo;
  const MsaConfig* config;
  TensorView q_idx;  // [T, Hkv, Di]
  core::KeyBlocks k_idx;
  float* scores;                            // [token_end - token_begin, Hkv, num_blocks]
  std::int64_t stride_token, stride_group;  // elements
  std::int32_t num_blocks;
  std::int64_t token_begin, token_end;
  bool fill;  // -inf past what a query sees
  void* stream;
};

struct ScoreFewParams;
ScoreFewParams score_few_params(const ScoreCall& call);

// Whether every sequence's queries fit the kernel that reads each key once (decode).
bool score_is_few(const core::Geometry& geo, const MsaConfig& config);
Plan reserve_score(core::Arena& arena, const core::Geometry& geo, const MsaConfig& config, std::int64_t num_tokens);
void launch_score(const ScoreCall& call, const Plan& plan);

}  // namespace openmsa::cuda
