// The public calls on a GPU for a Problem of tests/support: inputs copied over, outputs copied back as host tensors.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <memory>

#include "support/training.hpp"

namespace openmsa::test {

inline constexpr Device kGpu{DeviceType::kCuda, 0};

void check_cuda(cudaError_t status);

// Device memory of exactly the bytes that a host tensor's elements span, so that compute-sanitizer sees a step beyond them.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  explicit DeviceTensor(const Tensor& host);
  void upload(const Tensor& host);
  void download(Tensor& host) const;
  const TensorView& view() const { return view_; }

 private:
  std::size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
  TensorView view_;
};

// Scratch that is kept, reused by every call and filled with `poison` before each. With OPENMSA_TEST_RAW_WORKSPACE set every call
// gets fresh memory of exactly its size, never written to: what memcheck and initcheck want.
Workspace poisoned_workspace(std::size_t bytes, int poison);

// A Problem's inputs on the GPU.
struct DeviceProblem {
  explicit DeviceProblem(const Problem& problem);
  Batch batch() const;

  const Problem* host;
  DeviceTensor q, k, v, q_idx, k_idx, cu_seqlens_q, lengths, page_table, q_start;
};

// Each runs twice, on scratch poisoned in two ways, and expects the same bits, nothing written between the rows of an output, and
// no fault reported by the device.
Tensor gpu_block_scores(const DeviceProblem& problem);
Tensor gpu_select_blocks(const DeviceProblem& problem, const Tensor& scores);
Tensor gpu_index_select(const DeviceProblem& problem);
Attention gpu_attention(void (*function)(const SparseAttentionArgs&), const DeviceProblem& problem, const Tensor& block_ids);
MsaResult gpu_msa_attention(const DeviceProblem& problem);
Attention gpu_dense_attention(const DeviceProblem& problem, bool with_block_max);
// A null `block_ids` means every visible key, as in the calls of support/training.hpp.
Gradients gpu_attention_backward(const DeviceProblem& problem, const Tensor* block_ids, const Attention& forward,
                                 const Tensor& d_out);
IndexKl gpu_index_kl(const DeviceProblem& problem, const Tensor* block_ids, const Tensor& lse);

}  // namespace openmsa::test
