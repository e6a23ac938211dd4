// PageWrite: rows of a fused projection, the pages of a cache and where each row goes, for every test of write_pages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "openmsa/cache.hpp"
#include "support/problem.hpp"

namespace openmsa::test {

struct PageShape {
  std::int64_t num_tokens, num_heads, head_dim, index_dim, num_pages, block_size;
  DType dtype = DType::kBF16;
  // Elements before k, after k_idx and after each row of a pool: what decides alignment and strides.
  std::int64_t lead = 0, tail = 0, pool_padding = 0;

  std::string text() const;
};

struct PageWrite {
  // Rows go to random slots, each given once; about one row in four, not the first, is padding and holds NaN.
  PageWrite(const PageShape& shape, Rng& rng);

  Tensor rows;  // [T, lead + 2 Hkv D + Di + tail]: k, v and k_idx are views of it
  Tensor slots, k_pages, v_pages, k_idx_pages;

  std::int64_t slot(std::int64_t t) const { return static_cast<const std::int64_t*>(slots.view().data)[t]; }
  void set_slot(std::int64_t t, std::int64_t slot) { static_cast<std::int64_t*>(slots.view().data)[t] = slot; }
  WritePagesArgs args() const { return args(rows.view(), slots.view(), k_pages.view(), v_pages.view(), k_idx_pages.view()); }
  // On copies of the tensors in other memory.
  WritePagesArgs args(const TensorView& rows, const TensorView& slots, const TensorView& k_pages, const TensorView& v_pages,
                      const TensorView& k_idx_pages) const;
  // The pools as they must be after rows with a slot in them were written one after the other, from as they are now.
  PageWrite expected() const;
  // The same elements in the pools, and nothing written beside them.
  bool same_pools(const PageWrite& other) const;

  PageShape shape;
};

// Shapes for copies by 16, 8, 4 and 2 bytes, by way of rows, strides and addresses; more tokens than a CTA takes, or one.
std::vector<PageShape> page_shapes();

}  // namespace openmsa::test
