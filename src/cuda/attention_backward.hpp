// The backward pass with its cuts given: what tests make small, and the entry points leave at their defaults.
#pragma once

#include "cuda/visits.hpp"

namespace openmsa::cuda {

void attention_backward(const core::AttentionBackwardParams& params, const VisitLimits& limits);
void attention_backward_reserve(const core::AttentionBackwardParams& params, const VisitLimits& limits);

}  // namespace openmsa::cuda
