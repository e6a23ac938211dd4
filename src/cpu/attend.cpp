// sparse_attention, prefill: a tile of query tokens walks through the union of its tokens' blocks in ascending order. For each
// block the tokens that chose it are gathered (their rows only by pointer), the block is brought to fp32 once, and panels of
// gathered rows meet it in one online-softmax step. A row meets its blocks in ascending order whatever the tile.
#include <algorithm>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/attention.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attend.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h: compiled once per SIMD target.
#include "cpu/attention-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

inline constexpr std::int32_t kNoBlock = std::numeric_limits<std::int32_t>::max();

struct AttendTile {
  const core::SparseAttentionParams& params;
  std::int32_t seq;
  std::int32_t head;         // KV head g
  std::int64_t token_begin;  // packed; all tokens are of sequence seq
  std::int64_t num_tokens;
  AttentionScratch scratch;
  std::size_t group, dim;

  AttendTile(const core::SparseAttentionParams& p, std::int32_t of_seq, std::int32_t kv_head, std::int64_t begin, std::int64_t end,
             const AttentionScratch& worker_scratch)
      : params(p),
        seq(of_seq),
        head(kv_head),
        token_begin(begin),
        num_tokens(end - begin),
        scratch(worker_scratch),
        group(static_cast<std::size_t>(p.config.group_size())),
        dim(static_cast<std::size_t>(p.config.head_dim)) {}

  // Whole packs per token can be transposed once; otherwise each panel is packed from the rows it gathers.
  bool packs_per_token() const { return group % kLanes == 0; }

  const std::byte* q_row(std::int64_t token, std::size_t h) const {
    const TensorView& q = params.q;
    const std::int64_t q_head = std::int64_t{head} * static_cast<std::int64_t>(group) + static_cast<std::int64_t>(h);
    return static_cast<const std::byte*>(q.data) + (token * q.stride[0] + q_head * q.stride[1]) * dtype_bytes(q.dtype);
  }
  const std::int32_t* ids(std::int64_t i) const {
    const TensorView& ids = params.block_ids;
    return static_cast<const std::int32_t*>(ids.data) + (token_begin + i) * ids.stride[0] + head * ids.stride[1];
  }

  void prepare() const;
  std::int32_t gather(std::int32_t block, std::size_t* num_gathered) const;
  void prefetch(std::int32_t block, std::size_t key_begin, std::size_t key_end) const;
  void attend_block(std::int32_t block, std::size_t num_gathered, std::int32_t next_block) const;
  void finish() const;
};

void AttendTile::prepare() const {
  const std::int64_t first = token_begin - params.geo.query_begin(seq);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    scratch.visible[i] = static_cast<std::int32_t>(params.geo.num_visible(seq, params.geo.position(seq, first + i)));
    scratch.cursor[i] = 0;
    scratch.next_id[i] = ids(i)[0] < 0 ? kNoBlock : ids(i)[0];
  }
  const std::size_t num_rows = static_cast<std::size_t>(num_tokens) * group;
  std::fill_n(scratch.row_max, num_rows, kMinusInfinity);
  std::fill_n(scratch.row_sum, num_rows, 0.0f);
  std::fill_n(scratch.out, num_rows * dim, 0.0f);
  if (packs_per_token()) {
    pack_all(
        params.q.dtype, num_rows, dim,
        [&](std::size_t r) { return q_row(token_begin + static_cast<std::int64_t>(r / group), r % group); }, scratch.q_packs);
  }
}

// Lists the tokens whose next block is `block`, moves them on, and returns the smallest next block of all tokens.
std::int32_t AttendTile::gather(std::int32_t block, std::size_t* num_gathered) const {
  std::int32_t smallest = kNoBlock;
  std::size_t count = 0;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    std::int32_t next = scratch.next_id[i];
    if (next == block) {
      scratch.gathered[count++] = static_cast<std::int32_t>(i);
      const std::int32_t place = ++scratch.cursor[i];
      next = place < params.config.top_k ? ids(i)[place] : -1;
      if (next < 0) next = kNoBlock;
      scratch.next_id[i] = next;
    }
    smallest = std::min(smallest, next);
  }
  *num_gathered = count;
  return smallest;
}

