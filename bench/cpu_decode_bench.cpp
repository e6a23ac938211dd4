// One decode step of one sequence: Hq 64, Hkv 4, D = Di = 128, k 16, blocks of 128. Bound by memory, so GB/s counts the bytes a
// step must read: every index key once, the selected keys and values once per query token.
// Each call takes other queries and other index keys, so that no call finds its data in the cache by luck.
#include <algorithm>
#include <cstring>

#include "support.hpp"

namespace openmsa::bench {
namespace {

constexpr std::int64_t kNumQueryHeads = 64, kNumKvHeads = 4, kDim = 128, kBlock = 128, kTopK = 16;
constexpr int kNumQuerySets = 8, kNumIndexKeys = 2;
constexpr MsaConfig kConfig{.num_q_heads = kNumQueryHeads, .num_kv_heads = kNumKvHeads, .head_dim = kDim, .index_dim = kDim};

// Random values repeated every 2^20 elements: attention takes the same time, and 268 MB of fresh ones would take longer than the run.
Tensor repeating_tensor(DType dtype, std::int64_t num_keys, std::uint32_t seed) {
  Tensor tensor(dtype, {num_keys, kNumKvHeads, kDim});
  const std::int64_t period = std::min<std::int64_t>(tensor.view().numel(), 1 << 20);
  const Tensor values = random_tensor(dtype, {period}, seed);
  const std::int64_t bytes = tensor.view().numel() * dtype_bytes(dtype), period_bytes = period * dtype_bytes(dtype);
  for (std::int64_t at = 0; at < bytes; at += period_bytes) {
    std::memcpy(tensor.data<std::byte>() + at, values.view().data, static_cast<std::size_t>(std::min(period_bytes, bytes - at)));
  }
  return tensor;
}

struct Step {
  IndexSelectArgs select;
  SparseAttentionArgs attend;
};

class DecodeCase {
 public:
  DecodeCase(DType dtype, std::int64_t num_keys, std::int64_t num_queries, bool with_kv)
      : sequence_(num_queries, num_keys),
        block_ids_(DType::kI32, {num_queries, kNumKvHeads, kTopK}),
        out_(dtype, {num_queries, kNumQueryHeads, kDim}) {
    if (with_kv) {
      keys_.push_back(repeating_tensor(dtype, num_keys, 1));
      keys_.push_back(repeating_tensor(dtype, num_keys, 2));
    }
    for (std::uint32_t i = 0; i < kNumIndexKeys; ++i) index_keys_.push_back(random_tensor(dtype, {num_keys, kDim}, 30 + i));
    for (std::uint32_t i = 0; i < kNumQuerySets; ++i) {
      queries_.push_back(random_tensor(dtype, {num_queries, kNumQueryHeads, kDim}, 10 + i));
      index_queries_.push_back(random_tensor(dtype, {num_queries, kNumKvHeads, kDim}, 20 + i));
    }
    const RunOptions options{.backend = Backend::kCpu, .num_threads = num_threads()};
    step_.select = {.config = kConfig, .batch = sequence_.batch(), .block_ids = block_ids_.view(), .options = options};
    step_.attend = {
        .config = kConfig, .batch = sequence_.batch(), .block_ids = block_ids_.view(), .out = out_.view(), .options = options};
    next();
    select_workspace_ = Workspace(workspace_bytes(step_.select));
    if (with_kv) attend_workspace_ = Workspace(workspace_bytes(step_.attend));
    step_.select.options.workspace = &select_workspace_;
    step_.attend.options.workspace = &attend_workspace_;
  }

  Step& next() {
    step_.select.q_idx = index_queries_[count_ % kNumQuerySets].view();
    step_.select.k_idx = index_keys_[count_ % kNumIndexKeys].view();
    step_.attend.q = queries_[count_ % kNumQuerySets].view();
    if (!keys_.empty()) {
      step_.attend.k = keys_.front().view();
      step_.attend.v = keys_.back().view();
    }
    ++count_;
    return step_;
  }

 private:
  SingleSequence sequence_;
  Tensor block_ids_, out_;
  std::vector<Tensor> keys_, index_keys_, queries_, index_queries_;
  Workspace select_workspace_, attend_workspace_;
  Step step_;
  std::size_t count_ = 0;
};

void report_bytes(benchmark::State& state, double bytes) {
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

double index_bytes(DType dtype, std::int64_t num_keys) { return static_cast<double>(num_keys * kDim * dtype_bytes(dtype)); }
double selected_bytes(DType dtype, std::int64_t num_queries) {
  return static_cast<double>(num_queries * kNumKvHeads * kTopK * kBlock * kDim * 2 * dtype_bytes(dtype));
}

void decode_step(benchmark::State& state, DType dtype) {
  const std::int64_t num_keys = state.range(0), num_queries = state.range(1);
  DecodeCase decode(dtype, num_keys, num_queries, true);
  for (auto _ : state) {
    Step& step = decode.next();
    index_select(step.select);
    sparse_decode(step.attend);
  }
  report_bytes(state, index_bytes(dtype, num_keys) + selected_bytes(dtype, num_queries));
}

void decode_index_select(benchmark::State& state, DType dtype) {
  DecodeCase decode(dtype, state.range(0), state.range(1), false);
  for (auto _ : state) index_select(decode.next().select);
  report_bytes(state, index_bytes(dtype, state.range(0)));
}

// The second stage alone, on lists made beforehand.
void decode_attend(benchmark::State& state, DType dtype) {
  DecodeCase decode(dtype, state.range(0), state.range(1), true);
  std::vector<Tensor> lists;
  for (int i = 0; i < kNumQuerySets; ++i) {
    lists.emplace_back(DType::kI32, std::initializer_list<std::int64_t>{state.range(1), kNumKvHeads, kTopK});
    IndexSelectArgs& args = decode.next().select;
    args.block_ids = lists.back().view();
    index_select(args);
  }
  std::size_t i = 0;
  for (auto _ : state) {
    SparseAttentionArgs& args = decode.next().attend;
    args.block_ids = lists[i++ % kNumQuerySets].view();
    sparse_decode(args);
  }
  report_bytes(state, selected_bytes(dtype, state.range(1)));
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "tokens"})
      ->Args({131072, 1})
      ->Args({131072, 4})
      ->Args({8192, 1})
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(decode_step, bf16, DType::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(decode_step, f16, DType::kF16)->Apply(shapes);
BENCHMARK_CAPTURE(decode_step, f32, DType::kF32)->Apply(shapes);
BENCHMARK_CAPTURE(decode_index_select, bf16, DType::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(decode_index_select, f32, DType::kF32)->Apply(shapes);
BENCHMARK_CAPTURE(decode_attend, bf16, DType::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(decode_attend, f32, DType::kF32)->Apply(shapes);

}  // namespace
}  // namespace openmsa::bench
