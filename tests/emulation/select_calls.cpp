#include "select_calls.hpp"

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/msa_attention.hpp"

namespace openmsa::test {
namespace {

core::Geometry geometry(const Problem& problem) {
  core::Geometry geo = gpu_geometry(problem);
  geo.max_seqlen_q = 0;
  for (const std::int32_t n : problem.layout.seqlens_q) geo.max_seqlen_q = std::max<std::int64_t>(geo.max_seqlen_q, n);
  return geo;
}

core::KeyBlocks index_keys(const Problem& problem) { return core::KeyBlocks::of(problem.k_idx.view(), problem.layout.paged); }

Tensor id_lists(const Problem& problem) {
  return Tensor(DType::kI32, {problem.total_q, problem.config.num_kv_heads, problem.config.top_k}, output_padding(problem));
}

void expect_guards(std::initializer_list<const Tensor*> outputs) {
  for (const Tensor* output : outputs) EXPECT_TRUE(!output->given() || output->guards_intact()) << "wrote beside an output";
}

}  // namespace

Problem long_sequence(const MsaConfig& config, std::int32_t seqlen_q, std::int32_t num_pages, std::int32_t num_blocks,
                      Values values, Rng& rng) {
  Problem problem(config, single(seqlen_q, config.block_size * num_pages, true), DType::kBF16, rng, values);
  std::vector<std::int32_t> pages;
  for (std::int32_t b = 0; b < num_blocks; ++b) pages.push_back(problem.page_table[static_cast<std::size_t>(b % num_pages)]);
  std::shuffle(pages.begin(), pages.end(), rng);
  problem.page_table = std::move(pages);
  problem.layout.seqlens_k = {config.block_size * num_blocks - 3};
  problem.max_pages = problem.max_num_blocks = num_blocks;
  return problem;
}

Tensor emulated_block_scores(const Problem& problem, std::int64_t extra_blocks) {
  Tensor scores(DType::kF32, {problem.total_q, problem.config.num_kv_heads, problem.max_num_blocks + extra_blocks},
                output_padding(problem));
  run_emulated<core::BlockScoresParams>(
      {cuda::block_scores, cuda::block_scores_reserve},
      {gpu_config(problem), geometry(problem), problem.q_idx.view(), index_keys(problem), scores.view(), {}});
  expect_guards({&scores});
  return scores;
}

Tensor emulated_select_blocks(const Problem& problem, const Tensor& scores) {
  Tensor block_ids = id_lists(problem);
  run_emulated<core::SelectBlocksParams>({cuda::select_blocks, nullptr},
                                         {gpu_config(problem), geometry(problem), scores.view(), block_ids.view(), {}});
  expect_guards({&block_ids});
  return block_ids;
}

Tensor emulated_index_select(const Problem& problem) {
  Tensor block_ids = id_lists(problem);
  run_emulated<core::IndexSelectParams>(
      {cuda::index_select, cuda::index_select_reserve},
      {gpu_config(problem), geometry(problem), problem.q_idx.view(), index_keys(problem), block_ids.view(), {}});
  expect_guards({&block_ids});
  return block_ids;
}

Attention emulated_sparse_decode(const Problem& problem, const Tensor& block_ids) {
  return emulated_attention({cuda::sparse_decode, cuda::sparse_decode_reserve}, geometry(problem), problem, block_ids);
}

namespace {

using Call = std::function<void(const core::MsaAttentionParams&)>;

MsaResult run_whole(const Call& run, const Call& reserve, const Problem& problem, bool optional_outputs) {
  const std::int64_t heads = problem.config.num_q_heads;
  MsaResult result{{Tensor(problem.dtype, {problem.total_q, heads, problem.config.head_dim}, output_padding(problem)),
                    Tensor(DType::kF32, {problem.total_q, heads}), Tensor()},
                   Tensor()};
  if (optional_outputs)
    result.block_ids = id_lists(problem);
  else
    result.attention.lse = Tensor();
  const bool paged = problem.layout.paged;
  const auto bound = [&](const Call& call) {
    return [&](core::Context context) {
      call({gpu_config(problem), geometry(problem), problem.q.view(), core::KeyBlocks::of(problem.k.view(), paged),
            core::KeyBlocks::of(problem.v.view(), paged), problem.q_idx.view(), index_keys(problem), result.attention.out.view(),
            result.attention.lse.view(), result.block_ids.view(), context});
    };
  };
  run_emulated(bound(run), bound(reserve));
  expect_guards({&result.attention.out, &result.attention.lse, &result.block_ids});
  return result;
}

}  // namespace

MsaResult emulated_msa_attention(const Problem& problem, bool optional_outputs) {
  return run_whole(cuda::msa_attention, cuda::msa_attention_reserve, problem, optional_outputs);
}

MsaResult emulated_prefill(const Problem& problem, std::int64_t max_chunk) {
  using Params = core::MsaAttentionParams;
  return run_whole([=](const Params& params) { cuda::prefill(params, max_chunk); },
                   [=](const Params& params) { cuda::prefill_reserve(params, max_chunk); }, problem, true);
}

}  // namespace openmsa::test
