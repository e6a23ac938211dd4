// Gradients of sparse_attention and dense_attention in one pass: five products per (block, gathered rows), S and dP by QK tiles, then
// dQ by PV tiles and dK, dV by key tiles. Query tiles meet key ranges in a wavefront, so that every element of every gradient is
// one chain of additions in an order that threads and tiles do not change:
//   d_q over the blocks ordered by (b mod kNumRanges, b), d_k and d_v over the queries in ascending order.
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cpu/gradient.hpp"
#include "cpu/targets.hpp"
#include "cpu/wavefront.hpp"

#ifndef OPENMSA_CPU_BACKWARD_SCRATCH  // this file is read once per SIMD target
#define OPENMSA_CPU_BACKWARD_SCRATCH
namespace openmsa::cpu {

struct BackwardScratch {
  float *q_packs, *d_out_packs;     // [kMaxPanelRows][D]: transposed packs of the panel's rows
  float *q_values, *d_out_values;   // [kMaxPanelRows][D]: the same rows as a key tile reads them
  float *probabilities, *d_scores;  // [Bk][kMaxPanelRows]
  float *keys, *values;             // [Bk][D]: rows of the block
  float* key_values;                // [Bk][D]: its keys in panels of a PV tile's width
  TokenScratch tokens;

  static BackwardScratch take(FloatParts& parts, std::int64_t tile_tokens, std::int64_t dim, std::int64_t block_size) {
    BackwardScratch scratch{};
    for (float** part : {&scratch.q_packs, &scratch.d_out_packs, &scratch.q_values, &scratch.d_out_values}) {
      *part = parts.take(kMaxPanelRows * dim);
    }
    for (float** part : {&scratch.probabilities, &scratch.d_scores}) *part = parts.take(kMaxPanelRows * block_size);
    for (float** part : {&scratch.keys, &scratch.values, &scratch.key_values}) *part = parts.take(block_size * dim);
    scratch.tokens = TokenScratch::take(parts, tile_tokens);
    return scratch;
  }
};

// What a task needs beside the call's parameters.
struct BackwardState {
  const float* delta;  // [T, Hq]: <d_out, out> of each row
  KeySums d_k, d_v;
  float* d_q;  // [tile tokens][G][D]: sums of the task's tile
  BackwardScratch scratch;
};

}  // namespace openmsa::cpu
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_backward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/gradient-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// delta of packed tokens [begin, end): chains of multiply-adds over ascending d, as a QK tile's dP, so that in a row with one key,
// where out is v, dP - delta is exactly 0.
void backward_delta(const core::AttentionBackwardParams& params, std::int64_t begin, std::int64_t end, float* delta) {
  const auto num_heads = static_cast<std::size_t>(params.config.num_q_heads);
  const auto dim = static_cast<std::size_t>(params.config.head_dim);
  alignas(64) float out[kLanes * kMaxDim], d_out[kLanes * kMaxDim], sums[kLanes];
  const std::size_t num_rows = static_cast<std::size_t>(end - begin) * num_heads;
  for (std::size_t first = 0; first < num_rows; first += kLanes) {
    const std::size_t count = std::min(kLanes, num_rows - first);
    const auto row = [&](const TensorView& tensor, std::size_t r) {
      return row_of(tensor, begin + static_cast<std::int64_t>((first + r) / num_heads),
                    static_cast<std::int64_t>((first + r) % num_heads));
    };
    pack_all(
        params.out.dtype, count, dim, [&](std::size_t r) { return row(params.out, r); }, out);
    pack_all(
        params.d_out.dtype, count, dim, [&](std::size_t r) { return row(params.d_out, r); }, d_out);
    Vec sum = hn::Zero(kFloats);
    for (std::size_t d = 0; d < dim; ++d) {
      sum = hn::MulAdd(hn::Load(kFloats, d_out + d * kLanes), hn::Load(kFloats, out + d * kLanes), sum);
    }
    hn::Store(sum, kFloats, sums);
    std::copy_n(sums, count, delta + static_cast<std::size_t>(begin) * num_heads + first);
  }
}

