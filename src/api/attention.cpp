#include "openmsa/attention.hpp"

#include <algorithm>

#include "api/dispatch.hpp"

namespace openmsa {
namespace {

using api::Checker;
using api::Mode;
using api::Role;

// What sparse and dense attention have in common.
struct Tensors {
  Batch batch;
  TensorView q, k, v, out, lse;
};

template <typename Args>
Tensors check_tensors(Checker& checker, const Args& args, const MsaConfig& config) {
  Tensors tensors;
  tensors.q =
      checker.tensor("q", args.q, api::kFloatDTypes, {api::tokens(), api::q_heads(config), api::head_row(config)}, Role::kInput);
  tensors.batch = api::check_batch_structure(checker, args.batch);
  tensors.k = api::check_keys(checker, "k", args.k, tensors.batch, config, config.num_kv_heads, api::head_row(config));
  tensors.v = api::check_keys(checker, "v", args.v, tensors.batch, config, config.num_kv_heads, api::head_row(config));
  const api::Axis tokens = api::tokens_of(tensors.q, "q.shape[0]");
  tensors.out =
      checker.tensor("out", args.out, api::kFloatDTypes, {tokens, api::q_heads(config), api::head_row(config)}, Role::kOutput);
  tensors.lse = checker.optional_tensor("lse", args.lse, checker.result_dtypes(), {tokens, api::q_heads(config)}, Role::kOutput);
  api::check_same_dtype("k", tensors.k, "q", tensors.q);
  api::check_same_dtype("v", tensors.v, "q", tensors.q);
  api::check_same_dtype("out", tensors.out, "q", tensors.q);
  if (tensors.v.shape[0] != tensors.k.shape[0]) {
    api::refuse("v", "has shape " + api::shape_text(tensors.v) + ", but k has " + api::shape_text(tensors.k) +
                         "; their first axes must agree, a value belonging to every key. Pass the v of the same tokens or pages.");
  }
  return tensors;
}

core::Request request_of(const MsaConfig& config, DType dtype, std::int32_t top_k) {
  return {.dtype = dtype,
          .head_dim = config.head_dim,
          .block_size = config.block_size,
          .top_k = top_k,
          .group_size = config.group_size()};
}

struct SparseCall {
  core::SparseAttentionParams params;
  Backend backend = Backend::kCpu;
  core::Request request;
};

// Everything but the kernel: prefill and decode differ in nothing else.
SparseCall prepare(const SparseAttentionArgs& args, Mode mode) {
  args.config.validate();
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const Tensors tensors = check_tensors(checker, args, config);
  const TensorView block_ids =
      checker.tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                     {api::tokens_of(tensors.q, "q.shape[0]"), api::kv_heads(config), api::slots(config)}, Role::kInput);
  const Backend backend = checker.device();
  core::Geometry geo = api::make_geometry(tensors.batch, config, "q", tensors.q.shape[0]);
  api::check_key_extent(checker, "k", tensors.k, geo);
  api::check_block_ids(checker, block_ids, geo);
  checker.overlap();
  return {{config, geo, tensors.q, core::KeyBlocks::of(tensors.k, geo.paged()), core::KeyBlocks::of(tensors.v, geo.paged()),
           block_ids, tensors.out, tensors.lse, checker.context()},
          backend,
          request_of(config, tensors.q.dtype, config.top_k)};
}

void run_sparse(const char* stage, const std::vector<core::Kernel<core::SparseAttentionParams>>& kernels,
                const SparseAttentionArgs& args) {
  const SparseCall call = prepare(args, Mode::kRun);
  const auto& kernel = api::require_kernel(stage, kernels, args.options.backend, call.backend, call.request);
  api::run(api::Call<core::SparseAttentionParams>{call.params, &kernel}, args.options);
}

api::Call<core::MsaAttentionParams> prepare(const MsaAttentionArgs& args, Mode mode) {
  args.config.validate();
  api::require_index_dim(args.config);
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const Tensors tensors = check_tensors(checker, args, config);
  const api::Axis tokens = api::tokens_of(tensors.q, "q.shape[0]");
  const TensorView q_idx =
      checker.tensor("q_idx", args.q_idx, api::kFloatDTypes, {tokens, api::kv_heads(config), api::index_row(config)}, Role::kInput);
  const TensorView k_idx = api::check_keys(checker, "k_idx", args.k_idx, tensors.batch, config, 0, api::index_row(config));
  const TensorView block_ids = checker.optional_tensor("block_ids", args.block_ids, core::dtype_bit(DType::kI32),
                                                       {tokens, api::kv_heads(config), api::slots(config)}, Role::kOutput);
  api::check_same_dtype("q_idx", q_idx, "q", tensors.q);
  api::check_same_dtype("k_idx", k_idx, "q", tensors.q);
  if (k_idx.shape[0] != tensors.k.shape[0]) {
    api::refuse("k_idx", "has shape " + api::shape_text(k_idx) + ", but k has " + api::shape_text(tensors.k) +
                             "; their first axes must agree, an index key belonging to every key. Pass the k_idx of the same "
                             "tokens or pages.");
  }
  const Backend backend = checker.device();
  core::Request request = request_of(config, tensors.q.dtype, config.top_k);
  request.index_dim = config.index_dim;
  const auto& kernel =
      api::require_kernel("msa_attention", core::kernels<core::MsaAttentionParams>(), args.options.backend, backend, request);
  core::Geometry geo = api::make_geometry(tensors.batch, config, "q", tensors.q.shape[0]);
  api::check_key_extent(checker, "k", tensors.k, geo);
  checker.overlap();
  return {{config, geo, tensors.q, core::KeyBlocks::of(tensors.k, geo.paged()), core::KeyBlocks::of(tensors.v, geo.paged()), q_idx,
           core::KeyBlocks::of(k_idx, geo.paged()), tensors.out, tensors.lse, block_ids, checker.context()},
          &kernel};
}

api::Call<core::DenseAttentionParams> prepare(const DenseAttentionArgs& args, Mode mode) {
  args.config.validate();
  Checker checker(args.options, mode);
  const MsaConfig config = api::with_defaults(args.config);
  const Tensors tensors = check_tensors(checker, args, config);
  const TensorView block_max =
      checker.optional_tensor("block_max", args.block_max, checker.result_dtypes(),
                              {api::tokens_of(tensors.q, "q.shape[0]"), api::q_heads(config), {"num_blocks"}}, Role::kOutput);
  const Backend backend = checker.device();
  const auto& kernel = api::require_kernel("dense_attention", core::kernels<core::DenseAttentionParams>(), args.options.backend,
                                           backend, request_of(config, tensors.q.dtype, 0));
  core::Geometry geo = api::make_geometry(tensors.batch, config, "q", tensors.q.shape[0]);
  api::check_key_extent(checker, "k", tensors.k, geo);
  if (block_max.given()) api::check_block_width("block_max", block_max, geo);
  checker.overlap();
  return {{config, geo, tensors.q, core::KeyBlocks::of(tensors.k, geo.paged()), core::KeyBlocks::of(tensors.v, geo.paged()),
           tensors.out, tensors.lse, block_max, checker.context()},
          &kernel};
}

}  // namespace

