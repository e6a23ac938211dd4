// What a row of attention is divided by.
#pragma once

#include <cmath>

namespace openmsa::cuda {

// `sum`, of a row's probabilities, is 0 of a row that sees no key, which gives out = 0 and lse = -inf, and where all scores of the keys
// that it sees are -inf: 0/0, so NaN, which makes out and lse NaN.
__device__ __forceinline__ float softmax_sum(float sum, bool sees_key) { return sum == 0.f && sees_key ? NAN : sum; }

}  // namespace openmsa::cuda
