// Which tokens of a query tile meet a block: those that selected it, or all that see one of its keys where there are no lists.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/geometry.hpp"
#include "cpu/wavefront.hpp"
#include "openmsa/tensor.hpp"

namespace openmsa::cpu {

struct TokenLists {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int32_t>::max();

  const core::Geometry& geo;
  const TensorView& block_ids;  // [T, Hkv, k], may be absent
  std::int32_t seq, head;
  std::int64_t token_begin;  // packed; all num_tokens tokens are of sequence seq
  std::size_t num_tokens;
  std::int32_t* visible;                  // [num_tokens]: keys of the sequence that each token sees
  std::int32_t* next_id;                  // [num_tokens]: its next block
  std::int32_t* cursor;                   // [num_tokens]: that block's place in its list
  std::int32_t* gathered;                 // [num_tokens]: the tokens of gather()'s last block, ascending
  std::int64_t range = 0, range_end = 0;  // the range of the next block, and the first one that is not wanted

  const std::int32_t* list(std::size_t i) const {
    return static_cast<const std::int32_t*>(block_ids.data) + (token_begin + static_cast<std::int64_t>(i)) * block_ids.stride[0] +
           head * block_ids.stride[1];
  }

  // Begins at the blocks of ranges [begin, end), range by range; returns the first.
  std::int64_t start(std::int64_t begin, std::int64_t end) {
    const std::int64_t first = token_begin - geo.query_begin(seq);
    for (std::size_t i = 0; i < num_tokens; ++i) {
      visible[i] = static_cast<std::int32_t>(geo.num_visible(seq, geo.position(seq, first + static_cast<std::int64_t>(i))));
    }
    range = begin, range_end = end;
    return first_of_range();
  }
  // Begins at all blocks, in ascending order.
  std::int64_t start() { return start(kAscending, kAscending + 1); }

  // Lists in `gathered` the tokens that meet `block`, and returns the next block.
  std::int64_t gather(std::int64_t block, std::size_t* num_gathered) {
    std::size_t count = 0;
    if (!block_ids.given()) {
      const auto first =
          static_cast<std::size_t>(std::upper_bound(visible, visible + num_tokens, block * geo.block_size) - visible);
      for (std::size_t i = first; i < num_tokens; ++i) gathered[count++] = static_cast<std::int32_t>(i);
      *num_gathered = count;
      return or_of_next_range(if_seen(block + (range == kAscending ? 1 : kNumRanges)));
    }
    std::int64_t smallest = kNone;
    for (std::size_t i = 0; i < num_tokens; ++i) {
      std::int32_t next = next_id[i];
      if (next == block) {
        gathered[count++] = static_cast<std::int32_t>(i);
        next = advance(i);
      }
      smallest = std::min<std::int64_t>(smallest, next);
    }
    *num_gathered = count;
    return or_of_next_range(smallest);
  }

 private:
  static constexpr std::int64_t kAscending = -1;  // the range of all blocks

  std::int64_t or_of_next_range(std::int64_t block) {
    if (block != kNone) return block;
    ++range;
    return first_of_range();
  }

  std::int64_t first_of_range() {
    for (; range < range_end; ++range) {
      std::int64_t first = kNone;
      if (!block_ids.given()) {
        first = if_seen(std::max<std::int64_t>(range, 0));
      } else {
        for (std::size_t i = 0; i < num_tokens; ++i) {
          cursor[i] = -1;
          first = std::min<std::int64_t>(first, advance(i));
        }
      }
      if (first != kNone) return first;
    }
    return kNone;
  }

  // Later tokens see more.
  std::int64_t if_seen(std::int64_t block) const { return block * geo.block_size < visible[num_tokens - 1] ? block : kNone; }

  std::int32_t advance(std::size_t i) const {
    const std::int32_t* const ids = list(i);
    const auto top_k = static_cast<std::int32_t>(block_ids.shape[2]);
    std::int32_t place = cursor[i] + 1;
    while (place < top_k && ids[place] >= 0 && range != kAscending && ids[place] % kNumRanges != range) ++place;
    cursor[i] = place;
    return next_id[i] = place < top_k && ids[place] >= 0 ? ids[place] : static_cast<std::int32_t>(kNone);
  }
};

}  // namespace openmsa::cpu
