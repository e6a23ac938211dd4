// The C++ face as openmsa._core. Private: the Python package allocates outputs, fills in defaults and calls these functions,
// which build the args structs, release the GIL and run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/registry.hpp"
#include "cpu/cpu.hpp"
#include "openmsa/openmsa.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace openmsa::python {
namespace {

// The integer fields of MsaConfig in declaration order: num_q_heads .. num_local_blocks.
using ConfigSizes = std::array<std::int32_t, 8>;

MsaConfig config_of(const ConfigSizes& sizes, std::optional<double> softmax_scale, std::optional<double> index_scale = {}) {
  return {.num_q_heads = sizes[0],
          .num_kv_heads = sizes[1],
          .head_dim = sizes[2],
          .index_dim = sizes[3],
          .block_size = sizes[4],
          .top_k = sizes[5],
          .num_init_blocks = sizes[6],
          .num_local_blocks = sizes[7],
          .softmax_scale = softmax_scale,
          .index_scale = index_scale};
}

Backend backend_of(std::string_view name) {
  for (const Backend backend : {Backend::kAuto, Backend::kReference, Backend::kCpu, Backend::kCuda}) {
    if (name == backend_name(backend)) return backend;
  }
  throw Error(ErrorCode::kInvalidArgument, "backend",
              "backend is '" + std::string(name) + "'; known are 'auto', 'reference', 'cpu' and 'cuda'.");
}

// The tail that every operator takes, in this order, after its tensors.
#define OPENMSA_CALL_PARAMETERS                                                                                            \
  nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle seqlens_k, nb::handle page_table, nb::handle q_start,       \
      std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, const ConfigSizes &sizes, std::optional<double> softmax_scale, \
      std::string_view backend, std::int32_t num_threads, bool trust_indices
#define OPENMSA_CALL_NAMES                                                                                            \
  nb::arg("cu_seqlens_q"), nb::arg("cu_seqlens_k").none(), nb::arg("seqlens_k").none(), nb::arg("page_table").none(), \
      nb::arg("q_start").none(), nb::arg("max_seqlen_q"), nb::arg("max_seqlen_k"), nb::arg("sizes"),                  \
      nb::arg("softmax_scale").none(), nb::arg("backend"), nb::arg("num_threads"), nb::arg("trust_indices")
// Fills the fields that all args structs share.
#define OPENMSA_FILL_COMMON(args)                                                                                  \
  (args).config = config_of(sizes, softmax_scale);                                                                 \
  (args).batch = batch_of(cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table, q_start, max_seqlen_q, max_seqlen_k); \
  (args).options.backend = backend_of(backend);                                                                    \
  (args).options.num_threads = num_threads;                                                                        \
  (args).options.trust_indices = trust_indices

Batch batch_of(nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle seqlens_k, nb::handle page_table, nb::handle q_start,
               std::int64_t max_seqlen_q, std::int64_t max_seqlen_k) {
  return {.cu_seqlens_q = view_of(cu_seqlens_q, "batch.cu_seqlens_q"),
          .cu_seqlens_k = optional_view_of(cu_seqlens_k, "batch.cu_seqlens_k"),
          .seqlens_k = optional_view_of(seqlens_k, "batch.seqlens_k"),
          .page_table = optional_view_of(page_table, "batch.page_table"),
          .q_start = optional_view_of(q_start, "batch.q_start"),
          .max_seqlen_q = max_seqlen_q,
          .max_seqlen_k = max_seqlen_k};
}

void* current_stream(const nb::module_& torch, Device device) {
  return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(torch.attr("_C").attr("_cuda_getCurrentRawStream")(device.index)));
}

// What a call on a GPU needs besides its tensors: PyTorch's current stream, and scratch from PyTorch's own memory pool, which is
// ordered by that stream and knows about graph capture.
class GpuCall {
 public:
  template <typename Args>
  explicit GpuCall(Args& args) {
    const Device device = args.batch.cu_seqlens_q.device;
    if (device.type != DeviceType::kCuda) return;
    const nb::module_ torch = nb::module_::import_("torch");
    args.options.cuda_stream = current_stream(torch, device);
    const std::size_t bytes = workspace_bytes(args);
    if (bytes == 0) return;
    memory_ = torch.attr("empty")(bytes, "dtype"_a = torch.attr("uint8"), "device"_a = torch.attr("device")("cuda", device.index));
    workspace_ = Workspace(reinterpret_cast<void*>(nb::cast<std::uintptr_t>(memory_.attr("data_ptr")())), bytes, device);
    args.options.workspace = &workspace_;
  }

