#include "support/problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace openmsa::test {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

// Sum of four uniform 16-bit numbers out of one draw: near enough to a normal distribution, and an order of magnitude faster.
double draw(Rng& rng, Values values) {
  std::uint64_t bits = rng();
  if (values == Values::kIntegers) return static_cast<double>(bits % 5) - 2.0;
  double sum = 0.0;
  for (int i = 0; i < 4; ++i, bits >>= 16) sum += static_cast<double>(bits & 0xffff);
  return (sum / 65536.0 - 2.0) * std::sqrt(3.0);
}

std::string join(const std::vector<std::int32_t>& values) {
  std::string text = "[";
  for (const std::int32_t value : values) text += (text.size() > 1 ? "," : "") + std::to_string(value);
  return text + "]";
}

void fill_row(Tensor& tensor, std::int64_t row, Rng& rng, Values values) {
  std::vector<double> data(static_cast<std::size_t>(tensor.row_size()));
  for (double& x : data) x = draw(rng, values);
  tensor.set_row(row, data.data());
}

void poison_row(Tensor& tensor, std::int64_t row) {
  const std::vector<double> data(static_cast<std::size_t>(tensor.row_size()), kNaN);
  tensor.set_row(row, data.data());
}

}  // namespace

std::int64_t uniform(Rng& rng, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(high - low + 1));
}

std::string Layout::text() const {
  return "seqlens_q " + join(seqlens_q) + " seqlens_k " + join(seqlens_k) + (q_start.empty() ? "" : " q_start " + join(q_start)) +
         (paged ? " paged" : " packed") + (strided ? " strided" : "");
}

Layout random_layout(Rng& rng, std::int64_t max_pairs) {
  Layout layout;
  layout.paged = uniform(rng, 0, 1) == 1;
  layout.strided = uniform(rng, 0, 3) == 0;
  const bool given_starts = uniform(rng, 0, 2) == 0;
  const std::int64_t num_seqs = uniform(rng, 1, 6);
  std::int64_t keys_left = 6000;
  for (std::int64_t s = 0; s < num_seqs; ++s) {
    std::int64_t seqlen_k = uniform(rng, 0, 3) == 0
                                ? uniform(rng, 0, 700)
                                : pick<std::int64_t>(rng, {0, 1, 2, 3, 5, 127, 128, 129, 255, 2047, 2048, 2049, 2175});
    if (seqlen_k > keys_left) seqlen_k %= 130;
    keys_left -= seqlen_k;
    std::int64_t seqlen_q = pick<std::int64_t>(rng, {0, 1, 1, 2, 4, 5, 17, 64, seqlen_k, seqlen_k, seqlen_k + 3});
    seqlen_q = std::min(seqlen_q, max_pairs / num_seqs / std::max<std::int64_t>(seqlen_k, 1));
    const std::int64_t default_start = seqlen_k - seqlen_q;
    const std::int64_t start =
        pick<std::int64_t>(rng, {default_start, 0, -3, -seqlen_q, seqlen_k - 1, seqlen_k + 300, uniform(rng, 0, seqlen_k)});
    layout.seqlens_k.push_back(static_cast<std::int32_t>(seqlen_k));
    layout.seqlens_q.push_back(static_cast<std::int32_t>(seqlen_q));
    if (given_starts) layout.q_start.push_back(static_cast<std::int32_t>(start));
  }
  return layout;
}

Layout single(std::int32_t seqlen_q, std::int32_t seqlen_k, bool paged) { return ragged({seqlen_q}, {seqlen_k}, paged); }

Layout ragged(std::vector<std::int32_t> seqlens_q, std::vector<std::int32_t> seqlens_k, bool paged) {
  Layout layout;
  layout.seqlens_q = std::move(seqlens_q);
  layout.seqlens_k = std::move(seqlens_k);
  layout.paged = paged;
  return layout;
}

