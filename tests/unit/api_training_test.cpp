// The training calls' checks: every tensor spoiled in one way at a time, and what is particular to them.
#include <cmath>

#include "api/dispatch.hpp"
#include "api_calls.hpp"
#include "support/training.hpp"

namespace openmsa::test {
namespace {

// One valid call of each on shared small data, on the reference backend.
class TrainingCalls {
 public:
  explicit TrainingCalls(const MsaConfig& config = make_config(2, 2, 16, 32, 16, 3))
      : rng_(23), problem(config, calls_layout(false), DType::kF32, rng_) {
    const Batch batch = problem.batch();
    const RunOptions options = on(Backend::kReference);
    const std::vector<std::int64_t> query_shape{problem.total_q, config.num_q_heads, config.head_dim},
        key_shape{problem.total_k, config.num_kv_heads, config.head_dim};
    block_ids = run_index_select(problem, options);
    forward = run_sparse_attention(problem, block_ids, options);
    d_out = random_d_out(problem, rng_);
    d_q = Tensor(DType::kF32, query_shape);
    d_k = Tensor(DType::kF32, key_shape);
    d_v = Tensor(DType::kF32, key_shape);
    loss = Tensor(DType::kF32, {1});
    d_q_idx = Tensor(DType::kF32, {problem.total_q, config.num_kv_heads, config.index_dim});
    d_k_idx = Tensor(DType::kF32, {problem.total_k, config.index_dim});
    sparse = {.config = config,
              .batch = batch,
              .q = problem.q.view(),
              .k = problem.k.view(),
              .v = problem.v.view(),
              .block_ids = block_ids.view(),
              .out = forward.out.view(),
              .lse = forward.lse.view(),
              .d_out = d_out.view(),
              .d_q = d_q.view(),
              .d_k = d_k.view(),
              .d_v = d_v.view(),
              .options = options};
    dense = {.config = config,
             .batch = batch,
             .q = sparse.q,
             .k = sparse.k,
             .v = sparse.v,
             .out = sparse.out,
             .lse = sparse.lse,
             .d_out = sparse.d_out,
             .d_q = sparse.d_q,
             .d_k = sparse.d_k,
             .d_v = sparse.d_v,
             .options = options};
    kl = {.config = config,
          .batch = batch,
          .q = sparse.q,
          .k = sparse.k,
          .lse = sparse.lse,
          .q_idx = problem.q_idx.view(),
          .k_idx = problem.k_idx.view(),
          .block_ids = sparse.block_ids,
          .loss = loss.view(),
          .d_q_idx = d_q_idx.view(),
          .d_k_idx = d_k_idx.view(),
          .options = options};
  }
  TrainingCalls(const TrainingCalls&) = delete;
  TrainingCalls& operator=(const TrainingCalls&) = delete;

  struct Call {
    std::string name;
    MsaConfig* config;
    Batch* batch;
    RunOptions* options;
    std::function<void()> run;
    std::function<std::size_t()> workspace_bytes;
  };
  std::vector<Call> all() {
    const auto call = [](const char* name, auto& args, auto function) {
      return Call{name,
                  &args.config,
                  &args.batch,
                  &args.options,
                  [&args, function] { function(args); },
                  [&args] { return openmsa::workspace_bytes(args); }};
    };
    return {call("sparse_attention_backward", sparse, openmsa::sparse_attention_backward),
            call("dense_attention_backward", dense, openmsa::dense_attention_backward),
            call("index_kl_loss", kl, openmsa::index_kl_loss)};
  }

  struct Slot {
    std::string name;
    TensorView* view;
    enum Kind { kInput, kOutput, kOptionalInput, kOptionalOutput } kind;
    std::string call;
    std::function<void()> run;

