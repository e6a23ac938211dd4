// What the CUDA side of this build can use on this machine. Answers everywhere: without CUDA in the build, without a driver,
// without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace openmsa::cuda {

struct DeviceStatus {
  bool compiled = false;   // the CUDA backend is part of this build
  bool available = false;  // at least one GPU runs this build's device code
  std::string detail;      // one sentence: the GPUs found, or why there is none
};

// Asks the driver anew at each call. Never throws, creates a CUDA context only on a GPU this build has code for.
DeviceStatus device_status();

// Throws what checks on the device found in earlier calls (broken offsets, page ids, block ids), if anything. Does not wait.
void throw_device_fault(std::int32_t device);

// Scratch of a call whose caller gave none: taken from and returned to the device's memory pool in stream order.
class StreamScratch {
 public:
  StreamScratch(std::int32_t device, std::size_t bytes, void* stream);
  ~StreamScratch();
  StreamScratch(const StreamScratch&) = delete;
  StreamScratch& operator=(const StreamScratch&) = delete;
  void* data() const { return data_; }

 private:
  std::int32_t device_;
  void* stream_;
  void* data_ = nullptr;
};

// Waits for the stream, then throws like throw_device_fault.
void synchronize(std::int32_t device, void* stream);

}  // namespace openmsa::cuda
