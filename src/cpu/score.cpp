// block_scores: max over the visible keys of each block of <q_idx, k_idx>, in QK tiles with lanes over rows (token x group).
// A tile of rows is packed once and meets every key block; a key block is converted once per tile. The maximum runs down the
// keys inside registers, so nothing but the scores themselves is written.
#include "cpu/score.hpp"

#include <algorithm>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cpu/score_decode.hpp"
#include "cpu/targets.hpp"
#include "cpu/tiles.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/score.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/gemm-inl.h"
#include "hwy/highway.h"

#ifndef OPENMSA_CPU_SCORE_ONCE
#define OPENMSA_CPU_SCORE_ONCE
namespace openmsa::cpu {

// Rows whose packed index queries take about 256 KiB, a quarter of a server core's L2; a multiple of kMaxPanelRows.
constexpr std::int64_t score_tile_rows(std::int32_t index_dim) {
  return std::max<std::int64_t>(48, std::int64_t{65536} / index_dim / 48 * 48);
}

struct ScoreScratch {
  float* packs;           // [tile rows][Di]
  float* keys;            // [Bk][Di]
  std::int32_t* visible;  // [tile rows]: keys of the sequence that each row sees
};

}  // namespace openmsa::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

struct BlockView {
  KeyRows keys;
  std::size_t dim;
};

// best[v] = max over keys 0..num_keys-1, NaN if one of them is; limits[row] ends what a row sees when kMasked.
// Unmasked, NaN is only detected (a sum over the keys is NaN then), and the caller repeats the tile masked.
template <int kVecs, bool kMasked>
HWY_INLINE bool block_max(const float* const (&q)[kQkVecs], const BlockView& block, std::size_t num_keys,
                          const std::int32_t* limits, Vec (&best)[kVecs]) {
  const hn::RebindToSigned<Floats> di;
  Vec check[kVecs];  // masked: holds a NaN once one was seen
  const Vec minus_infinity = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < kVecs; ++v) {
    best[v] = minus_infinity;
    check[v] = hn::Zero(kFloats);
  }
  for (std::size_t j = 0; j < num_keys; j += kKeys) {
    Vec acc[kKeys][kVecs];
    qk_tile<kVecs>(q, block.keys.data + j * block.keys.stride, block.keys.stride, block.dim, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        Vec s = acc[i][v];
        if constexpr (kMasked) {
          const auto sees = hn::Gt(hn::LoadU(di, limits + v * kLanes), hn::Set(di, static_cast<std::int32_t>(j) + i));
          s = hn::IfThenElse(hn::RebindMask(kFloats, sees), s, minus_infinity);
          check[v] = hn::IfThenElse(hn::IsNaN(s), s, check[v]);
        } else {
          check[v] = hn::Add(check[v], s);
        }
        best[v] = hn::Max(best[v], s);
      }
    }
  }
  bool clean = true;
  for (int v = 0; v < kVecs; ++v) {
    if constexpr (kMasked) {
      best[v] = hn::IfThenElse(hn::IsNaN(check[v]), check[v], best[v]);
    } else {
      clean = clean && hn::AllFalse(kFloats, hn::IsNaN(check[v]));
    }
  }
  return clean;
}

template <int kVecs>
HWY_NOINLINE void score_panel(const float* const (&q)[kQkVecs], const BlockView& block, std::size_t num_keys,
                              std::size_t fewest_keys, const std::int32_t* limits, float* HWY_RESTRICT out) {
  Vec best[kVecs];
  // num_keys is a multiple of kKeys where every row sees all keys, unless the sequence ends inside the tile.
  const bool done = fewest_keys >= num_keys && num_keys % kKeys == 0 && block_max<kVecs, false>(q, block, num_keys, limits, best);
  if (!done) block_max<kVecs, true>(q, block, num_keys, limits, best);
  for (int v = 0; v < kVecs; ++v) hn::Store(best[v], kFloats, out + v * kLanes);
}

