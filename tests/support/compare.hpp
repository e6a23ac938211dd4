// SPEC.md, "Comparing two implementations", as GoogleTest assertions.
#pragma once

#include <gtest/gtest.h>

#include "support/oracle.hpp"

namespace openmsa::test {

// Every score within the error bound of an fp32 sum of index_dim products; -inf exactly where nothing is visible.
testing::AssertionResult scores_right(const Problem& problem, const Tensor& scores, const Tensor& oracle);

// Lists ascending, unique, of the right length, forced blocks in, and no unchosen block better than a chosen unforced one by more
// than twice the error bound. `exact`: no error is allowed (integer inputs); ties then go to the lower id.
testing::AssertionResult selection_right(const Problem& problem, const Tensor& block_ids, const Tensor& oracle_scores,
                                         bool exact = false);

// max |out - fp64| <= 2 * max |plain - fp64| + a small absolute term; lse within 1e-3; rows without keys exactly 0 and -inf; NaN
// and infinities exactly where fp64 has them.
testing::AssertionResult attention_right(const Problem& problem, const Attention& result, const Attention& oracle,
                                         const std::vector<float>& plain);

// block_max within the error bound of an fp32 sum of head_dim products; -inf exactly where nothing is visible.
testing::AssertionResult block_max_right(const Problem& problem, const Tensor& block_max, const Tensor& oracle);

// The whole check of one result: runs the oracle and the plain computation. block_ids null: dense.
testing::AssertionResult attention_right(const Problem& problem, const Attention& result, const Tensor* block_ids);

}  // namespace openmsa::test