 private:
  nb::object memory_;
  Workspace workspace_;
};

void py_block_scores(nb::handle q_idx, nb::handle k_idx, nb::handle scores, OPENMSA_CALL_PARAMETERS) {
  BlockScoresArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q_idx = view_of(q_idx, "q_idx");
  args.k_idx = view_of(k_idx, "k_idx");
  args.scores = view_of(scores, "scores");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  block_scores(args);
}

void py_select_blocks(nb::handle scores, nb::handle block_ids, OPENMSA_CALL_PARAMETERS) {
  SelectBlocksArgs args;
  OPENMSA_FILL_COMMON(args);
  args.scores = view_of(scores, "scores");
  args.block_ids = view_of(block_ids, "block_ids");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  select_blocks(args);
}

void py_index_select(nb::handle q_idx, nb::handle k_idx, nb::handle block_ids, OPENMSA_CALL_PARAMETERS) {
  IndexSelectArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q_idx = view_of(q_idx, "q_idx");
  args.k_idx = view_of(k_idx, "k_idx");
  args.block_ids = view_of(block_ids, "block_ids");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  index_select(args);
}

std::size_t py_index_select_workspace(nb::handle q_idx, nb::handle k_idx, nb::handle block_ids, OPENMSA_CALL_PARAMETERS) {
  IndexSelectArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q_idx = view_of(q_idx, "q_idx");
  args.k_idx = view_of(k_idx, "k_idx");
  args.block_ids = view_of(block_ids, "block_ids");
  return workspace_bytes(args);
}

void py_sparse_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle block_ids, nb::handle out, nb::handle lse,
                         bool decode, OPENMSA_CALL_PARAMETERS) {
  SparseAttentionArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.block_ids = view_of(block_ids, "block_ids");
  args.out = view_of(out, "out");
  args.lse = optional_view_of(lse, "lse");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  decode ? sparse_decode(args) : sparse_attention(args);
}

void py_msa_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle q_idx, nb::handle k_idx, nb::handle out, nb::handle lse,
                      nb::handle block_ids, OPENMSA_CALL_PARAMETERS) {
  MsaAttentionArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.q_idx = view_of(q_idx, "q_idx");
  args.k_idx = view_of(k_idx, "k_idx");
  args.out = view_of(out, "out");
  args.lse = optional_view_of(lse, "lse");
  args.block_ids = optional_view_of(block_ids, "block_ids");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  msa_attention(args);
}

void py_dense_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle block_max,
                        OPENMSA_CALL_PARAMETERS) {
  DenseAttentionArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.out = view_of(out, "out");
  args.lse = optional_view_of(lse, "lse");
  args.block_max = optional_view_of(block_max, "block_max");
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  dense_attention(args);
}

void py_sparse_attention_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle block_ids, nb::handle out, nb::handle lse,
                                  nb::handle d_out, nb::handle d_q, nb::handle d_k, nb::handle d_v, bool deterministic,
                                  OPENMSA_CALL_PARAMETERS) {
  SparseAttentionBackwardArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.block_ids = view_of(block_ids, "block_ids");
  args.out = view_of(out, "out");
  args.lse = view_of(lse, "lse");
  args.d_out = view_of(d_out, "d_out");
  args.d_q = view_of(d_q, "d_q");
  args.d_k = view_of(d_k, "d_k");
  args.d_v = view_of(d_v, "d_v");
  args.deterministic = deterministic;
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  sparse_attention_backward(args);
}

void py_dense_attention_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle d_out,
                                 nb::handle d_q, nb::handle d_k, nb::handle d_v, bool deterministic, OPENMSA_CALL_PARAMETERS) {
  DenseAttentionBackwardArgs args;
  OPENMSA_FILL_COMMON(args);
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.out = view_of(out, "out");
  args.lse = view_of(lse, "lse");
  args.d_out = view_of(d_out, "d_out");
  args.d_q = view_of(d_q, "d_q");
  args.d_k = view_of(d_k, "d_k");
  args.d_v = view_of(d_v, "d_v");
  args.deterministic = deterministic;
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  dense_attention_backward(args);
}

