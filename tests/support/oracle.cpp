#include "support/oracle.hpp"

#include <algorithm>
#include <cmath>

namespace openmsa::test {

namespace {

const RunOptions kOracle = on(Backend::kReference);

std::vector<std::int64_t> visible_keys(const Problem& problem, const Problem::Query& query, std::int64_t t, std::int64_t g,
                                       const Tensor* block_ids) {
  std::vector<std::int64_t> keys;
  const auto add_block = [&](std::int64_t b) {
    const std::int64_t begin = b * problem.config.block_size;
    for (std::int64_t j = begin; j < std::min(begin + problem.config.block_size, query.num_visible); ++j) keys.push_back(j);
  };
  if (block_ids == nullptr) {
    for (std::int64_t b = 0; b < query.num_visible_blocks; ++b) add_block(b);
  } else {
    for (std::int64_t n = 0; n < problem.config.top_k; ++n) {
      if (const double b = (*block_ids)(t, g, n); b >= 0) add_block(static_cast<std::int64_t>(b));
    }
  }
  return keys;
}

}  // namespace

Tensor oracle_scores(const Problem& problem) { return run_block_scores(problem.widened(), kOracle); }

Attention oracle_sparse_attention(const Problem& problem, const Tensor& block_ids) {
  return run_sparse_attention(problem.widened(), block_ids, kOracle);
}

Attention oracle_dense_attention(const Problem& problem) { return run_dense_attention(problem.widened(), kOracle, true); }

float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kBF16: return static_cast<float>(BFloat16(value));
    case DType::kF16: return static_cast<float>(Float16(value));
    default: return value;
  }
}

std::vector<float> plain_attention(const Problem& problem, const Tensor* block_ids) {
  const MsaConfig& config = problem.config;
  const std::int64_t head_dim = config.head_dim;
  const auto scale = static_cast<float>(config.effective_softmax_scale());
  const std::vector<float> q = problem.q.floats(), k = problem.k.floats(), v = problem.v.floats();
  std::vector<float> out(q.size(), 0.0f);
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    const Problem::Query query = problem.query(t);
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      const std::vector<std::int64_t> keys = visible_keys(problem, query, t, g, block_ids);
      for (std::int64_t h = std::int64_t{g} * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
        const float* q_row = q.data() + (t * config.num_q_heads + h) * head_dim;
        std::vector<float> probabilities(keys.size());
        float max = -INFINITY;
        for (std::size_t n = 0; n < keys.size(); ++n) {
          const float* k_row = k.data() + problem.key_row(query.seq, keys[n], g) * head_dim;
          float sum = 0.0f;
          for (std::int64_t d = 0; d < head_dim; ++d) sum += q_row[d] * k_row[d];
          probabilities[n] = round_to(problem.dtype, round_to(problem.dtype, sum) * scale);
          max = std::max(max, probabilities[n]);
        }
        float sum = 0.0f;
        for (float& p : probabilities) sum += p = std::exp(p - max);
        float* out_row = out.data() + (t * config.num_q_heads + h) * head_dim;
        for (std::size_t n = 0; n < keys.size(); ++n) {
          const float p = round_to(problem.dtype, probabilities[n] / sum);
          const float* v_row = v.data() + problem.key_row(query.seq, keys[n], g) * head_dim;
          for (std::int64_t d = 0; d < head_dim; ++d) out_row[d] += p * v_row[d];
        }
        for (std::int64_t d = 0; d < head_dim; ++d) out_row[d] = round_to(problem.dtype, out_row[d]);
      }
    }
  }
  return out;
}

}  // namespace openmsa::test
