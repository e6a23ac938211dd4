// sparse_decode: few query tokens, so the selected keys and values are read from memory for one token at a time and the work is
// cut along the keys. A work item is (token, group, split): the G query rows of the group against the blocks of some slots of its
// list, about kSplitKeys keys. Inside a split the softmax is plain: all scores first, their maximum, then the weights. The splits
// of a row are joined in slot order by their maxima and sums. Splits depend on the block size alone, so neither threads nor the
// other tokens of a call change a bit of a row.
//   K tile: turned once per 32 keys, S[G][keys] = q * K^T with lanes over keys
//   V tile: widened once per 32 keys, O[G][D] += P * V with lanes over D
// Only visible keys are read: what lies in other slots, NaN included, cannot matter. A split without keys has sum 0 and is skipped;
// a row without keys gets 0 and -inf.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/decode_tile-inl.h"
#include "cpu/softmax-inl.h"

#include <cmath>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"

#ifndef OPENMSA_CPU_DECODE_ONCE
#define OPENMSA_CPU_DECODE_ONCE
namespace openmsa::cpu {

struct DecodePlan {
  std::int64_t slots_per_split, num_splits;
  std::int64_t stride_p;      // floats from one row of S to the next; past a power of two, so that rows fall into different sets
  std::int64_t chunk_tokens;  // tokens whose partial results are held at a time
};

// Results of the splits of one (token, group).
struct Partials {
  float* out;  // [num_splits, G, D]: sum of weights * v, relative to the row's maximum in this split
  float* max;  // [num_splits, G]: largest score, times softmax_scale * log2(e)
  float* sum;  // [num_splits, G]: sum of weights; kNoKeys if the split has no keys, then out was not written
};
inline constexpr float kNoKeys = -1.0f;
inline constexpr std::int64_t kMaxDecodeSplits = 64;  // a split has at least one of at most 64 slots

struct DecodeScratch {
  float* q;     // [G, D]
  float* p;     // [G, stride_p]: scores, then weights
  float* tile;  // [kTileKeys, D]: keys in packs, then values in rows
};

}  // namespace openmsa::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// Turns the num_keys scores of a row into weights 2^(s * scale - max), zero in the lanes up to the next whole vector.
HWY_INLINE void softmax_row(float* HWY_RESTRICT row, std::int64_t num_keys, float scale_log2, float* max_out, float* sum_out) {
  const Vec lowest = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  const std::int64_t tail = num_keys % kTileLanes;
  if (tail != 0) {
    float* const last = row + num_keys - tail;
    hn::Store(hn::IfThenElse(hn::FirstN(kFloats, static_cast<std::size_t>(tail)), hn::Load(kFloats, last), lowest), kFloats, last);
  }
  Vec best = lowest;
  for (std::int64_t j = 0; j < num_keys; j += kTileLanes) {
    const Vec s = hn::Load(kFloats, row + j);
    best = hn::IfThenElse(hn::Gt(s, best), s, best);  // a NaN is left out here, and makes the sum NaN below
  }
  const float max = hn::GetLane(hn::MaxOfLanes(kFloats, best));
  // All scores -inf: measured from 0 their weights are 0 rather than 2^(-inf + inf), so that other splits still count.
  const float max_log2 = std::isinf(max) && max < 0 ? 0.0f : max * scale_log2;
  const Vec scale = hn::Set(kFloats, scale_log2), minus_max = hn::Set(kFloats, -max_log2);
  Vec sum = hn::Zero(kFloats);
  for (std::int64_t j = 0; j < num_keys; j += kTileLanes) {
    const Vec weight = exp2_nonpositive(kFloats, hn::MulAdd(hn::Load(kFloats, row + j), scale, minus_max));
    hn::Store(weight, kFloats, row + j);
    sum = hn::Add(sum, weight);
  }
  *max_out = std::isinf(max) && max < 0 ? max : max_log2;
  *sum_out = hn::GetLane(hn::SumOfLanes(kFloats, sum));
}

// Keys first .. first+count-1 of a block, which are columns column .. column+count-1 of S.
struct KeyTile {
  std::int64_t block, first, count, column;
};

