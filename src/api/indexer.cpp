#include "openmsa/indexer.hpp"

#include <algorithm>
#include <limits>

#include "api/dispatch.hpp"

namespace openmsa {
namespace {

using api::Checker;
using api::Mode;
using api::Role;

api::Call<core::BlockScoresParams> prepare(const BlockScoresArgs& args, Mode mode) {
  args.config.validate();
  api::require_index_dim(args.config);
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const TensorView q_idx = checker.tensor("q_idx", args.q_idx, api::kFloatDTypes,
                                          {api::tokens(), api::kv_heads(config), api::index_row(config)}, Role::kInput);
  const Batch batch = api::check_batch_structure(checker, args.batch);
  const TensorView k_idx = api::check_keys(checker, "k_idx", args.k_idx, batch, config, 0, api::index_row(config));
  const TensorView scores =
      checker.tensor("scores", args.scores, checker.result_dtypes(),
                     {api::tokens_of(q_idx, "q_idx.shape[0]"), api::kv_heads(config), {"num_blocks"}}, Role::kOutput);
  api::check_same_dtype("k_idx", k_idx, "q_idx", q_idx);
  const Backend backend = checker.device();
  const auto& kernel = api::require_kernel("block_scores", core::kernels<core::BlockScoresParams>(), args.options.backend, backend,
                                           {.dtype = q_idx.dtype, .index_dim = config.index_dim, .block_size = config.block_size});
  core::Geometry geo = api::make_geometry(batch, config, "q_idx", q_idx.shape[0]);
  api::check_key_extent(checker, "k_idx", k_idx, geo);
  if (backend == Backend::kCuda && geo.paged() && batch.max_seqlen_k == 0) {
    // Without a hint the width of the rows bounds the lengths; the kernels report a sequence that is longer.
    geo.max_seqlen_k = std::min(geo.max_seqlen_k, scores.shape[2] * std::int64_t{config.block_size});
  }
  api::check_block_width("scores", scores, geo);
  checker.overlap();
  return {{config, geo, q_idx, core::KeyBlocks::of(k_idx, geo.paged()), scores, checker.context()}, &kernel};
}

api::Call<core::SelectBlocksParams> prepare(const SelectBlocksArgs& args, Mode mode) {
  args.config.validate();
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const TensorView scores = checker.tensor("scores", args.scores, checker.result_dtypes(),
                                           {api::tokens(), api::kv_heads(config), {"num_blocks"}}, Role::kInput);
  const Batch batch = api::check_batch_structure(checker, args.batch);
  const TensorView block_ids =
      checker.tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                     {api::tokens_of(scores, "scores.shape[0]"), api::kv_heads(config), api::slots(config)}, Role::kOutput);
  const Backend backend = checker.device();
  const auto& kernel =
      api::require_kernel("select_blocks", core::kernels<core::SelectBlocksParams>(), args.options.backend, backend,
                          {.dtype = scores.dtype, .block_size = config.block_size, .top_k = config.top_k});
  core::Geometry geo = api::make_geometry(batch, config, "scores", scores.shape[0]);
  if (backend == Backend::kCuda) {
    // No keys here to take bounds from: the score rows hold what can be seen.
    geo.total_k = -1;
    constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
    if (geo.max_seqlen_k == 0)
      geo.max_seqlen_k = std::min(std::min(scores.shape[2], kMaxTokens) * std::int64_t{config.block_size}, kMaxTokens);
  }
  api::check_block_width("scores", scores, geo);
  checker.overlap();
  return {{config, geo, scores, block_ids, checker.context()}, &kernel};
}

api::Call<core::IndexSelectParams> prepare(const IndexSelectArgs& args, Mode mode) {
  args.config.validate();
  api::require_index_dim(args.config);
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const TensorView q_idx = checker.tensor("q_idx", args.q_idx, api::kFloatDTypes,
                                          {api::tokens(), api::kv_heads(config), api::index_row(config)}, Role::kInput);
  const Batch batch = api::check_batch_structure(checker, args.batch);
  const TensorView k_idx = api::check_keys(checker, "k_idx", args.k_idx, batch, config, 0, api::index_row(config));
  const TensorView block_ids =
      checker.tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                     {api::tokens_of(q_idx, "q_idx.shape[0]"), api::kv_heads(config), api::slots(config)}, Role::kOutput);
  api::check_same_dtype("k_idx", k_idx, "q_idx", q_idx);
  const Backend backend = checker.device();
  const auto& kernel = api::require_kernel(
      "index_select", core::kernels<core::IndexSelectParams>(), args.options.backend, backend,
      {.dtype = q_idx.dtype, .index_dim = config.index_dim, .block_size = config.block_size, .top_k = config.top_k});
  core::Geometry geo = api::make_geometry(batch, config, "q_idx", q_idx.shape[0]);
  api::check_key_extent(checker, "k_idx", k_idx, geo);
  checker.overlap();
  return {{config, geo, q_idx, core::KeyBlocks::of(k_idx, geo.paged()), block_ids, checker.context()}, &kernel};
}

}  // namespace

void block_scores(const BlockScoresArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
void select_blocks(const SelectBlocksArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
void index_select(const IndexSelectArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
std::size_t workspace_bytes(const BlockScoresArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }
std::size_t workspace_bytes(const SelectBlocksArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }
std::size_t workspace_bytes(const IndexSelectArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }

}  // namespace openmsa
