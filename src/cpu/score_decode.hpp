// The score stage for few query rows (decode, speculative decode): bound by reading the index keys, not by arithmetic.
#pragma once

#include "cpu/score.hpp"

namespace openmsa::cpu {

// Sequences with at most this many query rows (query tokens x KV heads) are scored this way.
inline constexpr std::int64_t kMaxFewRows = 64;

// Scratch floats that one call needs for `num_tokens` query tokens, aligned to 64 bytes.
std::size_t score_few_scratch(const ScoreInputs& inputs, std::int64_t num_tokens);

// What score_tile does, bit for bit, for few tokens: every key is read once in its storage type and turned once, and pieces of the
// context can go to different threads.
void score_few(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
               std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token, std::int64_t stride_head,
               float* scratch);

}  // namespace openmsa::cpu
