// From run-time sizes to compile-time instances: one place per axis, so that the registry's limits and the instances agree.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <type_traits>
#include <utility>

#include "openmsa/error.hpp"
#include "openmsa/tensor.hpp"

namespace openmsa::cuda {

template <int kValue>
using Size = std::integral_constant<int, kValue>;

// Calls f with the first listed size that equals `value` (or, for with_bound, is not below it). The registry keeps others away.
template <int... kSizes, typename F>
void with_size(int value, F&& f) {
  if (!((value == kSizes && (f(Size<kSizes>{}), true)) || ...)) {
    throw Error(ErrorCode::kUnsupported, "", "size " + std::to_string(value) + " has no compiled instance");
  }
}
template <int... kSizes, typename F>
void with_bound(int value, F&& f) {
  if (!((value <= kSizes && (f(Size<kSizes>{}), true)) || ...)) {
    throw Error(ErrorCode::kUnsupported, "", "size " + std::to_string(value) + " is above every compiled instance");
  }
}

template <typename F>
void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kBF16) {
    f(__nv_bfloat16{});
  } else {
    f(__half{});
  }
}

// log2 of the group size rounded up to a power of two: rows of a tile are tokens times this many heads.
inline int log2_ceil(int group_size) { return std::bit_width(static_cast<unsigned>(group_size - 1)); }

}  // namespace openmsa::cuda
