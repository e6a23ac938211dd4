// One step of online softmax attention: a panel of query rows meets one key block. Shared by attend.cpp (rows gathered by their
// selection) and dense.cpp (rows that follow each other). Compiled once per SIMD target.
//
// Per panel: scores S[key][row] by QK tiles, running maxima; probabilities P = 2^(c * S - c * max), c = scale * log2(e), written
// over S; then O = O * 2^(c * (old max - new max)) + P V by PV tiles, in fp32 rows of the worker's scratch.
// A key that a row does not see never enters its products: a zero probability times a NaN would be a NaN.
#if defined(OPENMSA_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_ATTENTION_INL_H_
#undef OPENMSA_CPU_ATTENTION_INL_H_
#else
#define OPENMSA_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention.hpp"
#include "cpu/gemm-inl.h"
#include "cpu/softmax-inl.h"
#include "openmsa/tensor.hpp"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A key block in fp32: K as rows, V as panels of kPvVecs vectors of d, each [num_keys][width].
struct BlockKv {
  KeyRows keys;
  const float* values;
  std::size_t num_keys;
  std::size_t dim;
};

HWY_INLINE void pack_values(const std::byte* values, DType dtype, std::int64_t stride_bytes, std::size_t num_keys, std::size_t dim,
                            float* HWY_RESTRICT out) {
  constexpr std::size_t kWidth = kPvVecs * kLanes;
  with_storage_type(dtype, [&](auto type) {
    for (std::size_t begin = 0; begin < dim; begin += kWidth) {
      const std::size_t width = std::min(kWidth, dim - begin);
      float* HWY_RESTRICT panel = out + begin * num_keys;
      for (std::size_t j = 0; j < num_keys; ++j) {
        const std::byte* row = values + static_cast<std::int64_t>(j) * stride_bytes;
        for (std::size_t d = 0; d < width; d += kLanes) {
          hn::Store(load_f32<decltype(type)::value>(kFloats, row, begin + d), kFloats, panel + j * width + d);
        }
      }
    }
  });
}

// Rows that meet a block together. Only the first num_rows of the packs' lanes are real rows; the others have limit 0.
struct Panel {
  const float* q[kQkVecs];
  std::size_t num_rows;
  alignas(64) std::int32_t limit[kPanelRows];  // keys of the block that each row sees
  alignas(64) std::int32_t row[kPanelRows];    // its place in the scratch's row_max, row_sum and out
};

struct PanelScratch {
  float* scores;  // [Bk][kPanelRows]
  float* row_max;
  float* row_sum;
  float* out;  // [row][D]
};

template <int kVecs>
HWY_INLINE void panel_scores(const Panel& panel, const BlockKv& block, std::size_t num_keys, bool masked,
                             float* HWY_RESTRICT scores, Vec (&best)[kVecs]) {
  const hn::RebindToSigned<Floats> di;
  const Vec minus_infinity = hn::Set(kFloats, kMinusInfinity);
  for (int v = 0; v < kVecs; ++v) best[v] = minus_infinity;
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kVecs];
    qk_tile<kVecs>(panel.q, block.keys.data + j * block.keys.stride, block.keys.stride, block.dim, acc);
    if (masked) {
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const auto sees = hn::Gt(hn::Load(di, panel.limit + v * kLanes), hn::Set(di, static_cast<std::int32_t>(j) + i));
          acc[i][v] = hn::IfThenElse(hn::RebindMask(kFloats, sees), acc[i][v], minus_infinity);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        best[v] = hn::Max(best[v], acc[i][v]);
        hn::Store(acc[i][v], kFloats, scores + ((j + i) * kVecs + v) * kLanes);
      }
    }
  }
}

