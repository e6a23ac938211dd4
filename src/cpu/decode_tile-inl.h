// What the two memory-bound kernels (score_decode, decode) share: a tile of keys turned so that lanes are keys, and a register-
// blocked product of a few fp32 rows with such a tile. Compiled once per SIMD target; see targets.hpp.
#if defined(OPENMSA_CPU_DECODE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPENMSA_CPU_DECODE_TILE_INL_H_
#undef OPENMSA_CPU_DECODE_TILE_INL_H_
#else
#define OPENMSA_CPU_DECODE_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/gemm-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// Keys per tile: 128 dims of 32 keys are 16 KB of fp32, so the tile stays in L1. Blocks hold a multiple of 16 keys.
inline constexpr std::int64_t kTileKeys = 32;
inline constexpr auto kTileLanes = static_cast<std::int64_t>(kLanes);
static_assert(kTileKeys % kTileLanes == 0);

#if HWY_TARGET != HWY_SCALAR
// 16 bytes at `offset` of every fourth key row, one row per 128-bit part of the vector.
template <class DU>
HWY_INLINE hn::Vec<DU> load_key_parts(DU du, const std::byte* const* rows, std::size_t offset) {
  if constexpr (hn::MaxLanes(DU()) == 4) {
    return hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(rows[0] + offset));
  } else {
    const hn::Half<DU> half;
    return hn::Combine(du, load_key_parts(half, rows + hn::MaxLanes(half), offset), load_key_parts(half, rows, offset));
  }
}

// Transposes kLanes rows of num_words (a multiple of 4) 32-bit words: store(w, v) gets word w of every row, lane j from rows[j].
// Named vectors rather than an array of 4: gcc 12 keeps such an array in memory, which costs a factor of 3.
template <class Store>
HWY_INLINE void transpose_words(const std::byte* const* rows, std::int64_t num_words, const Store& store) {
  const hn::Rebind<std::uint32_t, Floats> du;
  const hn::Repartition<std::uint64_t, Floats> du64;
  for (std::int64_t w = 0; w < num_words; w += 4) {
    const auto offset = static_cast<std::size_t>(w) * 4;
    const auto a = load_key_parts(du, rows, offset), b = load_key_parts(du, rows + 1, offset);
    const auto c = load_key_parts(du, rows + 2, offset), e = load_key_parts(du, rows + 3, offset);
    const auto ab_lo = hn::BitCast(du64, hn::InterleaveLower(du, a, b)), ab_hi = hn::BitCast(du64, hn::InterleaveUpper(du, a, b));
    const auto ce_lo = hn::BitCast(du64, hn::InterleaveLower(du, c, e)), ce_hi = hn::BitCast(du64, hn::InterleaveUpper(du, c, e));
    store(w, hn::BitCast(du, hn::InterleaveLower(du64, ab_lo, ce_lo)));
    store(w + 1, hn::BitCast(du, hn::InterleaveUpper(du64, ab_lo, ce_lo)));
    store(w + 2, hn::BitCast(du, hn::InterleaveLower(du64, ab_hi, ce_hi)));
    store(w + 3, hn::BitCast(du, hn::InterleaveUpper(du64, ab_hi, ce_hi)));
  }
}

// One pack, like pack_rows of gemm-inl.h. 16-bit dims are transposed in pairs, one 32-bit word each, and split afterwards, which
// halves the shuffles.
template <DType kType>
HWY_INLINE void pack_keys(const std::byte* const* rows, std::int64_t dim, float* HWY_RESTRICT out) {
  const hn::Rebind<std::uint32_t, Floats> du;
  using Words = hn::Vec<decltype(du)>;
  if constexpr (kType == DType::kF32) {
    transpose_words(rows, dim, [&](std::int64_t w, Words v) { hn::Store(hn::BitCast(kFloats, v), kFloats, out + w * kTileLanes); });
  } else {
    transpose_words(rows, dim / 2, [&](std::int64_t w, Words v) {
      float* const even = out + 2 * w * kTileLanes;
      float* const odd = even + kTileLanes;
      if constexpr (kType == DType::kBF16) {  // the upper half of its fp32
        hn::Store(hn::BitCast(kFloats, hn::ShiftLeft<16>(v)), kFloats, even);
        hn::Store(hn::BitCast(kFloats, hn::And(v, hn::Set(du, 0xffff0000u))), kFloats, odd);
      } else {
        const hn::Rebind<std::uint16_t, Floats> du16;
        const auto low = hn::TruncateTo(du16, v), high = hn::TruncateTo(du16, hn::ShiftRight<16>(v));
        hn::Store(promote_f16(kFloats, low), kFloats, even);
        hn::Store(promote_f16(kFloats, high), kFloats, odd);
      }
    });
  }
}
#else
template <DType kType>
HWY_INLINE void pack_keys(const std::byte* const* rows, std::int64_t dim, float* HWY_RESTRICT out) {
  pack_rows<kType>(rows, static_cast<std::size_t>(dim), out);
}
#endif

