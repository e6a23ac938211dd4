#include "cuda/decode.hpp"

#include <algorithm>
#include <limits>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/launch.hpp"
#include "cuda/score.hpp"
#include "cuda/select.hpp"
#include "cuda/smxx_decode.cuh"

namespace openmsa::cuda {
namespace {

constexpr std::int64_t kMaxUnits = std::int64_t{1} << 24;  // a launch

struct Scratch {
  std::int64_t chunk;  // query tokens a launch
  std::int32_t num_splits;
  float* partial;
  float2* stats;
};

// Into how many units of slots a (token, group) is cut: as many as keep all CTAs equally busy, a unit having a fixed cost of about
// two blocks (its selection, the start of its loads, its merge).
std::int32_t choose_splits(std::int64_t rows, std::int32_t top_k) {
  std::int32_t best = 1;
  std::int64_t best_cost = std::numeric_limits<std::int64_t>::max();
  for (std::int32_t splits = 1; splits <= top_k; ++splits) {
    const std::int64_t waves = (rows * splits + num_multiprocessors() - 1) / num_multiprocessors();
    const std::int64_t cost = waves * ((top_k + splits - 1) / splits + 2);
    if (cost < best_cost) best = splits, best_cost = cost;
  }
  return best;
}

Scratch reserve(core::Arena& arena, std::int64_t total_q, const MsaConfig& config) {
  const std::int64_t chunk =
      std::min<std::int64_t>(total_q, std::max<std::int64_t>(kMaxUnits / (config.num_kv_heads * config.top_k), 1));
  Scratch scratch{chunk, choose_splits(chunk * config.num_kv_heads, config.top_k), nullptr, nullptr};
  if (scratch.num_splits == 1) return scratch;
  const auto units = static_cast<std::size_t>(chunk * config.num_kv_heads * scratch.num_splits);
  scratch.partial = arena.take<float>(units * 16 * static_cast<std::size_t>(config.head_dim));
  scratch.stats = arena.take<float2>(units * 16);
  return scratch;
}

template <typename Params>  // SparseAttentionParams or MsaAttentionParams
DecodeParams decode_params(const Params& params, const Scratch& scratch) {
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
  device.stride_k_block = device.batch.page_table ? params.k.stride_page / size : config.block_size * device.stride_k_token;
  device.stride_v_token = params.v.stride_token / size;
  device.stride_v_head = params.v.stride_head / size;
  device.stride_v_block = device.batch.page_table ? params.v.stride_page / size : config.block_size * device.stride_v_token;
  device.out = params.out.data;
  device.stride_out_token = params.out.stride[0];
  device.stride_out_head = params.out.stride[1];
  device.lse = static_cast<float*>(params.lse.data);
  device.stride_lse_token = params.lse.stride[0];
  device.partial = scratch.partial;
  device.partial_stats = scratch.stats;
  device.groups = Divisor::of(config.num_kv_heads);
  device.group_size = config.group_size();
  device.top_k = config.top_k;
  device.splits = Divisor::of(scratch.num_splits);
  device.split_slots = config.top_k / scratch.num_splits;
  device.longer_splits = config.top_k % scratch.num_splits;
  device.scale_log2 = static_cast<float>(config.effective_softmax_scale() * 1.4426950408889634);
  device.num_tokens = static_cast<std::int32_t>(params.geo.total_q);
  return device;
}

}  // namespace

bool can_fuse_decode(const core::MsaAttentionParams& params) {
  const MsaConfig& config = params.config;
  return config.index_dim == config.head_dim && score_is_few(params.geo, config) &&
         params.geo.total_q * config.num_kv_heads * config.top_k <= kMaxUnits;
}

void fused_decode(const core::MsaAttentionParams& params) {
  const MsaConfig& config = params.config;
  core::Arena& arena = *params.context.arena;
  const Scratch scratch = reserve(arena, params.geo.total_q, config);
  const std::int64_t width = score_width(params.geo), stride_token = width * config.num_kv_heads;
  auto* scores = arena.take<float>(static_cast<std::size_t>(params.geo.total_q * stride_token));
  const DecodeParams decode = decode_params(params, scratch);
  const ScoreFewParams score =
      score_few_params({&params.geo, &config, params.q_idx, params.k_idx, scores, stride_token, width,
                        static_cast<std::int32_t>(width), 0, params.geo.total_q, false, params.context.stream});
  const SelectParams choice = select_params(
      {&params.geo, &config, scores, stride_token, width, params.block_ids, 0, params.geo.total_q, false, params.context.stream});
  with_dtype(params.q.dtype, [&](auto element) {
    with_size<64, 96, 128>(config.head_dim, [&](auto dim) {
      with_size<64, 128>(config.block_size, [&](auto block) {
        using Traits = DecodeTraits<decltype(element), dim.value, block.value>;
        using ScoreTraits = ScoreFewTraits<decltype(element), dim.value, block.value>;
        launch(smxx_msa_decode_kernel<Traits, ScoreTraits>, dim3(num_multiprocessors()), kFewThreads,
               std::max(Traits::kSmemBytes, ScoreTraits::kSmemBytes), params.context.stream, Order::kTogether, decode, score,
               choice);
      });
    });
  });
}

void fused_decode_reserve(const core::MsaAttentionParams& params) {
  core::Arena& arena = *params.context.arena;
  reserve(arena, params.geo.total_q, params.config);
  arena.take<float>(static_cast<std::size_t>(params.geo.total_q * params.config.num_kv_heads * score_width(params.geo)));
}

void sparse_decode_reserve(const core::SparseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  reserve(*params.context.arena, params.geo.total_q, params.config);
}

void sparse_decode(const core::SparseAttentionParams& params) {
  const DeviceGuard guard(params.q.device.index);
  const Scratch scratch = reserve(*params.context.arena, params.geo.total_q, params.config);
  DecodeParams device = decode_params(params, scratch);
  device.block_ids = static_cast<const std::int32_t*>(params.block_ids.data);
  device.stride_id_token = params.block_ids.stride[0];
  device.stride_id_group = params.block_ids.stride[1];
  for (std::int64_t begin = 0; begin < params.geo.total_q; begin += scratch.chunk) {
    device.token_begin = static_cast<std::int32_t>(begin);
    device.num_tokens = static_cast<std::int32_t>(std::min(scratch.chunk, params.geo.total_q - begin));
    with_dtype(params.q.dtype, [&](auto element) {
      with_size<64, 96, 128>(params.config.head_dim, [&](auto dim) {
        with_size<64, 128>(params.config.block_size, [&](auto block) {
          using Traits = DecodeTraits<decltype(element), dim.value, block.value>;
          launch(smxx_decode_kernel<Traits>, dim3(num_multiprocessors()), kFewThreads, Traits::kSmemBytes, params.context.stream,
                 Order::kTogether, device);
        });
      });
    });
  }
}

}  // namespace openmsa::cuda
