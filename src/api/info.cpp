#include "openmsa/info.hpp"

#include "core/registry.hpp"
#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cuda/device.hpp"

namespace openmsa {
namespace {

template <typename Params>
void append_rows(std::vector<KernelInfo>& rows, const char* stage, const std::vector<core::Kernel<Params>>& kernels) {
  for (const core::Kernel<Params>& kernel : kernels) {
    rows.push_back({stage, kernel.backend, kernel.name, core::describe(kernel.limits)});
  }
}

}  // namespace

const char* version() { return OPENMSA_VERSION; }

std::vector<BackendInfo> list_backends() {
  const std::int32_t threads = core::hardware_threads();
  const cuda::DeviceStatus gpu = cuda::device_status();
  return {
      {Backend::kReference, true, true, "float64, plain loops; the oracle"},
      {Backend::kCpu, true, true,
       "SIMD target " + cpu::simd_target() + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads")},
      {Backend::kCuda, gpu.compiled, gpu.available, gpu.detail},
  };
}

std::vector<KernelInfo> list_kernels() {
  std::vector<KernelInfo> rows;
  append_rows(rows, "block_scores", core::kernels<core::BlockScoresParams>());
  append_rows(rows, "select_blocks", core::kernels<core::SelectBlocksParams>());
  append_rows(rows, "index_select", core::kernels<core::IndexSelectParams>());
  append_rows(rows, "sparse_attention", core::kernels<core::SparseAttentionParams>());
  append_rows(rows, "sparse_decode", core::decode_kernels());
  append_rows(rows, "msa_attention", core::kernels<core::MsaAttentionParams>());
  append_rows(rows, "dense_attention", core::kernels<core::DenseAttentionParams>());
  append_rows(rows, "sparse_attention_backward", core::kernels<core::AttentionBackwardParams>());
  append_rows(rows, "dense_attention_backward", core::dense_backward_kernels());
  append_rows(rows, "index_kl_loss", core::kernels<core::IndexKlParams>());
  append_rows(rows, "write_pages", core::kernels<core::WritePagesParams>());
  return rows;
}

}  // namespace openmsa