// Calls visit(tile, next) for the tiles of at most kTileKeys visible keys in slots [slot_begin, slot_end); next has count 0 at the
// last one. Returns the number of keys.
template <class Visit>
HWY_INLINE std::int64_t for_each_tile(const std::int32_t* ids, std::int64_t slot_begin, std::int64_t slot_end,
                                      std::int64_t block_size, std::int64_t num_visible, const Visit& visit) {
  KeyTile tile{};
  std::int64_t column = 0;
  for (std::int64_t slot = slot_begin; slot < slot_end && ids[slot] >= 0; ++slot) {
    const std::int64_t block = ids[slot];
    const std::int64_t num_keys = std::clamp<std::int64_t>(num_visible - block * block_size, 0, block_size);
    for (std::int64_t first = 0; first < num_keys; first += kTileKeys) {
      const KeyTile next{block, first, std::min(kTileKeys, num_keys - first), column};
      if (tile.count > 0) visit(tile, next);
      tile = next;
      column += next.count;
    }
  }
  if (tile.count > 0) visit(tile, KeyTile{});
  return column;
}

template <DType kType>
HWY_INLINE void decode_split_of_type(const core::SparseAttentionParams& params, const DecodePlan& plan, std::int64_t t,
                                     std::int64_t g, std::int64_t split, const DecodeScratch& scratch, const Partials& partials) {
  const core::Geometry& geo = params.geo;
  const std::int64_t dim = params.config.head_dim, group_size = params.config.group_size(), block_size = geo.block_size;
  const std::int32_t seq = geo.seq_of_token(t);
  const std::int64_t num_visible = geo.num_visible(seq, geo.position(seq, t - geo.query_begin(seq)));
  const auto* const ids =
      static_cast<const std::int32_t*>(params.block_ids.data) + t * params.block_ids.stride[0] + g * params.block_ids.stride[1];
  const std::int64_t slot_begin = split * plan.slots_per_split;
  const std::int64_t slot_end = std::min<std::int64_t>(slot_begin + plan.slots_per_split, params.config.top_k);
  const auto head = static_cast<std::int32_t>(g);

  for (std::int64_t r = 0; r < group_size; ++r) {
    const std::byte* const row = static_cast<const std::byte*>(params.q.data) +
                                 (t * params.q.stride[0] + (g * group_size + r) * params.q.stride[1]) * dtype_bytes(kType);
    for (std::int64_t d = 0; d < dim; d += kTileLanes) {
      hn::Store(load_f32<kType>(kFloats, row, static_cast<std::size_t>(d)), kFloats, scratch.q + r * dim + d);
    }
  }

  const auto row_of = [&](const core::KeyBlocks& keys, const KeyTile& tile) {
    return keys.block(geo, seq, tile.block, head) + tile.first * keys.stride_token;
  };
  const auto prefetch = [&](const core::KeyBlocks& keys, const KeyTile& tile) {
    return tile.count > 0 ? RowPrefetch(row_of(keys, tile), keys.stride_token, tile.count, dim * dtype_bytes(kType))
                          : RowPrefetch();
  };
  KeyTile first_tile{};
  const std::int64_t num_keys =
      for_each_tile(ids, slot_begin, slot_end, block_size, num_visible, [&](const KeyTile& tile, const KeyTile& next) {
        if (tile.column == 0) first_tile = tile;
        turn_keys<kType>(row_of(params.k, tile), params.k.stride_token, tile.count, dim, scratch.tile);
        multiply<false>(group_size, scratch.q, dim, {scratch.tile, kTileLanes, dim * kTileLanes}, dim,
                        ceil_div(tile.count, kTileLanes), scratch.p + tile.column, plan.stride_p,
                        next.count > 0 ? prefetch(params.k, next) : prefetch(params.v, first_tile));
      });

  float* const max = partials.max + split * group_size;
  float* const sum = partials.sum + split * group_size;
  float* const out = partials.out + split * group_size * dim;
  if (num_keys == 0) {
    std::fill(max, max + group_size, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + group_size, kNoKeys);
    return;
  }
  const auto scale_log2 = static_cast<float>(params.config.effective_softmax_scale() * 1.4426950408889634);
  for (std::int64_t r = 0; r < group_size; ++r) {
    softmax_row(scratch.p + r * plan.stride_p, num_keys, scale_log2, max + r, sum + r);
  }
  std::fill(out, out + group_size * dim, 0.0f);
  for_each_tile(ids, slot_begin, slot_end, block_size, num_visible, [&](const KeyTile& tile, const KeyTile& next) {
    const std::byte* const values = row_of(params.v, tile);
    for (std::int64_t j = 0; j < tile.count; ++j) {
      for (std::int64_t d = 0; d < dim; d += kTileLanes) {
        hn::Store(load_f32<kType>(kFloats, values + j * params.v.stride_token, static_cast<std::size_t>(d)), kFloats,
                  scratch.tile + j * dim + d);
      }
    }
    multiply<true>(group_size, scratch.p + tile.column, plan.stride_p, {scratch.tile, dim, kTileLanes}, tile.count,
                   dim / kTileLanes, out, dim, prefetch(params.v, next));
  });
}