Problem::Problem(const MsaConfig& config_in, const Layout& layout_in, DType dtype_in, Rng& rng, Values values)
    : config(config_in), layout(layout_in), dtype(dtype_in) {
  cu_seqlens_q = cumulative(layout.seqlens_q);
  cu_seqlens_k = cumulative(layout.seqlens_k);
  total_q = cu_seqlens_q.back();
  total_k = cu_seqlens_k.back();
  const std::int64_t hkv = config.num_kv_heads, block_size = config.block_size;
  std::int64_t num_live_pages = 0;
  for (const std::int32_t n : layout.seqlens_k) {
    const std::int64_t blocks = (n + block_size - 1) / block_size;
    num_live_pages += blocks;
    max_num_blocks = std::max(max_num_blocks, blocks);
  }

  const std::int64_t padding = layout.strided ? 16 : 0;
  q = Tensor(dtype, {total_q, config.num_q_heads, config.head_dim}, padding);
  q_idx = Tensor(dtype, {total_q, hkv, config.index_dim}, padding);
  for (std::int64_t row = 0; row < total_q * config.num_q_heads; ++row) fill_row(q, row, rng, values);
  for (std::int64_t row = 0; row < total_q * hkv; ++row) fill_row(q_idx, row, rng, values);

  if (layout.paged) {
    // Page 0 and one page in four more belong to nobody; a fresh Tensor is all NaN, so they are poison.
    const std::int64_t num_pages = 1 + num_live_pages + num_live_pages / 4 + 1;
    std::vector<std::int32_t> pages(static_cast<std::size_t>(num_pages - 1));
    std::iota(pages.begin(), pages.end(), 1);
    std::shuffle(pages.begin(), pages.end(), rng);
    max_pages = max_num_blocks + 2;
    std::size_t next = 0;
    for (const std::int32_t n : layout.seqlens_k) {
      for (std::int64_t b = 0; b < max_pages; ++b) {
        const bool live = b * block_size < n;
        page_table.push_back(live ? pages[next++] : pick<std::int32_t>(rng, {-1, 0, std::numeric_limits<std::int32_t>::max()}));
      }
    }
    k = Tensor(dtype, {num_pages, hkv, block_size, config.head_dim}, padding);
    v = Tensor(dtype, {num_pages, hkv, block_size, config.head_dim}, padding);
    k_idx = Tensor(dtype, {num_pages, block_size, config.index_dim}, padding);
  } else {
    k = Tensor(dtype, {total_k, hkv, config.head_dim}, padding);
    v = Tensor(dtype, {total_k, hkv, config.head_dim}, padding);
    k_idx = Tensor(dtype, {total_k, config.index_dim}, padding);
  }
  for (std::int32_t seq = 0; seq < num_seqs(); ++seq) {
    for (std::int64_t j = 0; j < layout.seqlens_k[static_cast<std::size_t>(seq)]; ++j) {
      for (std::int32_t g = 0; g < hkv; ++g) {
        fill_row(k, key_row(seq, j, g), rng, values);
        fill_row(v, key_row(seq, j, g), rng, values);
      }
      fill_row(k_idx, index_key_row(seq, j), rng, values);
    }
  }
}

Batch Problem::batch() const {
  const std::int64_t b = num_seqs();
  Batch batch;
  batch.cu_seqlens_q = make_view(cu_seqlens_q.data(), {b + 1});
  if (layout.paged) {
    batch.seqlens_k = make_view(layout.seqlens_k.data(), {b});
    batch.page_table = make_view(page_table.data(), {b, max_pages});
  } else {
    batch.cu_seqlens_k = make_view(cu_seqlens_k.data(), {b + 1});
  }
  if (!layout.q_start.empty()) batch.q_start = make_view(layout.q_start.data(), {b});
  return batch;
}

Problem::Query Problem::query(std::int64_t t) const {
  std::int32_t seq = 0;
  while (cu_seqlens_q[static_cast<std::size_t>(seq) + 1] <= t) ++seq;
  const auto s = static_cast<std::size_t>(seq);
  const std::int64_t seqlen_k = layout.seqlens_k[s];
  const std::int64_t start = layout.q_start.empty() ? seqlen_k - layout.seqlens_q[s] : layout.q_start[s];
  const std::int64_t position = start + t - cu_seqlens_q[s];
  const std::int64_t num_visible = std::min(std::max<std::int64_t>(position + 1, 0), seqlen_k);
  const std::int64_t blocks = (num_visible + config.block_size - 1) / config.block_size;
  return {seq, position, num_visible, blocks, position < 0 ? -1 : position / config.block_size};
}

