#include "support/plain_training.hpp"

#include <algorithm>
#include <cmath>

#include "support/oracle.hpp"

namespace openmsa::test {

namespace {

std::vector<std::int64_t> attended_keys(const Problem& problem, std::int64_t t, std::int64_t g, const Tensor* block_ids) {
  const Problem::Query query = problem.query(t);
  std::vector<std::int64_t> blocks;
  for (std::int64_t n = 0; n < (block_ids == nullptr ? query.num_visible_blocks : problem.config.top_k); ++n) {
    const std::int64_t b = block_ids == nullptr ? n : static_cast<std::int64_t>((*block_ids)(t, g, n));
    if (b >= 0) blocks.push_back(b);
  }
  std::vector<std::int64_t> keys;
  for (const std::int64_t b : blocks) {
    const std::int64_t begin = b * problem.config.block_size;
    for (std::int64_t j = begin; j < std::min(begin + problem.config.block_size, query.num_visible); ++j) keys.push_back(j);
  }
  return keys;
}

float dot(const float* a, const float* b, std::int64_t size) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

void add(float* sums, float factor, const float* x, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) sums[i] += factor * x[i];
}

Tensor rounded(const Tensor& like, const std::vector<float>& values) {
  const TensorView& view = like.view();
  Tensor tensor(like.dtype(), std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank));
  const std::vector<double> wide(values.begin(), values.end());
  for (std::int64_t row = 0; row < tensor.num_rows(); ++row) tensor.set_row(row, wide.data() + row * tensor.row_size());
  return tensor;
}

}  // namespace

Gradients plain_attention_backward(const Problem& problem, const Tensor* block_ids, const Attention& forward, const Tensor& d_out) {
  const MsaConfig& config = problem.config;
  const std::int64_t dim = config.head_dim;
  const auto scale = static_cast<float>(config.effective_softmax_scale());
  const auto round = [&](float x) { return round_to(problem.dtype, x); };
  const std::vector<float> q = problem.q.floats(), k = problem.k.floats(), v = problem.v.floats(), out = forward.out.floats(),
                           d_o = d_out.floats();
  std::vector<float> d_q(q.size(), 0.0f), d_k(k.size(), 0.0f), d_v(v.size(), 0.0f);
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      const std::vector<std::int64_t> keys = attended_keys(problem, t, g, block_ids);
      for (std::int64_t h = std::int64_t{g} * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
        const std::int64_t row = (t * config.num_q_heads + h) * dim;
        const float delta = dot(&out[row], &d_o[row], dim), lse = static_cast<float>(forward.lse(t, h));
        for (const std::int64_t j : keys) {
          const std::int64_t key = problem.key_row(problem.query(t).seq, j, g) * dim;
          const float p = round(std::exp(round(round(dot(&q[row], &k[key], dim)) * scale) - lse));
          const float d_s = round(p * (round(dot(&d_o[row], &v[key], dim)) - delta));
          add(&d_q[row], scale * d_s, &k[key], dim);
          add(&d_k[key], scale * d_s, &q[row], dim);
          add(&d_v[key], p, &d_o[row], dim);
        }
      }
    }
  }
  return {rounded(problem.q, d_q), rounded(problem.k, d_k), rounded(problem.v, d_v)};
}

