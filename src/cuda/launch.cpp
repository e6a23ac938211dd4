#include "cuda/launch.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "openmsa/error.hpp"

namespace openmsa::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kDevice, "",
              std::string(what) + " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                  "). The device may have run out of memory, or an earlier kernel on it failed.");
}

DeviceGuard::DeviceGuard(std::int32_t device) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ != device) check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(previous_); }

int num_multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

CUtensorMap make_tensor_map(const void* data, DType dtype, std::initializer_list<std::int64_t> size,
                            std::initializer_list<std::int64_t> stride_bytes, std::initializer_list<std::int64_t> box) {
  // The encoder lives in the driver; looked up at run time, so that the library loads without one.
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  std::array<cuuint64_t, 5> sizes{}, strides{};
  std::array<cuuint32_t, 5> boxes{}, steps{1, 1, 1, 1, 1};
  // An axis of length 0 cannot be encoded and is never loaded from.
  std::transform(size.begin(), size.end(), sizes.begin(), [](std::int64_t x) { return std::max<std::int64_t>(x, 1); });
  std::copy(stride_bytes.begin(), stride_bytes.end(), strides.begin());
  std::copy(box.begin(), box.end(), boxes.begin());
  CUtensorMap map{};
  const CUresult status = encode(&map, dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                 static_cast<cuuint32_t>(size.size()), const_cast<void*>(data), sizes.data(), strides.data(),
                                 boxes.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, "",
                "cuTensorMapEncodeTiled refused a tensor (error " + std::to_string(static_cast<int>(status)) +
                    "); its pointer and strides must be multiples of 16 bytes");
  }
  return map;
}

CUtensorMap row_map(const TensorView& rows, std::int32_t box_heads, std::int32_t box_tokens) {
  const std::int64_t size = dtype_bytes(rows.dtype), tokens = rows.shape[0], heads = rows.shape[1];
  // Axes of length 1 may carry any stride; the encoder wants multiples of 16.
  return make_tensor_map(rows.data, rows.dtype, {rows.shape[2], heads, tokens},
                         {heads > 1 ? rows.stride[1] * size : 16, tokens > 1 ? rows.stride[0] * size : 16},
                         {64, box_heads, box_tokens});
}

CUtensorMap key_map(const core::KeyBlocks& keys, const core::Geometry& geo, std::int32_t dim, std::int32_t num_heads,
                    std::int32_t box_tokens) {
  const bool paged = geo.paged();
  // Axes of length 1 may carry any stride; the encoder wants multiples of 16.
  const std::int64_t head_stride = num_heads > 1 ? keys.stride_head : 16;
  return make_tensor_map(keys.data, keys.dtype, {dim, paged ? geo.block_size : geo.total_k, num_heads, paged ? geo.num_pages : 1},
                         {keys.stride_token, head_stride, paged ? keys.stride_page : 16},
                         {64, box_tokens > 0 ? box_tokens : geo.block_size, 1, 1});
}

BatchParams batch_params(const core::Geometry& geo) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  BatchParams batch{};
  batch.num_seqs = geo.num_seqs;
  batch.block_size = geo.block_size;
  batch.cu_seqlens_q = geo.cu_seqlens_q;
  batch.cu_seqlens_k = geo.cu_seqlens_k;
  batch.seqlens_k = geo.seqlens_k;
  batch.page_table = geo.page_table;
  batch.stride_page_table = geo.stride_page_table;
  batch.q_start = geo.q_start;
  batch.total_q = static_cast<std::int32_t>(geo.total_q);
  batch.total_k = static_cast<std::int32_t>(geo.total_k);
  batch.max_pages = static_cast<std::int32_t>(geo.max_pages);
  batch.num_pages = static_cast<std::int32_t>(geo.num_pages);
  batch.max_seqlen_q = static_cast<std::int32_t>(geo.max_seqlen_q);
  batch.max_seqlen_k = static_cast<std::int32_t>(geo.max_seqlen_k);
  batch.fault = device_fault(device);
  return batch;
}

}  // namespace openmsa::cuda
