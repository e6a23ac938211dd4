// The tile kernel as dense_attention and sparse_attention share it.
#pragma once

#include "cuda/dense_params.hpp"
#include "cuda/launch.hpp"

namespace openmsa::cuda {

void fill_attention(DenseParams& params, const MsaConfig& config, const TensorView& out, const TensorView& lse);
void launch_dense(DenseMode mode, const TensorView& q, const core::KeyBlocks& k, const core::KeyBlocks& v,
                  const core::Geometry& geo, const MsaConfig& config, const DenseParams& params, void* stream);

}  // namespace openmsa::cuda
