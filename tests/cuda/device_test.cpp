// The device query must tell the truth on every machine: with and without CUDA in the build, a driver, a GPU.
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "cuda/device.hpp"
#include "openmsa/openmsa.hpp"

namespace openmsa {
namespace {

bool driver_is_loaded() { return std::filesystem::exists("/dev/nvidiactl"); }

bool starts_with(const std::string& text, const std::string& prefix) { return text.compare(0, prefix.size(), prefix) == 0; }

TEST(CudaDevice, StatusMatchesTheBuildAndTheMachine) {
  const cuda::DeviceStatus status = cuda::device_status();
  EXPECT_EQ(status.compiled, OPENMSA_TEST_HAVE_CUDA == 1);
  ASSERT_FALSE(status.detail.empty());
  if (!status.compiled) {
    EXPECT_FALSE(status.available);
    EXPECT_TRUE(starts_with(status.detail, "built without CUDA")) << status.detail;
  } else if (!driver_is_loaded()) {
    EXPECT_FALSE(status.available);
    EXPECT_TRUE(starts_with(status.detail, "no CUDA device: ")) << status.detail;
  }
}

TEST(CudaDevice, AsksAnewAndGivesTheSameAnswer) {
  const cuda::DeviceStatus first = cuda::device_status(), second = cuda::device_status();
  EXPECT_EQ(first.available, second.available);
  EXPECT_EQ(first.detail, second.detail);
}

TEST(CudaDevice, BackendListSaysTheSame) {
  const cuda::DeviceStatus status = cuda::device_status();
  int num_rows = 0;
  for (const BackendInfo& info : list_backends()) {
    if (info.backend != Backend::kCuda) continue;
    ++num_rows;
    EXPECT_EQ(info.compiled, status.compiled);
  }
  EXPECT_EQ(num_rows, 1);
}

TEST(CudaDevice, HopperIsFoundAndNamed) {
  const cuda::DeviceStatus status = cuda::device_status();
  if (!status.available) GTEST_SKIP() << status.detail;
  EXPECT_NE(status.detail.find("compute capability 9.0"), std::string::npos) << status.detail;
}

}  // namespace
}  // namespace openmsa