// Calls the keys and values [key_begin, key_end) of a block into L2. Blocks are visited in no order that a hardware prefetcher
// follows; without this the first panel of each waits for memory (random selection, bf16: 411 GF/s, with it 431; AVX2 222 and 237).
void AttendTile::prefetch(std::int32_t block, std::size_t key_begin, std::size_t key_end) const {
  if (key_begin == key_end) return;  // also where there is no such block: its page must not be looked up
  const std::int64_t row_bytes = params.config.head_dim * dtype_bytes(params.k.dtype);
  const std::byte* const k = params.k.block(params.geo, seq, block, head);
  const std::byte* const v = params.v.block(params.geo, seq, block, head);
  for (std::size_t j = key_begin; j < key_end; ++j) {
    const auto row = static_cast<std::int64_t>(j);
    for (std::int64_t at = 0; at < row_bytes; at += 64) {
      __builtin_prefetch(k + row * params.k.stride_token + at, 0, 2);
      __builtin_prefetch(v + row * params.v.stride_token + at, 0, 2);
    }
  }
}

void AttendTile::attend_block(std::int32_t block, std::size_t num_gathered, std::int32_t next_block) const {
  const std::int64_t block_size = params.geo.block_size, first_key = block * block_size;
  // Tokens were gathered in ascending order, so the last one sees the most.
  const std::int64_t most = std::min(block_size, scratch.visible[scratch.gathered[num_gathered - 1]] - first_key);
  if (most <= 0) return;
  const std::size_t num_keys = static_cast<std::size_t>(most);
  pack_values(params.v.block(params.geo, seq, block, head), params.v.dtype, params.v.stride_token, num_keys, dim, scratch.values);
  const BlockKv kv{
      key_rows(params.k.block(params.geo, seq, block, head), params.k.dtype, params.k.stride_token, num_keys, dim, scratch.keys),
      scratch.values, num_keys, dim};
  const float log2_scale = static_cast<float>(params.config.effective_softmax_scale() * 1.4426950408889634);
  const PanelScratch panel_scratch{scratch.panel_scores, scratch.row_max, scratch.row_sum, scratch.out};

  const std::size_t num_rows = num_gathered * group;
  const std::size_t next_keys =
      next_block == kNoBlock
          ? 0
          : static_cast<std::size_t>(std::clamp<std::int64_t>(params.geo.seqlen_k(seq) - next_block * block_size, 0, block_size));
  std::size_t vecs = 0, place = 0, h = 0;  // the next row is head h of the token at `place` of the list
  for (std::size_t begin = 0; begin < num_rows; begin += vecs * kLanes) {
    vecs = panel_vecs((num_rows - begin + kLanes - 1) / kLanes);
    Panel panel;
    panel.num_rows = std::min(num_rows - begin, vecs * kLanes);
    const std::byte* rows[kPanelRows];
    for (std::size_t r = 0; r < panel.num_rows; ++r) {
      const std::int32_t i = scratch.gathered[place];
      panel.limit[r] = static_cast<std::int32_t>(std::clamp<std::int64_t>(scratch.visible[i] - first_key, 0, block_size));
      panel.row[r] = i * static_cast<std::int32_t>(group) + static_cast<std::int32_t>(h);
      if (packs_per_token()) {
        if (r % kLanes == 0) panel.q[r / kLanes] = scratch.q_packs + static_cast<std::size_t>(panel.row[r]) * dim;
      } else {
        rows[r] = q_row(token_begin + i, h);
      }
      if (++h == group) h = 0, ++place;
    }
    for (std::size_t r = panel.num_rows; r < vecs * kLanes; ++r) panel.limit[r] = 0;
    if (!packs_per_token()) {
      pack_all(
          params.q.dtype, panel.num_rows, dim, [&](std::size_t r) { return rows[r]; }, scratch.panel_packs);
      for (std::size_t v = 0; v < vecs; ++v) panel.q[v] = scratch.panel_packs + v * kLanes * dim;
    }
    prefetch(next_block, next_keys * begin / num_rows, next_keys * (begin + panel.num_rows) / num_rows);
    attend_panel_of(vecs, panel, kv, log2_scale, panel_scratch, nullptr);
  }
}

