#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/launch.hpp"
#include "cuda/smxx_decode.cuh"

namespace openmsa::cuda {
namespace {

// Query tokens per launch: partials take Hkv * k * 16 * D * 4 bytes a token, 512 MiB at the reference shape.
constexpr std::int64_t kChunkTokens = 1024;

struct Scratch {
  std::int64_t chunk;
  float* partial;
  float2* stats;
};

Scratch reserve(const core::SparseAttentionParams& params) {
  core::Arena& arena = *params.context.arena;
  const std::int64_t chunk = std::min(params.geo.total_q, kChunkTokens);
  const auto pairs = static_cast<std::size_t>(chunk * params.config.num_kv_heads);
  const std::size_t splits = pairs * static_cast<std::size_t>(params.config.top_k);
  return {chunk, arena.take<float>(splits * 16 * static_cast<std::size_t>(params.config.head_dim)),
          arena.take<float2>(splits * 16)};
}

}  // namespace

void sparse_decode_reserve(const core::SparseAttentionParams& params) { reserve(params); }

void sparse_decode(const core::SparseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  const Scratch scratch = reserve(params);
  const MsaConfig& config = params.config;
  const std::int64_t size = dtype_bytes(params.q.dtype);
  DecodeParams device{};
  device.batch = batch_params(params.geo);
  device.q = params.q.data;
  device.k = params.k.data;
  device.v = params.v.data;
  device.stride_q_token = params.q.stride[0];
  device.stride_q_head = params.q.stride[1];
  device.stride_k_token = params.k.stride_token / size;
  device.stride_k_head = params.k.stride_head / size;
  device.stride_k_page = params.k.stride_page / size;
  device.stride_v_token = params.v.stride_token / size;
  device.stride_v_head = params.v.stride_head / size;
  device.stride_v_page = params.v.stride_page / size;
  device.block_ids = static_cast<const std::int32_t*>(params.block_ids.data);
  device.stride_id_token = params.block_ids.stride[0];
  device.stride_id_group = params.block_ids.stride[1];
  device.out = params.out.data;
  device.stride_out_token = params.out.stride[0];
  device.stride_out_head = params.out.stride[1];
  device.lse = static_cast<float*>(params.lse.data);
  device.stride_lse_token = params.lse.stride[0];
  device.partial = scratch.partial;
  device.partial_stats = scratch.stats;
  device.num_groups = config.num_kv_heads;
  device.group_size = config.group_size();
  device.top_k = config.top_k;
  device.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  for (std::int64_t begin = 0; begin < params.geo.total_q; begin += scratch.chunk) {
    const std::int64_t pairs = std::min(scratch.chunk, params.geo.total_q - begin) * config.num_kv_heads;
    device.token_begin = static_cast<std::int32_t>(begin);
    const dim3 grid(static_cast<unsigned>(pairs * config.top_k)),
        merge_grid(static_cast<unsigned>(pairs * ((config.group_size() + 3) / 4)));
    with_dtype(params.q.dtype, [&](auto element) {
      with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
        with_size<64, 128>(config.block_size, [&](auto block) {
          using Traits = DecodeTraits<decltype(element), dim.value, block.value>;
          launch(smxx_decode_kernel<Traits>, grid, Traits::kThreads, 0, params.context.stream, true, device);
          launch(smxx_decode_combine_kernel<Traits>, merge_grid, 128, 0, params.context.stream, true, device);
        });
      });
    });
  }
}

}  // namespace openmsa::cuda
