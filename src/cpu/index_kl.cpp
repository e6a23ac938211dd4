// The index branch's KL loss and its gradients. Panels of query tokens meet a block: the teacher is summed over the group's heads
// vertically (a pack holds one head of kLanes tokens), then meets the student's scores of the same tokens. The student's
// normaliser comes from a pass of its own, which costs 1/G of the teacher's scores. Gradients are summed in a wavefront:
//   d_q_idx over the blocks ordered by (b mod kNumRanges, b), d_k_idx over the groups and then the queries in ascending order.
#include <algorithm>
#include <numeric>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cpu/gradient.hpp"
#include "cpu/targets.hpp"
#include "cpu/wavefront.hpp"

#ifndef OPENMSA_CPU_INDEX_KL_SCRATCH  // this file is read once per SIMD target
#define OPENMSA_CPU_INDEX_KL_SCRATCH
namespace openmsa::cpu {

struct IndexKlScratch {
  float* head_packs;                     // [kMaxPanelRows][D]: packs of one head of kLanes tokens each
  float* index_packs;                    // [kMaxPanelRows][Di]
  float* index_values;                   // [kMaxPanelRows][Di]: the same rows as a key tile reads them
  float *teacher, *scores;               // [Bk][kMaxPanelRows]; the student's scores become d loss / d score
  float* keys;                           // [Bk][D]
  float *index_keys, *index_key_values;  // [Bk][Di]: as rows, and in panels of a PV tile's width
  float *row_max, *row_sum;              // [tile_tokens]: the student's
  TokenScratch tokens;

  static IndexKlScratch take(FloatParts& parts, std::int64_t tile_tokens, const MsaConfig& config) {
    const std::int64_t block = config.block_size, rows = kMaxPanelRows;
    IndexKlScratch scratch{};
    scratch.head_packs = parts.take(rows * config.head_dim);
    scratch.index_packs = parts.take(rows * config.index_dim);
    scratch.index_values = parts.take(rows * config.index_dim);
    scratch.teacher = parts.take(block * rows);
    scratch.scores = parts.take(block * rows);
    scratch.keys = parts.take(block * config.head_dim);
    scratch.index_keys = parts.take(block * config.index_dim);
    scratch.index_key_values = parts.take(block * config.index_dim);
    scratch.row_max = parts.take(tile_tokens);
    scratch.row_sum = parts.take(tile_tokens);
    scratch.tokens = TokenScratch::take(parts, tile_tokens);
    return scratch;
  }
};

// What a task needs beside the call's parameters.
struct IndexKlState {
  float* log2_lse;     // [Hkv, T]: the student's normaliser
  double* divergence;  // [Hkv, T]: sum over the keys of P * log2(P / P_idx); null if no loss is wanted
  KeySums d_k_idx;     // with d_q_idx: unset if no gradients are wanted
  float* d_q_idx;      // [tile tokens][Di]: sums of the task's tile
  IndexKlScratch scratch;
};

}  // namespace openmsa::cpu
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/index_kl.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/gradient-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// The next panel of gathered tokens from number `first` of them; panel.q are packs of q_idx.
template <class Each>
HWY_INLINE std::size_t token_panel(const core::IndexKlParams& params, const TokenLists& lists, std::int64_t first_key,
                                   std::size_t first, std::size_t num_gathered, float* packs, Panel& panel, const Each& each) {
  const auto dim = static_cast<std::size_t>(params.config.index_dim);
  const std::size_t vecs = panel_vecs((num_gathered - first + kLanes - 1) / kLanes);
  panel.num_rows = std::min(num_gathered - first, vecs * kLanes);
  for (std::size_t r = 0; r < panel.num_rows; ++r) {
    const std::int32_t i = lists.gathered[first + r];
    panel.limit[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(lists.visible[i] - first_key, 0, params.geo.block_size));
    panel.row[r] = i;
    each(r, lists.token_begin + i);
  }
  for (std::size_t r = panel.num_rows; r < vecs * kLanes; ++r) panel.limit[r] = 0;
  pack_all(
      params.q_idx.dtype, panel.num_rows, dim,
      [&](std::size_t r) { return row_of(params.q_idx, lists.token_begin + panel.row[r], lists.head); }, packs);
  for (std::size_t v = 0; v < vecs; ++v) panel.q[v] = packs + v * kLanes * dim;
  return vecs;
}

