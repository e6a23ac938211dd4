#include "core/registry.hpp"

#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"
#include "reference/reference.hpp"

namespace openmsa::core {
namespace {

constexpr Limits kOracleLimits{.dtypes = kStorageDTypes | dtype_bit(DType::kF64)};

// Tiles of 16 lanes fix the steps; 256 is what the engine's on-stack row state is sized for.
constexpr Range kCpuDim{16, 256, 16};
constexpr Range kCpuBlock{16, 256, 16};
constexpr Range kCpuTopK{1, 64, 1};
constexpr Limits kCpuScoreLimits{.index_dim = kCpuDim, .block_size = kCpuBlock};
constexpr Limits kCpuSelectLimits{.dtypes = dtype_bit(DType::kF32), .block_size = kCpuBlock, .top_k = kCpuTopK};
constexpr Limits kCpuIndexLimits{.index_dim = kCpuDim, .block_size = kCpuBlock, .top_k = kCpuTopK};
constexpr Limits kCpuSparseLimits{.head_dim = kCpuDim, .block_size = kCpuBlock, .top_k = kCpuTopK};
#if OPENMSA_HAVE_CUDA
constexpr std::uint32_t kHalfDTypes = dtype_bit(DType::kBF16) | dtype_bit(DType::kF16);
constexpr Range kCudaDim{64, 128, 32};
constexpr Range kCudaBlock{64, 128, 64};
constexpr Range kCudaTopK{1, 32, 1};
constexpr Range kCudaGroup{1, 16, 1};
constexpr Limits kCudaScoreLimits{.dtypes = kHalfDTypes, .index_dim = kCudaDim, .block_size = kCudaBlock};
constexpr Limits kCudaSelectLimits{.dtypes = dtype_bit(DType::kF32), .top_k = kCudaTopK};
constexpr Limits kCudaIndexLimits{.dtypes = kHalfDTypes, .index_dim = kCudaDim, .block_size = kCudaBlock, .top_k = kCudaTopK};
constexpr Limits kCudaSparseLimits{
    .dtypes = kHalfDTypes, .head_dim = kCudaDim, .block_size = kCudaBlock, .top_k = kCudaTopK, .group_size = kCudaGroup};
constexpr Limits kCudaMsaLimits{.dtypes = kHalfDTypes,
                                .head_dim = kCudaDim,
                                .index_dim = kCudaDim,
                                .block_size = kCudaBlock,
                                .top_k = kCudaTopK,
                                .group_size = kCudaGroup};
constexpr Limits kCudaDenseLimits{.dtypes = kHalfDTypes, .head_dim = kCudaDim, .block_size = kCudaBlock, .group_size = kCudaGroup};
#endif

constexpr Limits kCpuMsaLimits{.head_dim = kCpuDim, .index_dim = kCpuDim, .block_size = kCpuBlock, .top_k = kCpuTopK};
constexpr Limits kCpuDenseLimits{.head_dim = kCpuDim, .block_size = kCpuBlock};

std::string describe(const Range& range) {
  std::string text = std::to_string(range.min) + "..";
  if (range.max != 0) text += std::to_string(range.max);
  if (range.step != 1) text += " step " + std::to_string(range.step);
  return text;
}

bool is_anything(const Range& range) { return range.min <= 1 && range.max == 0 && range.step == 1; }

struct Field {
  const char* name;
  Range Limits::*range;
  std::int32_t Request::*value;
};
constexpr Field kFields[] = {
    {"head_dim", &Limits::head_dim, &Request::head_dim},       {"index_dim", &Limits::index_dim, &Request::index_dim},
    {"block_size", &Limits::block_size, &Request::block_size}, {"top_k", &Limits::top_k, &Request::top_k},
    {"group_size", &Limits::group_size, &Request::group_size},
};

std::string describe_dtypes(std::uint32_t dtypes) {
  std::string text;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if ((dtypes & dtype_bit(dtype)) == 0) continue;
    if (!text.empty()) text += "|";
    text += dtype_name(dtype);
  }
  return text;
}

}  // namespace

std::string why_unsupported(const Limits& limits, const Request& request) {
  if ((limits.dtypes & dtype_bit(request.dtype)) == 0) {
    return std::string("dtype ") + dtype_name(request.dtype) + " is not one of " + describe_dtypes(limits.dtypes);
  }
  for (const Field& field : kFields) {
    const std::int32_t value = request.*field.value;
    const Range& range = limits.*field.range;
    if (value != 0 && !range.contains(value)) {
      return std::string(field.name) + " " + std::to_string(value) + " is not in " + describe(range);
    }
  }
  return {};
}

std::string describe(const Limits& limits) {
  std::string text = describe_dtypes(limits.dtypes);
  for (const Field& field : kFields) {
    const Range& range = limits.*field.range;
    if (!is_anything(range)) text += std::string(", ") + field.name + " " + describe(range);
  }
  return text;
}

