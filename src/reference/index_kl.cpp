// loss = 1/(T*Hkv) * sum over t, g of KL(P || P_idx) over the keys A that query t attends to for group g, where
//   P_idx = softmax over A of index_scale * <q_idx[t,g], k_idx[j]>            the student
//   P     = mean over the group's heads of softmax over A of softmax_scale * <q[t,h], k[j,g]>   the teacher, a constant
// d loss / d (index_scale * score) = (P_idx - P) / (T*Hkv). The teacher is worked out anew from q and k: `lse` is not read.
#include <numeric>

#include "reference/attend.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

namespace {

std::vector<double> teacher(const core::IndexKlParams& params, const Query& query, std::int32_t g,
                            const std::vector<std::int64_t>& keys) {
  const MsaConfig& config = params.config;
  const HeadRows k{params.geo, params.k, query.seq, g};
  std::vector<double> mean(keys.size(), 0.0);
  for (std::int32_t h = g * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
    const auto q = load_row(address(params.q, query.token, h), params.q.dtype, config.head_dim);
    const Softmax head = softmax(scaled_scores(k, q, config.effective_softmax_scale(), keys));
    add_scaled(mean, 1.0 / config.group_size(), head.probabilities);
  }
  return mean;
}

// sum of P * ln(P / P_idx), with 0 * ln 0 = 0; ln P_idx = s - lse stays finite where P_idx itself is too small for a double.
double divergence(const std::vector<double>& p, const std::vector<double>& student_scores, double student_lse) {
  double sum = 0.0;
  for (std::size_t n = 0; n < p.size(); ++n) {
    if (p[n] != 0.0) sum += p[n] * (std::log(p[n]) - (student_scores[n] - student_lse));
  }
  return sum;
}

// All groups of one sequence, which share its index keys. Returns the sequence's sum of divergences.
double kl_of_sequence(const core::IndexKlParams& params, std::int32_t seq) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  const double scale = config.effective_index_scale();
  const double weight = 1.0 / (static_cast<double>(params.num_tokens) * config.num_kv_heads);
  const HeadRows k_idx{geo, params.k_idx, seq, 0};
  const std::vector<double> zeros(static_cast<std::size_t>(config.index_dim), 0.0);
  std::vector<std::vector<double>> d_k_idx(static_cast<std::size_t>(geo.seqlen_k(seq)), zeros);

  double sum = 0.0;
  for (std::int64_t i = 0; i < geo.seqlen_q(seq); ++i) {
    const Query query = query_of(geo, seq, i);
    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      const auto keys = attended_keys(geo, params.block_ids, query, g);
      const auto p = teacher(params, query, g, keys);
      const auto q_idx = load_row(address(params.q_idx, query.token, g), params.q_idx.dtype, config.index_dim);
      const auto scores = scaled_scores(k_idx, q_idx, scale, keys);
      const Softmax student = softmax(scores);
      sum += divergence(p, scores, student.lse);

      std::vector<double> d_q_idx = zeros;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const double d_score = scale * weight * (student.probabilities[n] - p[n]);
        add_scaled(d_q_idx, d_score, k_idx.row(keys[n], config.index_dim));
        add_scaled(d_k_idx[static_cast<std::size_t>(keys[n])], d_score, q_idx);
      }
      if (params.d_q_idx.given()) store_row(address(params.d_q_idx, query.token, g), params.d_q_idx.dtype, d_q_idx);
    }
  }

  if (params.d_k_idx.given()) {
    for (std::size_t j = 0; j < d_k_idx.size(); ++j) {
      const std::int64_t row = geo.cu_seqlens_k[seq] + static_cast<std::int64_t>(j);
      store_row(address(params.d_k_idx, row, 0), params.d_k_idx.dtype, d_k_idx[j]);
    }
  }
  return weight * sum;
}

}  // namespace

void index_kl_loss(const core::IndexKlParams& params) {
  std::vector<double> losses(static_cast<std::size_t>(params.geo.num_seqs), 0.0);
  core::parallel_for(params.context.num_threads, params.geo.num_seqs, [&](std::int64_t seq, std::int32_t) {
    losses[static_cast<std::size_t>(seq)] = kl_of_sequence(params, static_cast<std::int32_t>(seq));
  });
  if (!params.loss.given()) return;
  store(static_cast<std::byte*>(params.loss.data), params.loss.dtype, 0, std::accumulate(losses.begin(), losses.end(), 0.0));
}

}  // namespace openmsa::reference
