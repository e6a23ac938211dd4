// The public calls on a Problem: allocates the outputs, runs, and checks that nothing beside them was written.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>

#include "support/problem.hpp"

namespace openmsa::test {

struct Attention {
  Tensor out, lse, block_max;
};

struct MsaResult {
  Attention attention;
  Tensor block_ids;
};

// With a null `options.workspace` the call uses scratch of exactly workspace_bytes(args), so a wrong answer there fails too.
Tensor run_block_scores(const Problem& problem, const RunOptions& options);
Tensor run_select_blocks(const Problem& problem, const Tensor& scores, const RunOptions& options);
Tensor run_index_select(const Problem& problem, const RunOptions& options);
Attention run_sparse_attention(const Problem& problem, const Tensor& block_ids, const RunOptions& options);
Attention run_sparse_decode(const Problem& problem, const Tensor& block_ids, const RunOptions& options);
// Without `optional_outputs` lse and block_ids are left out.
MsaResult run_msa_attention(const Problem& problem, const RunOptions& options, bool optional_outputs = true);
Attention run_dense_attention(const Problem& problem, const RunOptions& options, bool with_block_max = false);

RunOptions on(Backend backend, std::int32_t num_threads = 0);

// What the run_ functions are made of. The reference backend answers in float64 where its inputs are float64.
inline DType result_dtype(const Problem& problem) { return problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
inline std::int64_t output_padding(const Problem& problem) { return problem.layout.strided ? 16 : 0; }

template <typename Args>
void call(void (*function)(const Args&), Args args, std::initializer_list<const Tensor*> outputs) {
  Workspace workspace;
  if (args.options.workspace == nullptr) {
    workspace = Workspace(workspace_bytes(args));
    args.options.workspace = &workspace;
  }
  function(args);
  for (const Tensor* output : outputs) {
    EXPECT_TRUE(!output->given() || output->guards_intact()) << "wrote beside an output";
  }
}

}  // namespace openmsa::test