// Asks for the rows of the next tile, a cache line at a time, while this one is multiplied. A tile is read in bursts and at kLanes
// addresses at once, which the processor's own prefetchers do not follow; and all its lines asked for in one go would fill the
// queue of outstanding misses and stall the loads behind them.
class RowPrefetch {
 public:
  RowPrefetch() = default;  // nothing to ask for
  RowPrefetch(const std::byte* rows, std::int64_t stride_bytes, std::int64_t num_rows, std::int64_t row_bytes)
      : row_(reinterpret_cast<std::uintptr_t>(rows)),
        stride_(static_cast<std::uintptr_t>(stride_bytes)),
        row_bytes_(static_cast<std::uintptr_t>(row_bytes)),
        num_lines_(num_rows * ceil_div(row_bytes, 64)) {}

  std::int64_t num_lines() const { return num_lines_; }
  // Called a few times more than there are lines, it asks for the lines that follow, which is harmless.
  HWY_INLINE void next() {
    __builtin_prefetch(reinterpret_cast<const void*>(row_ + offset_));
    offset_ += 64;
    if (offset_ >= row_bytes_) {
      offset_ = 0;
      row_ += stride_;
    }
  }

 private:
  std::uintptr_t row_ = 0, stride_ = 0, row_bytes_ = 0, offset_ = 0;
  std::int64_t num_lines_ = 0;
};

// Turns keys 0 .. num_keys-1 (1..kTileKeys of them) into packs of kLanes keys, tile[pack][dim][kLanes]. Lanes past the last key, up
// to a whole pack, repeat it: nothing past num_keys is read, and a maximum over the lanes is right without a mask.
template <DType kType>
HWY_INLINE void turn_keys(const std::byte* keys, std::int64_t stride_bytes, std::int64_t num_keys, std::int64_t dim,
                          float* HWY_RESTRICT tile) {
  for (std::int64_t first = 0; first < num_keys; first += kTileLanes) {
    const std::byte* rows[kLanes];
    for (std::int64_t j = 0; j < kTileLanes; ++j) rows[j] = keys + std::min(first + j, num_keys - 1) * stride_bytes;
    pack_keys<kType>(rows, dim, tile + first * dim);
  }
}

// b of a product: row k of vector number v starts at data + k * stride_row + v * stride_vector.
struct Columns {
  const float* data;
  std::int64_t stride_row;
  std::int64_t stride_vector;
};

// c[r][..] (+)= sum over k of a[r][k] * b[k][..] for kRows rows and kVectors vectors of columns. Every element is one chain of
// MulAdd over ascending k, as in gemm-inl.h, whatever the blocking. Meanwhile num_lines lines of `ahead` are asked for.
template <int kRows, int kVectors, bool kAccumulate>
HWY_INLINE void multiply_registers(const float* HWY_RESTRICT a, std::int64_t lda, const Columns& b, std::int64_t depth,
                                   float* HWY_RESTRICT c, std::int64_t ldc, RowPrefetch& ahead, std::int64_t num_lines) {
  Vec acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = kAccumulate ? hn::LoadU(kFloats, c + r * ldc + v * kTileLanes) : hn::Zero(kFloats);
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    if (k < num_lines) ahead.next();
    Vec columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(kFloats, b.data + k * b.stride_row + v * b.stride_vector);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = hn::Set(kFloats, a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(factor, columns[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(acc[r][v], kFloats, c + r * ldc + v * kTileLanes);
  }
}

template <int kRows, bool kAccumulate>
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT a, std::int64_t lda, Columns b, std::int64_t depth,
                              std::int64_t num_vectors, float* HWY_RESTRICT c, std::int64_t ldc, RowPrefetch& ahead,
                              std::int64_t num_lines) {
  for (; num_vectors >= 2; num_vectors -= 2, b.data += 2 * b.stride_vector, c += 2 * kTileLanes) {
    multiply_registers<kRows, 2, kAccumulate>(a, lda, b, depth, c, ldc, ahead, num_lines);
  }
  if (num_vectors == 1) multiply_registers<kRows, 1, kAccumulate>(a, lda, b, depth, c, ldc, ahead, num_lines);
}

// c[num_rows][num_vectors * kLanes] (+)= a[num_rows][depth] * b[depth][..]. 4 rows x 2 vectors are the 8 chains that hide the
// latency of a fused multiply-add on two units.
template <bool kAccumulate>
HWY_INLINE void multiply(std::int64_t num_rows, const float* HWY_RESTRICT a, std::int64_t lda, const Columns& b, std::int64_t depth,
                         std::int64_t num_vectors, float* HWY_RESTRICT c, std::int64_t ldc, RowPrefetch ahead) {
  const std::int64_t num_register_tiles = ceil_div(num_rows, 4) * ceil_div(num_vectors, 2);
  const std::int64_t num_lines = ceil_div(ahead.num_lines(), num_register_tiles);
  for (; num_rows >= 4; num_rows -= 4, a += 4 * lda, c += 4 * ldc) {
    multiply_rows<4, kAccumulate>(a, lda, b, depth, num_vectors, c, ldc, ahead, num_lines);
  }
  switch (num_rows) {
    case 3: return multiply_rows<3, kAccumulate>(a, lda, b, depth, num_vectors, c, ldc, ahead, num_lines);
    case 2: return multiply_rows<2, kAccumulate>(a, lda, b, depth, num_vectors, c, ldc, ahead, num_lines);
    case 1: return multiply_rows<1, kAccumulate>(a, lda, b, depth, num_vectors, c, ldc, ahead, num_lines);
    default: return;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();
#endif  // OPENMSA_CPU_DECODE_TILE_INL_H_
