// select_blocks on given scores, and what it is of index_select in a prefill.
#include <random>

#include "support.hpp"

namespace openmsa::bench {
namespace {

constexpr std::int64_t kNumKvHeads = 4, kDim = 128, kBlock = 128;

MsaConfig config(std::int64_t top_k) {
  return {.num_q_heads = kNumKvHeads,
          .num_kv_heads = kNumKvHeads,
          .head_dim = kDim,
          .index_dim = kDim,
          .top_k = static_cast<std::int32_t>(top_k)};
}

// Queries at the end of the sequence, so that every row has all blocks to choose from. kRising: scores that grow towards the query,
// as recency makes them.
enum class Scores { kRandom, kRising };

void select_rows(benchmark::State& state, Scores kind) {
  const std::int64_t num_blocks = state.range(0), top_k = state.range(1), num_queries = 1024;
  const SingleSequence sequence(num_queries, num_blocks * kBlock);
  Tensor scores = random_tensor(DType::kF32, {num_queries, kNumKvHeads, num_blocks}, 1);
  if (kind == Scores::kRising) {
    for (std::int64_t i = 0; i < num_queries * kNumKvHeads * num_blocks; ++i) {
      scores.data<float>()[i] += 0.1f * static_cast<float>(i % num_blocks);
    }
  }
  const Tensor block_ids(DType::kI32, {num_queries, kNumKvHeads, top_k});
  const SelectBlocksArgs args{.config = config(top_k),
                              .batch = sequence.batch(),
                              .scores = scores.view(),
                              .block_ids = block_ids.view(),
                              .options = {.backend = Backend::kCpu, .num_threads = num_threads()}};
  select_blocks(args);
  for (auto _ : state) select_blocks(args);
  state.counters["rows/s"] =
      benchmark::Counter(static_cast<double>(num_queries * kNumKvHeads), benchmark::Counter::kIsIterationInvariantRate);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"blocks", "k"})->ArgsProduct({{256, 1024, 8192}, {16, 64}})->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(select_rows, random, Scores::kRandom)->Apply(shapes);
BENCHMARK_CAPTURE(select_rows, rising, Scores::kRising)->Apply(shapes);

// Hkv 4; flops of the scores alone, so the rate compares with block_scores of cpu_score_bench.
void index_select_prefill(benchmark::State& state, DType dtype) {
  const std::int64_t num_keys = state.range(0), num_queries = state.range(1);
  const SingleSequence sequence(num_queries, num_keys);
  const Tensor q_idx = random_tensor(dtype, {num_queries, kNumKvHeads, kDim}, 1), k_idx = random_tensor(dtype, {num_keys, kDim}, 2);
  const Tensor block_ids(DType::kI32, {num_queries, kNumKvHeads, 16});
  IndexSelectArgs args{.config = config(16),
                       .batch = sequence.batch(),
                       .q_idx = q_idx.view(),
                       .k_idx = k_idx.view(),
                       .block_ids = block_ids.view(),
                       .options = {.backend = Backend::kCpu, .num_threads = num_threads()}};
  Workspace workspace(workspace_bytes(args));
  args.options.workspace = &workspace;
  run(state, 2.0 * static_cast<double>(kDim * kNumKvHeads) * visible_pairs(num_queries, num_keys), [&] { index_select(args); });
  state.counters["scratch_MiB"] = static_cast<double>(workspace.bytes()) / (1 << 20);
}
void prefill_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "queries"})->Args({32768, 2048})->Args({131072, 1024})->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(index_select_prefill, f32, DType::kF32)->Apply(prefill_shapes);
BENCHMARK_CAPTURE(index_select_prefill, bf16, DType::kBF16)->Apply(prefill_shapes);

}  // namespace
}  // namespace openmsa::bench