void py_index_kl_loss(nb::handle q, nb::handle k, nb::handle lse, nb::handle q_idx, nb::handle k_idx, nb::handle block_ids,
                      nb::handle loss, nb::handle d_q_idx, nb::handle d_k_idx, std::int64_t num_tokens, bool deterministic,
                      std::optional<double> index_scale, OPENMSA_CALL_PARAMETERS) {
  IndexKlLossArgs args;
  OPENMSA_FILL_COMMON(args);
  args.config.index_scale = index_scale;
  args.q = view_of(q, "q");
  args.k = view_of(k, "k");
  args.lse = view_of(lse, "lse");
  args.q_idx = view_of(q_idx, "q_idx");
  args.k_idx = view_of(k_idx, "k_idx");
  args.block_ids = optional_view_of(block_ids, "block_ids");
  args.loss = optional_view_of(loss, "loss");
  args.d_q_idx = optional_view_of(d_q_idx, "d_q_idx");
  args.d_k_idx = optional_view_of(d_k_idx, "d_k_idx");
  args.num_tokens = num_tokens;
  args.deterministic = deterministic;
  const GpuCall gpu(args);
  const nb::gil_scoped_release release;
  index_kl_loss(args);
}

void py_write_pages(nb::handle k, nb::handle v, nb::handle k_idx, nb::handle slots, nb::handle k_pages, nb::handle v_pages,
                    nb::handle k_idx_pages, std::string_view backend, std::int32_t num_threads, bool trust_indices) {
  WritePagesArgs args;
  args.k = view_of(k, "k");
  args.v = view_of(v, "v");
  args.k_idx = view_of(k_idx, "k_idx");
  args.slots = view_of(slots, "slots");
  args.k_pages = view_of(k_pages, "k_pages");
  args.v_pages = view_of(v_pages, "v_pages");
  args.k_idx_pages = view_of(k_idx_pages, "k_idx_pages");
  args.options.backend = backend_of(backend);
  args.options.num_threads = num_threads;
  args.options.trust_indices = trust_indices;
  if (const Device device = args.k_pages.device; device.type == DeviceType::kCuda) {
    args.options.cuda_stream = current_stream(nb::module_::import_("torch"), device);
  }
  const nb::gil_scoped_release release;
  write_pages(args);
}

nb::list py_list_backends() {
  nb::list rows;
  for (const BackendInfo& info : list_backends()) {
    rows.append(nb::make_tuple(backend_name(info.backend), info.compiled, info.available, info.detail));
  }
  return rows;
}

nb::list py_list_kernels() {
  nb::list rows;
  for (const KernelInfo& info : list_kernels()) {
    rows.append(nb::make_tuple(info.stage, backend_name(info.backend), info.name, info.supports));
  }
  return rows;
}

// The first kernel of the backend decides: there is one per stage, and where there were more the fastest would be first.
template <typename Params>
std::string why_no_kernel(const std::vector<core::Kernel<Params>>& kernels, Backend backend, const core::Request& request) {
  std::string reason = "there is none in this build";
  for (const core::Kernel<Params>& kernel : kernels) {
    if (kernel.backend != backend) continue;
    reason = core::why_unsupported(kernel.limits, request);
    if (reason.empty()) break;
  }
  return reason;
}

// For choosing a device before there are tensors. A config without an index branch stands for a dense layer.
std::string py_why_unsupported(std::string_view backend_text, std::string_view dtype_text, const ConfigSizes& sizes) {
  const MsaConfig config = config_of(sizes, std::nullopt);
  const Backend backend = backend_of(backend_text);
  core::Request request{.head_dim = config.head_dim, .block_size = config.block_size, .group_size = config.group_size()};
  bool is_known = false;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (dtype_text != dtype_name(dtype)) continue;
    request.dtype = dtype;
    is_known = true;
  }
  if (!is_known) return "dtype " + std::string(dtype_text) + " is not one that any kernel takes";
  if (config.index_dim == 0) return why_no_kernel(core::kernels<core::DenseAttentionParams>(), backend, request);
  request.top_k = config.top_k;
  std::string reason = why_no_kernel(core::kernels<core::SparseAttentionParams>(), backend, request);
  if (!reason.empty()) return reason;
  request.head_dim = request.group_size = 0;
  request.index_dim = config.index_dim;
  return why_no_kernel(core::kernels<core::IndexSelectParams>(), backend, request);
}

// openmsa::Error becomes the exception class of openmsa.errors that stands for its code.
void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const char* class_name = "Error";
    switch (error.code()) {
      case ErrorCode::kInvalidArgument: class_name = "InvalidArgumentError"; break;
      case ErrorCode::kUnsupported: class_name = "UnsupportedError"; break;
      case ErrorCode::kOutOfWorkspace: class_name = "OutOfWorkspaceError"; break;
      case ErrorCode::kDevice: class_name = "DeviceError"; break;
    }
    try {
      const nb::object type = nb::module_::import_("openmsa.errors").attr(class_name);
      PyErr_SetObject(type.ptr(), type(error.what(), error.argument()).ptr());
    } catch (nb::python_error& failure) {
      failure.restore();
    }
  }
}

}  // namespace

