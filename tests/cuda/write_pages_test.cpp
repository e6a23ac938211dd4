// write_pages on the GPU against plain loops over elements: bit for bit, bad slots told and not written, replayed in a graph.
#include "cuda/device.hpp"
#include "device_run.hpp"
#include "support/pages.hpp"

namespace openmsa::test {
namespace {

class CudaWritePages : public testing::Test {
 protected:
  void SetUp() override {
    const cuda::DeviceStatus status = cuda::device_status();
    if (!status.available) GTEST_SKIP() << status.detail;
  }
};

// A PageWrite's tensors on the GPU.
struct DevicePages {
  explicit DevicePages(const PageWrite& pages)
      : rows(pages.rows), slots(pages.slots), k_pages(pages.k_pages), v_pages(pages.v_pages), k_idx_pages(pages.k_idx_pages) {}

  WritePagesArgs args(const PageWrite& pages) const {
    return pages.args(rows.view(), slots.view(), k_pages.view(), v_pages.view(), k_idx_pages.view());
  }
  PageWrite download(const PageWrite& pages) const {
    PageWrite result = pages;
    k_pages.download(result.k_pages);
    v_pages.download(result.v_pages);
    k_idx_pages.download(result.k_idx_pages);
    return result;
  }

  DeviceTensor rows, slots, k_pages, v_pages, k_idx_pages;
};

TEST_F(CudaWritePages, RowsGoToTheirSlotsAndNowhereElse) {
  Rng rng(51);
  std::vector<PageShape> shapes = page_shapes();
  shapes.push_back({3000, 4, 128, 128, 40, 128, DType::kBF16, 64});
  for (const PageShape& shape : shapes) {
    SCOPED_TRACE(shape.text());
    const PageWrite pages(shape, rng);
    const DevicePages device(pages);
    write_pages(device.args(pages));
    synchronize(kGpu);
    EXPECT_TRUE(device.download(pages).same_pools(pages.expected()));
  }
}

TEST_F(CudaWritePages, SlotsBeyondThePoolAreToldAndNotWritten) {
  Rng rng(52);
  for (const std::int64_t slot : {std::int64_t{48}, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 5}) {
    PageWrite pages({21, 2, 64, 64, 3, 16}, rng);
    pages.set_slot(9, slot);
    const DevicePages device(pages);
    write_pages(device.args(pages));
    try {
      synchronize(kGpu);
      ADD_FAILURE() << "slot " << slot << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "slots");
      EXPECT_NE(std::string(error.what()).find("[9] is " + std::to_string(slot)), std::string::npos) << error.what();
    }
    EXPECT_NO_THROW(synchronize(kGpu)) << "told twice";
    EXPECT_TRUE(device.download(pages).same_pools(pages.expected()));
  }
}

TEST_F(CudaWritePages, RefusesWhatTheHostCanSee) {
  Rng rng(53);
  const PageWrite pages({5, 2, 64, 64, 3, 16}, rng);
  const DevicePages device(pages);
  WritePagesArgs args = device.args(pages);
  args.k.device = {};
  EXPECT_THROW(write_pages(args), Error);
  args = device.args(pages);
  args.v_pages.data = args.k_pages.data;
  EXPECT_THROW(write_pages(args), Error);
  const PageWrite none({0, 2, 64, 64, 3, 16}, rng), wide({5, 2, 64, 64, 3, 16, DType::kF64}, rng);
  EXPECT_NO_THROW(write_pages(DevicePages(none).args(none)));
  EXPECT_THROW(write_pages(DevicePages(wide).args(wide)), Error) << "float64";
  EXPECT_NO_THROW(synchronize(kGpu));
  EXPECT_TRUE(device.download(pages).same_pools(pages));
}

// Captured once, replayed with other rows, slots and padding.
TEST_F(CudaWritePages, GraphsReplayWithOtherContents) {
  Rng rng(54);
  const PageShape shape{13, 3, 64, 96, 4, 16};
  PageWrite pages(shape, rng);
  DevicePages device(pages);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  // What a first call sets up, a capture must find.
  PageWrite padding(shape, rng);
  for (std::int64_t t = 0; t < shape.num_tokens; ++t) padding.set_slot(t, -1);
  write_pages(DevicePages(padding).args(padding));
  synchronize(kGpu);
  WritePagesArgs args = device.args(pages);
  args.options.cuda_stream = stream;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  write_pages(args);
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&executable, graph, 0));
  EXPECT_TRUE(device.download(pages).same_pools(pages)) << "a capture writes nothing";
  for (int replay = 0; replay < 3; ++replay) {
    const PageWrite next(shape, rng);
    pages.rows = next.rows;
    pages.slots = next.slots;
    device.rows.upload(next.rows);
    device.slots.upload(next.slots);
    check_cuda(cudaDeviceSynchronize());
    check_cuda(cudaGraphLaunch(executable, stream));
    synchronize(kGpu, stream);
    pages = pages.expected();
    EXPECT_TRUE(device.download(pages).same_pools(pages)) << "replay " << replay;
  }
  check_cuda(cudaGraphExecDestroy(executable));
  check_cuda(cudaGraphDestroy(graph));
  check_cuda(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace openmsa::test