// Turns scores into probabilities and updates the rows' state; scale[r] is what the rows' sums so far must be multiplied by.
template <int kVecs>
HWY_INLINE void panel_softmax(const Panel& panel, std::size_t num_keys, float log2_scale, const Vec (&best)[kVecs],
                              const PanelScratch& scratch, float* HWY_RESTRICT scale) {
  constexpr std::size_t kPitch = kVecs * kLanes;
  alignas(64) float old_max[kPitch], new_max[kPitch], sum[kPitch];
  for (std::size_t r = 0; r < kPitch; ++r) {
    old_max[r] = r < panel.num_rows ? scratch.row_max[panel.row[r]] : kMinusInfinity;
    sum[r] = r < panel.num_rows ? scratch.row_sum[panel.row[r]] : 0.0f;
  }
  const Vec c = hn::Set(kFloats, log2_scale);
  const Vec minus_infinity = hn::Set(kFloats, kMinusInfinity);
  Vec offset[kVecs], total[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    const Vec before = hn::Load(kFloats, old_max + v * kLanes);
    const Vec now = hn::Max(before, best[v]);
    hn::Store(now, kFloats, new_max + v * kLanes);
    // Where all scores so far are -inf the maximum cannot be subtracted: -inf minus -inf. 0 gives the right probabilities, 0.
    offset[v] = hn::Mul(hn::IfThenZeroElse(hn::Eq(now, minus_infinity), now), c);
    const Vec factor = exp2_nonpositive(kFloats, hn::Sub(hn::Mul(before, c), offset[v]));
    hn::Store(factor, kFloats, scale + v * kLanes);
    total[v] = hn::Mul(hn::Load(kFloats, sum + v * kLanes), factor);
  }
  float* HWY_RESTRICT p = scratch.scores;
  for (std::size_t j = 0; j < num_keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* at = p + (j * kVecs + v) * kLanes;
      const Vec probability = exp2_nonpositive(kFloats, hn::MulSub(hn::Load(kFloats, at), c, offset[v]));
      hn::Store(probability, kFloats, at);
      total[v] = hn::Add(total[v], probability);
    }
  }
  for (int v = 0; v < kVecs; ++v) hn::Store(total[v], kFloats, sum + v * kLanes);
  for (std::size_t r = 0; r < panel.num_rows; ++r) {
    scratch.row_max[panel.row[r]] = new_max[r];
    scratch.row_sum[panel.row[r]] = sum[r];
  }
}

// kNumRows rows of the panel from row `first` on, columns `column` .. + kVecs vectors.
template <int kNumRows, int kVecs>
HWY_INLINE void pv_rows(const Panel& panel, std::size_t first, const float* HWY_RESTRICT p, std::size_t pitch,
                        const float* HWY_RESTRICT values, std::size_t column, std::size_t dim, const float* scale, float* out) {
  static constexpr float kOne = 1.0f;
  float* o[kNumRows];
  std::int32_t common = panel.limit[first];
  bool ragged = false;
  for (int r = 0; r < kNumRows; ++r) {
    o[r] = out + static_cast<std::size_t>(panel.row[first + r]) * dim;
    ragged = ragged || panel.limit[first + r] != common;
    common = std::min(common, panel.limit[first + r]);
  }
  const auto num_common = static_cast<std::size_t>(common);
  pv_tile<kNumRows, kVecs>(p + first, pitch, values, num_common, o, column, scale + first);
  if (HWY_LIKELY(!ragged)) return;
  for (int r = 0; r < kNumRows; ++r) {
    const std::size_t more = static_cast<std::size_t>(panel.limit[first + r]) - num_common;
    if (more == 0) continue;
    pv_tile<1, kVecs>(p + num_common * pitch + first + r, pitch, values + num_common * kVecs * kLanes, more, &o[r], column, &kOne);
  }
}

template <int kVecs>
HWY_NOINLINE void pv_panel(const Panel& panel, const float* p, std::size_t pitch, const float* values, std::size_t column,
                           std::size_t dim, const float* scale, float* out) {
  std::size_t first = 0;
  for (; first + kRows <= panel.num_rows; first += kRows) {
    pv_rows<kRows, kVecs>(panel, first, p, pitch, values, column, dim, scale, out);
  }
  if constexpr (kRows > 4) {
    if (panel.num_rows - first >= 4) {
      pv_rows<4, kVecs>(panel, first, p, pitch, values, column, dim, scale, out);
      first += 4;
    }
  }
  if (panel.num_rows - first >= 2) {
    pv_rows<2, kVecs>(panel, first, p, pitch, values, column, dim, scale, out);
    first += 2;
  }
  if (panel.num_rows - first == 1) pv_rows<1, kVecs>(panel, first, p, pitch, values, column, dim, scale, out);
}