template <int kVecs>
HWY_NOINLINE void student_panel(const Panel& panel, const BlockKv& block, float log2_scale, const PanelScratch& scratch) {
  alignas(64) float scale[kVecs * kLanes];
  const auto num_keys = static_cast<std::size_t>(panel.limit[panel.num_rows - 1]);
  Vec best[kVecs];
  panel_scores<kVecs>(panel, block, num_keys, true, scratch.scores, best);
  panel_softmax<kVecs>(panel, num_keys, log2_scale, best, scratch, scale);
}

// The student's normaliser of packed tokens [begin, end) of sequence seq.
void student_lse(const core::IndexKlParams& params, std::int32_t seq, std::int32_t head, std::int64_t begin, std::int64_t end,
                 const IndexKlState& state) {
  const core::Geometry& geo = params.geo;
  const IndexKlScratch& scratch = state.scratch;
  const auto dim = static_cast<std::size_t>(params.config.index_dim);
  const auto log2_scale = static_cast<float>(params.config.effective_index_scale() * 1.4426950408889634);
  TokenLists lists = scratch.tokens.lists(geo, params.block_ids, seq, head, begin, end);
  std::fill_n(scratch.row_max, lists.num_tokens, kMinusInfinity);
  std::fill_n(scratch.row_sum, lists.num_tokens, 0.0f);
  const PanelScratch panel_scratch{scratch.scores, scratch.row_max, scratch.row_sum, nullptr};
  std::int64_t block = lists.start();
  while (block != TokenLists::kNone) {
    std::size_t num_gathered = 0;
    const std::int64_t next = lists.gather(block, &num_gathered), first_key = block * geo.block_size;
    const std::int64_t most = std::min<std::int64_t>(geo.block_size, lists.visible[lists.gathered[num_gathered - 1]] - first_key);
    if (most > 0) {
      const BlockKv kv{key_rows(params.k_idx.block(geo, seq, block, 0), params.k_idx.dtype, params.k_idx.stride_token,
                                static_cast<std::size_t>(most), dim, scratch.index_keys),
                       nullptr, static_cast<std::size_t>(most), dim};
      std::size_t vecs = 0;
      for (std::size_t first = 0; first < num_gathered; first += vecs * kLanes) {
        Panel panel;
        vecs = token_panel(params, lists, first_key, first, num_gathered, scratch.index_packs, panel, [](auto, auto) {});
        switch (vecs) {
          case 1: student_panel<1>(panel, kv, log2_scale, panel_scratch); break;
          case 2: student_panel<2>(panel, kv, log2_scale, panel_scratch); break;
          default: student_panel<3>(panel, kv, log2_scale, panel_scratch); break;
        }
      }
    }
    block = next;
  }
  float* const lse = state.log2_lse + head * geo.total_q + begin;
  for (std::size_t i = 0; i < lists.num_tokens; ++i) {
    lse[i] = static_cast<float>(static_cast<double>(scratch.row_max[i] * log2_scale) + std::log2(double{scratch.row_sum[i]}));
  }
}

// teacher[key][v] += exp of the scaled scores of kPacks packs; pack n belongs to the panel's vector vec[n].
template <int kPacks>
HWY_NOINLINE void add_teacher(const float* const (&packs)[kQkVecs], const float* const* log2_lse, const std::size_t* vec,
                              const KeyRows& keys, std::size_t num_keys, std::size_t dim, std::size_t pitch, float log2_scale,
                              float* HWY_RESTRICT teacher) {
  const Vec scale = hn::Set(kFloats, log2_scale);
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kPacks];
    qk_tile<kPacks>(packs, keys.data + j * keys.stride, keys.stride, dim, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < kPacks; ++n) {
        float* const at = teacher + (j + i) * pitch + vec[n] * kLanes;
        const Vec p = exp2_nonpositive(kFloats, hn::MulSub(acc[i][n], scale, hn::Load(kFloats, log2_lse[n])));
        hn::Store(hn::Add(hn::Load(kFloats, at), p), kFloats, at);
      }
    }
  }
}

