// A task is one head of k, v or k_idx and takes all rows in their order: in a page the rows of a head lie side by side, and of rows that
// share a slot the last one stays, whatever the number of threads.
#include <cstring>

#include "core/page_rows.hpp"
#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"

namespace openmsa::cpu {
namespace {

constexpr std::int64_t kThreadBytes = std::int64_t{1} << 18;  // fewer are copied before a second thread has woken up

}  // namespace

void write_pages(const core::WritePagesParams& params) {
  const auto* slots = static_cast<const std::int64_t*>(params.slots.data);
  const std::int64_t block_size = params.k_pages.shape[2], num_tokens = params.slots.shape[0];
  const auto parts = core::PageRows::all(params);
  std::int64_t num_tasks = 0, bytes = 0;
  for (const core::PageRows& part : parts) {
    num_tasks += part.heads;
    bytes += num_tokens * part.heads * part.head_bytes;
  }
  core::parallel_for(bytes < kThreadBytes ? 1 : params.context.num_threads, num_tasks, [&](std::int64_t task, std::int32_t) {
    const core::PageRows* part = parts.data();
    std::int64_t head = task;
    while (head >= part->heads) head -= (part++)->heads;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      if (slots[t] < 0) continue;
      std::memcpy(part->target(slots[t] / block_size, slots[t] % block_size, head), part->source(t, head),
                  static_cast<std::size_t>(part->head_bytes));
    }
  });
}

}  // namespace openmsa::cpu