// Rows that meet a block together; packs in panel.q are those of q.
struct BackwardPanel {
  Panel panel;
  const float* d_out[kQkVecs];
  alignas(64) float log2_lse[kPanelRows];
  alignas(64) float delta[kPanelRows];
  std::size_t num_next = 0;  // rows of the next panel, called into the caches while this one is at work
  const std::byte *next_q[kPanelRows], *next_d_out[kPanelRows];
};

HWY_INLINE void prefetch_row(const void* row, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const std::byte*>(row) + at, 0, 2);
}

struct BackwardBlock {
  KeyRows keys, values;
  const float* key_values;
  std::size_t num_keys, dim;  // of key_values
  std::int64_t row_bytes;     // of a stored row of q or d_out
  float *d_k, *d_v;           // its first key's sums
  std::int64_t stride_d_k, stride_d_v;
};

template <int kVecs>
HWY_NOINLINE void backward_panel(const BackwardPanel& rows, const BackwardBlock& block, float scale, const BackwardState& state) {
  constexpr std::size_t kPitch = kVecs * kLanes;
  const BackwardScratch& scratch = state.scratch;
  std::int32_t first_row[kMaxDim];  // block_size is at most kMaxDim, too
  const std::size_t num_keys = find_first_rows(rows.panel, first_row);
  const Vec log2_scale = hn::Set(kFloats, static_cast<float>(static_cast<double>(scale) * 1.4426950408889634));
  float* HWY_RESTRICT const p = scratch.probabilities;
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kVecs];
    // The packing of gathered rows waits for memory otherwise, as the sums over rows would (below).
    for (std::size_t r = j * rows.num_next / num_keys; r < std::min(num_keys, j + kKeys) * rows.num_next / num_keys; ++r) {
      prefetch_row(rows.next_q[r], block.row_bytes);
      prefetch_row(rows.next_d_out[r], block.row_bytes);
    }
    qk_tile<kVecs>(rows.panel.q, block.keys.data + j * block.keys.stride, block.keys.stride, block.dim, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec lse = hn::Load(kFloats, rows.log2_lse + v * kLanes);
        hn::Store(exp2_nonpositive(kFloats, hn::MulSub(acc[i][v], log2_scale, lse)), kFloats, p + ((j + i) * kVecs + v) * kLanes);
      }
    }
  }
  float* HWY_RESTRICT const d_s = scratch.d_scores;
  const Vec factor = hn::Set(kFloats, scale);
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kVecs];
    const std::size_t num_rows = rows.panel.num_rows;
    for (std::size_t r = j * num_rows / num_keys; r < std::min(num_keys, j + kKeys) * num_rows / num_keys; ++r) {
      prefetch_row(state.d_q + static_cast<std::size_t>(rows.panel.row[r]) * block.dim, block.dim * sizeof(float));
    }
    qk_tile<kVecs>(rows.d_out, block.values.data + j * block.values.stride, block.values.stride, block.dim, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const std::size_t at = ((j + i) * kVecs + v) * kLanes;
        const Vec d_p = hn::Sub(acc[i][v], hn::Load(kFloats, rows.delta + v * kLanes));
        hn::Store(hn::Mul(hn::Mul(hn::Load(kFloats, p + at), factor), d_p), kFloats, d_s + at);
      }
    }
  }
  add_to_rows<kPitch>(rows.panel, d_s, block.key_values, block.num_keys, block.dim, state.d_q);
  add_to_keys<kPitch>(first_row, num_keys, rows.panel.num_rows, p, scratch.d_out_values, block.dim, block.d_v, block.stride_d_v);
  add_to_keys<kPitch>(first_row, num_keys, rows.panel.num_rows, d_s, scratch.q_values, block.dim, block.d_k, block.stride_d_k);
}

