// What the backward passes add to the forward's tiles: rows in the layout of a PV tile's values, and the tile that sums over query
// rows into keys. Compiled once per SIMD target.
//
// A row that does not see a key never enters the key's sums, nor the key the row's: what is skipped is never multiplied by zero, so
// a NaN stays where the mathematics has it. Values of invisible pairs may therefore be anything.
#if defined(OPENMSA_CPU_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_GRADIENT_INL_H_
#undef OPENMSA_CPU_GRADIENT_INL_H_
#else
#define OPENMSA_CPU_GRADIENT_INL_H_
#endif

#include <algorithm>

#include "cpu/attention-inl.h"
#include "cpu/gradient.hpp"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

alignas(64) inline constexpr float kOnes[kMaxPanelRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Rows given by their addresses, in fp32 panels of kPvVecs vectors of d, each [num_rows][width].
HWY_INLINE void pack_row_values(DType dtype, const std::byte* const* rows, std::size_t num_rows, std::size_t dim,
                                float* HWY_RESTRICT out) {
  constexpr std::size_t kWidth = kPvVecs * kLanes;
  with_storage_type(dtype, [&](auto type) {
    for (std::size_t begin = 0; begin < dim; begin += kWidth) {
      const std::size_t width = std::min(kWidth, dim - begin);
      for (std::size_t r = 0; r < num_rows; ++r) {
        float* const at = out + begin * num_rows + r * width;
        for (std::size_t d = 0; d < width; d += kLanes) {
          hn::Store(load_f32<decltype(type)::value>(kFloats, rows[r], begin + d), kFloats, at + d);
        }
      }
    }
  });
}

// sums[i][d] += sum over rows [begin, end) of weights[i][row] * x[row][d], for kNumKeys keys and kVecs vectors of d.
template <int kNumKeys, int kVecs, std::size_t kPitch>
HWY_INLINE void key_tile(const float* HWY_RESTRICT weights, const float* HWY_RESTRICT x, std::size_t begin, std::size_t end,
                         float* sums, std::int64_t stride_sums) {
  Vec acc[kNumKeys][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kNumKeys; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::LoadU(kFloats, sums + i * stride_sums + v * kLanes);
  }
  for (std::size_t r = begin; r < end; ++r) {
    Vec values[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) values[v] = hn::Load(kFloats, x + (r * kVecs + v) * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kNumKeys; ++i) {
      const Vec weight = hn::Set(kFloats, weights[i * kPitch + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::MulAdd(weight, values[v], acc[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kNumKeys; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) hn::StoreU(acc[i][v], kFloats, sums + i * stride_sums + v * kLanes);
  }
}

// first_row[j]: the first of the panel's rows that sees key j; ascending in j, as the rows' numbers of visible keys are.
template <int kNumKeys, int kVecs, std::size_t kPitch>
HWY_INLINE void key_rows_sum(const std::int32_t* first_row, std::size_t num_rows, const float* HWY_RESTRICT weights,
                             const float* HWY_RESTRICT x, float* sums, std::int64_t stride_sums) {
  const auto common = static_cast<std::size_t>(first_row[kNumKeys - 1]);
  for (int i = 0; i < kNumKeys - 1; ++i) {
    const auto first = static_cast<std::size_t>(first_row[i]);
    if (HWY_LIKELY(first == common)) break;
    key_tile<1, kVecs, kPitch>(weights + i * kPitch, x, first, common, sums + i * stride_sums, stride_sums);
  }
  key_tile<kNumKeys, kVecs, kPitch>(weights, x, common, num_rows, sums, stride_sums);
}

template <int kVecs, std::size_t kPitch>
HWY_NOINLINE void key_panel(const std::int32_t* first_row, std::size_t num_keys, std::size_t num_rows, const float* weights,
                            const float* x, float* sums, std::int64_t stride_sums) {
  std::size_t j = 0;
  const auto sum = [&](auto count) {
    key_rows_sum<decltype(count)::value, kVecs, kPitch>(first_row + j, num_rows, weights + j * kPitch, x,
                                                        sums + static_cast<std::int64_t>(j) * stride_sums, stride_sums);
    j += decltype(count)::value;
  };
  while (j + kRows <= num_keys) sum(std::integral_constant<int, kRows>{});
  if constexpr (kRows > 4) {
    if (num_keys - j >= 4) sum(std::integral_constant<int, 4>{});
  }
  if (num_keys - j >= 2) sum(std::integral_constant<int, 2>{});
  if (num_keys - j == 1) sum(std::integral_constant<int, 1>{});
}

// sums[j][:] += sum over the rows that see key j of weights[j][row] * x[row][:]; x as pack_row_values writes it.
template <std::size_t kPitch>
HWY_INLINE void add_to_keys(const std::int32_t* first_row, std::size_t num_keys, std::size_t num_rows, const float* weights,
                            const float* x, std::size_t dim, float* sums, std::int64_t stride_sums) {
  constexpr std::size_t kWidth = kPvVecs * kLanes;
  for (std::size_t column = 0; column < dim; column += kWidth) {
    const float* const values = x + column * num_rows;
    const auto add = [&](auto vecs) {
      key_panel<decltype(vecs)::value, kPitch>(first_row, num_keys, num_rows, weights, values, sums + column, stride_sums);
    };
    switch (std::min<std::size_t>(kPvVecs, (dim - column) / kLanes)) {
      case 1: add(std::integral_constant<int, 1>{}); break;
      case 2: add(std::integral_constant<int, 2>{}); break;
      case 3: add(std::integral_constant<int, std::min(3, kPvVecs)>{}); break;
      default: add(std::integral_constant<int, kPvVecs>{}); break;
    }
  }
}

// sums[row][:] += sum over the keys that the row sees of weights[key][row] * values[key][:]; values as pack_values writes them.
template <std::size_t kPitch>
HWY_INLINE void add_to_rows(const Panel& panel, const float* weights, const float* values, std::size_t num_keys, std::size_t dim,
                            float* sums) {
  constexpr std::size_t kWidth = kPvVecs * kLanes;
  for (std::size_t column = 0; column < dim; column += kWidth) {
    const float* const part = values + column * num_keys;
    switch (std::min<std::size_t>(kPvVecs, (dim - column) / kLanes)) {
      case 1: pv_panel<1>(panel, weights, kPitch, part, column, dim, kOnes, sums); break;
      case 2: pv_panel<2>(panel, weights, kPitch, part, column, dim, kOnes, sums); break;
      case 3: pv_panel<std::min(3, kPvVecs)>(panel, weights, kPitch, part, column, dim, kOnes, sums); break;
      default: pv_panel<kPvVecs>(panel, weights, kPitch, part, column, dim, kOnes, sums); break;
    }
  }
}

// Fills first_row for the panel's keys and returns how many keys its last row sees.
HWY_INLINE std::size_t find_first_rows(const Panel& panel, std::int32_t* first_row) {
  const std::int32_t num_keys = panel.limit[panel.num_rows - 1];
  std::int32_t j = 0;
  for (std::size_t r = 0; r < panel.num_rows; ++r) {
    for (; j < panel.limit[r]; ++j) first_row[j] = static_cast<std::int32_t>(r);
  }
  return static_cast<std::size_t>(num_keys);
}

// Rows [begin, end) of fp32 sums to storage.
HWY_INLINE void store_sums(DType dtype, const float* sums, std::size_t dim, std::byte* out) {
  with_storage_type(dtype, [&](auto type) {
    for (std::size_t d = 0; d < dim; d += kLanes) {
      store_f32<decltype(type)::value>(kFloats, hn::LoadU(kFloats, sums + d), out, d);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_GRADIENT_INL_H_