std::int64_t Problem::key_row(std::int32_t seq, std::int64_t j, std::int32_t g) const {
  if (!layout.paged) return (cu_seqlens_k[static_cast<std::size_t>(seq)] + j) * config.num_kv_heads + g;
  const std::int64_t page = page_table[static_cast<std::size_t>(seq * max_pages + j / config.block_size)];
  return (page * config.num_kv_heads + g) * config.block_size + j % config.block_size;
}

std::int64_t Problem::index_key_row(std::int32_t seq, std::int64_t j) const {
  if (!layout.paged) return cu_seqlens_k[static_cast<std::size_t>(seq)] + j;
  const std::int64_t page = page_table[static_cast<std::size_t>(seq * max_pages + j / config.block_size)];
  return page * config.block_size + j % config.block_size;
}

Problem Problem::widened() const {
  Problem wide = *this;
  wide.dtype = DType::kF64;
  for (Tensor* tensor : {&wide.q, &wide.k, &wide.v, &wide.q_idx, &wide.k_idx}) *tensor = tensor->to(DType::kF64);
  return wide;
}

Problem Problem::query_chunk(std::int64_t first, std::int64_t count) const {
  Problem chunk = *this;
  chunk.layout.q_start.clear();
  for (std::size_t s = 0; s < layout.seqlens_q.size(); ++s) {
    const std::int64_t seqlen_q = layout.seqlens_q[s];
    const std::int64_t start = layout.q_start.empty() ? layout.seqlens_k[s] - seqlen_q : layout.q_start[s];
    chunk.layout.seqlens_q[s] = static_cast<std::int32_t>(std::clamp<std::int64_t>(seqlen_q - first, 0, count));
    chunk.layout.q_start.push_back(static_cast<std::int32_t>(start + first));
  }
  chunk.cu_seqlens_q = cumulative(chunk.layout.seqlens_q);
  chunk.total_q = chunk.cu_seqlens_q.back();
  for (auto [whole, part] : {std::pair{&q, &chunk.q}, std::pair{&q_idx, &chunk.q_idx}}) {
    const std::int64_t heads = whole->view().shape[1];
    *part = Tensor(dtype, {chunk.total_q, heads, whole->row_size()});
    std::vector<double> row(static_cast<std::size_t>(whole->row_size()));
    for (std::int64_t t = 0; t < chunk.total_q; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        whole->get_row(chunk_token(first, count, t) * heads + h, row.data());
        part->set_row(t * heads + h, row.data());
      }
    }
  }
  return chunk;
}

std::int64_t Problem::chunk_token(std::int64_t first, std::int64_t count, std::int64_t t) const {
  for (std::size_t s = 0; s < layout.seqlens_q.size(); ++s) {
    const std::int64_t taken = std::clamp<std::int64_t>(layout.seqlens_q[s] - first, 0, count);
    if (t < taken) return cu_seqlens_q[s] + first + t;
    t -= taken;
  }
  return -1;
}

void poison_unselected(Problem& problem, const Tensor& block_ids) {
  const MsaConfig& config = problem.config;
  const std::int64_t hkv = config.num_kv_heads;
  std::vector<bool> selected(static_cast<std::size_t>(problem.num_seqs() * hkv * problem.max_num_blocks), false);
  const auto slot = [&](std::int64_t seq, std::int64_t g, std::int64_t b) {
    return static_cast<std::size_t>((seq * hkv + g) * problem.max_num_blocks + b);
  };
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    for (std::int64_t g = 0; g < hkv; ++g) {
      for (std::int64_t n = 0; n < config.top_k; ++n) {
        const auto b = static_cast<std::int64_t>(block_ids(t, g, n));
        if (b >= 0) selected[slot(problem.query(t).seq, g, b)] = true;
      }
    }
  }
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    for (std::int64_t j = 0; j < problem.layout.seqlens_k[static_cast<std::size_t>(seq)]; ++j) {
      for (std::int32_t g = 0; g < hkv; ++g) {
        if (selected[slot(seq, g, j / config.block_size)]) continue;
        poison_row(problem.k, problem.key_row(seq, j, g));
        poison_row(problem.v, problem.key_row(seq, j, g));
      }
    }
  }
}