template <>
const std::vector<Kernel<BlockScoresParams>>& kernels() {
  static const std::vector<Kernel<BlockScoresParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_score", kCudaScoreLimits, cuda::block_scores, cuda::block_scores_reserve},
#endif
    {Backend::kCpu, "cpu_score", kCpuScoreLimits, cpu::block_scores, cpu::block_scores_reserve},
    {Backend::kReference, "reference_score", kOracleLimits, reference::block_scores, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<SelectBlocksParams>>& kernels() {
  static const std::vector<Kernel<SelectBlocksParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "smxx_select", kCudaSelectLimits, cuda::select_blocks, nullptr},
#endif
    {Backend::kCpu, "cpu_select", kCpuSelectLimits, cpu::select_blocks, nullptr},
    {Backend::kReference, "reference_select", kOracleLimits, reference::select_blocks, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<IndexSelectParams>>& kernels() {
  static const std::vector<Kernel<IndexSelectParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_index_select", kCudaIndexLimits, cuda::index_select, cuda::index_select_reserve},
#endif
    {Backend::kCpu, "cpu_index_select", kCpuIndexLimits, cpu::index_select, cpu::index_select_reserve},
    {Backend::kReference, "reference_index_select", kOracleLimits, reference::index_select, reference::index_select_reserve},
  };
  return table;
}

template <>
const std::vector<Kernel<SparseAttentionParams>>& kernels() {
  static const std::vector<Kernel<SparseAttentionParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_attend", kCudaSparseLimits, cuda::sparse_attention, cuda::sparse_attention_reserve},
#endif
    {Backend::kCpu, "cpu_attend", kCpuSparseLimits, cpu::sparse_attention, cpu::sparse_attention_reserve},
    {Backend::kReference, "reference_attend", kOracleLimits, reference::sparse_attention, nullptr},
  };
  return table;
}

const std::vector<Kernel<SparseAttentionParams>>& decode_kernels() {
  static const std::vector<Kernel<SparseAttentionParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "smxx_decode", kCudaSparseLimits, cuda::sparse_decode, cuda::sparse_decode_reserve},
#endif
    {Backend::kCpu, "cpu_decode", kCpuSparseLimits, cpu::sparse_decode, cpu::sparse_decode_reserve},
    {Backend::kReference, "reference_attend", kOracleLimits, reference::sparse_attention, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<MsaAttentionParams>>& kernels() {
  static const std::vector<Kernel<MsaAttentionParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_msa_attention", kCudaMsaLimits, cuda::msa_attention, cuda::msa_attention_reserve},
#endif
    {Backend::kCpu, "cpu_msa_attention", kCpuMsaLimits, cpu::msa_attention, cpu::msa_attention_reserve},
    {Backend::kReference, "reference_msa_attention", kOracleLimits, reference::msa_attention, reference::msa_attention_reserve},
  };
  return table;
}

template <>
const std::vector<Kernel<DenseAttentionParams>>& kernels() {
  static const std::vector<Kernel<DenseAttentionParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_dense", kCudaDenseLimits, cuda::dense_attention, cuda::dense_attention_reserve},
#endif
    {Backend::kCpu, "cpu_dense", kCpuDenseLimits, cpu::dense_attention, cpu::dense_attention_reserve},
    {Backend::kReference, "reference_dense", kOracleLimits, reference::dense_attention, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<AttentionBackwardParams>>& kernels() {
  static const std::vector<Kernel<AttentionBackwardParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_backward", kCudaSparseLimits, cuda::sparse_attention_backward, cuda::sparse_attention_backward_reserve},
#endif
    {Backend::kCpu, "cpu_attention_backward", kCpuSparseLimits, cpu::attention_backward, cpu::attention_backward_reserve},
    {Backend::kReference, "reference_attention_backward", kOracleLimits, reference::attention_backward, nullptr},
  };
  return table;
}

const std::vector<Kernel<AttentionBackwardParams>>& dense_backward_kernels() {
  static const std::vector<Kernel<AttentionBackwardParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_backward", kCudaDenseLimits, cuda::dense_attention_backward, cuda::dense_attention_backward_reserve},
#endif
    {Backend::kCpu, "cpu_attention_backward", kCpuDenseLimits, cpu::attention_backward, cpu::attention_backward_reserve},
    {Backend::kReference, "reference_attention_backward", kOracleLimits, reference::attention_backward, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<IndexKlParams>>& kernels() {
  static const std::vector<Kernel<IndexKlParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "sm90_index_kl", kCudaMsaLimits, cuda::index_kl_loss, cuda::index_kl_loss_reserve},
#endif
    {Backend::kCpu, "cpu_index_kl", kCpuMsaLimits, cpu::index_kl_loss, cpu::index_kl_loss_reserve},
    {Backend::kReference, "reference_index_kl", kOracleLimits, reference::index_kl_loss, nullptr},
  };
  return table;
}

template <>
const std::vector<Kernel<WritePagesParams>>& kernels() {
  static const std::vector<Kernel<WritePagesParams>> table = {
#if OPENMSA_HAVE_CUDA
    {Backend::kCuda, "smxx_write_pages", Limits{}, cuda::write_pages, nullptr},
#endif
    {Backend::kCpu, "cpu_write_pages", kOracleLimits, cpu::write_pages, nullptr},
    {Backend::kReference, "reference_write_pages", kOracleLimits, reference::write_pages, nullptr},
  };
  return table;
}

}  // namespace openmsa::core