IndexKl plain_index_kl(const Problem& problem, const Tensor* block_ids, const Tensor& lse) {
  const MsaConfig& config = problem.config;
  const std::int64_t dim = config.head_dim, index_dim = config.index_dim, hkv = config.num_kv_heads;
  const auto scale = static_cast<float>(config.effective_softmax_scale());
  const auto index_scale = static_cast<float>(config.effective_index_scale());
  const auto round = [&](float x) { return round_to(problem.dtype, x); };
  const std::vector<float> q = problem.q.floats(), k = problem.k.floats(), q_idx = problem.q_idx.floats(),
                           k_idx = problem.k_idx.floats();
  std::vector<float> d_q_idx(q_idx.size(), 0.0f), d_k_idx(k_idx.size(), 0.0f);
  const float weight = 1.0f / static_cast<float>(problem.total_q * hkv);
  double loss = 0.0;
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    const std::int32_t seq = problem.query(t).seq;
    for (std::int32_t g = 0; g < hkv; ++g) {
      const std::vector<std::int64_t> keys = attended_keys(problem, t, g, block_ids);
      const std::int64_t index_row = (t * hkv + g) * index_dim;
      std::vector<float> scores(keys.size());
      float max = -INFINITY, sum = 0.0f;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const float* const key = &k_idx[problem.index_key_row(seq, keys[n]) * index_dim];
        scores[n] = round(round(dot(&q_idx[index_row], key, index_dim)) * index_scale);
        max = std::max(max, scores[n]);
      }
      for (const float s : scores) sum += std::exp(s - max);
      const float student_lse = max + std::log(sum);
      for (std::size_t n = 0; n < keys.size(); ++n) {
        float teacher = 0.0f;
        for (std::int64_t h = std::int64_t{g} * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
          const float* const q_row = &q[(t * config.num_q_heads + h) * dim];
          const float s = round(round(dot(q_row, &k[problem.key_row(seq, keys[n], g) * dim], dim)) * scale);
          teacher += round(std::exp(s - static_cast<float>(lse(t, h))));
        }
        teacher = round(teacher / static_cast<float>(config.group_size()));
        if (teacher != 0.0f) loss += double{teacher * (std::log(teacher) - (scores[n] - student_lse))};
        const float d_score = round(round(std::exp(scores[n] - student_lse)) - teacher) * index_scale * weight;
        const std::int64_t index_key = problem.index_key_row(seq, keys[n]) * index_dim;
        add(&d_q_idx[index_row], d_score, &k_idx[index_key], index_dim);
        add(&d_k_idx[index_key], d_score, &q_idx[index_row], index_dim);
      }
    }
  }
  IndexKl result{Tensor(DType::kF32, {1}), rounded(problem.q_idx, d_q_idx), rounded(problem.k_idx, d_k_idx)};
  result.loss.set(0, loss * double{weight});
  return result;
}

testing::AssertionResult gradient_right(const char* name, const Tensor& result, const Tensor& oracle, const Tensor& plain,
                                        double absolute) {
  const std::vector<double> oracle_values = oracle.values(), values = result.values(), plain_values = plain.values();
  double plain_error = 0.0, error = 0.0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double exact = oracle_values[i], found = values[i];
    if (std::isfinite(exact) != std::isfinite(found)) {
      return testing::AssertionFailure() << name << " element " << i << " is " << found << ", fp64 has " << exact;
    }
    if (!std::isfinite(exact)) continue;
    if (const double e = std::abs(plain_values[i] - exact); std::isfinite(e)) plain_error = std::max(plain_error, e);
    if (const double e = std::abs(found - exact); e > error) error = e, worst = i;
  }
  if (error <= 3 * plain_error + absolute) return testing::AssertionSuccess();
  return testing::AssertionFailure() << name << " element " << worst << " is " << values[worst] << ", fp64 has "
                                     << oracle_values[worst] << ": error " << error << ", plain computation's " << plain_error;
}

testing::AssertionResult gradients_right(const Problem& problem, const Tensor* block_ids, const Attention& forward,
                                         const Tensor& d_out, const Gradients& result) {
  const double absolute = problem.dtype == DType::kF32 ? 2e-6 : 1e-5;
  const Gradients oracle = oracle_attention_backward(problem, block_ids, d_out);
  const Gradients plain = plain_attention_backward(problem, block_ids, forward, d_out);
  if (const auto right = gradient_right("d_q", result.d_q, oracle.d_q, plain.d_q, absolute); !right) return right;
  if (const auto right = gradient_right("d_k", result.d_k, oracle.d_k, plain.d_k, absolute); !right) return right;
  return gradient_right("d_v", result.d_v, oracle.d_v, plain.d_v, absolute);
}

testing::AssertionResult index_kl_right(const Problem& problem, const Tensor* block_ids, const Tensor& lse, const IndexKl& result) {
  const double weight = 1.0 / static_cast<double>(std::max<std::int64_t>(1, problem.total_q) * problem.config.num_kv_heads);
  const double absolute = problem.dtype == DType::kF32 ? 2e-6 : 1e-5;
  const IndexKl oracle = oracle_index_kl(problem, block_ids), plain = plain_index_kl(problem, block_ids, lse);
  if (result.loss.given()) {
    if (const auto right = gradient_right("loss", result.loss, oracle.loss, plain.loss, absolute); !right) return right;
  }
  if (!result.d_q_idx.given()) return testing::AssertionSuccess();
  if (const auto right = gradient_right("d_q_idx", result.d_q_idx, oracle.d_q_idx, plain.d_q_idx, absolute * weight); !right)
    return right;
  return gradient_right("d_k_idx", result.d_k_idx, oracle.d_k_idx, plain.d_k_idx, absolute * weight);
}

}  // namespace openmsa::test
