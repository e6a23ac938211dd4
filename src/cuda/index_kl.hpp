// index_kl_loss with the limits of a chunk in the caller's hands, for tests that want many chunks of few tokens.
#pragma once

#include "cuda/visits.hpp"

namespace openmsa::cuda {

void index_kl_loss(const core::IndexKlParams& params, const VisitLimits& limits);
void index_kl_loss_reserve(const core::IndexKlParams& params, const VisitLimits& limits);

}  // namespace openmsa::cuda
