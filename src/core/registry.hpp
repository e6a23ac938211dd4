// The kernel registry: which kernel serves which stage, backend and sizes, as data in one place. It drives dispatch, the
// "unsupported" error texts, list_kernels() (hence `openmsa info`) and the tests that sweep what is promised.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/params.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa::core {

// Bit i set: static_cast<DType>(i) is supported.
constexpr std::uint32_t dtype_bit(DType dtype) { return 1u << static_cast<unsigned>(dtype); }
inline constexpr std::uint32_t kStorageDTypes = dtype_bit(DType::kF32) | dtype_bit(DType::kBF16) | dtype_bit(DType::kF16);

struct Range {
  std::int32_t min = 1, max = 0, step = 1;  // values min, min+step, ..., max; max 0: no upper bound
  bool contains(std::int64_t value) const { return value >= min && (max == 0 || value <= max) && (value - min) % step == 0; }
};

// What a kernel can do. A field that a stage does not use is left at its default (anything).
struct Limits {
  std::uint32_t dtypes = kStorageDTypes;
  Range head_dim{}, index_dim{}, block_size{}, top_k{}, group_size{};
};

// The sizes a call asks for; fields at 0 are not involved.
struct Request {
  DType dtype = DType::kF32;
  std::int32_t head_dim = 0, index_dim = 0, block_size = 0, top_k = 0, group_size = 0;
};

template <typename Params>
struct Kernel {
  Backend backend;
  const char* name;  // "cpu_score"
  Limits limits;
  void (*run)(const Params&);
  // Takes from params.context.arena exactly what run() takes, touching nothing else. Null: no scratch.
  void (*reserve)(const Params&);
};

// All kernels of a stage, fastest first within a backend. Defined in registry.cpp, one table per stage.
template <typename Params>
const std::vector<Kernel<Params>>& kernels();
template <>
const std::vector<Kernel<BlockScoresParams>>& kernels();
template <>
const std::vector<Kernel<SelectBlocksParams>>& kernels();
template <>
const std::vector<Kernel<IndexSelectParams>>& kernels();
template <>
const std::vector<Kernel<SparseAttentionParams>>& kernels();  // prefill
template <>
const std::vector<Kernel<MsaAttentionParams>>& kernels();
template <>
const std::vector<Kernel<DenseAttentionParams>>& kernels();
template <>
const std::vector<Kernel<AttentionBackwardParams>>& kernels();  // of sparse_attention
template <>
const std::vector<Kernel<IndexKlParams>>& kernels();
template <>
const std::vector<Kernel<WritePagesParams>>& kernels();
const std::vector<Kernel<SparseAttentionParams>>& decode_kernels();
const std::vector<Kernel<AttentionBackwardParams>>& dense_backward_kernels();

// Empty if the limits cover the request, else the first rule broken: "head_dim 72 is not in 16..256 step 16".
std::string why_unsupported(const Limits& limits, const Request& request);
// "float32|bfloat16|float16, head_dim 16..256 step 16, ..."
std::string describe(const Limits& limits);

}  // namespace openmsa::core
