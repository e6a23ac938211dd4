// The two register tiles of the engine. Both put rows (query token x head) against keys in fp32:
//   S[key][row]  = <q[row], k[key]>              lanes over rows, keys broadcast; q comes transposed in packs of one vector
//   O[row][d]   += sum over keys P[key][row] * v[key][d]   lanes over d, probabilities broadcast
// So keys need no transposition, softmax and maxima over keys are vertical, and rows gathered from anywhere cost only pointers.
// Every element is one chain of fused multiply-adds in ascending d (S) or key (O), whatever tile it falls into: results do not
// depend on which rows share a tile.
#if defined(OPENMSA_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_GEMM_INL_H_
#undef OPENMSA_CPU_GEMM_INL_H_
#else
#define OPENMSA_CPU_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/geometry.hpp"
#include "cpu/convert-inl.h"
#include "cpu/tiles.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

using Floats = hn::ScalableTag<float>;
using Vec = hn::Vec<Floats>;
inline constexpr Floats kFloats{};
inline constexpr std::size_t kLanes = hn::MaxLanes(kFloats);

// Register budget: AVX-512 and NEON have 32 vector registers, SSE and AVX2 16. QK: kKeys x kQkVecs accumulators + kQkVecs
// loads + 1 broadcast. PV: kRows x kPvVecs accumulators + kPvVecs loads + 1 broadcast.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
inline constexpr int kKeys = 8;
inline constexpr int kPvVecs = 4;
#else
inline constexpr int kKeys = 4;
inline constexpr int kPvVecs = 2;
#endif
inline constexpr int kQkVecs = 3;
inline constexpr int kRows = kLanes == 1 ? 3 : 6;
inline constexpr std::size_t kPanelRows = kQkVecs * kLanes;  // rows per QK tile

static_assert(kPanelRows <= kMaxPanelRows && kMaxLanes % kLanes == 0);

#if HWY_TARGET == HWY_SCALAR  // the fallback without SIMD has one lane
template <DType kType>
HWY_INLINE void pack_rows(const std::byte* const* rows, std::size_t dim, float* HWY_RESTRICT out) {
  for (std::size_t d = 0; d < dim; ++d) hn::Store(load_f32<kType>(kFloats, rows[0], d), kFloats, out + d);
}
#else
// Elements d..d+3 of every fourth row: rows[0] in the lowest 128-bit part, rows[4] in the next, and so on.
template <DType kType, class D>
HWY_INLINE hn::Vec<D> load_quads(D tag, const std::byte* const* rows, std::size_t d) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return load_f32<kType>(tag, rows[0], d);
  } else {
    const hn::Half<D> half;
    return hn::Combine(tag, load_quads<kType>(half, rows + hn::MaxLanes(half), d), load_quads<kType>(half, rows, d));
  }
}

// One pack: kLanes rows of `dim` elements, transposed to out[dim][kLanes] f32.
template <DType kType>
HWY_INLINE void pack_rows(const std::byte* const* rows, std::size_t dim, float* HWY_RESTRICT out) {
  for (std::size_t d = 0; d < dim; d += 4) {
    Vec quad[4];
    for (std::size_t i = 0; i < 4; ++i) quad[i] = load_quads<kType>(kFloats, rows + i, d);
    // A 4x4 transpose inside each 128-bit part finishes the job.
    const Vec lower02 = hn::InterleaveLower(kFloats, quad[0], quad[2]), lower13 = hn::InterleaveLower(kFloats, quad[1], quad[3]);
    const Vec upper02 = hn::InterleaveUpper(kFloats, quad[0], quad[2]), upper13 = hn::InterleaveUpper(kFloats, quad[1], quad[3]);
    hn::Store(hn::InterleaveLower(kFloats, lower02, lower13), kFloats, out + d * kLanes);
    hn::Store(hn::InterleaveUpper(kFloats, lower02, lower13), kFloats, out + (d + 1) * kLanes);
    hn::Store(hn::InterleaveLower(kFloats, upper02, upper13), kFloats, out + (d + 2) * kLanes);
    hn::Store(hn::InterleaveUpper(kFloats, upper02, upper13), kFloats, out + (d + 3) * kLanes);
  }
}
#endif

