// The select stage as select_blocks and index_select share it.
#pragma once

#include "cuda/launch.hpp"

namespace openmsa::cuda {

struct SelectCall {
  const core::Geometry* geo;
  const MsaConfig* config;
  const float* scores;                      // [token_end - token_begin, Hkv, num_blocks]
  std::int64_t stride_token, stride_group;  // elements
  TensorView block_ids;                     // [T, Hkv, k]
  std::int64_t token_begin, token_end;
  bool dependent;  // follows the score kernel of a decode step and may overlap its tail
  void* stream;
};

struct SelectParams;
SelectParams select_params(const SelectCall& call);
void launch_select(const SelectCall& call);

}  // namespace openmsa::cuda