struct IndexKlBlock {
  KeyRows keys, index_keys;
  const float* index_key_values;
  std::size_t num_keys;
  float* d_k_idx;
  std::int64_t stride_d_k_idx;
};

// Sums over the group's heads of the tokens' probabilities, [key][token], heads in ascending order.
void sum_teacher(const core::IndexKlParams& params, const TokenLists& lists, const Panel& panel, std::size_t vecs,
                 std::size_t num_keys, const IndexKlBlock& block, const IndexKlScratch& scratch) {
  const std::int64_t group = params.config.group_size();
  const auto dim = static_cast<std::size_t>(params.config.head_dim);
  const auto log2_scale = static_cast<float>(params.config.effective_softmax_scale() * 1.4426950408889634);
  const std::size_t pitch = vecs * kLanes;
  std::fill_n(scratch.teacher, static_cast<std::size_t>(round_up(static_cast<std::int64_t>(num_keys), kKeys)) * pitch, 0.0f);
  const auto* const all_lse = static_cast<const float*>(params.lse.data);
  const std::size_t num_packs = vecs * static_cast<std::size_t>(group);  // number n: head n / vecs of the tokens of vector n % vecs
  std::size_t count = 0;
  for (std::size_t first = 0; first < num_packs; first += count) {
    count = panel_vecs(num_packs - first);
    alignas(64) float lse[kPanelRows];
    const float *packs[kQkVecs], *pack_lse[kQkVecs];
    std::size_t vec[kQkVecs];
    for (std::size_t n = 0; n < count; ++n) {
      const std::size_t begin = (first + n) % vecs * kLanes;
      const std::int64_t q_head = lists.head * group + static_cast<std::int64_t>((first + n) / vecs);
      const std::size_t num_rows = std::min(kLanes, panel.num_rows - begin);
      float* const pack = scratch.head_packs + n * kLanes * dim;
      pack_all(
          params.q.dtype, num_rows, dim,
          [&](std::size_t r) { return row_of(params.q, lists.token_begin + panel.row[begin + r], q_head); }, pack);
      for (std::size_t r = 0; r < kLanes; ++r) {
        const std::int64_t token = r < num_rows ? lists.token_begin + panel.row[begin + r] : -1;
        lse[n * kLanes + r] =
            token < 0 ? 0.0f
                      : static_cast<float>(double{all_lse[token * params.lse.stride[0] + q_head * params.lse.stride[1]]} *
                                           1.4426950408889634);
      }
      packs[n] = pack;
      pack_lse[n] = lse + n * kLanes;
      vec[n] = begin / kLanes;
    }
    switch (count) {
      case 1: add_teacher<1>(packs, pack_lse, vec, block.keys, num_keys, dim, pitch, log2_scale, scratch.teacher); break;
      case 2: add_teacher<2>(packs, pack_lse, vec, block.keys, num_keys, dim, pitch, log2_scale, scratch.teacher); break;
      default: add_teacher<3>(packs, pack_lse, vec, block.keys, num_keys, dim, pitch, log2_scale, scratch.teacher); break;
    }
  }
}

