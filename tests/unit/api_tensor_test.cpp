// Tensor arguments: every tensor of every function, spoiled in one way at a time.
#include <cstdint>
#include <limits>

#include "api/check.hpp"
#include "api_calls.hpp"

namespace openmsa::test {
namespace {

using Slot = Calls::Slot;

bool every(const Slot&) { return true; }
bool outputs(const Slot& slot) { return slot.is_output; }
bool optional(const Slot& slot) {
  return slot.name == "lse" || slot.name == "block_max" || (slot.name == "block_ids" && slot.call == "msa_attention");
}
// The tensor that says how many tokens, which dtype and which device the others must have.
bool leads(const Slot& slot) {
  return slot.name == "q" || (slot.name == "q_idx" && slot.call != "msa_attention") ||
         (slot.name == "scores" && slot.call == "select_blocks");
}

class ApiTensor : public testing::TestWithParam<bool> {
 protected:
  Calls calls{GetParam()};  // parameter: paged
};
INSTANTIATE_TEST_SUITE_P(, ApiTensor, testing::Bool(), [](const auto& info) { return info.param ? "paged" : "packed"; });

TEST_P(ApiTensor, RefusesMissing) {
  calls.expect_each_refused([](const Slot& slot) { return !optional(slot); }, [](TensorView& view) { view = {}; }, {"not given"});
}

TEST_P(ApiTensor, RefusesWrongDtype) {
  calls.expect_each_refused(every, [](TensorView& view) { view.dtype = view.dtype == DType::kI32 ? DType::kF32 : DType::kI32; },
                            {"dtype", "must be one of"});
  calls.expect_each_refused(every, [](TensorView& view) { view.dtype = static_cast<DType>(200); }, {"dtype unknown"});
}

TEST_P(ApiTensor, RefusesFloat64ResultsOutsideTheReference) {
  calls.expect_each_refused(
      [](const Slot& slot) { return slot.name == "scores" || slot.name == "lse" || slot.name == "block_max"; },
      [](TensorView& view) { view.dtype = DType::kF64; }, {"dtype float64", "must be one of: float32"});
}

TEST_P(ApiTensor, RefusesMixedDtypes) {
  calls.expect_each_refused(
      [](const Slot& slot) {
        return slot.name == "k" || slot.name == "v" || slot.name == "k_idx" || slot.name == "out" ||
               (slot.name == "q_idx" && !leads(slot));
      },
      [](TensorView& view) { view.dtype = DType::kBF16; }, {"bfloat16", "float32", "one dtype"});
}

TEST_P(ApiTensor, RefusesWrongRank) {
  calls.expect_each_refused(every, [](TensorView& view) { view.rank = view.rank == 4 ? 2 : view.rank + 1; }, {"rank"});
  for (const int rank : {-1, 0, kMaxRank + 1, 1000}) {
    calls.expect_each_refused(every, [=](TensorView& view) { view.rank = rank; }, {"rank " + std::to_string(rank)});
  }
}

TEST_P(ApiTensor, RefusesWrongAxisSizes) {
  calls.expect_each_refused([](const Slot& slot) { return slot.view->rank >= 2 && slot.name != "batch.page_table"; },
                            [](TensorView& view) { view.shape[1] += 1; }, {"shape"});
  calls.expect_each_refused(
      [](const Slot& slot) { return slot.name == "q" || slot.name == "k" || slot.name == "v" || slot.name == "out"; },
      [](TensorView& view) { view.shape[view.rank - 1] -= 1; }, {"(D)", "must be 16 = config.head_dim"});
  calls.expect_each_refused([](const Slot& slot) { return slot.name == "q_idx" || slot.name == "k_idx"; },
                            [](TensorView& view) { view.shape[view.rank - 1] -= 1; }, {"(Di)", "must be 32 = config.index_dim"});
  calls.expect_each_refused([](const Slot& slot) { return slot.name == "block_ids"; }, [](TensorView& view) { view.shape[2] = 2; },
                            {"(k)", "is 2", "must be 3 = config.top_k"});
  calls.expect_each_refused(every, [](TensorView& view) { view.shape[0] = -1; }, {"negative"});
}

TEST_P(ApiTensor, RefusesOutputsForAnotherNumberOfTokens) {
  calls.expect_each_refused(outputs, [](TensorView& view) { view.shape[0] += 1; }, {"(T)", "must be 26", "shape[0]"});
}

TEST_P(ApiTensor, RefusesNarrowScores) {
  calls.expect_each_refused([](const Slot& slot) { return slot.name == "scores" || slot.name == "block_max"; },
                            [](TensorView& view) { view.shape[2] = 3; }, {"64 keys in 4 blocks", "too narrow"});
}

TEST_P(ApiTensor, RefusesStrides) {
  calls.expect_each_refused(every, [](TensorView& view) { view.stride[view.rank - 1] = 2; },
                            {"stride 2", "last axis", "contiguous"});
  calls.expect_each_refused([](const Slot& slot) { return slot.view->rank >= 2; },
                            [](TensorView& view) { view.stride[0] = -view.stride[0]; }, {"strides must not be negative"});
}

TEST_P(ApiTensor, RefusesOutputsThatOverlapThemselves) {
  calls.expect_each_refused(outputs, [](TensorView& view) { view.stride[0] = 0; }, {"must not overlap itself"});
  calls.expect_each_refused(outputs, [](TensorView& view) { view.stride[0] -= 1; }, {"must not overlap itself"});
}

TEST_P(ApiTensor, RefusesMisalignedPointers) {
  calls.expect_each_refused(every, [](TensorView& view) { view.data = static_cast<std::byte*>(view.data) + 1; },
                            {"aligned", "element size"});
}

TEST_P(ApiTensor, RefusesNullPointers) {
  calls.expect_each_refused(every, [](TensorView& view) { view.data = nullptr; }, {"null"});
}

TEST_P(ApiTensor, RefusesShapesAndStridesThatOverflow) {
  const auto has_free_axis = [](const Slot& slot) {
    return slot.name == "k" || slot.name == "k_idx" || (leads(slot) && slot.name != "scores");
  };
  calls.expect_each_refused(has_free_axis, [](TensorView& view) { view.shape[0] = std::int64_t{1} << 58; }, {"overflows 64 bits"});
  calls.expect_each_refused([](const Slot& slot) { return slot.view->rank >= 2; },
                            [](TensorView& view) { view.stride[0] = std::int64_t{1} << 61; }, {"beyond 64 bits"});
  calls.expect_each_refused(has_free_axis, [](TensorView& view) { view.data = reinterpret_cast<void*>(UINTPTR_MAX - 1023); },
                            {"end of the address space"});
}

TEST_P(ApiTensor, RefusesMoreTokensThanOffsetsCanTell) {
  const std::int64_t too_many = std::int64_t{std::numeric_limits<std::int32_t>::max()} + 1;
  for (Calls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    calls.block_scores.q_idx.shape[0] = calls.block_scores.scores.shape[0] = too_many;
    calls.select_blocks.scores.shape[0] = calls.select_blocks.block_ids.shape[0] = too_many;
    calls.index_select.q_idx.shape[0] = calls.index_select.block_ids.shape[0] = too_many;
    for (TensorView* view :
         {&calls.sparse.q, &calls.sparse.block_ids, &calls.sparse.out, &calls.sparse.lse, &calls.decode.q, &calls.decode.block_ids,
          &calls.decode.out, &calls.decode.lse, &calls.msa_attention.q, &calls.msa_attention.q_idx, &calls.msa_attention.out,
          &calls.msa_attention.lse, &calls.msa_attention.block_ids, &calls.dense.q, &calls.dense.out, &calls.dense.lse,
          &calls.dense.block_max}) {
      view->shape[0] = too_many;
    }
    const bool is_index = call.name == "block_scores" || call.name == "index_select";
    expect_invalid(call.run, is_index ? "q_idx" : call.name == "select_blocks" ? "scores" : "q", {"2147483648 tokens", "int32"});
  }
  calls.expect_nothing_written();
}

TEST_P(ApiTensor, RefusesDeviceMix) {
  calls.expect_each_refused([](const Slot& slot) { return !leads(slot); },
                            [](TensorView& view) {
                              view.device = {DeviceType::kCuda, 1};
                            },
                            {"is on cuda:1", "is on cpu", "one device"});
}

TEST_P(ApiTensor, RefusesGpuTensorsWithoutReadingThem) {
  for (const BackendInfo& info : list_backends()) {
    if (info.backend == Backend::kCuda && info.available) GTEST_SKIP() << "a usable GPU would be handed these addresses";
  }
  for (const Calls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    for (const Slot& slot : calls.slots()) {
      slot.view->device = {DeviceType::kCuda, 0};
      slot.view->data = reinterpret_cast<void*>(std::uintptr_t{4096});  // any read faults
    }
    const bool is_index = call.name == "block_scores" || call.name == "index_select";
    const char* first = is_index ? "q_idx" : call.name == "select_blocks" ? "scores" : "q";
    expect_refused(call.run, ErrorCode::kDevice, first, {"cuda:0", "no GPU can be used"});
    for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
      call.options->backend = backend;
      expect_invalid(call.run, first, {"cuda:0", backend_name(backend), "CPU memory"});
    }
  }
  calls.expect_nothing_written();
}

TEST_P(ApiTensor, RefusesCudaBackendOnCpuTensors) {
  for (const Calls::Call& call : calls.all()) {
    SCOPED_TRACE(call.name);
    call.options->backend = Backend::kCuda;
    expect_invalid(call.run, "options.backend", {"cuda", "is on the CPU"});
  }
  calls.expect_nothing_written();
}

TEST_P(ApiTensor, RefusesOutputsThatShareMemory) {
  calls.dense.out = calls.dense.q;
  expect_invalid([&] { dense_attention(calls.dense); }, "out", {"shares memory with q"});
  calls.dense.out = calls.out.view();
  calls.dense.lse = {static_cast<float*>(calls.out.view().data) + 7, DType::kF32, 2, {26, 4}, {4, 1}};
  expect_invalid([&] { dense_attention(calls.dense); }, "out", {"shares memory with lse"});
  const Tensor before = calls.scores_in;
  calls.select_blocks.block_ids.data = calls.scores_in.view().data;
  expect_invalid([&] { select_blocks(calls.select_blocks); }, "block_ids", {"shares memory with scores"});
  EXPECT_TRUE(calls.scores_in.same_bits(before));
  const std::vector<std::int32_t> cu_seqlens = calls.problem.cu_seqlens_q;
  calls.sparse.lse.data = calls.problem.cu_seqlens_q.data();
  expect_invalid([&] { sparse_attention(calls.sparse); }, "lse", {"shares memory with batch.cu_seqlens_q"});
  EXPECT_EQ(calls.problem.cu_seqlens_q, cu_seqlens);
  calls.expect_nothing_written();
}

TEST(ApiTensorViews, AcceptsInterleavedSlicesOfOneBuffer) {
  Calls calls;
  const std::int64_t T = calls.problem.total_q;
  Tensor buffer(DType::kF32, {T, 4, 32});  // q in the first half of every row, out in the second
  for (std::int64_t t = 0; t < T; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t d = 0; d < 16; ++d) buffer.set(buffer.at(t, h, d), calls.problem.q(t, h, d));
    }
  }
  SparseAttentionArgs args = calls.sparse;
  args.options.backend = Backend::kReference;
  sparse_attention(args);
  args.q = args.out = buffer.view();
  args.q.shape[2] = args.out.shape[2] = 16;
  args.out.data = static_cast<float*>(args.out.data) + 16;
  sparse_attention(args);
  for (std::int64_t t = 0; t < T; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t d = 0; d < 16; ++d) ASSERT_EQ(buffer(t, h, d + 16), calls.out(t, h, d));
    }
  }
  args.out.data = static_cast<float*>(args.out.data) - 1;  // now the last element of each q row is an element of out
  expect_invalid([&] { sparse_attention(args); }, "out", {"shares memory with q"});
}