    bool optional() const { return kind == kOptionalInput || kind == kOptionalOutput; }
    bool output() const { return kind == kOutput || kind == kOptionalOutput; }
  };
  std::vector<Slot> slots() {
    std::vector<Slot> slots;
    const auto add = [&](const Call& call, std::initializer_list<std::pair<const char*, TensorView*>> views, Slot::Kind kind) {
      for (const auto& [name, view] : views) slots.push_back({name, view, kind, call.name, call.run});
    };
    const std::vector<Call> calls = all();
    for (const Call& call : calls) {
      add(call, {{"batch.cu_seqlens_q", &call.batch->cu_seqlens_q}, {"batch.cu_seqlens_k", &call.batch->cu_seqlens_k}},
          Slot::kInput);
    }
    const auto add_backward = [&](const Call& call, auto& args) {
      add(call, {{"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"out", &args.out}, {"lse", &args.lse}, {"d_out", &args.d_out}},
          Slot::kInput);
      add(call, {{"d_q", &args.d_q}, {"d_k", &args.d_k}, {"d_v", &args.d_v}}, Slot::kOutput);
    };
    add_backward(calls[0], sparse);
    add(calls[0], {{"block_ids", &sparse.block_ids}}, Slot::kInput);
    add_backward(calls[1], dense);
    add(calls[2], {{"q", &kl.q}, {"k", &kl.k}, {"lse", &kl.lse}, {"q_idx", &kl.q_idx}, {"k_idx", &kl.k_idx}}, Slot::kInput);
    add(calls[2], {{"block_ids", &kl.block_ids}}, Slot::kOptionalInput);
    add(calls[2], {{"loss", &kl.loss}, {"d_q_idx", &kl.d_q_idx}, {"d_k_idx", &kl.d_k_idx}}, Slot::kOptionalOutput);
    return slots;
  }

  void expect_each_refused(const std::function<bool(const Slot&)>& applies, const std::function<void(TensorView&)>& spoil,
                           std::initializer_list<std::string> words) {
    int num_tried = 0;
    for (const Slot& slot : slots()) {
      if (!applies(slot)) continue;
      SCOPED_TRACE(slot.call + ": " + slot.name);
      const TensorView saved = *slot.view;
      spoil(*slot.view);
      expect_invalid(slot.run, slot.name, words);
      *slot.view = saved;
      ++num_tried;
    }
    EXPECT_GT(num_tried, 0);
    expect_nothing_written();
  }

  void expect_nothing_written() const {
    for (const Tensor* output : {&d_q, &d_k, &d_v, &loss, &d_q_idx, &d_k_idx}) EXPECT_TRUE(output->untouched());
  }

 private:
  Rng rng_;

 public:
  Problem problem;
  Tensor block_ids, d_out, d_q, d_k, d_v, loss, d_q_idx, d_k_idx;
  Attention forward;
  SparseAttentionBackwardArgs sparse;
  DenseAttentionBackwardArgs dense;
  IndexKlLossArgs kl;
};

using Slot = TrainingCalls::Slot;

bool every(const Slot&) { return true; }
bool is_lengths(const Slot& slot) { return slot.name.starts_with("batch."); }

TEST(ApiTraining, TheCallsThatTestsSpoilAreValid) {
  TrainingCalls calls;
  for (const TrainingCalls::Call& call : calls.all()) {
    EXPECT_NO_THROW(call.run()) << call.name;
    EXPECT_EQ(call.workspace_bytes(), 0u) << "the oracle takes no scratch";
  }
  for (const Tensor* output : {&calls.d_q, &calls.d_k, &calls.d_v, &calls.loss, &calls.d_q_idx, &calls.d_k_idx}) {
    for (std::int64_t i = 0; i < output->numel(); ++i) ASSERT_TRUE(std::isfinite(output->get(i)));
  }
}

TEST(ApiTraining, RefusesSpoiledTensors) {
  TrainingCalls calls;
  calls.expect_each_refused([](const Slot& slot) { return !slot.optional(); }, [](TensorView& view) { view = {}; }, {"not given"});
  calls.expect_each_refused(every, [](TensorView& view) { view.dtype = view.dtype == DType::kI32 ? DType::kF32 : DType::kI32; },
                            {"dtype", "must be one of"});
  calls.expect_each_refused(
      [](const Slot& slot) { return slot.view->rank > 1 && slot.name != "lse" && slot.name != "block_ids" && slot.name != "q"; },
      [](TensorView& view) { view.dtype = DType::kBF16; }, {"bfloat16", "float32", "one dtype"});
  calls.expect_each_refused(every, [](TensorView& view) { ++view.rank; }, {"rank"});
  calls.expect_each_refused(every, [](TensorView& view) { view.shape[0] = -1; }, {"negative"});
  calls.expect_each_refused([](const Slot& slot) { return slot.view->rank > 1; },
                            [](TensorView& view) { ++view.shape[view.rank - 1]; }, {"shape", "must be"});
  calls.expect_each_refused([](const Slot& slot) { return !is_lengths(slot) && slot.name != "q" && slot.name != "k"; },
                            [](TensorView& view) { ++view.shape[0]; }, {"shape", "must be"});
  calls.expect_each_refused(every, [](TensorView& view) { view.data = nullptr; }, {"data pointer is null"});
  calls.expect_each_refused([](const Slot& slot) { return slot.name != "loss"; },
                            [](TensorView& view) { view.stride[view.rank - 1] = 2; }, {"last axis", "contiguous"});
  calls.expect_each_refused([](const Slot& slot) { return slot.name != "q"; },
                            [](TensorView& view) {
                              view.device = {DeviceType::kCuda, 0};
                            },
                            {"cuda:0", "one device"});
}

TEST(ApiTraining, RefusesOutputsThatShareMemory) {
  TrainingCalls calls;
  for (const Slot& slot : calls.slots()) {
    if (!slot.output()) continue;
    SCOPED_TRACE(slot.call + ": " + slot.name);
    const TensorView saved = *slot.view;
    slot.view->data = calls.sparse.k.data;  // no output is larger than k
    expect_invalid(slot.run, slot.name, {"shares memory with k"});
    *slot.view = saved;
  }
  calls.sparse.d_v = calls.sparse.d_k;
  expect_invalid(calls.all()[0].run, "d_k", {"shares memory with d_v"});
  calls.expect_nothing_written();
}

TEST(ApiTraining, RefusesPagedKeysByName) {
  TrainingCalls calls;
  Rng rng(1);
  const Problem paged(calls.problem.config, calls_layout(true), DType::kF32, rng);
  for (const TrainingCalls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    *call.batch = paged.batch();
    expect_invalid(call.run, "batch.page_table", {"packed keys", "batch.cu_seqlens_k", "Gather"});
    EXPECT_THROW(call.workspace_bytes(), Error);
    call.batch->page_table = {};
    expect_invalid(call.run, "batch.seqlens_k", {"packed keys"});
  }
  calls.expect_nothing_written();
}

TEST(ApiTraining, ChecksTheContentsOfBatchAndLists) {
  TrainingCalls calls;
  const std::vector<std::int32_t> short_by_one{0, 40, 47, 67, 130};
  for (const TrainingCalls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    const Batch saved = *call.batch;
    call.batch->cu_seqlens_k = make_view(short_by_one.data(), {5});
    expect_invalid(call.run, "batch.cu_seqlens_k", {"ends at 130", "131"});
    *call.batch = saved;
    call.config->top_k = 0;
    expect_invalid(call.run, "config.top_k", {"is 0"});
    call.config->top_k = 3;
  }
  calls.kl.config.index_dim = 0;
  expect_invalid(calls.all()[2].run, "config.index_dim", {"is 0"});
  calls.kl.config.index_dim = 32;
  calls.block_ids.set(0, 77);
  expect_invalid(calls.all()[0].run, "block_ids", {"77"});
  expect_invalid(calls.all()[2].run, "block_ids", {"77"});
  calls.expect_nothing_written();
}

TEST(ApiTraining, IndexKlGivesTheLossOrBothGradientsOrAll) {
  TrainingCalls calls;
  const auto run = [&] { index_kl_loss(calls.kl); };
  const TensorView d_q_idx = calls.kl.d_q_idx, d_k_idx = calls.kl.d_k_idx;
  calls.kl.d_q_idx = {};
  expect_invalid(run, "d_q_idx", {"not given", "d_k_idx is", "Give both"});
  calls.kl.d_q_idx = d_q_idx;
  calls.kl.d_k_idx = {};
  expect_invalid(run, "d_k_idx", {"not given", "d_q_idx is", "Give both"});
  calls.kl.d_q_idx = calls.kl.loss = {};
  expect_invalid(run, "loss", {"nothing to compute"});
  calls.expect_nothing_written();

  calls.kl.loss = calls.loss.view();
  calls.kl.block_ids = {};
  EXPECT_NO_THROW(run()) << "warm-up, loss alone";
  EXPECT_TRUE(calls.d_q_idx.untouched() && calls.d_k_idx.untouched());
  calls.kl.loss = {};
  calls.kl.d_q_idx = d_q_idx;
  calls.kl.d_k_idx = d_k_idx;
  EXPECT_NO_THROW(run()) << "gradients alone";
}

TEST(ApiTraining, NumTokensIsACount) {
  TrainingCalls calls;
  calls.kl.num_tokens = -1;
  expect_invalid([&] { index_kl_loss(calls.kl); }, "num_tokens", {"is -1", "0 for those of this call"});
  calls.expect_nothing_written();
}

TEST(ApiTraining, Float64IsForTheReferenceAlone) {
  TrainingCalls calls;
  for (const Backend backend : {Backend::kAuto, Backend::kCpu}) {
    for (const TrainingCalls::Call& call : calls.all()) call.options->backend = backend;
    calls.expect_each_refused([](const Slot& slot) { return slot.name == "lse" || slot.name == "loss"; },
                              [](TensorView& view) { view.dtype = DType::kF64; }, {"dtype float64", "must be one of: float32"});
  }
}

TEST(ApiTraining, SaysWhichLimitBroke) {
  for (const Backend backend : {Backend::kAuto, Backend::kCpu}) {
    TrainingCalls calls(make_config(2, 2, 24, 40, 16, 3));
    for (const TrainingCalls::Call& call : calls.all()) {
      SCOPED_TRACE(call.name);
      call.options->backend = backend;
      expect_refused(call.run, ErrorCode::kUnsupported, "options.backend",
                     {call.name, "head_dim 24 is not in 16..256 step 16", "reference backend"});
      EXPECT_THROW(call.workspace_bytes(), Error);
    }
    calls.expect_nothing_written();
  }
}

TEST(ApiTraining, ScratchTooSmallIsRefused) {
  TrainingCalls calls;
  for (const TrainingCalls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    call.options->backend = Backend::kCpu;
    const std::size_t bytes = call.workspace_bytes();
    ASSERT_GT(bytes, 0u);
    Workspace small(bytes - 1);
    call.options->workspace = &small;
    expect_refused(call.run, ErrorCode::kOutOfWorkspace, "options.workspace", {"needs " + std::to_string(bytes)});
    call.options->workspace = nullptr;
  }
  calls.expect_nothing_written();
}

// A stage without any kernel on a backend says so, rather than blaming this call's sizes.
TEST(ApiTraining, SaysWhatToDoWhereABackendHasNoKernel) {
  const std::vector<core::Kernel<core::IndexKlParams>> none;
  expect_refused([&] { api::require_kernel("index_kl_loss", none, Backend::kAuto, Backend::kCuda, {}); }, ErrorCode::kUnsupported,
                 "options.backend", {"is auto", "the cuda backend has no index_kl_loss kernel", "for any size", "to the CPU"});
  expect_refused([&] { api::require_kernel("index_kl_loss", none, Backend::kCpu, Backend::kCpu, {}); }, ErrorCode::kUnsupported,
                 "options.backend", {"is cpu", "the cpu backend has no index_kl_loss kernel", "reference backend"});
}

}  // namespace
}  // namespace openmsa::test