void sparse_attention(const SparseAttentionArgs& args) {
  run_sparse("sparse_attention", core::kernels<core::SparseAttentionParams>(), args);
}

void sparse_decode(const SparseAttentionArgs& args) { run_sparse("sparse_decode", core::decode_kernels(), args); }

std::size_t workspace_bytes(const SparseAttentionArgs& args) {
  const SparseCall call = prepare(args, Mode::kSize);
  std::string why_not;
  std::size_t bytes = 0;
  bool found = false;
  for (const auto* kernels : {&core::kernels<core::SparseAttentionParams>(), &core::decode_kernels()}) {
    const auto* kernel = api::find_kernel(*kernels, call.backend, call.request, &why_not);
    if (kernel == nullptr) continue;
    found = true;
    bytes = std::max(bytes, api::scratch_bytes(api::Call<core::SparseAttentionParams>{call.params, kernel}));
  }
  if (!found) api::refuse_unsupported("sparse_attention", args.options.backend, call.backend, why_not);
  return bytes;
}

void msa_attention(const MsaAttentionArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
std::size_t workspace_bytes(const MsaAttentionArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }

void dense_attention(const DenseAttentionArgs& args) { api::run(prepare(args, Mode::kRun), args.options); }
std::size_t workspace_bytes(const DenseAttentionArgs& args) { return api::scratch_bytes(prepare(args, Mode::kSize)); }

}  // namespace openmsa
