// The order of work in which a gradient is summed over queries (for keys) and over keys (for queries) in one pass, on any number
// of threads, with the same bits: query tiles against ranges of key blocks, (tile, range) after (tile - 1, range) and
// (tile, range - 1). A range is every kNumRanges-th block, so that causal and packed batches fill all of them alike. A task takes
// several neighbouring ranges where few threads are at work: the tile's rows then stay in the caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "core/thread_pool.hpp"
#include "cpu/tiles.hpp"

namespace openmsa::cpu {

// Part of what a result is: a query meets its blocks ordered by (b mod kNumRanges, b). Hence no parameter, and as many threads
// as can work at once.
inline constexpr std::int64_t kNumRanges = 32;

class Wavefront {
 public:
  struct alignas(64) Progress {
    std::atomic<std::int64_t> tiles_done{0};
  };

  Wavefront(std::int64_t num_tiles, std::int64_t num_blocks, std::int32_t num_threads)
      : num_tiles_(num_tiles), num_ranges_(std::clamp<std::int64_t>(num_blocks, 1, kNumRanges)) {
    num_strips_ = num_threads == 1 ? 1 : std::min<std::int64_t>(num_ranges_, std::int64_t{4} * num_threads);
    num_workers_ = static_cast<std::int32_t>(std::clamp<std::int64_t>(num_slots(), 1, num_threads));
  }

  std::int64_t num_ranges() const { return num_ranges_; }
  std::int32_t num_workers() const { return num_workers_; }
  // Tiles whose state must be kept at a time; tile i may use slot i % num_slots() from its first range to its last.
  std::int64_t num_slots() const { return std::min(num_tiles_, num_strips_); }
  std::size_t num_progress() const { return static_cast<std::size_t>(num_strips_); }

  // Calls body(tile, range_begin, range_end, worker). `progress` is memory for num_progress() of them.
  template <class Body>
  void run(void* progress, const Body& body) const {
    if (num_tiles_ == 0) return;
    auto* const strips = static_cast<Progress*>(progress);
    for (std::int64_t s = 0; s < num_strips_; ++s) new (strips + s) Progress;
    // By antidiagonals; tasks are taken in ascending order, so what a task waits for has been taken before it.
    core::parallel_for(num_workers_, (num_tiles_ + num_strips_ - 1) * num_strips_, [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t strip = task % num_strips_, tile = task / num_strips_ - strip;
      if (tile < 0 || tile >= num_tiles_) return;
      if (strip > 0) {
        wait(strips[strip - 1], tile + 1);
      } else if (tile >= num_slots()) {
        wait(strips[num_strips_ - 1], tile - num_slots() + 1);  // the slot's last tile
      }
      wait(strips[strip], tile);
      body(tile, strip * num_ranges_ / num_strips_, (strip + 1) * num_ranges_ / num_strips_, worker);
      strips[strip].tiles_done.store(tile + 1, std::memory_order_release);
    });
  }

 private:
  static void wait(const Progress& strip, std::int64_t tiles) {
    while (strip.tiles_done.load(std::memory_order_acquire) < tiles) std::this_thread::yield();
  }

  std::int64_t num_tiles_, num_ranges_, num_strips_ = 1;  // a strip is the ranges of one task
  std::int32_t num_workers_ = 1;
};

}  // namespace openmsa::cpu
