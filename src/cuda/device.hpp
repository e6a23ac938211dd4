// What the CUDA side of this build can use on this machine. Answers everywhere: without CUDA in the build, without a driver,
// without a GPU.
#pragma once

#include <string>

namespace openmsa::cuda {

struct DeviceStatus {
  bool compiled = false;   // the CUDA backend is part of this build
  bool available = false;  // at least one GPU runs this build's device code
  std::string detail;      // one sentence: the GPUs found, or why there is none
};

// Asks the driver anew at each call. Never throws, creates a CUDA context only on a GPU this build has code for.
DeviceStatus device_status();

}  // namespace openmsa::cuda
