// Packed batches with arbitrary offsets, positions and hints: a call runs exactly when the batch is valid by the plain reading of the
// contract below, and never touches memory beyond the tensors.
#include <algorithm>

#include "world.hpp"

namespace openmsa::fuzz {
namespace {

std::int64_t longest(const std::vector<std::int32_t>& offsets) {
  std::int64_t length = 0;
  for (std::size_t s = 0; s + 1 < offsets.size(); ++s)
    length = std::max<std::int64_t>(length, std::int64_t{offsets[s + 1]} - offsets[s]);
  return length;
}

void run(Input input) {
  World world;
  world.config.num_kv_heads = input.range(1, 2);
  world.config.num_q_heads = world.config.num_kv_heads * input.range(1, 2);
  world.config.head_dim = world.config.index_dim = 16;
  world.config.block_size = 16;
  world.config.top_k = input.range(1, 4);
  const RunOptions options{.backend = input.flag() ? Backend::kReference : Backend::kCpu, .num_threads = 1};
  world.choose_lengths(input, 5, 60, 20);
  for (std::vector<std::int32_t>* values : {&world.cu_seqlens_q, &world.cu_seqlens_k, &world.q_start}) {
    const bool bend = input.flag();
    for (std::int32_t& value : *values) value = bend ? input.int32_near(value) : value;
  }
  if (input.flag()) world.max_seqlen_q = input.range(-1, 30);
  if (input.flag()) world.max_seqlen_k = input.range(-1, 70);
  world.allocate(input.word());

  const bool hints_hold = world.offsets_hold();
  const bool valid = hints_hold && world.cu_seqlens_k.back() == world.total_k;
  const bool scores_fit = hints_hold && (longest(world.cu_seqlens_k) + 15) / 16 <= world.score_width();

  World::Results results = world.results(), selected = world.results(), decoded = world.results(), step = world.results(),
                 dense = world.results();
  require(world.block_scores(results, options) == valid, "block_scores runs exactly on valid batches");
  if (!valid) std::fill(results.scores.bytes.begin(), results.scores.bytes.end(), std::byte{0});  // some scores for the next call
  require(world.select_blocks(results.scores, selected, options) == scores_fit, "select_blocks runs exactly on valid batches");
  require(world.index_select(results, options) == valid, "index_select runs exactly on valid batches");
  require(world.sparse_attention(results.block_ids, results, options) == valid, "sparse_attention runs exactly on valid batches");
  require(world.sparse_decode(results.block_ids, decoded, options) == valid, "sparse_decode runs exactly on valid batches");
  require(world.msa_attention(step, options) == valid, "msa_attention runs exactly on valid batches");
  require(world.dense_attention(dense, options) == valid, "dense_attention runs exactly on valid batches");
  if (!valid) return;
  require(results.block_ids.bytes == selected.block_ids.bytes, "index_select equals block_scores and select_blocks");
  require(step.block_ids.bytes == results.block_ids.bytes, "msa_attention selects what index_select does");
  require(step.same_attention(decoded) || step.same_attention(results), "msa_attention equals its two steps");
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
