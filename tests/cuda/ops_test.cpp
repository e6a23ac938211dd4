// Every operator on the GPU against the fp64 oracle, at shapes small enough for compute-sanitizer (scripts/gpu-sanitize), which
// together launch every kernel. Larger shapes: tests/python/test_cuda.py.
#include <cmath>
#include <limits>

#include "cuda/device.hpp"
#include "device_run.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Shape {
  const char* name;
  MsaConfig config;
  Layout layout;
  DType dtype = DType::kBF16;
  Values values = Values::kGaussian;
};

Layout layout_of(std::vector<std::int32_t> seqlens_q, std::vector<std::int32_t> seqlens_k, bool paged,
                 std::vector<std::int32_t> q_start = {}, bool strided = false) {
  return {std::move(seqlens_q), std::move(seqlens_k), std::move(q_start), paged, strided};
}

// What each is here for: which of the routes through score, select and attention it takes.
std::vector<Shape> shapes() {
  const MsaConfig reference = make_config(2, 16, 128, 128, 128, 4);
  return {
      // Tiles of queries; the union route of attention and the one keys outermost; lists shorter than k.
      {"PrefillPacked", reference, layout_of({70, 1, 0, 40}, {70, 300, 5, 1290}, false)},
      {"PrefillPaged", reference, layout_of({70, 1, 0, 40}, {70, 300, 5, 1290}, true)},
      {"SharedLists", make_config(1, 16, 128, 128, 64, 8, 1), layout_of({90}, {500}, true), DType::kF16},
      {"ScatteredLists", make_config(1, 16, 128, 128, 64, 4), layout_of({75}, {1990}, false)},
      {"Ties", make_config(2, 2, 64, 64, 64, 4), layout_of({40, 30}, {700, 200}, false), DType::kBF16, Values::kIntegers},
      // Group sizes that do not fill a tile, the other dims, padded rows, positions of the caller's own.
      {"Group3Dim64", make_config(2, 3, 64, 64, 64, 4), layout_of({50, 9}, {400, 9}, true)},
      {"Group5Dim96", make_config(2, 5, 96, 96, 128, 4), layout_of({45, 33}, {600, 33}, false), DType::kF16},
      {"Group1Strided", make_config(3, 1, 128, 64, 64, 4, 1, 2), layout_of({60, 0, 20}, {60, 3, 330}, true, {}, true)},
      // Long enough for pairs of CTAs in dense attention, the last pair half empty.
      {"PairedDim64", make_config(2, 16, 64, 64, 128, 4), layout_of({134}, {700}, true)},
      {"PairedDim96", make_config(1, 8, 96, 96, 64, 4), layout_of({261}, {400}, false), DType::kF16},
      {"PairedStrided", make_config(2, 13, 128, 64, 64, 4), layout_of({130, 0, 300}, {260, 5, 310}, false, {}, true)},
      {"GivenPositions", make_config(2, 4, 64, 96, 64, 4), layout_of({40, 40, 9}, {300, 30, 70}, false, {100, 0, -4}, true)},
      // Few queries: the other kernels of score and select.
      {"Decode", reference, layout_of({1, 4, 0, 1}, {500, 1300, 7, 129}, true)},
      {"DecodeStrided", make_config(4, 8, 128, 128, 64, 16), layout_of({1, 16, 3}, {129, 1500, 3}, false, {}, true)},
      {"WideLists", make_config(1, 4, 64, 64, 64, 32), layout_of({5}, {2600}, true)},
      {"MoreQueriesThanKeys", make_config(1, 2, 64, 64, 64, 4), layout_of({70}, {10}, false)},
  };
}

class CudaOps : public testing::Test {
 protected:
  void SetUp() override {
    const cuda::DeviceStatus status = cuda::device_status();
    if (!status.available) GTEST_SKIP() << status.detail;
  }
};

class CudaOpsAt : public CudaOps, public testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(, CudaOpsAt, testing::ValuesIn(shapes()), [](const auto& info) { return info.param.name; });
void PrintTo(const Shape& shape, std::ostream* stream) { *stream << text(shape.config) << ", " << shape.layout.text(); }

Problem problem_of(const Shape& shape) {
  Rng rng(31);
  return {shape.config, shape.layout, shape.dtype, rng, shape.values};
}

