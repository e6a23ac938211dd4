#include "openmsa/training.hpp"

#include <algorithm>

#include "api/dispatch.hpp"

namespace openmsa {
namespace {

using api::Checker;
using api::Mode;
using api::Role;

Batch check_packed_batch(Checker& checker, const Batch& batch) {
  for (const auto& [name, view] : {std::pair{"batch.page_table", &batch.page_table}, {"batch.seqlens_k", &batch.seqlens_k}}) {
    if (view->rank == 0 && view->data == nullptr) continue;
    api::refuse(name,
                "is given, but training takes packed keys alone: k and v of shape [S, Hkv, D] with batch.cu_seqlens_k. Gather the "
                "pages into packed tensors first.");
  }
  return api::check_batch_structure(checker, batch);
}

// What the gradients of sparse and dense attention have in common.
struct Tensors {
  Batch batch;
  TensorView q, k, v, out, lse, d_out, d_q, d_k, d_v;
};

template <typename Args>
Tensors check_tensors(Checker& checker, const Args& args, const MsaConfig& config) {
  const api::Axis heads = api::q_heads(config), kv_heads = api::kv_heads(config), row = api::head_row(config);
  Tensors tensors;
  tensors.q = checker.tensor("q", args.q, api::kFloatDTypes, {api::tokens(), heads, row}, Role::kInput);
  tensors.batch = check_packed_batch(checker, args.batch);
  tensors.k = api::check_keys(checker, "k", args.k, tensors.batch, config, config.num_kv_heads, row);
  const api::Axis tokens = api::tokens_of(tensors.q, "q.shape[0]"), keys{"S", tensors.k.shape[0], "k.shape[0]"};
  tensors.v = checker.tensor("v", args.v, api::kFloatDTypes, {keys, kv_heads, row}, Role::kInput);
  tensors.out = checker.tensor("out", args.out, api::kFloatDTypes, {tokens, heads, row}, Role::kInput);
  tensors.lse = checker.tensor("lse", args.lse, checker.result_dtypes(), {tokens, heads}, Role::kInput);
  tensors.d_out = checker.tensor("d_out", args.d_out, api::kFloatDTypes, {tokens, heads, row}, Role::kInput);
  tensors.d_q = checker.tensor("d_q", args.d_q, api::kFloatDTypes, {tokens, heads, row}, Role::kOutput);
  tensors.d_k = checker.tensor("d_k", args.d_k, api::kFloatDTypes, {keys, kv_heads, row}, Role::kOutput);
  tensors.d_v = checker.tensor("d_v", args.d_v, api::kFloatDTypes, {keys, kv_heads, row}, Role::kOutput);
  const std::pair<const char*, const TensorView*> others[] = {
      {"k", &tensors.k},     {"v", &tensors.v},     {"out", &tensors.out}, {"d_out", &tensors.d_out},
      {"d_q", &tensors.d_q}, {"d_k", &tensors.d_k}, {"d_v", &tensors.d_v}};
  for (const auto& [name, view] : others) api::check_same_dtype(name, *view, "q", tensors.q);
  return tensors;
}

template <typename Args>
api::Call<core::AttentionBackwardParams> prepare_backward(const char* stage,
                                                          const std::vector<core::Kernel<core::AttentionBackwardParams>>& kernels,
                                                          const Args& args, Mode mode) {
  args.config.validate();
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const Tensors tensors = check_tensors(checker, args, config);
  core::Request request{
      .dtype = tensors.q.dtype, .head_dim = config.head_dim, .block_size = config.block_size, .group_size = config.group_size()};
  TensorView block_ids;
  if constexpr (requires { args.block_ids; }) {
    block_ids = checker.tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                               {api::tokens_of(tensors.q, "q.shape[0]"), api::kv_heads(config), api::slots(config)}, Role::kInput);
    request.top_k = config.top_k;
  }
  const Backend backend = checker.device();
  const auto& kernel = api::require_kernel(stage, kernels, args.options.backend, backend, request);
  core::Geometry geo = api::make_geometry(tensors.batch, config, "q", tensors.q.shape[0]);
  api::check_key_extent(checker, "k", tensors.k, geo);
  if (block_ids.given()) api::check_block_ids(checker, block_ids, geo);
  checker.overlap();
  return {{config, geo, tensors.q, core::KeyBlocks::of(tensors.k, false), core::KeyBlocks::of(tensors.v, false), block_ids,
           tensors.out, tensors.lse, tensors.d_out, tensors.d_q, tensors.d_k, tensors.d_v, args.deterministic, checker.context()},
          &kernel};
}

api::Call<core::AttentionBackwardParams> prepare(const SparseAttentionBackwardArgs& args, Mode mode) {
  return prepare_backward("sparse_attention_backward", core::kernels<core::AttentionBackwardParams>(), args, mode);
}

api::Call<core::AttentionBackwardParams> prepare(const DenseAttentionBackwardArgs& args, Mode mode) {
  return prepare_backward("dense_attention_backward", core::dense_backward_kernels(), args, mode);
}

// Which results were asked for: the loss, the two gradients, or all three.
void check_results(const TensorView& loss, const TensorView& d_q_idx, const TensorView& d_k_idx) {
  if (d_q_idx.given() != d_k_idx.given()) {
    const char *missing = d_q_idx.given() ? "d_k_idx" : "d_q_idx", *given = d_q_idx.given() ? "d_q_idx" : "d_k_idx";
    api::refuse(missing,
                std::string("is not given, but ") + given + " is; the two gradients are computed together. Give both, or neither.");
  }
  if (loss.given() || d_q_idx.given()) return;
  api::refuse("loss",
              "is not given, and neither are d_q_idx and d_k_idx; there is nothing to compute. Give loss, the two "
              "gradients, or all three.");
}

api::Call<core::IndexKlParams> prepare(const IndexKlLossArgs& args, Mode mode) {
  args.config.validate();
  api::require_index_dim(args.config);
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  if (args.num_tokens < 0) {
    api::refuse("num_tokens", "is " + std::to_string(args.num_tokens) +
                                  "; it must be the number of tokens that the loss is the mean of, or 0 for those of this call.");
  }
  const api::Axis kv_heads = api::kv_heads(config), index_row = api::index_row(config);
  const TensorView q =
      checker.tensor("q", args.q, api::kFloatDTypes, {api::tokens(), api::q_heads(config), api::head_row(config)}, Role::kInput);
  const Batch batch = check_packed_batch(checker, args.batch);
  const TensorView k = api::check_keys(checker, "k", args.k, batch, config, config.num_kv_heads, api::head_row(config));
  const api::Axis tokens = api::tokens_of(q, "q.shape[0]"), keys{"S", k.shape[0], "k.shape[0]"};
  const TensorView lse = checker.tensor("lse", args.lse, checker.result_dtypes(), {tokens, api::q_heads(config)}, Role::kInput);
  const TensorView q_idx = checker.tensor("q_idx", args.q_idx, api::kFloatDTypes, {tokens, kv_heads, index_row}, Role::kInput);
  const TensorView k_idx = checker.tensor("k_idx", args.k_idx, api::kFloatDTypes, {keys, index_row}, Role::kInput);
  const TensorView block_ids = checker.optional_tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                                                       {tokens, kv_heads, api::slots(config)}, Role::kInput);
  const TensorView loss =
      checker.optional_tensor("loss", args.loss, checker.result_dtypes(), {{"1", 1, "one number"}}, Role::kOutput);
  const TensorView d_q_idx =
      checker.optional_tensor("d_q_idx", args.d_q_idx, api::kFloatDTypes, {tokens, kv_heads, index_row}, Role::kOutput);
  const TensorView d_k_idx = checker.optional_tensor("d_k_idx", args.d_k_idx, api::kFloatDTypes, {keys, index_row}, Role::kOutput);
  api::check_same_dtype("k", k, "q", q);
  api::check_same_dtype("q_idx", q_idx, "q", q);
  api::check_same_dtype("k_idx", k_idx, "q", q);
  check_results(loss, d_q_idx, d_k_idx);
  if (d_q_idx.given()) {
    api::check_same_dtype("d_q_idx", d_q_idx, "q", q);
    api::check_same_dtype("d_k_idx", d_k_idx, "q", q);
  }
  const Backend backend = checker.device();
  const auto& kernel = api::require_kernel("index_kl_loss", core::kernels<core::IndexKlParams>(), args.options.backend, backend,
                                           {.dtype = q.dtype,
                                            .head_dim = config.head_dim,
                                            .index_dim = config.index_dim,
                                            .block_size = config.block_size,
                                            .top_k = block_ids.given() ? config.top_k : 0,
                                            .group_size = config.group_size()});
  core::Geometry geo = api::make_geometry(batch, config, "q", q.shape[0]);
  api::check_key_extent(checker, "k", k, geo);
  if (block_ids.given()) api::check_block_ids(checker, block_ids, geo);
  checker.overlap();
  const std::int64_t num_tokens = args.num_tokens > 0 ? args.num_tokens : std::max<std::int64_t>(q.shape[0], 1);
  return {{config, geo, q, core::KeyBlocks::of(k, false), lse, q_idx, core::KeyBlocks::of(k_idx, false), block_ids, loss, d_q_idx,
           d_k_idx, num_tokens, args.deterministic, checker.context()},
          &kernel};
}

}  // namespace

void sparse_attention_backward(const SparseAttentionBackwardArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
void dense_attention_backward(const DenseAttentionBackwardArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
void index_kl_loss(const IndexKlLossArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
std::size_t workspace_bytes(const SparseAttentionBackwardArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }
std::size_t workspace_bytes(const DenseAttentionBackwardArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }
std::size_t workspace_bytes(const IndexKlLossArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }

}  // namespace openmsa
