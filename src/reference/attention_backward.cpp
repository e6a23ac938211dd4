// With P[t,h,j] the softmax of the forward pass and dP[t,h,j] = <d_out[t,h], v[j,g]>, over the keys j that query t attends to:
//   dS = P * (dP - sum_j P dP);  d_q = softmax_scale * sum_j dS k_j;  d_k_j = softmax_scale * sum_t,h dS q;  d_v_j = sum_t,h P d_out.
// P and sum_j P dP (= <d_out, out>) are worked out anew from q, k and v. `out` and `lse`, rounded and perhaps from another kernel,
// are not read, so that nothing but the inputs can make this wrong.
#include "reference/attend.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

namespace {

// One KV head of one sequence. Its rows of d_k and d_v get nothing from elsewhere, nor do its query heads' rows of d_q.
void backward_of_head(const core::AttentionBackwardParams& params, std::int32_t seq, std::int32_t g) {
  const MsaConfig& config = params.config;
  const core::Geometry& geo = params.geo;
  const double scale = config.effective_softmax_scale();
  const HeadRows k{geo, params.k, seq, g}, v{geo, params.v, seq, g};
  const std::vector<double> zeros(static_cast<std::size_t>(config.head_dim), 0.0);
  std::vector<std::vector<double>> d_k(static_cast<std::size_t>(geo.seqlen_k(seq)), zeros), d_v = d_k;

  for (std::int64_t i = 0; i < geo.seqlen_q(seq); ++i) {
    const Query query = query_of(geo, seq, i);
    const auto keys = attended_keys(geo, params.block_ids, query, g);
    for (std::int32_t h = g * config.group_size(); h < (g + 1) * config.group_size(); ++h) {
      const auto q = load_row(address(params.q, query.token, h), params.q.dtype, config.head_dim);
      const auto d_out = load_row(address(params.d_out, query.token, h), params.d_out.dtype, config.head_dim);
      const auto p = softmax(scaled_scores(k, q, scale, keys)).probabilities;
      const auto d_p = scaled_scores(v, d_out, 1.0, keys);
      const double mean = dot(p, d_p);

      std::vector<double> d_q = zeros;
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const auto j = static_cast<std::size_t>(keys[n]);
        const double d_s = p[n] * (d_p[n] - mean);
        add_scaled(d_q, scale * d_s, k.row(keys[n], config.head_dim));
        add_scaled(d_k[j], scale * d_s, q);
        add_scaled(d_v[j], p[n], d_out);
      }
      store_row(address(params.d_q, query.token, h), params.d_q.dtype, d_q);
    }
  }

  for (std::size_t j = 0; j < d_k.size(); ++j) {
    const std::int64_t row = geo.cu_seqlens_k[seq] + static_cast<std::int64_t>(j);
    store_row(address(params.d_k, row, g), params.d_k.dtype, d_k[j]);
    store_row(address(params.d_v, row, g), params.d_v.dtype, d_v[j]);
  }
}

}  // namespace

void attention_backward(const core::AttentionBackwardParams& params) {
  const std::int32_t hkv = params.config.num_kv_heads;
  core::parallel_for(params.context.num_threads, std::int64_t{params.geo.num_seqs} * hkv, [&](std::int64_t task, std::int32_t) {
    backward_of_head(params, static_cast<std::int32_t>(task / hkv), static_cast<std::int32_t>(task % hkv));
  });
}

}  // namespace openmsa::reference
