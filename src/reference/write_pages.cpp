#include <cstring>

#include "core/page_rows.hpp"
#include "reference/reference.hpp"

namespace openmsa::reference {

void write_pages(const core::WritePagesParams& params) {
  const auto* slots = static_cast<const std::int64_t*>(params.slots.data);
  const std::int64_t block_size = params.k_pages.shape[2];
  for (const core::PageRows& part : core::PageRows::all(params)) {
    for (std::int64_t t = 0; t < params.slots.shape[0]; ++t) {
      if (slots[t] < 0) continue;
      const std::int64_t page = slots[t] / block_size, place = slots[t] % block_size;
      for (std::int64_t head = 0; head < part.heads; ++head) {
        std::memcpy(part.target(page, place, head), part.source(t, head), static_cast<std::size_t>(part.head_bytes));
      }
    }
  }
}

}  // namespace openmsa::reference
