#include "support/pages.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace openmsa::test {

std::string PageShape::text() const {
  std::string text = "T " + std::to_string(num_tokens) + ", Hkv " + std::to_string(num_heads) + ", D " + std::to_string(head_dim) +
                     ", Di " + std::to_string(index_dim) + ", pages " + std::to_string(num_pages) + " of " +
                     std::to_string(block_size) + ", " + dtype_name(dtype);
  return text + ", lead " + std::to_string(lead) + ", tail " + std::to_string(tail) + ", pools + " + std::to_string(pool_padding);
}

PageWrite::PageWrite(const PageShape& shape, Rng& rng)
    : rows(shape.dtype, {shape.num_tokens, shape.lead + 2 * shape.num_heads * shape.head_dim + shape.index_dim + shape.tail}),
      slots(DType::kI64, {shape.num_tokens}),
      k_pages(shape.dtype, {shape.num_pages, shape.num_heads, shape.block_size, shape.head_dim}, shape.pool_padding),
      v_pages(shape.dtype, {shape.num_pages, shape.num_heads, shape.block_size, shape.head_dim}, shape.pool_padding),
      k_idx_pages(shape.dtype, {shape.num_pages, shape.block_size, shape.index_dim}, shape.pool_padding),
      shape(shape) {
  std::normal_distribution<double> normal;
  std::vector<std::int64_t> free(static_cast<std::size_t>(shape.num_pages * shape.block_size));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), rng);
  for (std::int64_t t = 0; t < shape.num_tokens; ++t) {
    const bool is_padding = free.empty() || (t > 0 && uniform(rng, 0, 3) == 0);
    set_slot(t, is_padding ? pick<std::int64_t>(rng, {-1, -7, std::numeric_limits<std::int64_t>::min()}) : free.back());
    if (is_padding) continue;
    free.pop_back();
    for (std::int64_t i = 0; i < rows.row_size(); ++i) rows.set(rows.at(t, i), normal(rng));
  }
}

WritePagesArgs PageWrite::args(const TensorView& rows, const TensorView& slots, const TensorView& k_pages,
                               const TensorView& v_pages, const TensorView& k_idx_pages) const {
  const std::int64_t size = dtype_bytes(shape.dtype), width = shape.num_heads * shape.head_dim;
  const auto part = [&](std::int64_t first, std::vector<std::int64_t> sizes) {
    TensorView view = rows;
    view.data = static_cast<std::byte*>(view.data) + first * size;
    view.rank = static_cast<int>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), view.shape.begin());
    view.stride = {rows.shape[1], sizes.size() == 3 ? shape.head_dim : 1, 1, 0};
    return view;
  };
  return {.k = part(shape.lead, {shape.num_tokens, shape.num_heads, shape.head_dim}),
          .v = part(shape.lead + width, {shape.num_tokens, shape.num_heads, shape.head_dim}),
          .k_idx = part(shape.lead + 2 * width, {shape.num_tokens, shape.index_dim}),
          .slots = slots,
          .k_pages = k_pages,
          .v_pages = v_pages,
          .k_idx_pages = k_idx_pages,
          .options = {}};
}

PageWrite PageWrite::expected() const {
  PageWrite result = *this;
  const std::int64_t width = shape.num_heads * shape.head_dim;
  for (std::int64_t t = 0; t < shape.num_tokens; ++t) {
    if (slot(t) < 0 || slot(t) >= shape.num_pages * shape.block_size) continue;
    const std::int64_t page = slot(t) / shape.block_size, place = slot(t) % shape.block_size;
    for (std::int64_t i = 0; i < width; ++i) {
      const std::int64_t at = k_pages.at(page, i / shape.head_dim, place, i % shape.head_dim);
      result.k_pages.set(at, rows(t, shape.lead + i));
      result.v_pages.set(at, rows(t, shape.lead + width + i));
    }
    for (std::int64_t i = 0; i < shape.index_dim; ++i) {
      result.k_idx_pages.set(k_idx_pages.at(page, place, i), rows(t, shape.lead + 2 * width + i));
    }
  }
  return result;
}

bool PageWrite::same_pools(const PageWrite& other) const {
  return k_pages.same_bits(other.k_pages) && v_pages.same_bits(other.v_pages) && k_idx_pages.same_bits(other.k_idx_pages) &&
         k_pages.guards_intact() && v_pages.guards_intact() && k_idx_pages.guards_intact();
}

std::vector<PageShape> page_shapes() {
  return {
      // The reference model's, of a decode step and of a prompt; and rows of their own alignment.
      {1, 4, 128, 128, 3, 128},
      {61, 4, 128, 128, 4, 64, DType::kF16, 8, 16, 8},
      {9, 2, 96, 64, 2, 16, DType::kBF16, 0, 4},      // strides of 8 bytes
      {20, 3, 64, 64, 5, 16, DType::kBF16, 2},        // addresses of 4
      {17, 1, 16, 32, 3, 16, DType::kF16, 1, 3},      // of 2
      {30, 2, 64, 64, 4, 16, DType::kBF16, 0, 0, 4},  // pools of 8
      {12, 5, 7, 3, 9, 5, DType::kBF16},              // odd rows, pages that are no power of two
      {24, 3, 12, 20, 4, 8, DType::kF32, 2},          // of 8
      {16, 2, 16, 16, 3, 16, DType::kF32, 1, 2},      // of 4
      {40, 2, 16, 16, 2, 4, DType::kF32},             // more rows than slots
      {8, 1, 0, 16, 2, 8, DType::kBF16},              // no keys, index keys alone
  };
}

}  // namespace openmsa::test