// The student meets the teacher: divergences of the panel's tokens, and both gradients' sums.
template <int kVecs>
HWY_NOINLINE void kl_panel(const core::IndexKlParams& params, const TokenLists& lists, const Panel& panel,
                           const float* HWY_RESTRICT log2_lse, const IndexKlBlock& block, const IndexKlState& state) {
  constexpr std::size_t kPitch = kVecs * kLanes;
  const IndexKlScratch& scratch = state.scratch;
  const auto dim = static_cast<std::size_t>(params.config.index_dim);
  const double index_scale = params.config.effective_index_scale();
  const auto num_heads = static_cast<double>(params.config.num_kv_heads);
  std::int32_t first_row[kMaxDim];  // block_size is at most kMaxDim, too
  const std::size_t num_keys = find_first_rows(panel, first_row);
  const Vec log2_scale = hn::Set(kFloats, static_cast<float>(index_scale * 1.4426950408889634));
  const Vec mean = hn::Set(kFloats, 1.0f / static_cast<float>(params.config.group_size()));
  const Vec factor = hn::Set(kFloats, static_cast<float>(index_scale / (static_cast<double>(params.num_tokens) * num_heads)));
  const hn::RebindToSigned<Floats> di;
  Vec divergence[kVecs];
  for (int v = 0; v < kVecs; ++v) divergence[v] = hn::Zero(kFloats);
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kVecs];
    qk_tile<kVecs>(panel.q, block.index_keys.data + j * block.index_keys.stride, block.index_keys.stride, dim, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec log2_p = hn::MulSub(acc[i][v], log2_scale, hn::Load(kFloats, log2_lse + v * kLanes));
        hn::Store(log2_p, kFloats, scratch.scores + ((j + i) * kVecs + v) * kLanes);
      }
    }
  }
  for (std::size_t j = 0; j < num_keys; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      float* const at = scratch.scores + (j * kVecs + v) * kLanes;
      const Vec student = hn::Load(kFloats, at);  // log2 of P_idx
      const Vec teacher = hn::Mul(hn::Load(kFloats, scratch.teacher + (j * kVecs + v) * kLanes), mean);
      if (state.divergence != nullptr) {
        const auto sees =
            hn::RebindMask(kFloats, hn::Gt(hn::Load(di, panel.limit + v * kLanes), hn::Set(di, static_cast<std::int32_t>(j))));
        const Vec term = hn::Mul(teacher, hn::Sub(hn::Log2(kFloats, teacher), student));
        const auto counts = hn::And(sees, hn::Ne(teacher, hn::Zero(kFloats)));  // 0 ln 0 = 0
        divergence[v] = hn::Add(divergence[v], hn::IfThenElseZero(counts, term));
      }
      hn::Store(hn::Mul(factor, hn::Sub(exp2_nonpositive(kFloats, student), teacher)), kFloats, at);
    }
  }
  if (state.divergence != nullptr) {
    alignas(64) float sum[kPitch];
    for (int v = 0; v < kVecs; ++v) hn::Store(divergence[v], kFloats, sum + v * kLanes);
    for (std::size_t r = 0; r < panel.num_rows; ++r) {
      state.divergence[lists.head * params.geo.total_q + lists.token_begin + panel.row[r]] += double{sum[r]};
    }
  }
  if (!params.d_q_idx.given()) return;
  add_to_rows<kPitch>(panel, scratch.scores, block.index_key_values, block.num_keys, dim, state.d_q_idx);
  add_to_keys<kPitch>(first_row, num_keys, panel.num_rows, scratch.scores, scratch.index_values, dim, block.d_k_idx,
                      block.stride_d_k_idx);
}

