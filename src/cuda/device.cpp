// The build without CUDA; src/cuda/device.cu is its counterpart.
#include "cuda/device.hpp"

namespace openmsa::cuda {

DeviceStatus device_status() {
  return {
      .compiled = false, .available = false, .detail = "built without CUDA; configure with -DOPENMSA_CUDA=ON and nvcc on the PATH"};
}

}  // namespace openmsa::cuda