// Rows [row_begin, row_end) of the flattened (token, group) axis; at most score_tile_rows of them.
void score_rows(const ScoreInputs& in, std::int32_t seq, std::int64_t token_begin, std::int64_t row_begin, std::int64_t row_end,
                std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token,
                std::int64_t stride_head, const ScoreScratch& scratch) {
  const std::int64_t num_heads = in.num_kv_heads, block_size = in.geo.block_size;
  const std::size_t dim = static_cast<std::size_t>(in.index_dim);
  const std::size_t num_rows = static_cast<std::size_t>(row_end - row_begin);
  const std::int64_t element = dtype_bytes(in.q_idx.dtype);
  const auto* const q_data = static_cast<const std::byte*>(in.q_idx.data);
  const std::int64_t seq_begin = in.geo.query_begin(seq);

  pack_all(
      in.q_idx.dtype, num_rows, dim,
      [&](std::size_t r) {
        const std::int64_t row = row_begin + static_cast<std::int64_t>(r);
        const std::int64_t token = token_begin + row / num_heads, head = row % num_heads;
        return q_data + (token * in.q_idx.stride[0] + head * in.q_idx.stride[1]) * element;
      },
      scratch.packs);
  const std::size_t padded_rows = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(num_rows), kMaxLanes));
  for (std::size_t r = 0; r < padded_rows; ++r) {
    const std::int64_t row = row_begin + static_cast<std::int64_t>(std::min(r, num_rows - 1));
    const std::int64_t i = token_begin + row / num_heads - seq_begin;
    scratch.visible[r] = static_cast<std::int32_t>(in.geo.num_visible(seq, in.geo.position(seq, i)));
  }
  const auto store = [&](std::size_t r, std::int64_t b, float value) {
    const std::int64_t row = row_begin + static_cast<std::int64_t>(r);
    scores[row / num_heads * stride_token + row % num_heads * stride_head + (b - block_begin)] = value;
  };
  // Visible key counts ascend with the row.
  const std::int64_t most = scratch.visible[num_rows - 1];

  for (std::int64_t b = block_begin; b < block_end; ++b) {
    const std::int64_t first_key = b * block_size;
    if (first_key >= most) {
      for (std::size_t r = 0; r < num_rows; ++r) store(r, b, -std::numeric_limits<float>::infinity());
      continue;
    }
    const std::size_t block_keys = static_cast<std::size_t>(std::min(block_size, most - first_key));
    const BlockView block{
        key_rows(in.k_idx.block(in.geo, seq, b, 0), in.k_idx.dtype, in.k_idx.stride_token, block_keys, dim, scratch.keys), dim};
    std::size_t vecs = 0;
    for (std::size_t begin = 0; begin < num_rows; begin += vecs * kLanes) {
      const std::size_t vecs_left = (num_rows - begin + kLanes - 1) / kLanes;
      vecs = vecs_left == 4 ? 2 : std::min<std::size_t>(vecs_left, kQkVecs);  // 2 + 2 packs run faster than 3 + 1
      const std::size_t end = std::min(num_rows, begin + vecs * kLanes);
      alignas(64) float best[kMaxPanelRows];
      alignas(64) std::int32_t limits[kMaxPanelRows];
      const auto limit_of = [&](std::size_t r) {
        return static_cast<std::int32_t>(std::clamp<std::int64_t>(scratch.visible[r] - first_key, 0, block_size));
      };
      for (std::size_t i = 0; i < vecs * kLanes; ++i) limits[i] = limit_of(begin + i);
      const auto num_keys = static_cast<std::size_t>(limit_of(end - 1)), fewest_keys = static_cast<std::size_t>(limit_of(begin));
      const float* q[kQkVecs] = {};
      for (std::size_t v = 0; v < vecs; ++v) q[v] = scratch.packs + (begin + v * kLanes) * dim;
      switch (vecs) {
        case 1: score_panel<1>(q, block, num_keys, fewest_keys, limits, best); break;
        case 2: score_panel<2>(q, block, num_keys, fewest_keys, limits, best); break;
        default: score_panel<3>(q, block, num_keys, fewest_keys, limits, best); break;
      }
      std::int64_t token = (row_begin + static_cast<std::int64_t>(begin)) / num_heads;
      std::int64_t head = (row_begin + static_cast<std::int64_t>(begin)) % num_heads;
      for (std::size_t r = begin; r < end; ++r) {
        scores[token * stride_token + head * stride_head + (b - block_begin)] = best[r - begin];
        if (++head == num_heads) head = 0, ++token;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {
HWY_EXPORT(score_rows);

namespace {

// How block_scores is cut: tiles of tokens x segments of blocks.
struct ScoreTasks {
  std::int64_t tile_tokens, num_tiles;
  std::int64_t segment_blocks, num_segments;
  std::int32_t num_workers;
  std::size_t worker_floats;
};

// Sequences with few query rows are bound by reading their keys, and scored by the path made for that (the same results).
bool has_few_rows(const core::BlockScoresParams& params, std::int32_t seq) {
  return params.geo.seqlen_q(seq) * params.config.num_kv_heads <= kMaxFewRows;
}

ScoreTasks plan(const core::BlockScoresParams& params, const ScoreInputs& inputs) {
  const std::int64_t num_threads = params.context.num_threads, num_blocks = params.scores.shape[2];
  const std::int64_t wanted = num_threads == 1 ? 1 : 4 * num_threads;
  ScoreTasks tasks{};
  tasks.tile_tokens = std::min(score_tile_tokens(inputs), std::max<std::int64_t>(1, params.geo.total_q));
  tasks.num_tiles = ceil_div(params.geo.total_q, tasks.tile_tokens);
  tasks.num_segments = std::clamp<std::int64_t>(ceil_div(wanted, std::max<std::int64_t>(1, tasks.num_tiles)), 1,
                                                std::max<std::int64_t>(1, num_blocks));
  tasks.segment_blocks = ceil_div(num_blocks, tasks.num_segments);
  tasks.num_workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks.num_tiles * tasks.num_segments, 1, num_threads));
  const std::int64_t few_tokens = std::min(std::max<std::int64_t>(1, kMaxFewRows / params.config.num_kv_heads), params.geo.total_q);
  tasks.worker_floats = std::max(score_tile_scratch(inputs), score_few_scratch(inputs, few_tokens));
  tasks.worker_floats = (tasks.worker_floats + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  return tasks;
}

ScoreInputs inputs_of(const core::BlockScoresParams& params) {
  return {params.geo, params.q_idx, params.k_idx, params.config.num_kv_heads, params.config.index_dim};
}

}  // namespace

std::int64_t score_tile_tokens(const ScoreInputs& inputs) {
  return std::max<std::int64_t>(1, score_tile_rows(inputs.index_dim) / inputs.num_kv_heads);
}

std::size_t score_tile_scratch(const ScoreInputs& inputs) {
  const std::int64_t rows = score_tile_rows(inputs.index_dim);
  return static_cast<std::size_t>(rows * inputs.index_dim + std::int64_t{inputs.geo.block_size} * inputs.index_dim + rows);
}

void score_tile(const ScoreInputs& inputs, std::int32_t seq, std::int64_t token_begin, std::int64_t token_end,
                std::int64_t block_begin, std::int64_t block_end, float* scores, std::int64_t stride_token,
                std::int64_t stride_head, float* scratch) {
  const std::int64_t tile_rows = score_tile_rows(inputs.index_dim), num_rows = (token_end - token_begin) * inputs.num_kv_heads;
  float* const keys = scratch + tile_rows * inputs.index_dim;
  const ScoreScratch parts{scratch, keys,
                           reinterpret_cast<std::int32_t*>(keys + std::int64_t{inputs.geo.block_size} * inputs.index_dim)};
  for (std::int64_t begin = 0; begin < num_rows; begin += tile_rows) {
    HWY_DYNAMIC_DISPATCH(score_rows)
    (inputs, seq, token_begin, begin, std::min(num_rows, begin + tile_rows), block_begin, block_end, scores, stride_token,
     stride_head, parts);
  }
}

void block_scores_reserve(const core::BlockScoresParams& params) {
  const ScoreTasks tasks = plan(params, inputs_of(params));
  params.context.arena->take<float>(tasks.worker_floats * static_cast<std::size_t>(tasks.num_workers));
}

void block_scores(const core::BlockScoresParams& params) {
  const ScoreInputs inputs = inputs_of(params);
  const ScoreTasks tasks = plan(params, inputs);
  float* const scratch = params.context.arena->take<float>(tasks.worker_floats * static_cast<std::size_t>(tasks.num_workers));
  auto* const scores = static_cast<float*>(params.scores.data);
  const std::int64_t num_blocks = params.scores.shape[2];

  core::parallel_for(tasks.num_workers, tasks.num_tiles * tasks.num_segments, [&](std::int64_t task, std::int32_t worker) {
    // From the last tile to the first: under the causal mask the last ones are the longest, and should not start last.
    const std::int64_t tile = tasks.num_tiles - 1 - task / tasks.num_segments;
    const std::int64_t block_begin = task % tasks.num_segments * tasks.segment_blocks;
    const std::int64_t block_end = std::min(num_blocks, block_begin + tasks.segment_blocks);
    if (block_begin >= block_end) return;
    const std::int64_t tile_end = std::min(params.geo.total_q, (tile + 1) * tasks.tile_tokens);
    for (std::int64_t begin = tile * tasks.tile_tokens; begin < tile_end;) {
      const std::int32_t seq = params.geo.seq_of_token(begin);
      const std::int64_t end = std::min<std::int64_t>(tile_end, params.geo.cu_seqlens_q[seq + 1]);
      const auto score = has_few_rows(params, seq) ? score_few : score_tile;
      score(inputs, seq, begin, end, block_begin, block_end, scores + begin * params.scores.stride[0] + block_begin,
            params.scores.stride[0], params.scores.stride[1], scratch + tasks.worker_floats * static_cast<std::size_t>(worker));
      begin = end;
    }
  });
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