void inject_specials(Problem& problem, Rng& rng) {
  const auto spoil = [&rng](Tensor& tensor, std::int64_t row) {
    const double special = pick(rng, {kNaN, kInfinity, -kInfinity});
    tensor.set(row * tensor.row_size() + uniform(rng, 0, tensor.row_size() - 1), special);
  };
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    const std::int64_t n = problem.layout.seqlens_k[static_cast<std::size_t>(seq)];
    if (n == 0) continue;
    const auto g = static_cast<std::int32_t>(uniform(rng, 0, problem.config.num_kv_heads - 1));
    spoil(problem.k, problem.key_row(seq, uniform(rng, 0, n - 1), g));
    spoil(problem.v, problem.key_row(seq, uniform(rng, 0, n - 1), g));
    spoil(problem.k_idx, problem.index_key_row(seq, uniform(rng, 0, n - 1)));
  }
  for (Tensor* queries : {&problem.q, &problem.q_idx}) {
    for (std::int64_t row = uniform(rng, 0, 9); row < queries->num_rows(); row += 29) spoil(*queries, row);
  }
}

void inject_minus_infinities(Problem& problem, Rng& rng) {
  const std::int64_t dim = problem.config.head_dim;
  // Positive where the other side gets its -inf: in dim 0 of the keys, in dim 1 of the queries.
  const auto make_positive = [](Tensor& tensor, std::int64_t at) { tensor.set(at, std::abs(tensor.get(at)) + 0.125); };
  for (std::int64_t row = 0; row < problem.q.num_rows(); ++row) make_positive(problem.q, row * dim + 1);
  for (std::int64_t row = uniform(rng, 0, 4); row < problem.q.num_rows(); row += uniform(rng, 1, 9)) {
    problem.q.set(row * dim, -kInfinity);
  }
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    for (std::int32_t g = 0; g < problem.config.num_kv_heads; ++g) {
      bool whole = false;
      for (std::int64_t j = 0; j < problem.layout.seqlens_k[static_cast<std::size_t>(seq)]; ++j) {
        if (j % problem.config.block_size == 0) whole = j == 0 ? seq % 2 == 0 : uniform(rng, 0, 2) == 0;
        const std::int64_t row = problem.key_row(seq, j, g);
        make_positive(problem.k, row * dim);
        if (whole || uniform(rng, 0, 7) == 0) problem.k.set(row * dim + 1, -kInfinity);
      }
    }
  }
}

MsaConfig make_config(std::int32_t num_kv_heads, std::int32_t group_size, std::int32_t head_dim, std::int32_t index_dim,
                      std::int32_t block_size, std::int32_t top_k, std::int32_t num_init_blocks, std::int32_t num_local_blocks) {
  MsaConfig config;
  config.num_kv_heads = num_kv_heads;
  config.num_q_heads = num_kv_heads * group_size;
  config.head_dim = head_dim;
  config.index_dim = index_dim;
  config.block_size = block_size;
  config.top_k = top_k;
  config.num_init_blocks = num_init_blocks;
  config.num_local_blocks = num_local_blocks;
  return config;
}

MsaConfig random_config(Rng& rng) {
  const auto top_k = pick<std::int32_t>(rng, {1, 4, 8, 16, 32, 64});
  const auto num_local = static_cast<std::int32_t>(uniform(rng, 0, std::min(top_k, 3)));
  const auto num_init = static_cast<std::int32_t>(uniform(rng, 0, std::min(top_k - num_local, 2)));
  MsaConfig config = make_config(
      pick(rng, {1, 2, 3, 4}), pick(rng, {1, 2, 3, 4, 5, 6, 7, 8, 16}), pick(rng, {16, 32, 48, 64, 80, 96, 128, 192, 256}),
      pick(rng, {16, 32, 48, 64, 80, 96, 128, 192, 256}), pick(rng, {16, 32, 48, 64, 128, 256}), top_k, num_init, num_local);
  if (uniform(rng, 0, 3) == 0) config.softmax_scale = 0.5 / std::sqrt(config.head_dim);
  return config;
}

std::string text(const MsaConfig& config) {
  return "Hkv " + std::to_string(config.num_kv_heads) + " G " + std::to_string(config.group_size()) + " D " +
         std::to_string(config.head_dim) + " Di " + std::to_string(config.index_dim) + " Bk " + std::to_string(config.block_size) +
         " k " + std::to_string(config.top_k) + " init " + std::to_string(config.num_init_blocks) + " local " +
         std::to_string(config.num_local_blocks);
}

}  // namespace openmsa::test
