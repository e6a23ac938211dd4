// One MSA layer: a prompt of 4,096 tokens, then one decoding step over a paged cache.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace {

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::ranges::generate(values, [&] { return normal(generator); });
  return values;
}

void print_blocks(const char* label, const std::int32_t* ids, std::int32_t count) {
  std::printf("%s", label);
  for (std::int32_t i = 0; i < count && ids[i] >= 0; ++i) std::printf(" %d", ids[i]);
  std::printf("\n");
}

}  // namespace

int main() try {
  using openmsa::make_view;

  // 8 query heads in 2 GQA groups; each query token keeps 8 of the 32 blocks of 128 tokens, separately per group.
  const openmsa::MsaConfig config{
      .num_q_heads = 8, .num_kv_heads = 2, .head_dim = 64, .index_dim = 64, .block_size = 128, .top_k = 8};
  const std::int64_t num_tokens = 4096;
  const std::int64_t hq = config.num_q_heads, hkv = config.num_kv_heads, d = config.head_dim, di = config.index_dim;

  // 1. Prefill. q, k, v, q_idx and k_idx are what a model's projections give; here they are random.
  const auto q = random_values(num_tokens * hq * d, 1), k = random_values(num_tokens * hkv * d, 2);
  const auto v = random_values(num_tokens * hkv * d, 3), q_idx = random_values(num_tokens * hkv * di, 4);
  const auto k_idx = random_values(num_tokens * di, 5);
  std::vector<float> out(num_tokens * hq * d), lse(num_tokens * hq);
  std::vector<std::int32_t> block_ids(num_tokens * hkv * config.top_k);

  const std::int32_t cu_seqlens[2] = {0, static_cast<std::int32_t>(num_tokens)};  // a batch of one sequence
  const openmsa::Batch batch{.cu_seqlens_q = make_view(cu_seqlens, {2}), .cu_seqlens_k = make_view(cu_seqlens, {2})};

  const openmsa::IndexSelectArgs select{
      .config = config,
      .batch = batch,
      .q_idx = make_view(q_idx.data(), {num_tokens, hkv, di}),
      .k_idx = make_view(k_idx.data(), {num_tokens, di}),
      .block_ids = make_view(block_ids.data(), {num_tokens, hkv, config.top_k}),
  };
  openmsa::index_select(select);

  const openmsa::SparseAttentionArgs attend{
      .config = config,
      .batch = batch,
      .q = make_view(q.data(), {num_tokens, hq, d}),
      .k = make_view(k.data(), {num_tokens, hkv, d}),
      .v = make_view(v.data(), {num_tokens, hkv, d}),
      .block_ids = select.block_ids,
      .out = make_view(out.data(), {num_tokens, hq, d}),
      .lse = make_view(lse.data(), {num_tokens, hq}),
  };
  openmsa::sparse_attention(attend);

  const std::int32_t* last_ids = block_ids.data() + (num_tokens - 1) * hkv * config.top_k;
  print_blocks("last token, group 0 chose blocks", last_ids, config.top_k);
  print_blocks("last token, group 1 chose blocks", last_ids + config.top_k, config.top_k);

  // 2. Decoding. A serving engine keeps keys in pages of one block each, in any order. Here the last token of the prompt is
  // asked for again, over a copy of the same keys in pages laid down backwards, so the answer is known.
  const std::int64_t block = config.block_size, num_pages = num_tokens / block;
  std::vector<std::int32_t> page_table(num_pages);
  std::iota(page_table.rbegin(), page_table.rend(), 0);
  std::vector<std::int64_t> slots(num_tokens);
  for (std::int64_t token = 0; token < num_tokens; ++token) slots[token] = page_table[token / block] * block + token % block;
  std::vector<float> k_pages(k.size()), v_pages(v.size()), k_idx_pages(k_idx.size());
  openmsa::write_pages({
      .k = attend.k,
      .v = attend.v,
      .k_idx = select.k_idx,
      .slots = make_view(slots.data(), {num_tokens}),
      .k_pages = make_view(k_pages.data(), {num_pages, hkv, block, d}),
      .v_pages = make_view(v_pages.data(), {num_pages, hkv, block, d}),
      .k_idx_pages = make_view(k_idx_pages.data(), {num_pages, block, di}),
  });
  const std::int32_t cu_one_query[2] = {0, 1};
  const std::int32_t seqlen_k[1] = {static_cast<std::int32_t>(num_tokens)};
  const openmsa::Batch step{
      .cu_seqlens_q = make_view(cu_one_query, {2}),
      .seqlens_k = make_view(seqlen_k, {1}),
      .page_table = make_view(page_table.data(), {1, num_pages}),
  };
  std::vector<std::int32_t> step_ids(hkv * config.top_k);
  std::vector<float> step_out(hq * d);
  openmsa::msa_attention({
      .config = config,
      .batch = step,
      .q = make_view(&q[(num_tokens - 1) * hq * d], {1, hq, d}),
      .k = make_view(k_pages.data(), {num_pages, hkv, block, d}),
      .v = make_view(v_pages.data(), {num_pages, hkv, block, d}),
      .q_idx = make_view(&q_idx[(num_tokens - 1) * hkv * di], {1, hkv, di}),
      .k_idx = make_view(k_idx_pages.data(), {num_pages, block, di}),
      .out = make_view(step_out.data(), {1, hq, d}),
      .block_ids = make_view(step_ids.data(), {1, hkv, config.top_k}),
  });

  float difference = 0;
  for (std::int64_t i = 0; i < hq * d; ++i) {
    difference = std::max(difference, std::abs(step_out[i] - out[(num_tokens - 1) * hq * d + i]));
  }
  const bool same_blocks = std::equal(step_ids.begin(), step_ids.end(), last_ids);
  std::printf("decoding step: %s blocks, largest difference %.1e\n", same_blocks ? "the same" : "OTHER", difference);

  // 3. A mistake: lengths that do not match the tensors. The call says what is wrong and writes nothing.
  const std::int32_t wrong_lengths[2] = {0, 4000};
  openmsa::SparseAttentionArgs wrong = attend;
  wrong.batch.cu_seqlens_q = make_view(wrong_lengths, {2});
  try {
    openmsa::sparse_attention(wrong);
  } catch (const openmsa::Error& error) {
    std::printf("refused, as it should be (%s): %s\n", error.argument().c_str(), error.what());
    return same_blocks && difference < 1e-5f ? 0 : 1;
  }
  return 1;
} catch (const openmsa::Error& error) {
  std::fprintf(stderr, "openmsa: %s\n", error.what());
  return 1;
}
