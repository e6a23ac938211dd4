// What results are held against: the library's fp64 reference backend, and the error that a plain computation makes.
#pragma once

#include <vector>

#include "support/run.hpp"

namespace openmsa::test {

// The reference backend on the same inputs in float64; answers in float64.
Tensor oracle_scores(const Problem& problem);
Attention oracle_sparse_attention(const Problem& problem, const Tensor& block_ids);
Attention oracle_dense_attention(const Problem& problem);

// `out` as plain tensor code in the storage dtype gives it: scores, probabilities and output each rounded to the dtype, sums in
// fp32. block_ids null: dense. Row-major [T, Hq, D].
std::vector<float> plain_attention(const Problem& problem, const Tensor* block_ids);

// `value` rounded to the storage dtype.
float round_to(DType dtype, float value);

}  // namespace openmsa::test
