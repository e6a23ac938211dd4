// The build with CUDA: the runtime is linked statically and loads the driver by itself, so the library also loads where no driver
// is installed and says so here.
#include <cuda_runtime.h>

#include <string>

#include "cuda/device.hpp"
#include "cuda/fault.hpp"
#include "cuda/launch.hpp"

namespace openmsa::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;  // sm_90a: the "a" binds the code to exactly this compute capability

__device__ std::int32_t claim = 0;

// Never launched. Its attributes can be read only if this build's device code loads on the current GPU.
__global__ void probe_kernel() {}

std::string describe(const cudaDeviceProp& prop) {
  const auto gib = static_cast<unsigned long long>(prop.totalGlobalMem >> 30);
  return std::string(prop.name) + " (compute capability " + std::to_string(prop.major) + "." + std::to_string(prop.minor) + ", " +
         std::to_string(prop.multiProcessorCount) + " SMs, " + std::to_string(gib) + " GiB)";
}

// Empty if the device runs our code, else the reason why not.
std::string why_unusable(int device, const cudaDeviceProp& prop) {
  if (prop.major != kMajor || prop.minor != kMinor) return "this build holds code for compute capability 9.0 (Hopper) only";
  int current = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&attributes, probe_kernel);
    cudaSetDevice(current);
  }
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // leave no sticky error for the caller's own CUDA calls to find
  return cudaGetErrorString(error);
}

std::string cuda_version(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// The runtime says "insufficient driver" both for an old driver and for none at all.
std::string why_no_devices(cudaError_t error) {
  if (error == cudaSuccess) return "the driver lists none";
  int driver = 0;
  if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess) return cudaGetErrorString(error);
  if (driver == 0) return "no NVIDIA driver is installed";
  return "the NVIDIA driver supports CUDA " + cuda_version(driver) + ", this build needs " + cuda_version(CUDART_VERSION);
}

}  // namespace

DeviceStatus device_status() {
  DeviceStatus status{.compiled = true, .available = false, .detail = ""};
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error != cudaSuccess || num_devices == 0) {
    status.detail = "no CUDA device: " + why_no_devices(error);
    cudaGetLastError();
    return status;
  }
  std::string usable, unusable;
  for (int device = 0; device < num_devices; ++device) {
    cudaDeviceProp prop{};
    if (const cudaError_t failed = cudaGetDeviceProperties(&prop, device); failed != cudaSuccess) {
      cudaGetLastError();
      unusable += (unusable.empty() ? "" : "; ") + ("GPU " + std::to_string(device) + ": " + cudaGetErrorString(failed));
      continue;
    }
    const std::string reason = why_unusable(device, prop);
    std::string& list = reason.empty() ? usable : unusable;
    list += (list.empty() ? "" : "; ") + describe(prop) + (reason.empty() ? "" : ": " + reason);
  }
  status.available = !usable.empty();
  status.detail = status.available ? usable : "no usable CUDA device: " + unusable;
  return status;
}

std::int32_t* fault_claim() {
  void* address = nullptr;
  check(cudaGetSymbolAddress(&address, claim), "cudaGetSymbolAddress");
  return static_cast<std::int32_t*>(address);
}

}  // namespace openmsa::cuda
