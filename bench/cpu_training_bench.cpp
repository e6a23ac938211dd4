// Training on one GQA group of the reference model (16 heads of 128, blocks of 128, k 16), a whole causal prefill: the backward
// passes beside the forward passes they belong to, and the index KL loss. Flops per (query head, key attended to): 4 D forward,
// 10 D backward, 2 D for the teacher's scores; and 8 Di per (token, key) for the student's two passes and its gradients.
#include <algorithm>
#include <random>

#include "support.hpp"

namespace openmsa::bench {
namespace {

constexpr std::int64_t kBlock = 128, kTopK = 16;
constexpr std::int32_t kHeads = 16, kDim = 128;

// The own block and any others before it: neighbours share little, the worst case.
double select(std::int64_t num_tokens, Tensor& block_ids) {
  std::mt19937 generator(7);
  double visible_keys = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int64_t own = t / kBlock, count = std::min(kTopK, own + 1);
    std::vector<std::int32_t> others(static_cast<std::size_t>(own)), chosen;
    for (std::size_t b = 0; b < others.size(); ++b) others[b] = static_cast<std::int32_t>(b);
    std::sample(others.begin(), others.end(), std::back_inserter(chosen), count - 1, generator);
    chosen.push_back(static_cast<std::int32_t>(own));
    std::int32_t* row = block_ids.data<std::int32_t>() + t * kTopK;
    std::fill(std::copy(chosen.begin(), chosen.end(), row), row + kTopK, -1);
    visible_keys += static_cast<double>((count - 1) * kBlock + t % kBlock + 1);
  }
  return visible_keys;
}

enum class Pass { kForward, kBackward, kIndexKl };

void training(benchmark::State& state, DType dtype, Pass pass, bool sparse) {
  const std::int64_t n = state.range(0);
  const SingleSequence sequence(n, n);
  const MsaConfig config{
      .num_q_heads = kHeads, .num_kv_heads = 1, .head_dim = kDim, .index_dim = kDim, .block_size = kBlock, .top_k = kTopK};
  const RunOptions cpu{.backend = Backend::kCpu, .num_threads = num_threads()};
  const Tensor q = random_tensor(dtype, {n, kHeads, kDim}, 1), k = random_tensor(dtype, {n, 1, kDim}, 2),
               v = random_tensor(dtype, {n, 1, kDim}, 3), d_out = random_tensor(dtype, {n, kHeads, kDim}, 4),
               q_idx = random_tensor(dtype, {n, 1, kDim}, 5), k_idx = random_tensor(dtype, {n, kDim}, 6);
  Tensor block_ids(DType::kI32, {n, 1, kTopK});
  const double sparse_keys = select(n, block_ids), keys = sparse ? sparse_keys : visible_pairs(n, n);
  const Tensor out(dtype, {n, kHeads, kDim}), lse(DType::kF32, {n, kHeads}), d_q(dtype, {n, kHeads, kDim}),
      d_k(dtype, {n, 1, kDim}), d_v(dtype, {n, 1, kDim}), loss(DType::kF32, {1}), d_q_idx(dtype, {n, 1, kDim}),
      d_k_idx(dtype, {n, kDim});
  const auto run_pass = [&](double flops, auto args, auto* function) {
    Workspace workspace(workspace_bytes(args));
    args.options.workspace = &workspace;
    state.counters["MiB"] = static_cast<double>(workspace.bytes()) / 1048576.0;
    run(state, flops, [&] { function(args); });
  };
  SparseAttentionArgs sparse_forward{.config = config,
                                     .batch = sequence.batch(),
                                     .q = q.view(),
                                     .k = k.view(),
                                     .v = v.view(),
                                     .block_ids = block_ids.view(),
                                     .out = out.view(),
                                     .lse = lse.view(),
                                     .options = cpu};
  DenseAttentionArgs dense_forward{.config = config,
                                   .batch = sequence.batch(),
                                   .q = q.view(),
                                   .k = k.view(),
                                   .v = v.view(),
                                   .out = out.view(),
                                   .lse = lse.view(),
                                   .block_max = {},
                                   .options = cpu};
  if (pass == Pass::kForward) {
    if (sparse) return run_pass(4.0 * kDim * kHeads * keys, sparse_forward, &sparse_attention);
    return run_pass(4.0 * kDim * kHeads * keys, dense_forward, &dense_attention);
  }
  if (sparse) {
    sparse_attention(sparse_forward);
  } else {
    dense_attention(dense_forward);
  }
  if (pass == Pass::kIndexKl) {
    return run_pass((2.0 * kDim * kHeads + 8.0 * kDim) * keys,
                    IndexKlLossArgs{.config = config,
                                    .batch = sequence.batch(),
                                    .q = q.view(),
                                    .k = k.view(),
                                    .lse = lse.view(),
                                    .q_idx = q_idx.view(),
                                    .k_idx = k_idx.view(),
                                    .block_ids = sparse ? block_ids.view() : TensorView{},
                                    .loss = loss.view(),
                                    .d_q_idx = d_q_idx.view(),
                                    .d_k_idx = d_k_idx.view(),
                                    .options = cpu},
                    &index_kl_loss);
  }
  const auto fill = [&](auto args) {
    args.config = config, args.batch = sequence.batch(), args.options = cpu;
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.out = out.view(), args.lse = lse.view(),
    args.d_out = d_out.view();
    args.d_q = d_q.view(), args.d_k = d_k.view(), args.d_v = d_v.view();
    return args;
  };
  if (sparse) {
    return run_pass(10.0 * kDim * kHeads * keys, fill(SparseAttentionBackwardArgs{.block_ids = block_ids.view()}),
                    &sparse_attention_backward);
  }
  run_pass(10.0 * kDim * kHeads * keys, fill(DenseAttentionBackwardArgs{}), &dense_attention_backward);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgName("tokens")->Arg(4096)->Arg(8192)->UseRealTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(training, f32_sparse_forward, DType::kF32, Pass::kForward, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, f32_sparse_backward, DType::kF32, Pass::kBackward, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, f32_sparse_kl, DType::kF32, Pass::kIndexKl, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, bf16_sparse_forward, DType::kBF16, Pass::kForward, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, bf16_sparse_backward, DType::kBF16, Pass::kBackward, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, bf16_sparse_kl, DType::kBF16, Pass::kIndexKl, true)->Apply(shapes);
BENCHMARK_CAPTURE(training, f32_dense_forward, DType::kF32, Pass::kForward, false)->Apply(shapes);
BENCHMARK_CAPTURE(training, f32_dense_backward, DType::kF32, Pass::kBackward, false)->Apply(shapes);
BENCHMARK_CAPTURE(training, f32_dense_kl, DType::kF32, Pass::kIndexKl, false)->Apply(shapes);

}  // namespace
}  // namespace openmsa::bench
