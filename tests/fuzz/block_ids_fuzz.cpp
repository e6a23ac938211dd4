// Arbitrary block lists over valid batches: attention runs exactly when every list is strictly ascending, with -1 only in its tail and
// no block without a key that its query sees. What runs is run on both CPU backends.
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

  World::Results results = world.results();
  require(world.index_select(results, {.backend = Backend::kReference}), "a valid batch runs");
  const bool valid = world.bend_block_ids(input, results.block_ids);

  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    World::Results out = world.results(), out_decode = world.results();
    require(world.sparse_attention(results.block_ids, out, {.backend = backend}) == valid,
            "sparse_attention runs exactly on valid lists");
    require(world.sparse_decode(results.block_ids, out_decode, {.backend = backend}) == valid,
            "sparse_decode runs exactly on valid lists");
  }
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
