// Integer arithmetic that refuses to overflow: shapes come from outside, and a product that wraps becomes a wrong address.
#pragma once

#include "openmsa/error.hpp"

namespace openmsa::core {

template <typename T>
T checked_mul(T a, T b) {
  T result;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw Error(
        ErrorCode::kInvalidArgument, "",
        "size overflow: " + std::to_string(a) + " x " + std::to_string(b) + " does not fit its integer type; use smaller shapes");
  }
  return result;
}

template <typename T>
T checked_add(T a, T b) {
  T result;
  if (__builtin_add_overflow(a, b, &result)) {
    throw Error(
        ErrorCode::kInvalidArgument, "",
        "size overflow: " + std::to_string(a) + " + " + std::to_string(b) + " does not fit its integer type; use smaller shapes");
  }
  return result;
}

}  // namespace openmsa::core