// block_max, where given, receives the panel's largest raw scores, NaN where a row's scores hold one.
template <int kVecs>
HWY_NOINLINE void attend_panel(const Panel& panel, const BlockKv& block, float log2_scale, const PanelScratch& scratch,
                               float* block_max) {
  constexpr std::size_t kPitch = kVecs * kLanes;
  std::int32_t most = 0, fewest = std::numeric_limits<std::int32_t>::max();
  for (std::size_t r = 0; r < panel.num_rows; ++r) {
    most = std::max(most, panel.limit[r]);
    fewest = std::min(fewest, panel.limit[r]);
  }
  const std::size_t num_keys = static_cast<std::size_t>(most);
  const bool masked = fewest < most || num_keys % kKeys != 0;
  Vec best[kVecs];
  panel_scores<kVecs>(panel, block, num_keys, masked, scratch.scores, best);
  if (block_max != nullptr) {
    for (int v = 0; v < kVecs; ++v) {
      Vec nan = hn::Zero(kFloats);
      for (std::size_t j = 0; j < num_keys; ++j) {
        const Vec s = hn::Load(kFloats, scratch.scores + (j * kVecs + v) * kLanes);
        nan = hn::IfThenElse(hn::IsNaN(s), s, nan);
      }
      hn::Store(hn::IfThenElse(hn::IsNaN(nan), nan, best[v]), kFloats, block_max + v * kLanes);
    }
  }
  alignas(64) float scale[kPitch];
  panel_softmax<kVecs>(panel, num_keys, log2_scale, best, scratch, scale);

  constexpr std::size_t kWidth = kPvVecs * kLanes;
  for (std::size_t column = 0; column < block.dim; column += kWidth) {
    const float* values = block.values + column * block.num_keys;
    switch (std::min<std::size_t>(kPvVecs, (block.dim - column) / kLanes)) {
      case 1: pv_panel<1>(panel, scratch.scores, kPitch, values, column, block.dim, scale, scratch.out); break;
      case 2: pv_panel<2>(panel, scratch.scores, kPitch, values, column, block.dim, scale, scratch.out); break;
      case 3: pv_panel<std::min(3, kPvVecs)>(panel, scratch.scores, kPitch, values, column, block.dim, scale, scratch.out); break;
      default: pv_panel<kPvVecs>(panel, scratch.scores, kPitch, values, column, block.dim, scale, scratch.out); break;
    }
  }
}

// How many packs the next panel takes when vecs_left remain: 2 + 2 runs faster than 3 + 1.
HWY_INLINE std::size_t panel_vecs(std::size_t vecs_left) { return vecs_left == 4 ? 2 : std::min<std::size_t>(vecs_left, kQkVecs); }

HWY_INLINE void attend_panel_of(std::size_t vecs, const Panel& panel, const BlockKv& block, float log2_scale,
                                const PanelScratch& scratch, float* block_max) {
  switch (vecs) {
    case 1: attend_panel<1>(panel, block, log2_scale, scratch, block_max); break;
    case 2: attend_panel<2>(panel, block, log2_scale, scratch, block_max); break;
    default: attend_panel<3>(panel, block, log2_scale, scratch, block_max); break;
  }
}

// out = sums / row_sum and lse = ln(row_sum) + scaled maximum of one row; exact zeros and -inf where the row saw no key.
template <DType kType>
HWY_INLINE void store_row(const float* HWY_RESTRICT sums, float row_max, float row_sum, bool sees_keys, float log2_scale,
                          std::size_t dim, std::byte* out, float* lse) {
  constexpr double kLn2 = 0.69314718055994530942;
  if (!sees_keys) {
    for (std::size_t d = 0; d < dim; d += kLanes) store_f32<kType>(kFloats, hn::Zero(kFloats), out, d);
    if (lse != nullptr) *lse = kMinusInfinity;
    return;
  }
  const Vec divisor = hn::Set(kFloats, row_sum);
  for (std::size_t d = 0; d < dim; d += kLanes) {
    store_f32<kType>(kFloats, hn::Div(hn::LoadU(kFloats, sums + d), divisor), out, d);
  }
  if (lse == nullptr) return;
  // The fp32 product is what the probabilities were taken relative to. A row of nothing but -inf has a softmax of 0/0.
  *lse = row_sum == 0.0f ? std::numeric_limits<float>::quiet_NaN()
                         : static_cast<float>(static_cast<double>(row_max * log2_scale) * kLn2 + std::log(double{row_sum}));
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_ATTENTION_INL_H_
