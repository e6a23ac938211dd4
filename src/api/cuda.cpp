#include "openmsa/cuda.hpp"

#include "api/check.hpp"
#include "cuda/device.hpp"

namespace openmsa {

void synchronize(Device device, void* cuda_stream) {
  if (device.type != DeviceType::kCuda)
    api::refuse("device", "is the CPU, whose calls have finished when they return; pass a GPU.");
  cuda::synchronize(device.index, cuda_stream);
}

}  // namespace openmsa