TEST_P(CudaOpsAt, ScoreAndSelectAreRight) {
  const Problem problem = problem_of(GetParam());
  const DeviceProblem device(problem);
  const bool exact = GetParam().values == Values::kIntegers;
  const Tensor oracle = oracle_scores(problem);
  const Tensor scores = gpu_block_scores(device);
  EXPECT_TRUE(scores_right(problem, scores, oracle));
  const Tensor selected = gpu_select_blocks(device, scores);
  EXPECT_TRUE(selected.same_bits(run_select_blocks(problem, scores, on(Backend::kReference))));
  const Tensor block_ids = gpu_index_select(device);
  EXPECT_TRUE(selection_right(problem, block_ids, oracle, exact));
}

TEST_P(CudaOpsAt, SparseAttentionIsRight) {
  const Problem problem = problem_of(GetParam());
  const DeviceProblem device(problem);
  Rng rng(32);
  for (const Tensor& block_ids : {run_index_select(problem, on(Backend::kReference)), random_block_ids(problem, rng)}) {
    const Attention oracle = oracle_sparse_attention(problem, block_ids);
    const std::vector<float> plain = plain_attention(problem, &block_ids);
    EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_attention, device, block_ids), oracle, plain)) << "prefill";
    EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_decode, device, block_ids), oracle, plain)) << "decode";
  }
}

// Also for many queries, which it takes though it is not made for them.
TEST_P(CudaOpsAt, MsaAttentionIsRight) {
  const Problem problem = problem_of(GetParam());
  const DeviceProblem device(problem);
  const MsaResult step = gpu_msa_attention(device);
  EXPECT_TRUE(selection_right(problem, step.block_ids, oracle_scores(problem), GetParam().values == Values::kIntegers));
  EXPECT_TRUE(attention_right(problem, step.attention, &step.block_ids));
}

TEST_P(CudaOpsAt, DenseAttentionIsRight) {
  const Problem problem = problem_of(GetParam());
  const DeviceProblem device(problem);
  const Attention oracle = oracle_dense_attention(problem);
  const std::vector<float> plain = plain_attention(problem, nullptr);
  EXPECT_TRUE(attention_right(problem, gpu_dense_attention(device, false), oracle, plain));
  const Attention with_max = gpu_dense_attention(device, true);
  EXPECT_TRUE(attention_right(problem, with_max, oracle, plain));
  EXPECT_TRUE(block_max_right(problem, with_max.block_max, oracle.block_max));
}

// A value reaches the rows that see it and no others: in a later position of the own block, in a block that only a neighbour chose,
// in a tile's later block; NaN and infinities, in one dim or all.
TEST_P(CudaOpsAt, ValuesReachTheRowsThatSeeThem) {
  Problem problem = problem_of(GetParam());
  Rng rng(33);
  const Tensor block_ids = random_block_ids(problem, rng);
  const MsaConfig& config = problem.config;
  for (std::int32_t seq = 0; seq < problem.num_seqs(); ++seq) {
    const std::int64_t n = problem.layout.seqlens_k[static_cast<std::size_t>(seq)];
    for (int i = 0; i < 4 && n > 0; ++i) {
      const std::int64_t j = i == 0 ? n - 1 : uniform(rng, std::max<std::int64_t>(n - 90, 0), n - 1);
      const auto group = static_cast<std::int32_t>(uniform(rng, 0, config.num_kv_heads - 1));
      const double special = pick(rng, {kNaN, kInfinity, -kInfinity});
      for (std::int64_t d = 0; d < config.head_dim; d += i == 1 ? 1 : 29) {
        problem.v.set(problem.key_row(seq, j, group) * config.head_dim + d, special);
      }
      if (i == 2) problem.k.set(problem.key_row(seq, j, group) * config.head_dim, kNaN);
    }
  }
  const DeviceProblem device(problem);
  EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_attention, device, block_ids), &block_ids)) << "prefill";
  EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_decode, device, block_ids), &block_ids)) << "decode";
  const MsaResult step = gpu_msa_attention(device);
  EXPECT_TRUE(attention_right(problem, step.attention, &step.block_ids)) << "msa_attention";
  EXPECT_TRUE(attention_right(problem, gpu_dense_attention(device, false), nullptr)) << "dense";
  EXPECT_TRUE(attention_right(problem, gpu_dense_attention(device, true), nullptr)) << "dense with block_max";
}

