// The CPU engine against the oracle on small random problems. Data are small integers, so every score is exact and the selections must
// be equal, ties included; attention must agree within the rounding of its storage type. One and three threads must agree bit for bit.
#include <cmath>

#include "world.hpp"

namespace openmsa::fuzz {
namespace {

// Largest |x| of V is 2. 16-bit results may fall on either side of a rounding border: one unit in the last place of 2.
double tolerance(DType dtype) { return dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 2.0 / 1024 : 2.0 / 128; }

void require_close(const Buffer& a, const Buffer& b, double bound, const char* rule) {
  for (std::int64_t i = 0; i < a.view.numel(); ++i) {
    const double x = a.get(i), y = b.get(i);
    const bool same_infinity = std::isinf(x) && x == y;
    require(same_infinity || std::abs(x - y) <= bound, rule);  // false for NaN
  }
}

void run(Input input) {
  World world;
  world.choose_cpu_sizes(input);
  world.paged = input.flag();
  // One in eight is large enough to fill panels and split work; the rest go by in milliseconds.
  const bool large = input.byte() % 8 == 7;
  world.choose_lengths(input, large ? 4 : 2, large ? 255 : 130, large ? 70 : 12);
  world.limit_work(30'000'000);
  world.allocate(input.word());

  World::Results expected = world.results(), selected = world.results();
  const RunOptions reference{.backend = Backend::kReference};
  require(world.block_scores(expected, reference) && world.index_select(expected, reference) &&
              world.sparse_attention(expected.block_ids, expected, reference),
          "the reference takes every valid problem");
  World::Results first;
  for (const std::int32_t num_threads : {1, 3}) {
    const RunOptions cpu{.backend = Backend::kCpu, .num_threads = num_threads};
    World::Results found = world.results(), decoded = world.results(), step = world.results();
    require(world.block_scores(found, cpu) && world.index_select(found, cpu) &&
                world.sparse_attention(expected.block_ids, found, cpu) && world.sparse_decode(expected.block_ids, decoded, cpu) &&
                world.msa_attention(step, cpu) && world.select_blocks(expected.scores, selected, cpu),
            "the CPU engine takes every problem within its sizes");
    require(found.scores.bytes == expected.scores.bytes, "scores of integers are exact");
    require(found.block_ids.bytes == expected.block_ids.bytes, "index_select selects what the reference does");
    require(selected.block_ids.bytes == expected.block_ids.bytes, "select_blocks selects what the reference does");
    require_close(found.out, expected.out, tolerance(world.dtype), "sparse_attention agrees with the reference");
    require_close(found.lse, expected.lse, 1e-3, "sparse_attention's lse agrees with the reference");
    require_close(decoded.out, expected.out, tolerance(world.dtype), "sparse_decode agrees with the reference");
    require_close(decoded.lse, expected.lse, 1e-3, "sparse_decode's lse agrees with the reference");
    require(step.block_ids.bytes == expected.block_ids.bytes, "msa_attention selects what the reference does");
    require(step.same_attention(decoded) || step.same_attention(found), "msa_attention equals its two steps");
    if (num_threads == 1) {
      first = std::move(found);
    } else {
      require(first.out.bytes == found.out.bytes && first.lse.bytes == found.lse.bytes, "threads do not change results");
    }
  }

  World::Results dense_expected = world.results(), dense = world.results();
  require(world.dense_attention(dense_expected, reference) && world.dense_attention(dense, {.backend = Backend::kCpu}),
          "dense runs");
  require_close(dense.out, dense_expected.out, tolerance(world.dtype), "dense_attention agrees with the reference");
  require_close(dense.lse, dense_expected.lse, 1e-3, "dense_attention's lse agrees with the reference");
  require_close(dense.block_max, dense_expected.block_max, 1e-3, "dense_attention's block maxima agree with the reference");
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
