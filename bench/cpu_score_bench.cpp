// block_scores of one sequence with one index query head, causal; flops are 2 Di per visible (query, key) pair.
#include "support.hpp"

namespace openmsa::bench {
namespace {

void block_scores_prefill(benchmark::State& state, DType dtype) {
  const std::int64_t num_keys = state.range(0), num_queries = state.range(1), dim = 128, block_size = 128;
  const SingleSequence sequence(num_queries, num_keys);
  const Tensor q_idx = random_tensor(dtype, {num_queries, 1, dim}, 1), k_idx = random_tensor(dtype, {num_keys, dim}, 2);
  const Tensor scores(DType::kF32, {num_queries, 1, (num_keys + block_size - 1) / block_size});
  BlockScoresArgs args{.config = {.num_q_heads = 1, .num_kv_heads = 1, .head_dim = 128, .index_dim = 128},
                       .batch = sequence.batch(),
                       .q_idx = q_idx.view(),
                       .k_idx = k_idx.view(),
                       .scores = scores.view(),
                       .options = {.backend = Backend::kCpu, .num_threads = num_threads()}};
  Workspace workspace(workspace_bytes(args));
  args.options.workspace = &workspace;
  run(state, 2.0 * static_cast<double>(dim) * visible_pairs(num_queries, num_keys), [&] { block_scores(args); });
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "queries"})->Args({8192, 8192})->Args({32768, 4096})->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(block_scores_prefill, f32, DType::kF32)->Apply(shapes);
BENCHMARK_CAPTURE(block_scores_prefill, bf16, DType::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(block_scores_prefill, f16, DType::kF16)->Apply(shapes);

}  // namespace
}  // namespace openmsa::bench
