// The host calls of src/cuda, and what src/cuda would link with on a machine with CUDA.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda/fault.hpp"

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidClusterSize: return "invalid cluster size";
  }
  return "unknown error";
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = openmsa::emulation::options().num_multiprocessors;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *entry = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

namespace openmsa::emulation {
namespace {
std::map<const void*, int> allowed_smem;

// Null where the launch does not say.
const cudaLaunchAttribute* find_attribute(const cudaLaunchConfig_t& config, cudaLaunchAttributeID id) {
  const cudaLaunchAttribute *begin = config.attrs, *end = begin + config.numAttrs;
  const auto* found = std::find_if(begin, end, [id](const cudaLaunchAttribute& attribute) { return attribute.id == id; });
  return found == end ? nullptr : found;
}
}  // namespace

cudaError_t allow_smem(const void* kernel, int bytes) {
  if (bytes > static_cast<int>(kMaxSmemBytes)) return cudaErrorInvalidValue;
  allowed_smem[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t check_launch(const void* kernel, const cudaLaunchConfig_t& config) {
  constexpr std::size_t kDefaultSmemBytes = std::size_t{48} << 10;
  const std::size_t threads = std::size_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z;
  const std::size_t ctas = std::size_t{config.gridDim.x} * config.gridDim.y * config.gridDim.z;
  if (threads == 0 || threads > std::size_t{kMaxThreads} || ctas == 0) return cudaErrorInvalidConfiguration;
  if (config.gridDim.x > 0x7fffffffu || config.gridDim.y > 65535 || config.gridDim.z > 65535) return cudaErrorInvalidConfiguration;
  constexpr unsigned kMaxCluster = 8;  // without asking for more
  const unsigned cluster = cluster_of(config);
  if (cluster == 0 || cluster > kMaxCluster || config.gridDim.x % cluster != 0) return cudaErrorInvalidClusterSize;
  const auto found = allowed_smem.find(kernel);
  const std::size_t allowed = found == allowed_smem.end() ? kDefaultSmemBytes : static_cast<std::size_t>(found->second);
  return config.dynamicSmemBytes <= allowed ? cudaSuccess : cudaErrorInvalidValue;
}

bool is_together(const cudaLaunchConfig_t& config) {
  const cudaLaunchAttribute* cooperative = find_attribute(config, cudaLaunchAttributeCooperative);
  return cooperative != nullptr && cooperative->val.cooperative != 0;
}

unsigned cluster_of(const cudaLaunchConfig_t& config) {
  const cudaLaunchAttribute* cluster = find_attribute(config, cudaLaunchAttributeClusterDimension);
  if (cluster == nullptr) return 1;
  const auto& dim = cluster->val.clusterDim;
  return dim.y == 1 && dim.z == 1 ? dim.x : 0;
}

}  // namespace openmsa::emulation

namespace openmsa::cuda {

std::int32_t* fault_claim() {
  static std::int32_t claim = 0;
  return &claim;
}

}  // namespace openmsa::cuda