// NaN for rows all of whose scores are -inf, 0 for rows that see no key; blocks of -inf beside others have no weight.
TEST_P(CudaOpsAt, RowsOfNothingButMinusInfinityAreNaN) {
  Problem problem = problem_of(GetParam());
  Rng rng(36);
  inject_minus_infinities(problem, rng);
  const DeviceProblem device(problem);
  const Tensor block_ids = random_block_ids(problem, rng);
  EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_attention, device, block_ids), &block_ids)) << "prefill";
  EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_decode, device, block_ids), &block_ids)) << "decode";
  const MsaResult step = gpu_msa_attention(device);
  EXPECT_TRUE(attention_right(problem, step.attention, &step.block_ids)) << "msa_attention";
  EXPECT_TRUE(attention_right(problem, gpu_attention(sparse_attention, device, step.block_ids), &step.block_ids)) << "union";
  EXPECT_TRUE(attention_right(problem, gpu_dense_attention(device, false), nullptr)) << "dense";
  EXPECT_TRUE(attention_right(problem, gpu_dense_attention(device, true), nullptr)) << "dense with block_max";
}

// Whatever the index data hold, nothing outside the tensors is touched (compute-sanitizer looks) and the caller is told.
TEST_F(CudaOps, BrokenIndexDataAreReportedAndReadNothing) {
  for (const bool paged : {false, true}) {
    for (const std::int32_t queries : {3, 90}) {
      Rng rng(34);
      const Problem problem(make_config(2, 16, 64, 64, 64, 4), layout_of({queries, 2}, {700, 130}, paged), DType::kBF16, rng);
      const Tensor block_ids = run_index_select(problem, on(Backend::kReference));
      enum { kFarBlock, kNegativeBlock, kUnsorted, kFarPage, kNegativePage, kLength, kOffsets, kNumFaults };
      for (int fault = 0; fault < kNumFaults; ++fault) {
        if (!paged && (fault == kFarPage || fault == kNegativePage)) continue;
        Tensor ids = block_ids;
        Problem broken = problem;
        if (fault == kFarBlock) ids.set(ids.at(1, 1, 3), 1 << 30);
        if (fault == kNegativeBlock) ids.set(ids.at(1, 1, 1), -(1 << 30));
        if (fault == kUnsorted) ids.set(ids.at(1, 1, 1), ids(1, 1, 3));
        if (fault == kFarPage) broken.page_table[1] = std::numeric_limits<std::int32_t>::max();
        if (fault == kNegativePage) broken.page_table[1] = -1;
        DeviceProblem device(broken);
        const Batch sound = device.batch();
        if (fault == kLength) (paged ? broken.layout.seqlens_k : broken.cu_seqlens_k).back() = 1 << 30;
        if (fault == kOffsets) broken.cu_seqlens_q[1] = -(1 << 30);
        device = DeviceProblem(broken);
        Batch batch = device.batch();
        batch.max_seqlen_q = sound.max_seqlen_q;
        batch.max_seqlen_k = sound.max_seqlen_k;
        const DeviceTensor ids_on_gpu(ids);
        const MsaConfig& config = broken.config;
        DeviceTensor out(Tensor(broken.dtype, {broken.total_q, config.num_q_heads, config.head_dim}));
        DeviceTensor selected(Tensor(DType::kI32, {broken.total_q, config.num_kv_heads, config.top_k}));
        DeviceTensor scores(Tensor(DType::kF32, {broken.total_q, config.num_kv_heads, broken.max_num_blocks}));
        const auto told = [&](const char* what, auto function, auto args) {
          Workspace workspace = poisoned_workspace(workspace_bytes(args), 0xff);
          args.options.workspace = &workspace;
          function(args);
          EXPECT_THROW(synchronize(kGpu), Error) << what << " fault " << fault << (paged ? " paged" : " packed");
          EXPECT_NO_THROW(synchronize(kGpu)) << "told twice";
        };
        for (const auto function : {sparse_attention, sparse_decode}) {
          told(function == sparse_decode ? "decode" : "prefill", function,
               SparseAttentionArgs{
                   config, batch, device.q.view(), device.k.view(), device.v.view(), ids_on_gpu.view(), out.view(), {}, {}});
        }
        if (fault <= kUnsorted) continue;  // the others read no lists
        told("dense", dense_attention,
             DenseAttentionArgs{config, batch, device.q.view(), device.k.view(), device.v.view(), out.view(), {}, {}, {}});
        told("score", block_scores, BlockScoresArgs{config, batch, device.q_idx.view(), device.k_idx.view(), scores.view(), {}});
        told("index_select", index_select,
             IndexSelectArgs{config, batch, device.q_idx.view(), device.k_idx.view(), selected.view(), {}});
        told("msa_attention", msa_attention,
             MsaAttentionArgs{.config = config,
                              .batch = batch,
                              .q = device.q.view(),
                              .k = device.k.view(),
                              .v = device.v.view(),
                              .q_idx = device.q_idx.view(),
                              .k_idx = device.k_idx.view(),
                              .out = out.view(),
                              .lse = {},
                              .block_ids = {},
                              .options = {}});
      }
    }
  }
}

