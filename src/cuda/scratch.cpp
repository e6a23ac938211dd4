#include <cuda_runtime.h>

#include "cuda/device.hpp"
#include "cuda/fault.hpp"
#include "cuda/launch.hpp"

namespace openmsa::cuda {

StreamScratch::StreamScratch(std::int32_t device, std::size_t bytes, void* stream) : device_(device), stream_(stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device_);
  check(cudaMallocAsync(&data_, bytes, static_cast<cudaStream_t>(stream_)), "allocation of scratch memory on the GPU");
}

StreamScratch::~StreamScratch() {
  if (data_ == nullptr) return;
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(device_);
  cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_));
  cudaSetDevice(previous);
}

void synchronize(std::int32_t device, void* stream) {
  const DeviceGuard guard(device);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
  throw_device_fault(device);
}

}  // namespace openmsa::cuda
