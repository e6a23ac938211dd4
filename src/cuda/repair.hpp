// The last step of sparse_attention and dense_attention: see smxx_repair.cuh.
#pragma once

#include "core/params.hpp"

namespace openmsa::cuda {

void launch_repair(const core::SparseAttentionParams& params);
void launch_repair(const core::DenseAttentionParams& params);

}  // namespace openmsa::cuda