// Rows 0..num_rows-1, given by row(r) as the address of row r, to ceil(num_rows / kLanes) packs; missing rows become zeros.
template <class RowAddress>
HWY_INLINE void pack_all(DType dtype, std::size_t num_rows, std::size_t dim, const RowAddress& row, float* out) {
  with_storage_type(dtype, [&](auto type) {
    for (std::size_t begin = 0; begin < num_rows; begin += kLanes) {
      const std::byte* rows[kLanes];
      for (std::size_t i = 0; i < kLanes; ++i) {
        rows[i] = begin + i < num_rows ? row(begin + i) : reinterpret_cast<const std::byte*>(kZeroRow);
      }
      pack_rows<decltype(type)::value>(rows, dim, out + begin * dim);
    }
  });
}

// Keys of one block as the QK tile reads them: f32 rows, num_keys rounded up to kKeys of them readable.
struct KeyRows {
  const float* data = nullptr;
  std::size_t stride = 0;  // floats
};

// Points at f32 keys where they lie if their rows are packed closely, else converts them into scratch [Bk][dim].
// Rows from num_keys to the next multiple of kKeys are zeroed: they are read, and their scores never used.
HWY_INLINE KeyRows key_rows(const std::byte* keys, DType dtype, std::int64_t stride_bytes, std::size_t num_keys, std::size_t dim,
                            float* HWY_RESTRICT scratch) {
  if (dtype == DType::kF32 && stride_bytes == static_cast<std::int64_t>(dim * sizeof(float)) && num_keys % kKeys == 0) {
    return {reinterpret_cast<const float*>(keys), dim};
  }
  with_storage_type(dtype, [&](auto type) {
    for (std::size_t j = 0; j < num_keys; ++j) {
      const std::byte* row = keys + static_cast<std::int64_t>(j) * stride_bytes;
      for (std::size_t d = 0; d < dim; d += kLanes) {
        hn::StoreU(load_f32<decltype(type)::value>(kFloats, row, d), kFloats, scratch + j * dim + d);
      }
    }
  });
  const std::size_t padded = (num_keys + kKeys - 1) / kKeys * kKeys;
  std::fill(scratch + num_keys * dim, scratch + padded * dim, 0.0f);
  return {scratch, dim};
}

// S for kKeys keys and kVecs packs of rows.
template <int kVecs>
HWY_INLINE void qk_tile(const float* const (&q)[kQkVecs], const float* HWY_RESTRICT k, std::size_t stride_k, std::size_t dim,
                        Vec (&acc)[kKeys][kVecs]) {
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::Zero(kFloats);
  }
  for (std::size_t d = 0; d < dim; ++d) {
    Vec rows[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) rows[v] = hn::Load(kFloats, q[v] + d * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      const Vec key = hn::Set(kFloats, k[static_cast<std::size_t>(i) * stride_k + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::MulAdd(rows[v], key, acc[i][v]);
    }
  }
}

// O of kNumRows rows and kVecs vectors of d: o[r][..] = o[r][..] * scale[r] + sum over num_keys keys of p[key][r] * v[key][..].
template <int kNumRows, int kVecs>
HWY_INLINE void pv_tile(const float* HWY_RESTRICT p, std::size_t stride_p, const float* HWY_RESTRICT v, std::size_t num_keys,
                        float* const* o, std::size_t column, const float* scale) {
  Vec acc[kNumRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r) {
    const Vec factor = hn::Set(kFloats, scale[r]);
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) acc[r][i] = hn::Mul(hn::LoadU(kFloats, o[r] + column + i * kLanes), factor);
  }
  for (std::size_t j = 0; j < num_keys; ++j) {
    Vec values[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) values[i] = hn::Load(kFloats, v + (j * kVecs + i) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kNumRows; ++r) {
      const Vec weight = hn::Set(kFloats, p[j * stride_p + r]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) acc[r][i] = hn::MulAdd(weight, values[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kNumRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) hn::StoreU(acc[r][i], kFloats, o[r] + column + i * kLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_GEMM_INL_H_