void decode_split(const core::SparseAttentionParams& params, const DecodePlan& plan, std::int64_t t, std::int64_t g,
                  std::int64_t split, const DecodeScratch& scratch, const Partials& partials) {
  with_storage_type(params.q.dtype,
                    [&](auto type) { decode_split_of_type<decltype(type)::value>(params, plan, t, g, split, scratch, partials); });
}

// out and lse of row r of group (t, g) from its splits, always in slot order.
template <DType kType>
HWY_INLINE void join_row(const core::SparseAttentionParams& params, const DecodePlan& plan, std::int64_t t, std::int64_t g,
                         std::int64_t r, const Partials& partials) {
  const std::int64_t dim = params.config.head_dim, group_size = params.config.group_size(), h = g * group_size + r;
  const auto has_keys = [&](std::int64_t s) { return partials.sum[s * group_size + r] != kNoKeys; };
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float max = kLowest;
  bool any = false;
  for (std::int64_t s = 0; s < plan.num_splits; ++s) {
    any = any || has_keys(s);
    max = std::max(max, partials.max[s * group_size + r]);
  }
  // 2^(split's max - max); a split of NaN scores has no maximum, and any weight but 0 lets its NaN through.
  alignas(64) float weights[kMaxDecodeSplits];
  for (std::int64_t s = 0; s < round_up(plan.num_splits, kTileLanes); ++s) {
    const bool counts = s < plan.num_splits && has_keys(s) && partials.max[s * group_size + r] > kLowest;
    weights[s] = counts ? partials.max[s * group_size + r] - max : 0.0f;
  }
  for (std::int64_t s = 0; s < plan.num_splits; s += kTileLanes) {
    hn::Store(exp2_nonpositive(kFloats, hn::Load(kFloats, weights + s)), kFloats, weights + s);
  }
  float sum = 0.0f;
  for (std::int64_t s = 0; s < plan.num_splits; ++s) {
    if (has_keys(s)) sum += weights[s] * partials.sum[s * group_size + r];
  }

  auto* const out =
      static_cast<std::byte*>(params.out.data) + (t * params.out.stride[0] + h * params.out.stride[1]) * dtype_bytes(kType);
  const Vec inverse = hn::Set(kFloats, any ? 1.0f / sum : 0.0f);
  for (std::int64_t d = 0; d < dim; d += kTileLanes) {
    Vec acc = hn::Zero(kFloats);
    for (std::int64_t s = 0; s < plan.num_splits; ++s) {
      if (!has_keys(s)) continue;
      acc = hn::MulAdd(hn::Set(kFloats, weights[s]), hn::LoadU(kFloats, partials.out + (s * group_size + r) * dim + d), acc);
    }
    store_f32<kType>(kFloats, hn::Mul(acc, inverse), out, static_cast<std::size_t>(d));
  }
  if (params.lse.given()) {
    static_cast<float*>(params.lse.data)[t * params.lse.stride[0] + h * params.lse.stride[1]] =
        !any          ? kLowest
        : sum == 0.0f ? std::numeric_limits<float>::quiet_NaN()  // nothing but -inf: a softmax of 0/0, as in out
                      : max * 0.6931471805599453f + std::log(sum);
  }
}

