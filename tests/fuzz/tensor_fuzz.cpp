// Tensor views with arbitrary dtype, rank, shape, strides and pointer. Only workspace_bytes() is called, since no library can know how
// much memory lies behind a pointer: whatever it makes of the view, its arithmetic must not overflow and nothing may be read through it.
#include "world.hpp"

namespace openmsa::fuzz {
namespace {

std::int64_t int64_near(Input& input, std::int64_t value) {
  switch (input.byte() % 8) {
    case 0: return static_cast<std::int64_t>(input.word());
    case 1: return std::numeric_limits<std::int64_t>::max() - input.byte();
    case 2: return std::numeric_limits<std::int64_t>::min() + input.byte();
    case 3: return std::int64_t{1} << (input.byte() % 63);
    case 4: return input.range(-2, 20);
    default: return value;
  }
}

void bend(Input& input, TensorView& view) {
  if (input.byte() % 4 == 0) view.dtype = static_cast<DType>(input.byte());
  if (input.byte() % 4 == 0) view.rank = input.range(-1, 7);
  if (input.byte() % 8 == 0) view.device = {static_cast<DeviceType>(input.byte() % 3), input.range(0, 9)};
  if (input.byte() % 4 == 0) view.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(input.word()));
  for (int axis = 0; axis < kMaxRank; ++axis) {
    view.shape[static_cast<std::size_t>(axis)] = int64_near(input, view.shape[static_cast<std::size_t>(axis)]);
    view.stride[static_cast<std::size_t>(axis)] = int64_near(input, view.stride[static_cast<std::size_t>(axis)]);
  }
}

void run(Input input) {
  World world;
  world.paged = input.flag();
  world.config.num_kv_heads = world.config.num_q_heads = input.range(1, 2);
  world.config.head_dim = world.config.index_dim = 16;
  world.config.block_size = 16;
  world.config.top_k = 2;
  world.choose_lengths(input, 3, 40, 10);
  world.allocate(1);
  World::Results results = world.results();
  const RunOptions options{.backend = static_cast<Backend>(input.byte() % 5), .num_threads = int32_t{input.byte()} - 2};
  IndexSelectArgs index{world.config, world.batch(), world.q_idx.view, world.k_idx.view, results.block_ids.view, options};
  BlockScoresArgs score{world.config, world.batch(), world.q_idx.view, world.k_idx.view, results.scores.view, options};
  SelectBlocksArgs select{world.config, world.batch(), results.scores.view, results.block_ids.view, options};
  SparseAttentionArgs sparse{world.config,           world.batch(),    world.q.view,     world.k.view, world.v.view,
                             results.block_ids.view, results.out.view, results.lse.view, options};
  DenseAttentionArgs dense{world.config,     world.batch(),    world.q.view,           world.k.view, world.v.view,
                           results.out.view, results.lse.view, results.block_max.view, options};
  // Training takes packed keys alone, so with paged ones these calls are refused whatever else bends.
  const World::TrainingResults trained = world.training_results();
  SparseAttentionBackwardArgs backward = world.sparse_backward(results.block_ids, results, trained);
  IndexKlLossArgs kl = world.index_kl(&results.block_ids, results, trained);
  backward.options = kl.options = options;
  // The lengths are read by contract, so they keep their memory and bend in the other functions' targets.
  TensorView* const views[] = {&index.q_idx,
                               &index.k_idx,
                               &index.block_ids,
                               &score.q_idx,
                               &score.k_idx,
                               &score.scores,
                               &select.scores,
                               &select.block_ids,
                               &sparse.q,
                               &sparse.k,
                               &sparse.v,
                               &sparse.block_ids,
                               &sparse.out,
                               &sparse.lse,
                               &dense.q,
                               &dense.k,
                               &dense.v,
                               &dense.out,
                               &dense.lse,
                               &dense.block_max,
                               &backward.q,
                               &backward.k,
                               &backward.v,
                               &backward.block_ids,
                               &backward.out,
                               &backward.lse,
                               &backward.d_out,
                               &backward.d_q,
                               &backward.d_k,
                               &backward.d_v,
                               &kl.q,
                               &kl.k,
                               &kl.lse,
                               &kl.q_idx,
                               &kl.k_idx,
                               &kl.block_ids,
                               &kl.loss,
                               &kl.d_q_idx,
                               &kl.d_k_idx};
  const std::int32_t num_bent = input.range(1, 3);
  for (std::int32_t i = 0; i < num_bent; ++i) bend(input, *views[input.byte() % std::size(views)]);
  std::size_t bytes = 0;
  runs([&] { bytes += workspace_bytes(index); });
  runs([&] { bytes += workspace_bytes(score); });
  runs([&] { bytes += workspace_bytes(select); });
  runs([&] { bytes += workspace_bytes(sparse); });
  runs([&] { bytes += workspace_bytes(dense); });
  runs([&] { bytes += workspace_bytes(backward); });
  runs([&] { bytes += workspace_bytes(kl); });
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
