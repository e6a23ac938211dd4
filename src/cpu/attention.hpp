// Scratch of one attention worker, laid out the same way for every SIMD target. Shared by attend.cpp and dense.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/tiles.hpp"

namespace openmsa::cpu {

struct AttentionSizes {
  std::int64_t tile_rows;  // query token x head, padded to a multiple of kMaxLanes by the layout
  std::int64_t tile_tokens;
  std::int64_t head_dim;
  std::int64_t block_size;
};

struct AttentionScratch {
  float* q_packs;          // [tile_rows][D]: packs of kLanes rows, transposed
  float* out;              // [tile_rows][D]: sums of probability x value
  float* row_max;          // [tile_rows]: largest raw score so far, -inf at first
  float* row_sum;          // [tile_rows]: sum of exp(scaled score - scaled row_max)
  std::int32_t* visible;   // [tile_rows]: keys of the sequence that each row sees
  float* panel_packs;      // [kMaxPanelRows][D]: packs of gathered rows
  float* panel_scores;     // [Bk][kMaxPanelRows]: scores, then probabilities
  float* keys;             // [Bk][D]
  float* values;           // [Bk][D], in panels of a PV tile's width
  std::int32_t* next_id;   // [tile_tokens]: next selected block of each token
  std::int32_t* cursor;    // [tile_tokens]: its place in the token's list
  std::int32_t* gathered;  // [tile_tokens]: tokens that chose the current block

  // Floats one worker needs, and the parts of such a piece.
  static std::size_t floats(const AttentionSizes& sizes) { return AttentionScratch().assign(nullptr, sizes); }
  static AttentionScratch at(float* base, const AttentionSizes& sizes) {
    AttentionScratch scratch{};
    scratch.assign(base, sizes);
    return scratch;
  }

 private:
  std::size_t assign(float* base, const AttentionSizes& sizes) {
    const auto rows = static_cast<std::size_t>(round_up(sizes.tile_rows, kMaxLanes));
    const auto tokens = static_cast<std::size_t>(sizes.tile_tokens), dim = static_cast<std::size_t>(sizes.head_dim);
    const auto block = static_cast<std::size_t>(sizes.block_size);
    std::size_t used = 0;
    const auto take = [&](auto** part, std::size_t count) {
      using Element = std::remove_reference_t<decltype(**part)>;
      static_assert(sizeof(Element) == sizeof(float));
      if (base != nullptr) *part = reinterpret_cast<Element*>(base + used);
      used += (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;  // parts start on cache lines
    };
    take(&q_packs, rows * dim);
    take(&out, rows * dim);
    take(&row_max, rows);
    take(&row_sum, rows);
    take(&visible, rows);
    take(&panel_packs, kMaxPanelRows * dim);
    take(&panel_scores, block * kMaxPanelRows);
    take(&keys, block * dim);
    take(&values, block * dim);
    take(&next_id, tokens);
    take(&cursor, tokens);
    take(&gathered, tokens);
    return used;
  }
};

}  // namespace openmsa::cpu