void join_splits(const core::SparseAttentionParams& params, const DecodePlan& plan, std::int64_t t, std::int64_t g,
                 const Partials& partials) {
  with_storage_type(params.q.dtype, [&](auto type) {
    for (std::int64_t r = 0; r < params.config.group_size(); ++r) join_row<decltype(type)::value>(params, plan, t, g, r, partials);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(decode_split);
HWY_EXPORT(join_splits);

namespace {

// Keys per split: 4 MB of keys and values (16 blocks of 128, 4 groups, bf16) become 16 work items of some 20 us, and joining costs
// a few percent of the reading.
constexpr std::int64_t kSplitKeys = 512;
// Partial results held at a time.
constexpr std::int64_t kPartialBudgetBytes = std::int64_t{16} << 20;
constexpr std::int64_t kTileKeysOnAnyTarget = 32;

class Decode {
 public:
  // Takes the scratch from the arena; with a counting arena that is all that may be done with the object.
  explicit Decode(const core::SparseAttentionParams& params) : params_(params) {
    const MsaConfig& config = params.config;
    dim_ = config.head_dim;
    group_size_ = config.group_size();
    plan_.slots_per_split = std::clamp<std::int64_t>(kSplitKeys / config.block_size, 1, config.top_k);
    plan_.num_splits = ceil_div(config.top_k, plan_.slots_per_split);
    plan_.stride_p = plan_.slots_per_split * config.block_size + static_cast<std::int64_t>(kMaxLanes);

    // G is unbounded, hence the roundings: every part starts on a cache line.
    out_floats_ = plan_.num_splits * group_size_ * dim_;
    row_floats_ = round_up(plan_.num_splits * group_size_, 16);
    group_floats_ = out_floats_ + 2 * row_floats_;
    const std::int64_t token_bytes = core::checked_mul<std::int64_t>(group_floats_ * config.num_kv_heads, sizeof(float));
    plan_.chunk_tokens =
        std::clamp<std::int64_t>(kPartialBudgetBytes / token_bytes, 1, std::max<std::int64_t>(1, params.geo.total_q));
    q_floats_ = group_size_ * dim_;
    p_floats_ = group_size_ * plan_.stride_p;
    worker_floats_ = q_floats_ + p_floats_ + kTileKeysOnAnyTarget * dim_;

    core::Arena& arena = *params.context.arena;
    partials_ = arena.take<float>(static_cast<std::size_t>(plan_.chunk_tokens * config.num_kv_heads * group_floats_));
    workers_ = arena.take<float>(static_cast<std::size_t>(params.context.num_threads * worker_floats_));
  }

  void run() {
    const std::int64_t num_heads = params_.config.num_kv_heads, num_splits = plan_.num_splits;
    for (std::int64_t begin = 0; begin < params_.geo.total_q; begin += plan_.chunk_tokens) {
      const std::int64_t num_groups = std::min(plan_.chunk_tokens, params_.geo.total_q - begin) * num_heads;
      core::parallel_for(params_.context.num_threads, num_groups * num_splits, [&](std::int64_t task, std::int32_t worker) {
        const std::int64_t group = task / num_splits;
        float* const scratch = workers_ + worker * worker_floats_;
        HWY_DYNAMIC_DISPATCH(decode_split)
        (params_, plan_, begin + group / num_heads, group % num_heads, task % num_splits,
         {scratch, scratch + q_floats_, scratch + q_floats_ + p_floats_}, partials(group));
      });
      core::parallel_for(params_.context.num_threads, num_groups, [&](std::int64_t group, std::int32_t) {
        HWY_DYNAMIC_DISPATCH(join_splits)(params_, plan_, begin + group / num_heads, group % num_heads, partials(group));
      });
    }
  }

 private:
  Partials partials(std::int64_t group) const {
    float* const base = partials_ + group * group_floats_;
    return {base, base + out_floats_, base + out_floats_ + row_floats_};
  }

  const core::SparseAttentionParams& params_;
  DecodePlan plan_{};
  std::int64_t dim_, group_size_, out_floats_, row_floats_, group_floats_, q_floats_, p_floats_, worker_floats_;
  float* partials_;  // [chunk_tokens, Hkv][group_floats]
  float* workers_;   // [num_threads][worker_floats]
};

}  // namespace

void sparse_decode(const core::SparseAttentionParams& params) { Decode(params).run(); }
void sparse_decode_reserve(const core::SparseAttentionParams& params) { Decode{params}; }

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
