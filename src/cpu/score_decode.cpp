// Block scores for few query rows. Lanes are keys: a tile of 32 keys is turned once (decode_tile-inl.h) and multiplied with all the
// rows, each product one chain of MulAdd over ascending dims, as in score.cpp, so both give the same bits.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/score_decode.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/decode_tile-inl.h"

#include <limits>

#include "cpu/score_decode.hpp"

#ifndef OPENMSA_CPU_SCORE_DECODE_SCRATCH
#define OPENMSA_CPU_SCORE_DECODE_SCRATCH
namespace openmsa::cpu {

struct FewScratch {
  float* q;         // [num_rows, Di]
  float* products;  // [num_rows, Bk]
  float* tile;      // [kTileKeys, Di], in packs
  std::size_t used = 0;

  FewScratch(const ScoreInputs& inputs, std::int64_t num_tokens, float* base) {
    const auto num_rows = static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(inputs.num_kv_heads);
    const auto dim = static_cast<std::size_t>(inputs.index_dim);
    q = take(base, num_rows * dim);
    products = take(base, num_rows * static_cast<std::size_t>(inputs.geo.block_size));
    tile = take(base, 32 * dim);
  }

 private:
  // All extents are multiples of 16 floats, so every part is aligned as the base is.
  float* take(float* base, std::size_t count) {
    float* const part = base == nullptr ? nullptr : base + used;
    used += count;
    return part;
  }
};

}  // namespace openmsa::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// Maximum of row[0 .. count), NaN if there is one among them.
HWY_INLINE float max_or_nan(const float* HWY_RESTRICT row, std::int64_t count) {
  const auto lowest = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  auto best = lowest;
  auto nan = hn::Zero(kFloats);
  for (std::int64_t i = 0; i < count; i += kTileLanes) {
    auto x = hn::Load(kFloats, row + i);
    if (count - i < kTileLanes) x = hn::IfThenElse(hn::FirstN(kFloats, static_cast<std::size_t>(count - i)), x, lowest);
    best = hn::IfThenElse(hn::Gt(x, best), x, best);
    nan = hn::IfThenElse(hn::IsNaN(x), x, nan);
  }
  if (HWY_UNLIKELY(!hn::AllFalse(kFloats, hn::IsNaN(nan)))) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(kFloats, best));
}

template <DType kType>
HWY_INLINE void score_few_of_type(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
                                  std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token,
                                  std::int64_t stride_head, float* scratch) {
  static_assert(kTileKeys == 32);  // FewScratch
  const core::Geometry& geo = inputs.geo;
  const FewScratch parts(inputs, token_end - token_begin, scratch);
  const std::int64_t dim = inputs.index_dim, num_heads = inputs.num_kv_heads, block_size = geo.block_size;
  const std::int64_t num_rows = (token_end - token_begin) * num_heads;

  for (std::int64_t t = token_begin; t < token_end; ++t) {
    for (std::int64_t g = 0; g < num_heads; ++g) {
      const std::byte* const row = static_cast<const std::byte*>(inputs.q_idx.data) +
                                   (t * inputs.q_idx.stride[0] + g * inputs.q_idx.stride[1]) * dtype_bytes(kType);
      float* const q = parts.q + ((t - token_begin) * num_heads + g) * dim;
      for (std::int64_t d = 0; d < dim; d += kTileLanes)
        hn::Store(load_f32<kType>(kFloats, row, static_cast<std::size_t>(d)), kFloats, q + d);
    }
  }
  const auto visible_in_block = [&](std::int64_t t, std::int64_t b) {
    const std::int64_t num_visible = geo.num_visible(seq, geo.position(seq, t - geo.query_begin(seq)));
    return std::clamp<std::int64_t>(num_visible - b * block_size, 0, block_size);
  };

  for (std::int64_t b = block_begin; b < block_end; ++b) {
    const std::int64_t num_keys = visible_in_block(token_end - 1, b);  // later tokens see more
    const std::byte* const keys = num_keys > 0 ? inputs.k_idx.block(geo, seq, b, 0) : nullptr;
    const std::int64_t num_next_keys = b + 1 < block_end ? visible_in_block(token_end - 1, b + 1) : 0;
    const std::byte* const next_keys = num_next_keys > 0 ? inputs.k_idx.block(geo, seq, b + 1, 0) : nullptr;
    for (std::int64_t first = 0; first < num_keys; first += kTileKeys) {
      const std::int64_t count = std::min(num_keys - first, kTileKeys);
      const std::int64_t ahead = first + kTileKeys;
      const bool same_block = ahead < num_keys;
      const RowPrefetch next(same_block ? keys + ahead * inputs.k_idx.stride_token : next_keys, inputs.k_idx.stride_token,
                             std::min(same_block ? num_keys - ahead : num_next_keys, kTileKeys), dim * dtype_bytes(kType));
      turn_keys<kType>(keys + first * inputs.k_idx.stride_token, inputs.k_idx.stride_token, count, dim, parts.tile);
      const Columns columns{parts.tile, kTileLanes, dim * kTileLanes};
      multiply<false>(num_rows, parts.q, dim, columns, dim, ceil_div(count, kTileLanes), parts.products + first, block_size, next);
    }
    for (std::int64_t t = token_begin; t < token_end; ++t) {
      const std::int64_t count = visible_in_block(t, b);
      for (std::int64_t g = 0; g < num_heads; ++g) {
        const float* const row = parts.products + ((t - token_begin) * num_heads + g) * block_size;
        scores[(t - token_begin) * stride_token + g * stride_head + (b - block_begin)] = max_or_nan(row, count);
      }
    }
  }
}

void score_few_on_target(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
                         std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token,
                         std::int64_t stride_head, float* scratch) {
  with_storage_type(inputs.q_idx.dtype, [&](auto type) {
    score_few_of_type<decltype(type)::value>(inputs, seq, token_begin, token_end, block_begin, block_end, scores, stride_token,
                                             stride_head, scratch);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(score_few_on_target);

std::size_t score_few_scratch(const ScoreInputs& inputs, std::int64_t num_tokens) {
  return FewScratch(inputs, num_tokens, nullptr).used;
}

void score_few(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
               std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token, std::int64_t stride_head,
               float* scratch) {
  HWY_DYNAMIC_DISPATCH(score_few_on_target)
  (inputs, seq, token_begin, token_end, block_begin, block_end, scores, stride_token, stride_head, scratch);
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
