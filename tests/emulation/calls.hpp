// Functions of the CUDA backend called on a Problem, as the api layer would for tensors on a GPU: lengths are upper bounds, scratch is
// exactly what reserve() takes and starts as NaN. Nothing beside outputs and scratch may be written.
#pragma once

#include <functional>

#include "core/params.hpp"
#include "support/training.hpp"

namespace openmsa::test {

template <typename Params>
struct EmulatedKernel {
  void (*run)(const Params&);
  void (*reserve)(const Params&);
};

// Eight sequences of 100 tokens whose broken key offsets make every other one span all 800 keys: more blocks, and lists into them, than
// sound offsets could have.
struct OverlappingSequences {
  Problem problem;
  Tensor block_ids;
};
OverlappingSequences overlapping_sequences(std::int32_t dim, Rng& rng);

core::Geometry gpu_geometry(const Problem& problem);
MsaConfig gpu_config(const Problem& problem);  // with the defaults filled in

// Every head or index dim with every block size, numbered.
template <typename F>
void for_each_shape(F f) {
  int i = 0;
  for (const std::int32_t dim : {64, 96, 128}) {
    for (const std::int32_t block_size : {64, 128}) f(dim, block_size, i++);
  }
}

// Throws what kernels reported (a broken list, say) as an Error. `exact`: the call takes all of the scratch that reserve() does.
void run_emulated(const std::function<void(core::Context)>& run, const std::function<void(core::Context)>& reserve,
                  bool exact = true);
template <typename Params>
void run_emulated(const EmulatedKernel<Params>& kernel, const Params& params, bool exact = true) {
  const auto bound = [&params](void (*function)(const Params&)) {
    return [&params, function](core::Context context) {
      Params with_context = params;
      with_context.context = context;
      if (function != nullptr) function(with_context);
    };
  };
  run_emulated(bound(kernel.run), bound(kernel.reserve), exact);
}

Attention emulated_attention(const EmulatedKernel<core::SparseAttentionParams>& kernel, const core::Geometry& geo,
                             const Problem& problem, const Tensor& block_ids);
Attention emulated_sparse_attention(const Problem& problem, const Tensor& block_ids);
// block_max with a column more than there are blocks.
Attention emulated_dense_attention(const Problem& problem, bool with_block_max, bool with_lse = true);
// A null `block_ids` means every visible key, as in the calls of support/training.hpp.
Gradients emulated_attention_backward(const EmulatedKernel<core::AttentionBackwardParams>& kernel, const Problem& problem,
                                      const Tensor* block_ids, const Attention& forward, const Tensor& d_out);
IndexKl emulated_index_kl(const EmulatedKernel<core::IndexKlParams>& kernel, const Problem& problem, const Tensor* block_ids,
                          const Tensor& lse, const IndexKlOptions& options = {});

}  // namespace openmsa::test