TEST(ApiTensorViews, IgnoresStridesOfAxesThatDoNotStep) {
  // One token: frameworks leave any stride on an axis of size 1, the largest integers included.
  const MsaConfig config = make_config(1, 1, 16, 16, 16, 1);
  Rng rng(1);
  const Problem problem(config, single(1, 9), DType::kF32, rng);
  Tensor out(DType::kF32, {1, 1, 16}), expected(DType::kF32, {1, 1, 16});
  DenseAttentionArgs args{config, problem.batch(), problem.q.view(), problem.k.view(), problem.v.view(), expected.view()};
  args.options.backend = Backend::kReference;
  dense_attention(args);
  args.out = out.view();
  for (TensorView* view : {&args.q, &args.out}) view->stride[0] = view->stride[1] = std::numeric_limits<std::int64_t>::max();
  args.k.stride[1] = -5;
  dense_attention(args);
  EXPECT_TRUE(out.same_bits(expected));
}

TEST(ApiTensorViews, ReplacedStridesFitInBytes) {
  // One page of two heads that lie 2^60 elements apart, which fits; two such steps would not fit in bytes. Kernels multiply every stride
  // by the element's size, that of the single page too.
  for (const std::int64_t stride : {std::int64_t{1} << 60, std::int64_t{1} << 30}) {
    const RunOptions options;
    api::Checker checker(options, api::Mode::kSize);
    const TensorView view{nullptr, DType::kF32, 4, {1, 2, 16, 16}, {7, stride, 16, 1}};
    const TensorView checked =
        checker.tensor("k", view, core::dtype_bit(DType::kF32), {{"num_pages"}, {"Hkv"}, {"Bk"}, {"D"}}, api::Role::kInput);
    std::int64_t bytes = 0;
    EXPECT_FALSE(__builtin_mul_overflow(checked.stride[0], dtype_bytes(DType::kF32), &bytes));
    EXPECT_EQ(checked.stride[0], stride == std::int64_t{1} << 60 ? 0 : 2 * stride);
    EXPECT_EQ(checked.stride[1], stride);
  }
  // What is wrong is named at the axis that the caller gave, not at the one whose stride follows from it.
  Calls calls;
  calls.dense.k.shape[0] = 1;
  calls.dense.k.stride[1] = -3;
  expect_invalid([&] { dense_attention(calls.dense); }, "k", {"has stride -3 on axis 1"});
}

TEST(ApiTensorViews, MakeViewRefusesWhatNoTensorCanBe) {
  const float x = 0;
  EXPECT_THROW(make_view(&x, {1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(make_view(&x, {2, -3}), Error);
  EXPECT_THROW(make_view(&x, {std::int64_t{1} << 40, std::int64_t{1} << 40}), Error);
}

TEST(ApiTensorViews, KeysAndValuesMustAgree) {
  for (const bool paged : {false, true}) {
    Calls calls(paged);
    calls.sparse.v.shape[0] -= 1;
    expect_invalid([&] { sparse_attention(calls.sparse); }, "v", {"k has", "first axes must agree"});
    calls.msa_attention.v.shape[0] -= 1;
    expect_invalid([&] { msa_attention(calls.msa_attention); }, "v", {"k has", "first axes must agree"});
    calls.msa_attention.v.shape[0] += 1;
    calls.msa_attention.k_idx.shape[0] -= 1;
    expect_invalid([&] { msa_attention(calls.msa_attention); }, "k_idx", {"k has", "first axes must agree"});
    calls.expect_nothing_written();
  }
}

}  // namespace
}  // namespace openmsa::test