void AttendTile::finish() const {
  const float log2_scale = static_cast<float>(params.config.effective_softmax_scale() * 1.4426950408889634);
  const TensorView& out = params.out;
  const TensorView& lse = params.lse;
  with_storage_type(out.dtype, [&](auto type) {
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      const std::int32_t first_id = ids(i)[0];
      const bool sees_keys = first_id >= 0 && first_id * std::int64_t{params.geo.block_size} < scratch.visible[i];
      for (std::size_t h = 0; h < group; ++h) {
        const std::size_t row = static_cast<std::size_t>(i) * group + h;
        const std::int64_t q_head = std::int64_t{head} * static_cast<std::int64_t>(group) + static_cast<std::int64_t>(h);
        std::byte* at = static_cast<std::byte*>(out.data) +
                        ((token_begin + i) * out.stride[0] + q_head * out.stride[1]) * dtype_bytes(out.dtype);
        float* lse_at =
            lse.given() ? static_cast<float*>(lse.data) + (token_begin + i) * lse.stride[0] + q_head * lse.stride[1] : nullptr;
        store_row<decltype(type)::value>(scratch.out + row * dim, scratch.row_max[row], scratch.row_sum[row], sees_keys, log2_scale,
                                         dim, at, lse_at);
      }
    }
  });
}

// Packed tokens [begin, end) of sequence seq for KV head `head`.
void attend_tile(const core::SparseAttentionParams& params, std::int32_t seq, std::int32_t head, std::int64_t begin,
                 std::int64_t end, const AttentionScratch& scratch) {
  const AttendTile tile(params, seq, head, begin, end, scratch);
  tile.prepare();
  std::int32_t block = *std::min_element(scratch.next_id, scratch.next_id + tile.num_tokens);
  while (block != kNoBlock) {
    std::size_t num_gathered = 0;
    const std::int32_t next = tile.gather(block, &num_gathered);
    tile.attend_block(block, num_gathered, next);
    block = next;
  }
  tile.finish();
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {
HWY_EXPORT(attend_tile);

namespace {

struct AttendTasks {
  AttentionSizes sizes;
  std::int64_t num_tiles;  // per KV head
  std::int32_t num_workers;
};

AttendTasks plan(const core::SparseAttentionParams& params) {
  const std::int64_t group = params.config.group_size(), num_heads = params.config.num_kv_heads;
  const std::int64_t num_threads = params.context.num_threads;
  // Large tiles share a converted block among more tokens; their rows (2 x 1 MiB) live in L2 and L3.
  std::int64_t tokens = std::max<std::int64_t>(1, 2048 * 128 / params.config.head_dim / group);
  if (num_threads > 1) {
    const std::int64_t even = ceil_div(params.geo.total_q * num_heads, 4 * num_threads);
    tokens = std::min(tokens, std::max<std::int64_t>(even, ceil_div(64, group)));
  }
  tokens = std::clamp<std::int64_t>(params.geo.total_q, 1, tokens);
  AttendTasks tasks{};
  tasks.sizes = {tokens * group, tokens, params.config.head_dim, params.config.block_size};
  tasks.num_tiles = ceil_div(params.geo.total_q, tokens);
  tasks.num_workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(tasks.num_tiles * num_heads, 1, num_threads));
  return tasks;
}

}  // namespace

void sparse_attention_reserve(const core::SparseAttentionParams& params) {
  const AttendTasks tasks = plan(params);
  params.context.arena->take<float>(AttentionScratch::floats(tasks.sizes) * static_cast<std::size_t>(tasks.num_workers));
}

void sparse_attention(const core::SparseAttentionParams& params) {
  const AttendTasks tasks = plan(params);
  const std::size_t worker_floats = AttentionScratch::floats(tasks.sizes);
  float* const scratch = params.context.arena->take<float>(worker_floats * static_cast<std::size_t>(tasks.num_workers));

  core::parallel_for(tasks.num_workers, tasks.num_tiles * params.config.num_kv_heads, [&](std::int64_t task, std::int32_t worker) {
    const auto head = static_cast<std::int32_t>(task / tasks.num_tiles);
    const std::int64_t tile = task % tasks.num_tiles;
    const auto parts = AttentionScratch::at(scratch + worker_floats * static_cast<std::size_t>(worker), tasks.sizes);
    const std::int64_t tile_end = std::min(params.geo.total_q, (tile + 1) * tasks.sizes.tile_tokens);
    for (std::int64_t begin = tile * tasks.sizes.tile_tokens; begin < tile_end;) {
      const std::int32_t seq = params.geo.seq_of_token(begin);
      const std::int64_t end = std::min<std::int64_t>(tile_end, params.geo.cu_seqlens_q[seq + 1]);
      HWY_DYNAMIC_DISPATCH(attend_tile)(params, seq, head, begin, end, parts);
      begin = end;
    }
  });
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