NB_MODULE(_core, module) {
  nb::register_exception_translator(translate_error);

  module.def("version", &version);
  module.def("list_backends", &py_list_backends, "Tuples (backend, compiled, available, detail).");
  module.def("list_kernels", &py_list_kernels, "Tuples (stage, backend, name, supports).");
  module.def(
      "synchronize",
      [](std::int32_t device, std::uintptr_t stream) {
        const nb::gil_scoped_release release;
        synchronize({DeviceType::kCuda, device}, reinterpret_cast<void*>(stream));
      },
      "device"_a, "stream"_a);
  module.def("why_unsupported", &py_why_unsupported, "backend"_a, "dtype"_a, "sizes"_a,
             "Which limit of the backend's kernels a layer of these sizes breaks; empty if none.");
  module.def("simd_target", &cpu::simd_target);
  module.def("limit_simd_target", &cpu::limit_simd_target, "name"_a, "'avx2' or 'best'; for `openmsa bench` and tests.");
  module.def(
      "validate_config",
      [](const ConfigSizes& sizes, std::optional<double> softmax_scale, std::optional<double> index_scale) {
        config_of(sizes, softmax_scale, index_scale).validate();
      },
      "sizes"_a, "softmax_scale"_a.none(), "index_scale"_a.none(), "MsaConfig::validate(); raises on the first rule broken.");

  module.def("block_scores", &py_block_scores, "q_idx"_a, "k_idx"_a, "scores"_a, OPENMSA_CALL_NAMES, "Writes scores.");
  module.def("select_blocks", &py_select_blocks, "scores"_a, "block_ids"_a, OPENMSA_CALL_NAMES, "Writes block_ids.");
  module.def("index_select", &py_index_select, "q_idx"_a, "k_idx"_a, "block_ids"_a, OPENMSA_CALL_NAMES, "Writes block_ids.");
  module.def("index_select_workspace_bytes", &py_index_select_workspace, "q_idx"_a, "k_idx"_a, "block_ids"_a, OPENMSA_CALL_NAMES,
             "Bytes of scratch that index_select takes; for `openmsa bench`.");
  module.def("sparse_attention", &py_sparse_attention, "q"_a, "k"_a, "v"_a, "block_ids"_a, "out"_a, "lse"_a.none(), "decode"_a,
             OPENMSA_CALL_NAMES, "Writes out and lse; with decode, by the path for few query tokens.");
  module.def("msa_attention", &py_msa_attention, "q"_a, "k"_a, "v"_a, "q_idx"_a, "k_idx"_a, "out"_a, "lse"_a.none(),
             "block_ids"_a.none(), OPENMSA_CALL_NAMES, "Writes out, lse and block_ids.");
  module.def("dense_attention", &py_dense_attention, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(), "block_max"_a.none(),
             OPENMSA_CALL_NAMES, "Writes out, lse and block_max.");
  module.def("sparse_attention_backward", &py_sparse_attention_backward, "q"_a, "k"_a, "v"_a, "block_ids"_a, "out"_a, "lse"_a,
             "d_out"_a, "d_q"_a, "d_k"_a, "d_v"_a, "deterministic"_a, OPENMSA_CALL_NAMES, "Writes d_q, d_k and d_v.");
  module.def("dense_attention_backward", &py_dense_attention_backward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "d_out"_a, "d_q"_a,
             "d_k"_a, "d_v"_a, "deterministic"_a, OPENMSA_CALL_NAMES, "Writes d_q, d_k and d_v.");
  module.def("index_kl_loss", &py_index_kl_loss, "q"_a, "k"_a, "lse"_a, "q_idx"_a, "k_idx"_a, "block_ids"_a.none(), "loss"_a.none(),
             "d_q_idx"_a.none(), "d_k_idx"_a.none(), "num_tokens"_a, "deterministic"_a, "index_scale"_a.none(), OPENMSA_CALL_NAMES,
             "Writes loss, d_q_idx and d_k_idx.");
  module.def("write_pages", &py_write_pages, "k"_a, "v"_a, "k_idx"_a, "slots"_a, "k_pages"_a, "v_pages"_a, "k_idx_pages"_a,
             "backend"_a, "num_threads"_a, "trust_indices"_a, "Writes rows of k_pages, v_pages and k_idx_pages.");
}

}  // namespace openmsa::python
