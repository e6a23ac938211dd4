// The build without CUDA; src/cuda/device.cu is its counterpart.
#include "cuda/device.hpp"

#include "openmsa/error.hpp"

namespace openmsa::cuda {

DeviceStatus device_status() {
  return {
      .compiled = false, .available = false, .detail = "built without CUDA; configure with -DOPENMSA_CUDA=ON and nvcc on the PATH"};
}

// Nothing gets here without a GPU backend: the checks refuse GPU tensors first.
void throw_device_fault(std::int32_t) {}
StreamScratch::StreamScratch(std::int32_t device, std::size_t, void* stream) : device_(device), stream_(stream) {}
StreamScratch::~StreamScratch() = default;
void synchronize(std::int32_t, void*) { throw Error(ErrorCode::kDevice, "device", "device: this library was built without CUDA."); }

}  // namespace openmsa::cuda
