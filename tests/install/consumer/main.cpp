// Selects blocks and attends over them with an installed OpenMSA, on data whose results can be worked out by hand.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <openmsa/openmsa.hpp>

namespace {

constexpr std::int64_t kTokens = 64, kNumQHeads = 2, kDim = 16, kBlockSize = 16, kTopK = 2;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

}  // namespace

int main() {
  using openmsa::make_view;
  const openmsa::MsaConfig config{
      .num_q_heads = kNumQHeads, .num_kv_heads = 1, .head_dim = kDim, .index_dim = kDim, .block_size = kBlockSize, .top_k = kTopK};
  const std::vector<std::int32_t> cu_seqlens{0, kTokens};
  openmsa::Batch batch;
  batch.cu_seqlens_q = make_view(cu_seqlens.data(), {2});
  batch.cu_seqlens_k = make_view(cu_seqlens.data(), {2});

  // Index keys point along axis 0; those of block 1 are three times as long, so block 1 wins wherever it can be seen.
  std::vector<float> q_idx(kTokens * kDim), k_idx(kTokens * kDim);
  for (std::int64_t j = 0; j < kTokens; ++j) {
    q_idx[j * kDim] = 1.0f;
    k_idx[j * kDim] = j / kBlockSize == 1 ? 3.0f : 1.0f;
  }
  std::vector<std::int32_t> block_ids(kTokens * kTopK, -7);
  openmsa::IndexSelectArgs select{.config = config, .batch = batch};
  select.q_idx = make_view(q_idx.data(), {kTokens, 1, kDim});
  select.k_idx = make_view(k_idx.data(), {kTokens, kDim});
  select.block_ids = make_view(block_ids.data(), {kTokens, 1, kTopK});
  openmsa::index_select(select);

  // Zero queries weigh all visible keys alike, and v[j] = j, so each output is the mean of the visible positions.
  std::vector<float> q(kTokens * kNumQHeads * kDim), k(kTokens * kDim, 1.0f), v(kTokens * kDim);
  std::vector<float> out(q.size()), lse(kTokens * kNumQHeads);
  for (std::int64_t i = 0; i < kTokens * kDim; ++i) v[i] = static_cast<float>(i / kDim);
  openmsa::SparseAttentionArgs attend{.config = config, .batch = batch};
  attend.q = make_view(q.data(), {kTokens, kNumQHeads, kDim});
  attend.k = make_view(k.data(), {kTokens, 1, kDim});
  attend.v = make_view(v.data(), {kTokens, 1, kDim});
  attend.block_ids = select.block_ids;
  attend.out = make_view(out.data(), {kTokens, kNumQHeads, kDim});
  attend.lse = make_view(lse.data(), {kTokens, kNumQHeads});
  openmsa::sparse_attention(attend);

  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t own = t / kBlockSize;
    const std::int64_t other = own == 1 ? 0 : 1;  // the block beside the query's own; none for the first block's queries
    const std::string at = " at token " + std::to_string(t);
    expect(block_ids[t * kTopK] == (own == 0 ? 0 : other), "first block id" + at);
    expect(block_ids[t * kTopK + 1] == (own == 0 ? -1 : own), "second block id" + at);
    double sum = 0, count = 0;
    for (std::int64_t j = 0; j <= t; ++j) {
      if (j / kBlockSize != own && (own == 0 || j / kBlockSize != other)) continue;
      sum += static_cast<double>(j);
      count += 1;
    }
    for (std::int64_t h = 0; h < kNumQHeads; ++h) {
      const std::int64_t row = t * kNumQHeads + h;
      expect(std::abs(lse[row] - std::log(count)) < 1e-5, "lse" + at);
      for (std::int64_t d = 0; d < kDim; ++d) expect(std::abs(out[row * kDim + d] - sum / count) < 1e-3, "output" + at);
    }
  }

  // An error crosses the library's border with its type and its argument's name.
  bool refused = false;
  try {
    select.q_idx = make_view(q_idx.data(), {kTokens - 1, 1, kDim});
    openmsa::index_select(select);
  } catch (const openmsa::Error& error) {
    refused = error.code() == openmsa::ErrorCode::kInvalidArgument;
    std::printf("refused as it should be: %s\n", error.what());
  }
  expect(refused, "a query tensor that does not match the batch must be refused");
  std::printf("OpenMSA %s: all %lld tokens right\n", openmsa::version(), static_cast<long long>(kTokens));
  return 0;
}
