// Paged batches with arbitrary page ids and lengths: a call runs exactly when every live page exists and the table is wide enough.
#include "world.hpp"

namespace openmsa::fuzz {
namespace {

void run(Input input) {
  World world;
  world.paged = true;
  world.config.num_kv_heads = input.range(1, 2);
  world.config.num_q_heads = world.config.num_kv_heads * input.range(1, 2);
  world.config.head_dim = world.config.index_dim = 16;
  world.config.block_size = 16;
  world.config.top_k = input.range(1, 4);
  const RunOptions options{.backend = input.flag() ? Backend::kReference : Backend::kCpu, .num_threads = 1};
  world.choose_lengths(input, 5, 60, 20);
  const bool bend_lengths = input.flag(), bend_pages = input.flag();
  for (std::int32_t& length : world.seqlens_k) length = bend_lengths ? input.int32_near(length) : length;
  for (std::int32_t& page : world.page_table) page = bend_pages ? input.int32_near(page) : page;
  world.allocate(input.word());

  bool lengths_fit = true, pages_exist = true;
  for (std::size_t s = 0; s < world.seqlens_k.size(); ++s) {
    const std::int64_t length = world.seqlens_k[s];
    if (length < 0 || (length + 15) / 16 > world.max_pages) {
      lengths_fit = false;
      continue;
    }
    for (std::int64_t b = 0; b * 16 < length; ++b) {
      const std::int64_t page = world.page_table[s * static_cast<std::size_t>(world.max_pages) + static_cast<std::size_t>(b)];
      pages_exist = pages_exist && page >= 0 && page < world.num_pages;
    }
  }
  const bool valid = lengths_fit && pages_exist;

  World::Results results = world.results(), selected = world.results(), decoded = world.results(), step = world.results(),
                 dense = world.results();
  require(world.block_scores(results, options) == valid, "block_scores runs exactly on valid tables");
  if (!valid) std::fill(results.scores.bytes.begin(), results.scores.bytes.end(), std::byte{0});
  require(world.select_blocks(results.scores, selected, options) == lengths_fit,
          "select_blocks needs no pages, but lengths that fit");
  require(world.index_select(results, options) == valid, "index_select runs exactly on valid tables");
  require(world.sparse_attention(results.block_ids, results, options) == valid, "sparse_attention runs exactly on valid tables");
  require(world.sparse_decode(results.block_ids, decoded, options) == valid, "sparse_decode runs exactly on valid tables");
  require(world.msa_attention(step, options) == valid, "msa_attention runs exactly on valid tables");
  require(world.dense_attention(dense, options) == valid, "dense_attention runs exactly on valid tables");
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