// Calls the share [begin, end) of `all` of a block's keys, values and their sums into L2; see AttendTile::prefetch.
void prefetch_block(const core::AttentionBackwardParams& params, const TokenLists& lists, std::int64_t block, std::size_t begin,
                    std::size_t end, std::size_t all, const BackwardState& state) {
  if (block == TokenLists::kNone) return;
  const core::Geometry& geo = params.geo;
  const std::int64_t first_key = block * geo.block_size;
  const auto num_keys = static_cast<std::size_t>(std::clamp<std::int64_t>(geo.seqlen_k(lists.seq) - first_key, 0, geo.block_size));
  const std::int64_t row_bytes = params.config.head_dim * dtype_bytes(params.k.dtype);
  const std::int64_t sum_bytes = params.config.head_dim * static_cast<std::int64_t>(sizeof(float));
  const std::byte* const k = params.k.block(geo, lists.seq, block, lists.head);
  const std::byte* const v = params.v.block(geo, lists.seq, block, lists.head);
  for (std::size_t j = num_keys * begin / all; j < num_keys * end / all; ++j) {
    const auto row = static_cast<std::int64_t>(j), token = geo.cu_seqlens_k[lists.seq] + first_key + row;
    prefetch_row(k + row * params.k.stride_token, row_bytes);
    prefetch_row(v + row * params.v.stride_token, row_bytes);
    prefetch_row(state.d_k.row(token, lists.head), sum_bytes);
    prefetch_row(state.d_v.row(token, lists.head), sum_bytes);
  }
}

struct GatheredRow {
  std::int32_t token;  // in the tile
  std::int64_t head;   // in the group
};

void backward_block(const core::AttentionBackwardParams& params, const TokenLists& lists, std::int64_t block,
                    std::size_t num_gathered, std::int64_t next_block, const BackwardState& state) {
  const core::Geometry& geo = params.geo;
  const BackwardScratch& scratch = state.scratch;
  const std::int64_t block_size = geo.block_size, first_key = block * block_size, head = lists.head;
  const std::int64_t first_head = head * params.config.group_size();
  const auto group = static_cast<std::size_t>(params.config.group_size()), dim = static_cast<std::size_t>(params.config.head_dim);
  // Tokens were gathered in ascending order, so the last one sees the most.
  const std::int64_t most = std::min(block_size, lists.visible[lists.gathered[num_gathered - 1]] - first_key);
  if (most <= 0) return;
  const auto num_keys = static_cast<std::size_t>(most);
  const std::byte* const keys = params.k.block(geo, lists.seq, block, lists.head);
  const std::byte* const values = params.v.block(geo, lists.seq, block, lists.head);
  pack_values(keys, params.k.dtype, params.k.stride_token, num_keys, dim, scratch.key_values);
  const std::int64_t key_token = geo.cu_seqlens_k[lists.seq] + first_key;
  const BackwardBlock kv{key_rows(keys, params.k.dtype, params.k.stride_token, num_keys, dim, scratch.keys),
                         key_rows(values, params.v.dtype, params.v.stride_token, num_keys, dim, scratch.values),
                         scratch.key_values,
                         num_keys,
                         dim,
                         params.config.head_dim * dtype_bytes(params.q.dtype),
                         state.d_k.row(key_token, head),
                         state.d_v.row(key_token, head),
                         state.d_k.stride_token,
                         state.d_v.stride_token};
  const auto scale = static_cast<float>(params.config.effective_softmax_scale());
  const auto* const lse = static_cast<const float*>(params.lse.data);

  const std::size_t num_rows = num_gathered * group;
  const auto row_at = [&](std::size_t r) { return GatheredRow{lists.gathered[r / group], static_cast<std::int64_t>(r % group)}; };
  std::size_t vecs = 0;
  for (std::size_t begin = 0; begin < num_rows; begin += vecs * kLanes) {
    vecs = panel_vecs((num_rows - begin + kLanes - 1) / kLanes);
    BackwardPanel rows;
    Panel& panel = rows.panel;
    panel.num_rows = std::min(num_rows - begin, vecs * kLanes);
    const std::byte *q[kPanelRows], *d_out[kPanelRows];
    for (std::size_t r = 0; r < panel.num_rows; ++r) {
      const auto [i, h] = row_at(begin + r);
      const std::int64_t token = lists.token_begin + i, q_head = first_head + h;
      panel.limit[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(lists.visible[i] - first_key, 0, block_size));
      panel.row[r] = i * static_cast<std::int32_t>(group) + static_cast<std::int32_t>(h);
      q[r] = row_of(params.q, token, q_head);
      d_out[r] = row_of(params.d_out, token, q_head);
      rows.log2_lse[r] =
          static_cast<float>(double{lse[token * params.lse.stride[0] + q_head * params.lse.stride[1]]} * 1.4426950408889634);
      rows.delta[r] = state.delta[token * params.config.num_q_heads + q_head];
    }
    rows.num_next = std::min(num_rows - begin - panel.num_rows, kPanelRows);
    for (std::size_t r = 0; r < rows.num_next; ++r) {
      const auto [i, h] = row_at(begin + panel.num_rows + r);
      rows.next_q[r] = row_of(params.q, lists.token_begin + i, first_head + h);
      rows.next_d_out[r] = row_of(params.d_out, lists.token_begin + i, first_head + h);
    }
    for (std::size_t r = panel.num_rows; r < vecs * kLanes; ++r) rows.log2_lse[r] = rows.delta[r] = 0.0f;
    if (panel.limit[panel.num_rows - 1] == 0) continue;
    pack_all(
        params.q.dtype, panel.num_rows, dim, [&](std::size_t r) { return q[r]; }, scratch.q_packs);
    pack_all(
        params.d_out.dtype, panel.num_rows, dim, [&](std::size_t r) { return d_out[r]; }, scratch.d_out_packs);
    pack_row_values(params.q.dtype, q, panel.num_rows, dim, scratch.q_values);
    pack_row_values(params.d_out.dtype, d_out, panel.num_rows, dim, scratch.d_out_values);
    for (std::size_t v = 0; v < vecs; ++v) {
      panel.q[v] = scratch.q_packs + v * kLanes * dim;
      rows.d_out[v] = scratch.d_out_packs + v * kLanes * dim;
    }
    prefetch_block(params, lists, next_block, begin, begin + panel.num_rows, num_rows, state);
    switch (vecs) {
      case 1: backward_panel<1>(rows, kv, scale, state); break;
      case 2: backward_panel<2>(rows, kv, scale, state); break;
      default: backward_panel<3>(rows, kv, scale, state); break;
    }
  }
}