void kl_block(const core::IndexKlParams& params, const TokenLists& lists, std::int64_t block_id, std::size_t num_gathered,
              const IndexKlState& state) {
  const core::Geometry& geo = params.geo;
  const IndexKlScratch& scratch = state.scratch;
  const std::int64_t block_size = geo.block_size, first_key = block_id * block_size;
  const auto dim = static_cast<std::size_t>(params.config.head_dim), index_dim = static_cast<std::size_t>(params.config.index_dim);
  const std::int64_t most = std::min(block_size, lists.visible[lists.gathered[num_gathered - 1]] - first_key);
  if (most <= 0) return;
  const auto num_keys = static_cast<std::size_t>(most);
  const bool gradients = params.d_q_idx.given();
  const std::byte* const index_keys = params.k_idx.block(geo, lists.seq, block_id, 0);
  if (gradients) {
    pack_values(index_keys, params.k_idx.dtype, params.k_idx.stride_token, num_keys, index_dim, scratch.index_key_values);
  }
  const IndexKlBlock block{
      key_rows(params.k.block(geo, lists.seq, block_id, lists.head), params.k.dtype, params.k.stride_token, num_keys, dim,
               scratch.keys),
      key_rows(index_keys, params.k_idx.dtype, params.k_idx.stride_token, num_keys, index_dim, scratch.index_keys),
      scratch.index_key_values,
      num_keys,
      gradients ? state.d_k_idx.row(geo.cu_seqlens_k[lists.seq] + first_key, 0) : nullptr,
      state.d_k_idx.stride_token};
  const float* const student_lse = state.log2_lse + lists.head * geo.total_q;
  std::size_t vecs = 0;
  for (std::size_t first = 0; first < num_gathered; first += vecs * kLanes) {
    Panel panel;
    alignas(64) float log2_lse[kPanelRows] = {};
    const std::byte* rows[kPanelRows];
    vecs = token_panel(params, lists, first_key, first, num_gathered, scratch.index_packs, panel,
                       [&](std::size_t r, std::int64_t token) {
                         log2_lse[r] = student_lse[token];
                         rows[r] = row_of(params.q_idx, token, lists.head);
                       });
    const std::int32_t panel_keys = panel.limit[panel.num_rows - 1];
    if (panel_keys == 0) continue;
    if (gradients) pack_row_values(params.q_idx.dtype, rows, panel.num_rows, index_dim, scratch.index_values);
    sum_teacher(params, lists, panel, vecs, static_cast<std::size_t>(panel_keys), block, scratch);
    switch (vecs) {
      case 1: kl_panel<1>(params, lists, panel, log2_lse, block, state); break;
      case 2: kl_panel<2>(params, lists, panel, log2_lse, block, state); break;
      default: kl_panel<3>(params, lists, panel, log2_lse, block, state); break;
    }
  }
}

// Packed tokens [begin, end) of sequence seq against ranges [range_begin, range_end) of its blocks. The first range finds the tile's
// sums uninitialised; after the last one they are stored.
void kl_task(const core::IndexKlParams& params, std::int32_t seq, std::int32_t head, std::int64_t begin, std::int64_t end,
             std::int64_t range_begin, std::int64_t range_end, bool last, const IndexKlState& state) {
  const std::int64_t dim = params.config.index_dim;
  const bool gradients = params.d_q_idx.given();
  if (range_begin == 0) {
    if (gradients) std::fill_n(state.d_q_idx, (end - begin) * dim, 0.0f);
    if (state.divergence != nullptr) std::fill_n(state.divergence + head * params.geo.total_q + begin, end - begin, 0.0);
  }
  TokenLists lists = state.scratch.tokens.lists(params.geo, params.block_ids, seq, head, begin, end);
  std::int64_t block = lists.start(range_begin, range_end);
  while (block != TokenLists::kNone) {
    std::size_t num_gathered = 0;
    const std::int64_t next = lists.gather(block, &num_gathered);
    kl_block(params, lists, block, num_gathered, state);
    block = next;
  }
  if (!last || !gradients) return;
  for (std::int64_t t = begin; t < end; ++t) {
    store_sums(params.d_q_idx.dtype, state.d_q_idx + (t - begin) * dim, static_cast<std::size_t>(dim),
               row_of(params.d_q_idx, t, head));
  }
}

