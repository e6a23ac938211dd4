// Scratch of the backward passes, laid out the same way for every SIMD target.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/params.hpp"
#include "cpu/tiles.hpp"
#include "cpu/token_lists.hpp"

namespace openmsa::cpu {

// Hands out parts of one piece of floats, each starting on a cache line; counts where there is no memory.
class FloatParts {
 public:
  explicit FloatParts(float* base) : base_(base) {}
  template <typename Element = float>
  Element* take(std::int64_t count) {
    static_assert(sizeof(Element) == sizeof(float));
    float* const part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<std::size_t>(round_up(count, kMaxLanes));
    return reinterpret_cast<Element*>(part);
  }
  std::size_t used() const { return used_; }

 private:
  float* base_;
  std::size_t used_ = 0;
};

struct TokenScratch {
  std::int32_t *visible, *next_id, *cursor, *gathered;  // [tile_tokens]

  static TokenScratch take(FloatParts& parts, std::int64_t tile_tokens) {
    TokenScratch scratch{};
    for (std::int32_t** part : {&scratch.visible, &scratch.next_id, &scratch.cursor, &scratch.gathered}) {
      *part = parts.take<std::int32_t>(tile_tokens);
    }
    return scratch;
  }
  TokenLists lists(const core::Geometry& geo, const TensorView& block_ids, std::int32_t seq, std::int32_t head, std::int64_t begin,
                   std::int64_t end) const {
    return {.geo = geo,
            .block_ids = block_ids,
            .seq = seq,
            .head = head,
            .token_begin = begin,
            .num_tokens = static_cast<std::size_t>(end - begin),
            .visible = visible,
            .next_id = next_id,
            .cursor = cursor,
            .gathered = gathered};
  }
};

// fp32 sums of one row per key: the result itself where it is stored as f32, else scratch.
struct KeySums {
  float* data = nullptr;
  std::int64_t stride_token = 0, stride_head = 0;

  static KeySums of(core::Arena& arena, const TensorView& result) {
    const std::int64_t heads = result.rank == 3 ? result.shape[1] : 1, dim = result.shape[result.rank - 1];
    if (result.dtype == DType::kF32) {
      return {static_cast<float*>(result.data), result.stride[0], result.rank == 3 ? result.stride[1] : 0};
    }
    return {arena.take<float>(static_cast<std::size_t>(result.shape[0] * heads * dim)), heads * dim, dim};
  }
  float* row(std::int64_t token, std::int64_t head) const { return data + token * stride_token + head * stride_head; }
};

// Tiles of query tokens, per KV head: large enough to share a converted block among many rows, small enough to keep all threads
// busy. No result depends on it.
struct QueryTiles {
  std::int64_t tokens;  // of a tile
  std::int64_t per_head;

  QueryTiles(const core::Geometry& geo, std::int64_t num_heads, std::int64_t most_tokens, std::int64_t fewest_tokens,
             std::int32_t num_threads) {
    tokens = std::max<std::int64_t>(most_tokens, 1);
    if (num_threads > 1) {
      const std::int64_t even = ceil_div(geo.total_q * num_heads, std::int64_t{4} * num_threads);
      tokens = std::min(tokens, std::max(even, fewest_tokens));
    }
    tokens = std::clamp<std::int64_t>(geo.total_q, 1, tokens);
    per_head = ceil_div(geo.total_q, tokens);
  }

  // Calls body(seq, begin, end) for the packed tokens of tile number `tile`, one sequence at a time.
  template <class Body>
  void for_each_sequence(const core::Geometry& geo, std::int64_t tile, const Body& body) const {
    const std::int64_t tile_end = std::min(geo.total_q, (tile + 1) * tokens);
    for (std::int64_t begin = tile * tokens; begin < tile_end;) {
      const std::int32_t seq = geo.seq_of_token(begin);
      const std::int64_t end = std::min<std::int64_t>(tile_end, geo.cu_seqlens_q[seq + 1]);
      body(seq, begin, end);
      begin = end;
    }
  }
};

// Address of row [token, head, :] of a packed tensor.
inline std::byte* row_of(const TensorView& tensor, std::int64_t token, std::int64_t head) {
  return static_cast<std::byte*>(tensor.data) + (token * tensor.stride[0] + head * tensor.stride[1]) * dtype_bytes(tensor.dtype);
}

}  // namespace openmsa::cpu
