// Gradients and the index KL loss on the GPU against the fp64 oracle, at shapes small enough for compute-sanitizer, which together
// launch every training kernel. Larger shapes: tests/python/test_cuda_training.py.
#include <limits>

#include "cuda/device.hpp"
#include "device_run.hpp"
#include "openmsa/info.hpp"
#include "support/cases.hpp"
#include "support/plain_training.hpp"

namespace openmsa::test {
namespace {

struct Shape {
  const char* name;
  MsaConfig config;
  Layout layout;
  DType dtype = DType::kBF16;
};

Layout packed(std::vector<std::int32_t> seqlens_q, std::vector<std::int32_t> seqlens_k, std::vector<std::int32_t> q_start = {},
              bool strided = false) {
  return {std::move(seqlens_q), std::move(seqlens_k), std::move(q_start), false, strided};
}

std::vector<Shape> shapes() {
  const MsaConfig reference = make_config(2, 16, 128, 128, 128, 4);
  return {
      {"Reference", reference, packed({70, 1, 0, 40}, {70, 300, 5, 1290})},
      {"ReferenceHalf", reference, packed({90}, {500}), DType::kF16},
      {"Documents", make_config(2, 16, 128, 128, 128, 16), packed({127, 129, 1, 2, 3, 5, 128}, {127, 129, 1, 2, 3, 5, 128})},
      // A block that more tokens choose than an item holds, so that its items share it.
      {"HotBlock", make_config(1, 2, 64, 64, 64, 4, 1, 1), packed({1300}, {1300})},
      {"Group1", make_config(3, 1, 64, 96, 64, 8), packed({60, 0, 20}, {60, 3, 330}, {}, true)},
      {"Group3Dim96", make_config(2, 3, 96, 64, 128, 4), packed({50, 9}, {400, 9}), DType::kF16},
      {"Group5", make_config(2, 5, 128, 96, 64, 4), packed({45, 33}, {600, 33}, {}, true)},
      {"Group8Dim64", make_config(2, 8, 64, 128, 128, 32), packed({33}, {700})},
      {"GivenPositions", make_config(2, 4, 64, 96, 64, 4), packed({40, 40, 9}, {300, 30, 70}, {100, 0, -4}, true)},
      {"MoreQueriesThanKeys", make_config(1, 2, 64, 64, 64, 4), packed({70}, {10})},
  };
}

class CudaTraining : public testing::Test {
 protected:
  void SetUp() override {
    const cuda::DeviceStatus status = cuda::device_status();
    if (!status.available) GTEST_SKIP() << status.detail;
  }
};

class CudaTrainingAt : public CudaTraining, public testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(, CudaTrainingAt, testing::ValuesIn(shapes()), [](const auto& info) { return info.param.name; });
void PrintTo(const Shape& shape, std::ostream* stream) { *stream << text(shape.config) << ", " << shape.layout.text(); }

// For the lists given, or every visible block.
void expect_right(const Problem& problem, const Tensor* block_ids) {
  SCOPED_TRACE(block_ids == nullptr ? "every block" : "sparse");
  const DeviceProblem device(problem);
  const Attention forward =
      block_ids != nullptr ? gpu_attention(sparse_attention, device, *block_ids) : gpu_dense_attention(device, false);
  Rng rng(42);
  const Tensor d_out = random_d_out(problem, rng);
  EXPECT_TRUE(gradients_right(problem, block_ids, forward, d_out, gpu_attention_backward(device, block_ids, forward, d_out)));
  EXPECT_TRUE(index_kl_right(problem, block_ids, forward.lse, gpu_index_kl(device, block_ids, forward.lse)));
}

TEST_P(CudaTrainingAt, GradientsAndIndexLossAreRight) {
  Rng rng(41);
  const Problem problem(GetParam().config, GetParam().layout, GetParam().dtype, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  expect_right(problem, &block_ids);
  expect_right(problem, nullptr);
}

// Rows all of whose scores are -inf have gradients of NaN, as the keys that they see; keys behind them get what others give.
TEST_F(CudaTraining, RowsOfNothingButMinusInfinity) {
  Rng rng(43);
  Problem problem(make_config(1, 16, 128, 128, 128, 4), packed({12, 20}, {160, 64}, {10, 44}), DType::kBF16, rng);
  for (std::int64_t row = 0; row < problem.q.num_rows(); ++row) problem.q.set(row * 128, 1.0);
  for (std::int64_t j = 0; j < 22; ++j) {
    problem.k.set(problem.key_row(0, j, 0) * 128, -std::numeric_limits<double>::infinity());
  }
  const Tensor block_ids = random_block_ids(problem, rng);
  expect_right(problem, &block_ids);
  expect_right(problem, nullptr);
}

}  // namespace
}  // namespace openmsa::test
