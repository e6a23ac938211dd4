// Stands in for the CUDA runtime's header: qualifiers, built-in variables, vector types, the intrinsics that our kernels use, and the
// few host calls of src/cuda.
#pragma once

#include <math.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.hpp"

// Kernels in headers may be seen by several sources.
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
// Standard headers say __attribute__((__noinline__)), so this has to stay a valid attribute list.
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// A section of its own, which the emulator fills with what the CTA has there whose thread runs.
#define __shared__ static __attribute__((section("openmsa_shared")))
#define __constant__ static

using uint3 = ::openmsa::emulation::Index;
inline constexpr const uint3& threadIdx = ::openmsa::emulation::position.thread;
inline constexpr const uint3& blockIdx = ::openmsa::emulation::position.block;
inline constexpr const uint3& blockDim = ::openmsa::emulation::position.block_dim;
inline constexpr const uint3& gridDim = ::openmsa::emulation::position.grid_dim;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct float3 {
  float x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- barriers and exchanges ----

inline void __syncthreads() { ::openmsa::emulation::sync_threads(false); }
inline int __syncthreads_or(int x) { return ::openmsa::emulation::sync_threads(x != 0).any; }
inline int __syncthreads_and(int x) { return ::openmsa::emulation::sync_threads(x != 0).all; }
inline int __syncthreads_count(int x) { return ::openmsa::emulation::sync_threads(x != 0).count; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::openmsa::emulation::meet_warp("__syncwarp", mask, nullptr, nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace openmsa::emulation {

struct Exchange {
  std::uint64_t value;
  int from;  // lane
  std::uint64_t result;
};

template <typename T>
T exchange(const char* instruction, unsigned mask, T value, int from) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Exchange mine{0, from, 0};
  std::memcpy(&mine.value, &value, sizeof value);
  meet_warp(instruction, mask, &mine, [](void* const(&lanes)[32], std::uint32_t present) {
    for (int i = 0; i < 32; ++i) {
      if ((present >> i & 1) == 0) continue;
      auto* to = static_cast<Exchange*>(lanes[i]);
      if ((present >> to->from & 1) == 0) fail("shuffles a value out of a lane that takes no part");
      to->result = static_cast<Exchange*>(lanes[to->from])->value;
    }
  });
  std::memcpy(&value, &mine.result, sizeof value);
  return value;
}

// What all lanes of the mask bring, by lane; zero for lanes outside.
struct Gathered {
  std::uint32_t mine, present, lanes[32];
};
inline Gathered gather(const char* instruction, unsigned mask, std::uint32_t value) {
  Gathered all{value, 0, {}};
  meet_warp(instruction, mask, &all, [](void* const(&lanes)[32], std::uint32_t present) {
    for (int i = 0; i < 32; ++i) {
      if ((present >> i & 1) == 0) continue;
      auto* to = static_cast<Gathered*>(lanes[i]);
      to->present = present;
      for (int j = 0; j < 32; ++j) {
        if ((present >> j & 1) != 0) to->lanes[j] = static_cast<Gathered*>(lanes[j])->mine;
      }
    }
  });
  return all;
}
template <typename T, typename F>
T reduce(const char* instruction, unsigned mask, T value, F&& combine) {
  const Gathered all = gather(instruction, mask, static_cast<std::uint32_t>(value));
  bool first = true;
  T result{};
  for (int i = 0; i < 32; ++i) {
    if ((all.present >> i & 1) == 0) continue;
    const T x = static_cast<T>(all.lanes[i]);
    result = first ? x : combine(result, x);
    first = false;
  }
  return result;
}
inline unsigned ballot(const char* instruction, unsigned mask, bool vote) {
  const Gathered all = gather(instruction, mask, vote);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= all.lanes[i] << i;
  return votes;
}

}  // namespace openmsa::emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int segment = ::openmsa::emulation::lane() / width * width;
  return ::openmsa::emulation::exchange("__shfl_sync", mask, value, segment + (from & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = ::openmsa::emulation::lane(), from = lane ^ bits;
  return ::openmsa::emulation::exchange("__shfl_xor_sync", mask, value, from / width > lane / width ? lane : from);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = ::openmsa::emulation::lane(), from = lane - static_cast<int>(delta);
  return ::openmsa::emulation::exchange("__shfl_up_sync", mask, value, from < lane / width * width ? lane : from);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = ::openmsa::emulation::lane(), from = lane + static_cast<int>(delta);
  return ::openmsa::emulation::exchange("__shfl_down_sync", mask, value, from >= lane / width * width + width ? lane : from);
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return ::openmsa::emulation::ballot("__ballot_sync", mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return ::openmsa::emulation::ballot("__any_sync", mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return ::openmsa::emulation::ballot("__all_sync", mask, vote == 0) == 0; }
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return ::openmsa::emulation::reduce("__reduce_add_sync", mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return ::openmsa::emulation::reduce("__reduce_min_sync", mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return ::openmsa::emulation::reduce("__reduce_max_sync", mask, value, [](T a, T b) { return a < b ? b : a; });
}

// ---- memory ----

template <typename T>
T atomicAdd(T* target, std::type_identity_t<T> value) {
  const T before = *target;
  *target = before + value;
  return before;
}
template <typename T>
T atomicMax(T* target, std::type_identity_t<T> value) {
  const T before = *target;
  if (before < value) *target = value;
  return before;
}
template <typename T>
T atomicMin(T* target, std::type_identity_t<T> value) {
  const T before = *target;
  if (value < before) *target = value;
  return before;
}
template <typename T>
T atomicOr(T* target, std::type_identity_t<T> value) {
  const T before = *target;
  *target = before | value;
  return before;
}
template <typename T>
T atomicExch(T* target, std::type_identity_t<T> value) {
  const T before = *target;
  *target = value;
  return before;
}
template <typename T>
T atomicCAS(T* target, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const T before = *target;
  if (before == expected) *target = value;
  return before;
}

namespace openmsa::emulation {
// A GPU faults on an access that is not aligned to its size.
template <typename T>
void check_aligned(const T* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) != 0) fail("accesses memory that is not aligned to the access");
}
}  // namespace openmsa::emulation
template <typename T>
T __ldg(const T* source) {
  ::openmsa::emulation::check_aligned(source);
  return *source;
}
template <typename T>
T __ldcs(const T* source) {
  return __ldg(source);
}
template <typename T>
T __ldcg(const T* source) {
  return __ldg(source);
}
template <typename T>
void __stcs(T* target, std::type_identity_t<T> value) {
  ::openmsa::emulation::check_aligned(target);
  *target = value;
}
template <typename T>
void __stcg(T* target, std::type_identity_t<T> value) {
  __stcs(target, value);
}

// ---- arithmetic ----

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;  // bit 3, which would spread a sign, is not modelled
    result |= static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> 8 * (choice & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline int __vimin3_s32(int a, int b, int c) { return min(min(a, b), c); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// Arithmetic of a GPU gives one NaN, positive; that of the CPU others, often negative. Kernels take bits of results only.
inline unsigned __float_as_uint(float x) { return std::isnan(x) ? 0x7fffffffu : std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
// glibc declares, but does not have, functions of these names.
#define __expf(x) ::expf(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

// ---- host ----

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidClusterSize = 912
};
using cudaStream_t = void*;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
inline constexpr unsigned long long cudaEnableDefault = 0;
inline constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream);
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int cooperative, programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace openmsa::emulation {
cudaError_t allow_smem(const void* kernel, int bytes);
cudaError_t check_launch(const void* kernel, const cudaLaunchConfig_t& config);
bool is_together(const cudaLaunchConfig_t& config);     // a cooperative launch
unsigned cluster_of(const cudaLaunchConfig_t& config);  // CTAs; 0: of a shape that is not emulated
}  // namespace openmsa::emulation

template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
  return ::openmsa::emulation::allow_smem(reinterpret_cast<const void*>(kernel), bytes);
}
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Args&... args) {
  const auto* name = reinterpret_cast<const void*>(kernel);
  const cudaError_t status = ::openmsa::emulation::check_launch(name, *config);
  if (status != cudaSuccess) return status;
  const auto index = [](const dim3& x) { return ::openmsa::emulation::Index{x.x, x.y, x.z}; };
  ::openmsa::emulation::run_grid(
      name, index(config->gridDim), index(config->blockDim), config->dynamicSmemBytes, [&] { kernel(args...); },
      ::openmsa::emulation::is_together(*config), ::openmsa::emulation::cluster_of(*config));
  return cudaSuccess;
}
