// Which kernel a call gets, what is said when there is none, and what the library tells about itself.
#include <algorithm>

#include "api_calls.hpp"

namespace openmsa::test {
namespace {

TEST(ApiDispatch, RefusesOptionsThatMakeNoSense) {
  Calls calls;
  for (const Calls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    call.options->num_threads = -1;
    expect_invalid(call.run, "options.num_threads", {"is -1", "0..1024"});
    call.options->num_threads = 1'000'000;
    expect_invalid(call.run, "options.num_threads", {"is 1000000"});
    call.options->num_threads = 0;
    call.options->backend = static_cast<Backend>(77);
    expect_invalid(call.run, "options.backend", {"is 77", "kReference"});
  }
  calls.expect_nothing_written();
}

TEST(ApiDispatch, SaysWhichLimitBrokeAndWhatIsSupported) {
  for (const Backend backend : {Backend::kAuto, Backend::kCpu}) {
    Calls odd_dims(false, make_config(2, 2, 24, 40, 16, 3));
    for (const Calls::Call& call : odd_dims.all()) {
      if (call.name == "select_blocks") continue;  // has no dims
      SCOPED_TRACE(call.name);
      call.options->backend = backend;
      const bool is_index = call.name == "block_scores" || call.name == "index_select";
      expect_refused(call.run, ErrorCode::kUnsupported, "options.backend",
                     {call.name, "is " + std::string(backend_name(backend)), "kernel of the cpu backend",
                      is_index ? "index_dim 40 is not in 16..256 step 16" : "head_dim 24 is not in 16..256 step 16",
                      "supports float32|bfloat16|float16", "reference backend"});
      EXPECT_THROW(call.workspace_bytes(), Error);
    }
    odd_dims.expect_nothing_written();

    Calls odd_block(false, make_config(2, 2, 16, 16, 8, 3));
    for (const Calls::Call& call : odd_block.all()) {
      SCOPED_TRACE(call.name);
      call.options->backend = backend;
      expect_refused(call.run, ErrorCode::kUnsupported, "options.backend", {"block_size 8 is not in 16..256"});
    }
    odd_block.expect_nothing_written();

    Calls many(false, make_config(2, 2, 16, 16, 16, 65));
    for (const Calls::Call& call : many.all()) {
      if (call.name == "block_scores" || call.name == "dense_attention") continue;  // do not select
      SCOPED_TRACE(call.name);
      call.options->backend = backend;
      expect_refused(call.run, ErrorCode::kUnsupported, "options.backend", {"top_k 65 is not in 1..64"});
    }
    many.expect_nothing_written();
  }
}

TEST(ApiDispatch, ReferenceTakesAnySize) {
  Calls calls(false, make_config(3, 5, 7, 9, 11, 70));
  for (const Calls::Call& call : calls.all()) {
    call.options->backend = Backend::kReference;
    EXPECT_NO_THROW(call.run()) << call.name;
  }
}

TEST(ApiDispatch, Float64IsForTheReferenceAlone) {
  Rng rng(3);
  const Problem problem = Problem(make_config(2, 2, 16, 16, 16, 3), calls_layout(false), DType::kF32, rng).widened();
  const Tensor block_ids = run_index_select(problem, on(Backend::kReference));
  const Attention wide = run_sparse_attention(problem, block_ids, on(Backend::kReference));
  EXPECT_EQ(wide.lse.dtype(), DType::kF64);

  // float32 results are taken with float64 inputs too.
  Tensor out(DType::kF64, {problem.total_q, 4, 16}), lse(DType::kF32, {problem.total_q, 4});
  SparseAttentionArgs args{problem.config,   problem.batch(), problem.q.view(), problem.k.view(),       problem.v.view(),
                           block_ids.view(), out.view(),      lse.view(),       on(Backend::kReference)};
  sparse_attention(args);
  EXPECT_TRUE(out.same_bits(wide.out));
  for (std::int64_t i = 0; i < lse.numel(); ++i) EXPECT_EQ(lse.get(i), static_cast<float>(wide.lse.get(i)));

  Tensor untouched(DType::kF64, {problem.total_q, 4, 16});
  args.out = untouched.view();
  args.lse = {};
  for (const Backend backend : {Backend::kAuto, Backend::kCpu}) {
    args.options.backend = backend;
    expect_refused([&] { sparse_attention(args); }, ErrorCode::kUnsupported, "options.backend",
                   {"dtype float64", "float32|bfloat16|float16"});
  }
  EXPECT_TRUE(untouched.untouched());
}

TEST(ApiDispatch, OptionalResultsMayBeLeftOut) {
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    Calls calls;
    calls.sparse.lse = calls.decode.lse = calls.msa_attention.lse = calls.dense.lse = calls.dense.block_max = {};
    calls.msa_attention.block_ids = {};
    for (const Calls::Call& call : calls.all()) {
      call.options->backend = backend;
      EXPECT_NO_THROW(call.run()) << call.name;
    }
    EXPECT_TRUE(calls.lse.untouched());
    EXPECT_TRUE(calls.block_max.untouched());
    EXPECT_FALSE(calls.out.untouched());
  }
}

TEST(ApiInfo, ListsEveryBackendOnce) {
  const std::vector<BackendInfo> backends = list_backends();
  ASSERT_EQ(backends.size(), 3u);
  for (const Backend backend : {Backend::kReference, Backend::kCpu, Backend::kCuda}) {
    const auto row =
        std::find_if(backends.begin(), backends.end(), [&](const BackendInfo& info) { return info.backend == backend; });
    ASSERT_NE(row, backends.end());
    EXPECT_FALSE(row->detail.empty());
    if (backend != Backend::kCuda) {
      EXPECT_TRUE(row->compiled && row->available);
    }
    EXPECT_TRUE(row->compiled || !row->available);
  }
}

TEST(ApiInfo, ListsAKernelOfEachStageForEachCpuBackend) {
  const std::vector<KernelInfo> kernels = list_kernels();
  for (const char* stage :
       {"block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention",
        "sparse_attention_backward", "dense_attention_backward", "index_kl_loss", "write_pages"}) {
    for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
      EXPECT_TRUE(std::any_of(kernels.begin(), kernels.end(),
                              [&](const KernelInfo& info) {
                                return info.stage == stage && info.backend == backend && !info.name.empty() &&
                                       info.supports.find("float32") != std::string::npos;
                              }))
          << stage << " on " << backend_name(backend);
    }
  }
}

TEST(ApiInfo, NamesAreThoseOfPyTorch) {
  EXPECT_STREQ(dtype_name(DType::kBF16), "bfloat16");
  EXPECT_STREQ(backend_name(Backend::kReference), "reference");
  EXPECT_EQ(std::count(version(), version() + std::string(version()).size(), '.'), 2);
}

}  // namespace
}  // namespace openmsa::test
