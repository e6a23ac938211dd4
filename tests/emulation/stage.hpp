// What stands between a Problem and a stage of src/cuda: its geometry, and scratch of exactly the size that the stage reserves.
#pragma once

#include <cstring>
#include <string>

#include "core/params.hpp"
#include "openmsa/error.hpp"
#include "support/problem.hpp"

namespace openmsa::test {

// As the api layer makes it, for packed keys. The bounds are exact, as on the CPU, or what a GPU batch without hints has.
inline core::Geometry geometry_of(const Problem& problem, bool exact_bounds = true) {
  core::Geometry geo;
  geo.num_seqs = problem.num_seqs();
  geo.cu_seqlens_q = problem.cu_seqlens_q.data();
  geo.cu_seqlens_k = problem.cu_seqlens_k.data();
  geo.q_start = problem.layout.q_start.empty() ? nullptr : problem.layout.q_start.data();
  geo.total_q = problem.total_q;
  geo.total_k = problem.total_k;
  geo.max_seqlen_q = geo.total_q;
  geo.max_seqlen_k = geo.total_k;
  geo.block_size = problem.config.block_size;
  if (exact_bounds) {
    geo.max_seqlen_q = geo.max_seqlen_k = 0;
    for (std::int32_t seq = 0; seq < geo.num_seqs; ++seq) {
      geo.max_seqlen_q = std::max(geo.max_seqlen_q, geo.seqlen_q(seq));
      geo.max_seqlen_k = std::max(geo.max_seqlen_k, geo.seqlen_k(seq));
    }
  }
  return geo;
}

// Scratch that holds nonsense: NaN as floats, and no sound index.
class StageScratch {
 public:
  // `reserve` takes from the arena what the stage needs.
  template <typename Reserve>
  explicit StageScratch(const Reserve& reserve) {
    core::Arena counting;
    reserve(counting);
    memory_ = Workspace(counting.used() + Workspace::kAlignment);
    std::memset(memory_.data(), 0xff, memory_.bytes());
    arena_ = core::Arena(memory_.data(), counting.used());
  }
  core::Arena& arena() { return arena_; }
  // True while nothing was written past the end.
  bool end_intact() const {
    const auto* end = static_cast<const unsigned char*>(memory_.data()) + memory_.bytes() - Workspace::kAlignment;
    for (std::size_t i = 0; i < Workspace::kAlignment; ++i) {
      if (end[i] != 0xff) return false;
    }
    return true;
  }

 private:
  Workspace memory_;
  core::Arena arena_;
};

}  // namespace openmsa::test
