// Arbitrary block lists over valid batches: attention runs exactly when every list is strictly ascending, with -1 only in its tail and
// no block without a key that its query sees. What runs is run on both CPU backends.
#include <algorithm>

#include "world.hpp"

namespace openmsa::fuzz {
namespace {

void run(Input input) {
  World world;
  world.paged = input.flag();
  world.config.num_kv_heads = input.range(1, 3);
  world.config.num_q_heads = world.config.num_kv_heads;
  world.config.head_dim = world.config.index_dim = 16;
  world.config.block_size = 16;
  world.config.top_k = input.range(1, 6);
  world.choose_lengths(input, 3, 100, 20);
  world.allocate(input.word());

  World::Results results = world.results(), decoded = world.results();
  require(world.index_select(results, {.backend = Backend::kReference}), "a valid batch runs");
  Buffer block_ids = world.results().block_ids;
  const std::int32_t top_k = world.config.top_k;
  // A rate of bent ids that leaves many inputs valid.
  const std::int32_t one_in = 1 << input.range(0, 6);
  bool valid = true;
  for (std::size_t s = 0; s + 1 < world.cu_seqlens_q.size(); ++s) {
    const std::int64_t seqlen_q = world.cu_seqlens_q[s + 1] - world.cu_seqlens_q[s], seqlen_k = world.seqlens_k[s];
    for (std::int64_t i = 0; i < seqlen_q; ++i) {
      const std::int64_t position = (world.q_start.empty() ? seqlen_k - seqlen_q : world.q_start[s]) + i;
      const std::int64_t num_visible = std::clamp<std::int64_t>(position + 1, 0, seqlen_k);
      for (std::int64_t g = 0; g < world.config.num_kv_heads; ++g) {
        const std::int64_t row = ((world.cu_seqlens_q[s] + i) * world.config.num_kv_heads + g) * top_k;
        std::int64_t last = -1;
        bool ended = false;
        for (std::int32_t slot = 0; slot < top_k; ++slot) {
          auto id = static_cast<std::int32_t>(results.block_ids.get(row + slot));
          if (input.byte() % one_in == 1 % one_in) id = input.flag() ? input.range(-2, 8) : input.int32_near(id);
          block_ids.set(row + slot, id);
          if (id == -1) {
            ended = true;
          } else {
            valid = valid && !ended && id > last && std::int64_t{id} * 16 < num_visible;
            last = id;
          }
        }
      }
    }
  }

  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    World::Results out = world.results(), out_decode = world.results();
    require(world.sparse_attention(block_ids, out, {.backend = backend}) == valid, "sparse_attention runs exactly on valid lists");
    require(world.sparse_decode(block_ids, out_decode, {.backend = backend}) == valid, "sparse_decode runs exactly on valid lists");
  }
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