void store_index_key_sums(const KeySums& sums, const TensorView& result, std::int64_t begin, std::int64_t end) {
  for (std::int64_t j = begin; j < end; ++j) {
    store_sums(result.dtype, sums.row(j, 0), static_cast<std::size_t>(result.shape[1]),
               static_cast<std::byte*>(result.data) + j * result.stride[0] * dtype_bytes(result.dtype));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {
HWY_EXPORT(student_lse);
HWY_EXPORT(kl_task);
HWY_EXPORT(store_index_key_sums);

namespace {

struct IndexKlPlan {
  QueryTiles tiles;
  Wavefront wavefront;
  std::int64_t worker_floats, slot_floats;
  float *scratch, *slots = nullptr, *log2_lse;
  double* divergence = nullptr;
  KeySums d_k_idx;
  void* progress;

  explicit IndexKlPlan(const core::IndexKlParams& params)
      // A block is converted once per tile, and a token's state is small: only half a MiB of sums at 1,024 tokens.
      : tiles(params.geo, params.config.num_kv_heads, 1024, kMaxPanelRows, params.context.num_threads),
        wavefront(tiles.per_head * params.config.num_kv_heads, params.geo.max_num_blocks(), params.context.num_threads) {
    core::Arena& arena = *params.context.arena;
    FloatParts counted(nullptr);
    IndexKlScratch::take(counted, tiles.tokens, params.config);
    worker_floats = static_cast<std::int64_t>(counted.used());
    slot_floats = tiles.tokens * params.config.index_dim;
    const auto num_rows = static_cast<std::size_t>(params.geo.total_q * params.config.num_kv_heads);
    scratch = arena.take<float>(static_cast<std::size_t>(worker_floats * wavefront.num_workers()));
    log2_lse = arena.take<float>(num_rows);
    if (params.loss.given()) divergence = arena.take<double>(num_rows);
    if (params.d_q_idx.given()) {
      d_k_idx = KeySums::of(arena, params.d_k_idx);
      slots = arena.take<float>(static_cast<std::size_t>(slot_floats * wavefront.num_slots()));
    }
    progress = arena.take<Wavefront::Progress>(wavefront.num_progress());
  }
};

}  // namespace

void index_kl_loss_reserve(const core::IndexKlParams& params) { IndexKlPlan{params}; }

void index_kl_loss(const core::IndexKlParams& params) {
  const IndexKlPlan plan(params);
  const std::int64_t num_tiles = plan.tiles.per_head * params.config.num_kv_heads;
  const auto state_of = [&](std::int32_t worker) {
    FloatParts parts(plan.scratch + plan.worker_floats * worker);
    return IndexKlState{plan.log2_lse, params.loss.given() ? plan.divergence : nullptr, plan.d_k_idx, nullptr,
                        IndexKlScratch::take(parts, plan.tiles.tokens, params.config)};
  };
  const bool gradients = params.d_q_idx.given();
  const std::int64_t num_keys = gradients ? params.d_k_idx.shape[0] : 0;
  for (std::int64_t j = 0; j < num_keys; ++j) std::fill_n(plan.d_k_idx.row(j, 0), params.config.index_dim, 0.0f);

  core::parallel_for(plan.wavefront.num_workers(), num_tiles, [&](std::int64_t tile, std::int32_t worker) {
    const IndexKlState state = state_of(worker);
    plan.tiles.for_each_sequence(params.geo, tile % plan.tiles.per_head,
                                 [&](std::int32_t seq, std::int64_t begin, std::int64_t end) {
                                   HWY_DYNAMIC_DISPATCH(student_lse)
                                   (params, seq, static_cast<std::int32_t>(tile / plan.tiles.per_head), begin, end, state);
                                 });
  });
  plan.wavefront.run(plan.progress, [&](std::int64_t tile, std::int64_t range_begin, std::int64_t range_end, std::int32_t worker) {
    IndexKlState state = state_of(worker);
    const std::int64_t in_head = tile % plan.tiles.per_head;
    plan.tiles.for_each_sequence(params.geo, in_head, [&](std::int32_t seq, std::int64_t begin, std::int64_t end) {
      if (gradients) {
        state.d_q_idx = plan.slots + tile % plan.wavefront.num_slots() * plan.slot_floats +
                        (begin - in_head * plan.tiles.tokens) * params.config.index_dim;
      }
      HWY_DYNAMIC_DISPATCH(kl_task)
      (params, seq, static_cast<std::int32_t>(tile / plan.tiles.per_head), begin, end, range_begin, range_end,
       range_end == plan.wavefront.num_ranges(), state);
    });
  });

  if (gradients && params.d_k_idx.dtype != DType::kF32) {
    HWY_DYNAMIC_DISPATCH(store_index_key_sums)(plan.d_k_idx, params.d_k_idx, 0, num_keys);
  }
  if (!params.loss.given()) return;
  const std::int64_t num_rows = params.geo.total_q * params.config.num_kv_heads;
  const double sum = std::accumulate(plan.divergence, plan.divergence + num_rows, 0.0);
  constexpr double kLn2 = 0.69314718055994530942;
  *static_cast<float*>(params.loss.data) =
      static_cast<float>(kLn2 * sum / (static_cast<double>(params.num_tokens) * params.config.num_kv_heads));
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
