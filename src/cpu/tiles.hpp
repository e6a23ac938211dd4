// Sizes that hold for every SIMD target, so that scratch can be laid out before dispatch has chosen one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace openmsa::cpu {

inline constexpr std::size_t kMaxLanes = 16;      // floats in the widest vector
inline constexpr std::size_t kMaxPanelRows = 48;  // rows of the widest QK tile
inline constexpr std::size_t kMaxDim = 256;

// What missing rows of a pack point at: all-zero bits are 0 in every storage type.
alignas(64) inline constexpr float kZeroRow[kMaxDim] = {};

constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }
constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t step) { return (value + step - 1) / step; }

}  // namespace openmsa::cpu
