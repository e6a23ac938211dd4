// Workspace: scratch memory owned by the caller, so that a call allocates nothing. RunOptions: how a call runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "openmsa/tensor.hpp"

namespace openmsa {

// Scratch for one call at a time. Contents need no initialisation and carry nothing from call to call.
class Workspace {
 public:
  Workspace() = default;
  // Owns `bytes` of host memory, aligned to kAlignment.
  explicit Workspace(std::size_t bytes);
  // Borrows memory that stays the caller's (host or device). `data` must be aligned to kAlignment.
  Workspace(void* data, std::size_t bytes, Device device);
  Workspace(Workspace&& other) noexcept;
  Workspace& operator=(Workspace&& other) noexcept;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  static constexpr std::size_t kAlignment = 256;

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_{};
  bool owns_ = false;
};

enum class Backend : std::uint8_t {
  kAuto,       // the fastest backend for the tensors' device
  kReference,  // fp64, plain loops, CPU memory; the oracle. Also takes and returns float64
  kCpu,        // SIMD and threads
  kCuda,       // Hopper
};

const char* backend_name(Backend backend);  // "auto", "reference", "cpu", "cuda"

struct RunOptions {
  Backend backend = Backend::kAuto;
  std::int32_t num_threads = 0;    // CPU threads; 0: one per processor this process may use. Results do not depend on it
  void* cuda_stream = nullptr;     // cudaStream_t; null: the default stream
  bool trust_indices = false;      // skip the check of block_ids, page_table and slots. A wrong id is then undefined behaviour
  Workspace* workspace = nullptr;  // null on the CPU: the call allocates what it needs and frees it
};

}  // namespace openmsa
