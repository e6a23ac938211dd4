// sparse_attention of one GQA group, causal prefill, k 16 of blocks of 128; flops are 4 D per (query head, visible selected key),
// counted exactly. 16 heads of 128 are a group of the reference model, 3 heads of 64 one of SmolLM2-135M. Two selections: 'random',
// where neighbours share nothing but the own block, the worst case for sharing converted blocks; 'clustered', where runs of 64
// tokens agree on all but two blocks.
#include <algorithm>
#include <random>

#include "support.hpp"

namespace openmsa::bench {
namespace {

constexpr std::int64_t kBlock = 128, kTopK = 16;

enum class Selection { kRandom, kClustered };

// Fills block_ids [T, 1, k] for queries at the end of num_keys tokens, and returns the number of visible selected keys.
double select(Selection selection, std::int64_t num_queries, std::int64_t num_keys, Tensor& block_ids) {
  std::mt19937 generator(7);
  double visible_keys = 0;
  std::vector<std::int32_t> shared;
  for (std::int64_t t = 0; t < num_queries; ++t) {
    const std::int64_t position = num_keys - num_queries + t, own = position / kBlock;
    std::vector<std::int32_t> chosen{static_cast<std::int32_t>(own)};
    const auto draw = [&](std::vector<std::int32_t>& list, std::size_t size) {
      std::uniform_int_distribution<std::int32_t> any(0, static_cast<std::int32_t>(own) - 1);
      while (list.size() < size) {
        const std::int32_t b = any(generator);
        if (std::find(list.begin(), list.end(), b) == list.end()) list.push_back(b);
      }
    };
    const std::size_t wanted = static_cast<std::size_t>(std::min(kTopK, own + 1));
    if (selection == Selection::kClustered && wanted == kTopK) {
      if (t % 64 == 0 || shared.empty()) {
        shared.clear();
        draw(shared, kTopK - 3);
      }
      for (const std::int32_t b : shared) {
        if (b < own) chosen.push_back(b);
      }
    }
    if (own > 0) draw(chosen, wanted);
    std::sort(chosen.begin(), chosen.end());
    std::int32_t* row = block_ids.data<std::int32_t>() + t * kTopK;
    std::fill(row, row + kTopK, -1);
    std::copy(chosen.begin(), chosen.end(), row);
    visible_keys += static_cast<double>((wanted - 1) * kBlock + position % kBlock + 1);
  }
  return visible_keys;
}

void sparse_attention_prefill(benchmark::State& state, DType dtype, Selection selection, std::int32_t num_heads, std::int32_t dim) {
  const std::int64_t num_keys = state.range(0), num_queries = state.range(1);
  const SingleSequence sequence(num_queries, num_keys);
  const Tensor q = random_tensor(dtype, {num_queries, num_heads, dim}, 1);
  const Tensor k = random_tensor(dtype, {num_keys, 1, dim}, 2), v = random_tensor(dtype, {num_keys, 1, dim}, 3);
  Tensor block_ids(DType::kI32, {num_queries, 1, kTopK});
  const double visible_keys = select(selection, num_queries, num_keys, block_ids);
  const Tensor out(dtype, {num_queries, num_heads, dim}), lse(DType::kF32, {num_queries, num_heads});
  SparseAttentionArgs args{
      .config = {.num_q_heads = num_heads, .num_kv_heads = 1, .head_dim = dim, .block_size = kBlock, .top_k = kTopK},
      .batch = sequence.batch(),
      .q = q.view(),
      .k = k.view(),
      .v = v.view(),
      .block_ids = block_ids.view(),
      .out = out.view(),
      .lse = lse.view(),
      .options = {.backend = Backend::kCpu, .num_threads = num_threads()}};
  Workspace workspace(workspace_bytes(args));
  args.options.workspace = &workspace;
  run(state, 4.0 * dim * num_heads * visible_keys, [&] { sparse_attention(args); });
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "queries"})->Args({32768, 4096})->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(sparse_attention_prefill, f32_random, DType::kF32, Selection::kRandom, 16, 128)->Apply(shapes);
BENCHMARK_CAPTURE(sparse_attention_prefill, f32_clustered, DType::kF32, Selection::kClustered, 16, 128)->Apply(shapes);
BENCHMARK_CAPTURE(sparse_attention_prefill, bf16_random, DType::kBF16, Selection::kRandom, 16, 128)->Apply(shapes);
BENCHMARK_CAPTURE(sparse_attention_prefill, bf16_clustered, DType::kBF16, Selection::kClustered, 16, 128)->Apply(shapes);
BENCHMARK_CAPTURE(sparse_attention_prefill, f16_random, DType::kF16, Selection::kRandom, 16, 128)->Apply(shapes);
BENCHMARK_CAPTURE(sparse_attention_prefill, f32_3_heads_of_64, DType::kF32, Selection::kRandom, 3, 64)->Apply(shapes);

}  // namespace
}  // namespace openmsa::bench
