// dense_attention: a tile of query rows (token x head of one group) against every block that its last token sees, in ascending
// order; the kernels and hence the rounding are those of sparse_attention. Optionally writes each block's largest score.
#include <algorithm>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/attention.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dense.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/attention-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

// Packed tokens [begin, end) of sequence seq, heads of KV head `head`.
void dense_tile(const core::DenseAttentionParams& params, std::int32_t seq, std::int32_t head, std::int64_t begin, std::int64_t end,
                const AttentionScratch& scratch) {
  const core::Geometry& geo = params.geo;
  const auto group = static_cast<std::size_t>(params.config.group_size()), dim = static_cast<std::size_t>(params.config.head_dim);
  const std::int64_t block_size = geo.block_size;
  const std::size_t num_rows = static_cast<std::size_t>(end - begin) * group;
  const std::int64_t first_head = std::int64_t{head} * static_cast<std::int64_t>(group);
  const double scale = params.config.effective_softmax_scale();
  const float log2_scale = static_cast<float>(scale * 1.4426950408889634);
  const auto token_of = [&](std::size_t r) { return begin + static_cast<std::int64_t>(r / group); };
  const auto head_of = [&](std::size_t r) { return first_head + static_cast<std::int64_t>(r % group); };

  const std::int64_t seq_begin = geo.query_begin(seq);
  for (std::size_t r = 0; r < num_rows; ++r) {
    scratch.visible[r] = static_cast<std::int32_t>(geo.num_visible(seq, geo.position(seq, token_of(r) - seq_begin)));
  }
  std::fill_n(scratch.row_max, num_rows, kMinusInfinity);
  std::fill_n(scratch.row_sum, num_rows, 0.0f);
  std::fill_n(scratch.out, num_rows * dim, 0.0f);
  pack_all(
      params.q.dtype, num_rows, dim,
      [&](std::size_t r) {
        return static_cast<const std::byte*>(params.q.data) +
               (token_of(r) * params.q.stride[0] + head_of(r) * params.q.stride[1]) * dtype_bytes(params.q.dtype);
      },
      scratch.q_packs);

  // Rows see ascending numbers of keys.
  const std::int64_t most = scratch.visible[num_rows - 1], num_blocks = ceil_div(most, block_size);
  const TensorView& block_max = params.block_max;
  const auto block_max_row = [&](std::size_t r) {
    return static_cast<float*>(block_max.data) + token_of(r) * block_max.stride[0] + head_of(r) * block_max.stride[1];
  };
  if (block_max.given()) {
    for (std::size_t r = 0; r < num_rows; ++r) std::fill_n(block_max_row(r), block_max.shape[2], kMinusInfinity);
  }

  const PanelScratch panel_scratch{scratch.panel_scores, scratch.row_max, scratch.row_sum, scratch.out};
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    const std::int64_t first_key = b * block_size;
    const std::size_t num_keys = static_cast<std::size_t>(std::min(block_size, most - first_key));
    pack_values(params.v.block(geo, seq, b, head), params.v.dtype, params.v.stride_token, num_keys, dim, scratch.values);
    const std::byte* const keys = params.k.block(geo, seq, b, head);
    const BlockKv kv{key_rows(keys, params.k.dtype, params.k.stride_token, num_keys, dim, scratch.keys), scratch.values, num_keys,
                     dim};
    std::size_t vecs = 0;
    for (std::size_t first = 0; first < num_rows; first += vecs * kLanes) {
      vecs = panel_vecs((num_rows - first + kLanes - 1) / kLanes);
      Panel panel;
      panel.num_rows = std::min(num_rows - first, vecs * kLanes);
      if (scratch.visible[first + panel.num_rows - 1] <= first_key) continue;  // these rows do not see the block yet
      for (std::size_t r = 0; r < vecs * kLanes; ++r) {
        const std::int64_t visible = r < panel.num_rows ? scratch.visible[first + r] - first_key : 0;
        panel.limit[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(visible, 0, block_size));
        panel.row[r] = static_cast<std::int32_t>(first + r);
      }
      for (std::size_t v = 0; v < vecs; ++v) panel.q[v] = scratch.q_packs + (first + v * kLanes) * dim;
      alignas(64) float best[kPanelRows];
      attend_panel_of(vecs, panel, kv, log2_scale, panel_scratch, block_max.given() ? best : nullptr);
      if (!block_max.given()) continue;
      for (std::size_t r = 0; r < panel.num_rows; ++r) {
        if (panel.limit[r] > 0) block_max_row(first + r)[b] = best[r] * static_cast<float>(scale);
      }
    }
  }

  with_storage_type(params.out.dtype, [&](auto type) {
    for (std::size_t r = 0; r < num_rows; ++r) {
      std::byte* out = static_cast<std::byte*>(params.out.data) +
                       (token_of(r) * params.out.stride[0] + head_of(r) * params.out.stride[1]) * dtype_bytes(params.out.dtype);
      float* lse = params.lse.given() ? static_cast<float*>(params.lse.data) + token_of(r) * params.lse.stride[0] +
                                            head_of(r) * params.lse.stride[1]
                                      : nullptr;
      store_row<decltype(type)::value>(scratch.out + r * dim, scratch.row_max[r], scratch.row_sum[r], scratch.visible[r] > 0,
                                       log2_scale, dim, out, lse);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {
HWY_EXPORT(dense_tile);

namespace {

struct DenseTasks {
  AttentionSizes sizes;
  std::int64_t num_tiles;  // per KV head
  std::int32_t num_workers;
};

DenseTasks plan(const core::DenseAttentionParams& params) {
  const std::int64_t group = params.config.group_size(), num_heads = params.config.num_kv_heads;
  const std::int64_t num_threads = params.context.num_threads;
  // Queries and sums of a tile (2 x 192 KiB) share L2 with one converted block.
  std::int64_t tokens = std::max<std::int64_t>(1, 384 * 128 / params.config.head_dim / group);
  if (num_threads > 1) {
    const std::int64_t even = ceil_div(params.geo.total_q * num_heads, 4 * num_threads);
    tokens = std::min(tokens, std::max<std::int64_t>(even, ceil_div(kMaxPanelRows, group)));
  }
  tokens = std::clamp<std::int64_t>(params.geo.total_q, 1, tokens);
  DenseTasks tasks{};
  tasks.sizes = {tokens * group, tokens, params.config.head_dim, params.config.block_size};
  tasks.num_tiles = ceil_div(params.geo.total_q, tokens);
  tasks.num_workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks.num_tiles * num_heads, 1, num_threads));
  return tasks;
}

}  // namespace

void dense_attention_reserve(const core::DenseAttentionParams& params) {
  const DenseTasks tasks = plan(params);
  params.context.arena->take<float>(AttentionScratch::floats(tasks.sizes) * static_cast<std::size_t>(tasks.num_workers));
}

void dense_attention(const core::DenseAttentionParams& params) {
  const DenseTasks tasks = plan(params);
  const std::size_t worker_floats = AttentionScratch::floats(tasks.sizes);
  float* const scratch = params.context.arena->take<float>(worker_floats * static_cast<std::size_t>(tasks.num_workers));

  core::parallel_for(tasks.num_workers, tasks.num_tiles * params.config.num_kv_heads, [&](std::int64_t task, std::int32_t worker) {
    // The last tiles see the most keys: they go first, so that no worker is left alone with one at the end.
    const auto head = static_cast<std::int32_t>(task % params.config.num_kv_heads);
    const std::int64_t tile = tasks.num_tiles - 1 - task / params.config.num_kv_heads;
    const auto parts = AttentionScratch::at(scratch + worker_floats * static_cast<std::size_t>(worker), tasks.sizes);
    const std::int64_t tile_end = std::min(params.geo.total_q, (tile + 1) * tasks.sizes.tile_tokens);
    for (std::int64_t begin = tile * tasks.sizes.tile_tokens; begin < tile_end;) {
      const std::int32_t seq = params.geo.seq_of_token(begin);
      const std::int64_t end = std::min<std::int64_t>(tile_end, params.geo.cu_seqlens_q[seq + 1]);
      HWY_DYNAMIC_DISPATCH(dense_tile)(params, seq, head, begin, end, parts);
      begin = end;
    }
  });
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
