// TensorView: a non-owning strided view of memory on one device. The library never owns or frees tensor memory, and never
// writes through a view that an args struct lists as an input.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "openmsa/half.hpp"

namespace openmsa {

enum class DType : std::uint8_t {
  kF64,  // the reference backend alone
  kF32,
  kBF16,
  kF16,
  kI32,
  kI64,  // slots of a paged cache alone
};

// Bytes per element.
constexpr std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
  }
  return 0;
}

// "float64", "float32", "bfloat16", "float16", "int32", "int64": the words PyTorch and NumPy use.
const char* dtype_name(DType dtype);

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 4;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;                                 // 0 with data == nullptr means "not given"
  std::array<std::int64_t, kMaxRank> shape{};   // elements
  std::array<std::int64_t, kMaxRank> stride{};  // elements, not bytes
  Device device{};

  // A tensor with zero elements may have a null pointer, so "given" is decided by the rank.
  bool given() const { return rank > 0; }
  std::int64_t numel() const {
    std::int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
};

// A dense row-major view of `data` with the given shape. Constness is dropped: inputs are never written.
TensorView make_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

template <typename T>
inline constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kF64;
template <>
inline constexpr DType kDTypeOf<float> = DType::kF32;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kF16;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kI32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kI64;

// Same, the dtype taken from the pointer: make_view(q.data(), {T, Hq, D}).
template <typename T>
TensorView make_view(const T* data, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return make_view(static_cast<const void*>(data), kDTypeOf<T>, shape, device);
}

}  // namespace openmsa
