// What this build can do on this machine: version, backends, kernels. Feeds `openmsa info`, error texts and tests.
#pragma once

#include <string>
#include <vector>

#include "openmsa/workspace.hpp"

namespace openmsa {

// "0.1.0"
const char* version();

struct BackendInfo {
  Backend backend = Backend::kCpu;
  bool compiled = false;   // part of this build
  bool available = false;  // usable on this machine now
  std::string detail;      // SIMD target and threads, GPU name, or the reason why it is not available
};
std::vector<BackendInfo> list_backends();

// One row of the kernel registry.
struct KernelInfo {
  std::string stage;  // "block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "dense_attention"
  Backend backend = Backend::kCpu;
  std::string name;      // "cpu_score"
  std::string supports;  // "float32|bfloat16|float16, head_dim 16..256 step 16, ..."
};
std::vector<KernelInfo> list_kernels();

}  // namespace openmsa
