// Host side of a launch: device guard, error check, dependent launch, tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "core/params.hpp"
#include "cuda/params.hpp"

namespace openmsa::cuda {

// Throws Error(kDevice) with the runtime's own words.
void check(cudaError_t status, const char* what);

class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

int num_multiprocessors();  // of the current device

enum class Order {
  kAfter,      // starts when the kernel before it has finished
  kDependent,  // may start while the kernel before it is still finishing; it then calls griddepcontrol.wait itself
  kTogether,   // all CTAs are resident at once, so that they may wait for each other (cooperative_groups)
};

// In clusters of `cluster` CTAs, neighbours in x, of which the grid has a multiple.
template <typename... Args>
void launch_clusters(void (*kernel)(Args...), int cluster, dim3 grid, int threads, std::size_t smem_bytes, void* stream,
                     Order order, Args... args) {
  constexpr std::size_t kDefaultSmemBytes = std::size_t{48} << 10;  // more has to be asked for
  if (smem_bytes > kDefaultSmemBytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes)),
          "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (order == Order::kDependent) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  } else if (order == Order::kTogether) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

template <typename... Args>
void launch(void (*kernel)(Args...), dim3 grid, int threads, std::size_t smem_bytes, void* stream, Order order, Args... args) {
  launch_clusters(kernel, 1, grid, threads, smem_bytes, stream, order, args...);
}

inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// A row-major tensor of 2-byte elements, innermost axis first, outer strides in bytes, read in boxes with a 128-byte swizzle; what
// lies outside the tensor reads as zero and is not written.
CUtensorMap make_tensor_map(const void* data, DType dtype, std::initializer_list<std::int64_t> size,
                            std::initializer_list<std::int64_t> stride_bytes, std::initializer_list<std::int64_t> box);

// [T, H, D] as (dim, head, token), a box being 64 dims of `box_heads` heads of `box_tokens` tokens.
CUtensorMap row_map(const TensorView& rows, std::int32_t box_heads, std::int32_t box_tokens = 1);

// [S, Hkv, D] or [num_pages, Hkv, Bk, D] as (dim, token, head, page), a box being 64 dims of one block, or of `box_tokens` of its
// tokens; for index keys num_heads 1.
CUtensorMap key_map(const core::KeyBlocks& keys, const core::Geometry& geo, std::int32_t dim, std::int32_t num_heads,
                    std::int32_t box_tokens = 0);

BatchParams batch_params(const core::Geometry& geo);

}  // namespace openmsa::cuda
