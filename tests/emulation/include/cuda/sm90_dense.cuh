// The kernel's own source. Its clusters are declared (__cluster_dims__), not asked for by the launch, and a function in plain C++ cannot
// carry that; so the kernel's name stands for an object here, which is launched in clusters of that size.
#pragma once

#define __cluster_dims__(x, y, z)
#define sm90_dense_kernel sm90_dense_bare_kernel
#include "../../../../src/cuda/sm90_dense.cuh"
#undef sm90_dense_kernel
#undef __cluster_dims__

#include "cuda/launch.hpp"

namespace openmsa::cuda {

template <typename Traits>
struct DenseKernel {};
template <typename Traits>
inline constexpr DenseKernel<Traits> sm90_dense_kernel{};

inline DenseMode last_dense_mode;  // of the last launch

template <typename T, int kHeadDim, int kBlock, DenseMode kMode, typename... Args>
void launch(DenseKernel<DenseTraits<T, kHeadDim, kBlock, kMode>>, dim3 grid, int threads, std::size_t smem_bytes, void* stream,
            Order order, const Args&... args) {
  using Traits = DenseTraits<T, kHeadDim, kBlock, kMode>;
  last_dense_mode = kMode;
  launch_clusters(sm90_dense_bare_kernel<Traits>, Traits::kCluster, grid, threads, smem_bytes, stream, order, args...);
}

}  // namespace openmsa::cuda