// Packed tokens [begin, end) of sequence seq, heads of KV head `head`, against ranges [range_begin, range_end) of its blocks. The
// first range finds the tile's sums uninitialised; after the last one they are stored.
void backward_task(const core::AttentionBackwardParams& params, std::int32_t seq, std::int32_t head, std::int64_t begin,
                   std::int64_t end, std::int64_t range_begin, std::int64_t range_end, bool last, const BackwardState& state) {
  const std::int64_t group = params.config.group_size(), dim = params.config.head_dim;
  if (range_begin == 0) std::fill_n(state.d_q, (end - begin) * group * dim, 0.0f);
  TokenLists lists = state.scratch.tokens.lists(params.geo, params.block_ids, seq, head, begin, end);
  std::int64_t block = lists.start(range_begin, range_end);
  while (block != TokenLists::kNone) {
    std::size_t num_gathered = 0;
    const std::int64_t next = lists.gather(block, &num_gathered);
    backward_block(params, lists, block, num_gathered, next, state);
    block = next;
  }
  if (!last) return;
  for (std::int64_t row = 0; row < (end - begin) * group; ++row) {
    store_sums(params.d_q.dtype, state.d_q + row * dim, static_cast<std::size_t>(dim),
               row_of(params.d_q, begin + row / group, head * group + row % group));
  }
}

