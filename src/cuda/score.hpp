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
  // A merge that is launched right behind and may run beside: its (token, group) pairs, [1] on the device, or null, and what one
  // costs in multiprocessor time.
  struct {
    const std::int32_t* pairs = nullptr;
    float pair_us = 0.f;
  } beside{};
};

// Scores of a chunk of query tokens stay below this; the scratch does not grow with T.
inline constexpr std::int64_t kMaxScoreBytes = std::int64_t{9} << 28;  // 2.25 GiB: 16,896 tokens x 4 groups x 8,192 blocks

// Width of a row of scores that start on 16 bytes.
std::int64_t score_width(const core::Geometry& geo);

struct ScoreFewParams;
ScoreFewParams score_few_params(const ScoreCall& call);

// Whether every sequence's queries fit the kernel that reads each key once (decode).
bool score_is_few(const core::Geometry& geo, const MsaConfig& config);
Plan reserve_score(core::Arena& arena, const core::Geometry& geo, const MsaConfig& config, std::int64_t num_tokens);
void launch_score(const ScoreCall& call, const Plan& plan);

}  // namespace openmsa::cuda
