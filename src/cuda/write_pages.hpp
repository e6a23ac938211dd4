// Rows of k, v and k_idx into the pages of a cache, see openmsa/cache.hpp.
#pragma once

#include <cstdint>

#include "cuda/fault.hpp"

namespace openmsa::cuda {

// One of k, v and k_idx, counted in units of the copy (2, 4, 8 or 16 bytes).
struct PageRowsParams {
  const void* rows;           // [T, heads, width]
  void* pages;                // [num_pages, heads, Bk, width]
  std::int32_t heads, width;  // of a head's row
  std::int64_t stride_token, stride_head, stride_page, stride_page_head, stride_page_token;
};

struct WritePagesParams {
  PageRowsParams parts[3];
  std::int32_t chunks[3];     // a warp's share of a token: how many make up each part
  const std::int64_t* slots;  // [T]
  std::int32_t num_tokens, block_size, num_pages;
  Fault* fault;
};

}  // namespace openmsa::cuda