// Captured once, replayed with other lengths, pages, queries and keys on scratch full of NaN: the same bits as a call of its own.
TEST_F(CudaOps, GraphsReplayWithOtherContents) {
  for (const std::int32_t queries : {1, 60}) {
    const MsaConfig config = make_config(2, 16, 128, 128, 64, 4);
    Rng rng(35);
    const Problem problem(config, layout_of({queries, queries}, {900, 130}, true), DType::kBF16, rng);
    DeviceProblem device(problem);
    Batch batch = device.batch();
    batch.max_seqlen_k = 900;
    Tensor ids(DType::kI32, {problem.total_q, config.num_kv_heads, config.top_k});
    Tensor out(problem.dtype, {problem.total_q, config.num_q_heads, config.head_dim});
    DeviceTensor ids_on_gpu(ids), out_on_gpu(out);
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RunOptions options;
    options.cuda_stream = stream;
    IndexSelectArgs select{config, batch, device.q_idx.view(), device.k_idx.view(), ids_on_gpu.view(), options};
    SparseAttentionArgs attend{
        config, batch, device.q.view(), device.k.view(), device.v.view(), ids_on_gpu.view(), out_on_gpu.view(), {}, options};
    const std::size_t bytes = std::max(workspace_bytes(select), workspace_bytes(attend));
    // Of its own: it must outlive the calls that the replays are compared with.
    const DeviceTensor scratch(Tensor(DType::kI32, {static_cast<std::int64_t>(bytes / 4) + 1}));
    Workspace workspace(scratch.view().data, bytes, kGpu);
    select.options.workspace = attend.options.workspace = &workspace;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    index_select(select);
    (queries == 1 ? sparse_decode : sparse_attention)(attend);
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&executable, graph, 0));

    for (const auto& lengths : {std::vector<std::int32_t>{900, 130}, {61, 897}, {400, 400}}) {
      const Problem other(config, layout_of({queries, queries}, lengths, true), DType::kBF16, rng);
      // The captured pool is the largest: fewer pages of other contents fit.
      ASSERT_LE(other.k.view().shape[0], problem.k.view().shape[0]);
      ASSERT_LE(other.max_pages, problem.max_pages);
      const auto padded = [](const Tensor& target, const Tensor& source) {
        Tensor whole(target.dtype(), {target.view().shape.begin(), target.view().shape.begin() + target.view().rank});
        for (std::int64_t i = 0; i < source.numel(); ++i) whole.set(i, source.get(i));
        return whole;
      };
      device.q.upload(other.q);
      device.q_idx.upload(other.q_idx);
      device.k.upload(padded(problem.k, other.k));
      device.v.upload(padded(problem.v, other.v));
      device.k_idx.upload(padded(problem.k_idx, other.k_idx));
      Tensor lengths_now(DType::kI32, {2}), table(DType::kI32, {2, problem.max_pages});
      for (std::int64_t s = 0; s < 2; ++s) {
        lengths_now.set(s, lengths[static_cast<std::size_t>(s)]);
        for (std::int64_t b = 0; b < problem.max_pages; ++b) {
          table.set(table.at(s, b), b < other.max_pages ? other.page_table[static_cast<std::size_t>(s * other.max_pages + b)] : -1);
        }
      }
      device.lengths.upload(lengths_now);
      device.page_table.upload(table);
      ids_on_gpu.upload(ids);
      out_on_gpu.upload(out);
      check_cuda(cudaMemset(workspace.data(), 0xff, bytes));
      check_cuda(cudaDeviceSynchronize());
      check_cuda(cudaGraphLaunch(executable, stream));
      synchronize(kGpu, stream);
      Tensor replayed_ids = ids, replayed = out;
      ids_on_gpu.download(replayed_ids);
      out_on_gpu.download(replayed);
      const DeviceProblem fresh(other);
      const Tensor want_ids = gpu_index_select(fresh);
      EXPECT_TRUE(replayed_ids.same_bits(want_ids));
      EXPECT_TRUE(replayed.same_bits(gpu_attention(queries == 1 ? sparse_decode : sparse_attention, fresh, want_ids).out));
    }
    check_cuda(cudaGraphExecDestroy(executable));
    check_cuda(cudaGraphDestroy(graph));
    check_cuda(cudaStreamDestroy(stream));
  }
}

}  // namespace
}  // namespace openmsa::test
