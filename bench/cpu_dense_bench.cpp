// dense_attention of one GQA group, causal; flops are 4 D per (query head, visible key).
#include "support.hpp"

namespace openmsa::bench {
namespace {

void dense_attention_prefill(benchmark::State& state, DType dtype, std::int64_t num_heads, std::int64_t dim, bool with_block_max) {
  const std::int64_t num_keys = state.range(0), num_queries = state.range(1), block_size = 128;
  const SingleSequence sequence(num_queries, num_keys);
  const Tensor q = random_tensor(dtype, {num_queries, num_heads, dim}, 1);
  const Tensor k = random_tensor(dtype, {num_keys, 1, dim}, 2), v = random_tensor(dtype, {num_keys, 1, dim}, 3);
  const Tensor out(dtype, {num_queries, num_heads, dim});
  const Tensor block_max(DType::kF32, {num_queries, num_heads, (num_keys + block_size - 1) / block_size});
  DenseAttentionArgs args{.config = {.num_q_heads = static_cast<std::int32_t>(num_heads),
                                     .num_kv_heads = 1,
                                     .head_dim = static_cast<std::int32_t>(dim)},
                          .batch = sequence.batch(),
                          .q = q.view(),
                          .k = k.view(),
                          .v = v.view(),
                          .out = out.view(),
                          .lse = {},
                          .block_max = with_block_max ? block_max.view() : TensorView{},
                          .options = {.backend = Backend::kCpu, .num_threads = num_threads()}};
  Workspace workspace(workspace_bytes(args));
  args.options.workspace = &workspace;
  run(state, 4.0 * static_cast<double>(dim * num_heads) * visible_pairs(num_queries, num_keys), [&] { dense_attention(args); });
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "queries"})->Args({4096, 4096})->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(dense_attention_prefill, f32, DType::kF32, 16, 128, false)->Apply(shapes);
BENCHMARK_CAPTURE(dense_attention_prefill, bf16, DType::kBF16, 16, 128, false)->Apply(shapes);
BENCHMARK_CAPTURE(dense_attention_prefill, f32_block_max, DType::kF32, 16, 128, true)->Apply(shapes);
BENCHMARK_CAPTURE(dense_attention_prefill, f32_3_heads_of_64, DType::kF32, 3, 64, false)->Apply(shapes);

}  // namespace
}  // namespace openmsa::bench
