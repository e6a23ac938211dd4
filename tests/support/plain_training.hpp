// SPEC.md's rule for gradients: what a plain computation in the storage dtype gives, and results held against fp64 by its error.
#pragma once

#include <gtest/gtest.h>

#include "support/training.hpp"

namespace openmsa::test {

// The formulas of openmsa/training.hpp with scores, probabilities and their gradients each rounded to the problem's dtype, sums in
// fp32, results rounded. Null block_ids: every visible key.
Gradients plain_attention_backward(const Problem& problem, const Tensor* block_ids, const Attention& forward, const Tensor& d_out);
IndexKl plain_index_kl(const Problem& problem, const Tensor* block_ids, const Tensor& lse);

// max |x - fp64| <= 3 * max |plain - fp64| + `absolute`; finite exactly where fp64 is.
testing::AssertionResult gradient_right(const char* name, const Tensor& result, const Tensor& oracle, const Tensor& plain,
                                        double absolute);

// The whole checks of one result.
testing::AssertionResult gradients_right(const Problem& problem, const Tensor* block_ids, const Attention& forward,
                                         const Tensor& d_out, const Gradients& result);
testing::AssertionResult index_kl_right(const Problem& problem, const Tensor* block_ids, const Tensor& lse, const IndexKl& result);

}  // namespace openmsa::test