// Keys [begin, end) of all heads.
void store_key_sums(const KeySums& sums, const TensorView& result, std::int64_t begin, std::int64_t end) {
  for (std::int64_t j = begin; j < end; ++j) {
    for (std::int64_t head = 0; head < result.shape[1]; ++head) {
      store_sums(result.dtype, sums.row(j, head), static_cast<std::size_t>(result.shape[2]), row_of(result, j, head));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {
HWY_EXPORT(backward_delta);
HWY_EXPORT(backward_task);
HWY_EXPORT(store_key_sums);

namespace {

constexpr std::int64_t kRowsPerTask = 256;  // of the passes over all tokens or keys

struct BackwardPlan {
  QueryTiles tiles;
  Wavefront wavefront;
  std::int64_t worker_floats, slot_floats;
  KeySums d_k, d_v;
  float *scratch, *slots, *delta;
  void* progress;

  explicit BackwardPlan(const core::AttentionBackwardParams& params)
      // 2,048 rows of 128: 1 MiB of sums in each slot.
      : tiles(params.geo, params.config.num_kv_heads, 2048 * 128 / params.config.head_dim / params.config.group_size(),
              ceil_div(64, params.config.group_size()), params.context.num_threads),
        wavefront(tiles.per_head * params.config.num_kv_heads, params.geo.max_num_blocks(), params.context.num_threads) {
    core::Arena& arena = *params.context.arena;
    FloatParts counted(nullptr);
    BackwardScratch::take(counted, tiles.tokens, params.config.head_dim, params.config.block_size);
    worker_floats = static_cast<std::int64_t>(counted.used());
    slot_floats = tiles.tokens * params.config.group_size() * params.config.head_dim;
    d_k = KeySums::of(arena, params.d_k);
    d_v = KeySums::of(arena, params.d_v);
    scratch = arena.take<float>(static_cast<std::size_t>(worker_floats * wavefront.num_workers()));
    slots = arena.take<float>(static_cast<std::size_t>(slot_floats * wavefront.num_slots()));
    delta = arena.take<float>(static_cast<std::size_t>(params.geo.total_q * params.config.num_q_heads));
    progress = arena.take<Wavefront::Progress>(wavefront.num_progress());
  }
};

template <class Body>
void for_row_chunks(std::int32_t num_threads, std::int64_t num_rows, const Body& body) {
  core::parallel_for(num_threads, ceil_div(num_rows, kRowsPerTask), [&](std::int64_t task, std::int32_t) {
    body(task * kRowsPerTask, std::min(num_rows, (task + 1) * kRowsPerTask));
  });
}

}  // namespace

void attention_backward_reserve(const core::AttentionBackwardParams& params) { BackwardPlan{params}; }

void attention_backward(const core::AttentionBackwardParams& params) {
  const BackwardPlan plan(params);
  const std::int32_t num_threads = params.context.num_threads;
  const std::int64_t num_keys = params.d_k.shape[0], num_heads = params.config.num_kv_heads, dim = params.config.head_dim;
  for_row_chunks(num_threads, num_keys, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j) {
      for (std::int64_t head = 0; head < num_heads; ++head) {
        std::fill_n(plan.d_k.row(j, head), dim, 0.0f);
        std::fill_n(plan.d_v.row(j, head), dim, 0.0f);
      }
    }
  });
  for_row_chunks(num_threads, params.geo.total_q, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(backward_delta)(params, begin, end, plan.delta);
  });

  plan.wavefront.run(plan.progress, [&](std::int64_t tile, std::int64_t range_begin, std::int64_t range_end, std::int32_t worker) {
    FloatParts parts(plan.scratch + plan.worker_floats * worker);
    BackwardState state{plan.delta, plan.d_k, plan.d_v, nullptr,
                        BackwardScratch::take(parts, plan.tiles.tokens, dim, params.config.block_size)};
    float* const slot = plan.slots + tile % plan.wavefront.num_slots() * plan.slot_floats;
    const std::int64_t in_head = tile % plan.tiles.per_head;
    plan.tiles.for_each_sequence(params.geo, in_head, [&](std::int32_t seq, std::int64_t begin, std::int64_t end) {
      state.d_q = slot + (begin - in_head * plan.tiles.tokens) * params.config.group_size() * dim;
      HWY_DYNAMIC_DISPATCH(backward_task)
      (params, seq, static_cast<std::int32_t>(tile / plan.tiles.per_head), begin, end, range_begin, range_end,
       range_end == plan.wavefront.num_ranges(), state);
    });
  });

  if (params.d_k.dtype == DType::kF32) return;  // the sums are the results
  for_row_chunks(num_threads, num_keys, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(store_key_sums)(plan.d_k, params.d_k, begin, end);
    HWY_DYNAMIC_DISPATCH(store_key_sums)(plan.d_v, params.d_v, begin, end);
  });
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
