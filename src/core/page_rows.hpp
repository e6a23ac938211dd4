// What write_pages copies of one of k, v and k_idx, every backend's the same: rows of heads, and where they go in the pool's pages.
#pragma once

#include <array>
#include <cstddef>

#include "core/params.hpp"

namespace openmsa::core {

struct PageRows {
  const std::byte* rows;           // [T, heads] of head_bytes
  std::byte* pages;                // [num_pages, heads, Bk] of head_bytes
  std::int64_t heads, head_bytes;  // no heads where rows have no elements, and then maybe no memory
  // In bytes; from a token to the next in rows, and in a page.
  std::int64_t stride_token, stride_head, stride_page, stride_page_head, stride_page_token;

  // [T, Hkv, D] to [num_pages, Hkv, Bk, D], or [T, Di] to [num_pages, Bk, Di], which has one head.
  static PageRows of(const TensorView& rows, const TensorView& pages) {
    const std::int64_t size = dtype_bytes(rows.dtype);
    const std::int64_t width = rows.shape[rows.rank - 1];
    const bool has_heads = rows.rank == 3;
    return {.rows = static_cast<const std::byte*>(rows.data),
            .pages = static_cast<std::byte*>(pages.data),
            .heads = width == 0 ? 0 : (has_heads ? rows.shape[1] : 1),
            .head_bytes = width * size,
            .stride_token = rows.stride[0] * size,
            .stride_head = has_heads ? rows.stride[1] * size : 0,
            .stride_page = pages.stride[0] * size,
            .stride_page_head = has_heads ? pages.stride[1] * size : 0,
            .stride_page_token = pages.stride[pages.rank - 2] * size};
  }
  static std::array<PageRows, 3> all(const WritePagesParams& params) {
    return {of(params.k, params.k_pages), of(params.v, params.v_pages), of(params.k_idx, params.k_idx_pages)};
  }

  const std::byte* source(std::int64_t token, std::int64_t head) const { return rows + token * stride_token + head * stride_head; }
  std::byte* target(std::int64_t page, std::int64_t place, std::int64_t head) const {
    return pages + page * stride_page + head * stride_page_head + place * stride_page_token;
  }
};

}  // namespace openmsa::core
