#include "cuda/score.hpp"

#include <algorithm>

#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/sm90_score.cuh"
#include "cuda/smxx_score_few.cuh"

namespace openmsa::cuda {
namespace {

constexpr int kTileRows = 256;

template <typename T>
void launch_few(const ScoreCall& call) {
  const ScoreFewParams params = score_few_params(call);
  with_size<64, 96, 128>(call.config->index_dim, [&](auto dim) {
    with_size<64, 128>(call.geo->block_size, [&](auto block) {
      using Traits = ScoreFewTraits<T, dim.value, block.value>;
      launch(smxx_score_few_kernel<Traits>, dim3(num_multiprocessors()), kFewThreads, Traits::kSmemBytes, call.stream,
             Order::kAfter, params);
    });
  });
}

// Pairs of CTAs halve what keys cost the L2; a sequence's last pair may be half empty, so sequences must be long enough for that
// not to matter.
int score_cluster(const core::Geometry& geo, const MsaConfig& config) {
  const std::int64_t tokens = 2 * (kTileRows / config.num_kv_heads);
  return geo.total_q >= 8 * tokens * geo.num_seqs ? 2 : 1;
}

template <typename T>
void launch_tiles(const ScoreCall& call, const Plan& plan) {
  const core::Geometry& geo = *call.geo;
  const std::int32_t num_groups = call.config->num_kv_heads, dim = call.config->index_dim, tile_tokens = kTileRows / num_groups;
  const int cluster = score_cluster(geo, *call.config);
  ScoreParams params{};
  params.batch = batch_params(geo);
  params.tiles = plan.tiles;
  params.sum = plan.sum;
  params.scores = call.scores;
  params.stride_token = call.stride_token;
  params.stride_group = call.stride_group;
  params.token_begin = static_cast<std::int32_t>(call.token_begin);
  params.num_blocks = call.num_blocks;
  params.num_groups = num_groups;
  params.tile_tokens = tile_tokens;
  params.fill = call.fill;
  params.beside_pairs = call.beside.pairs;
  params.beside_pair_us = call.beside.pair_us;
  launch_plan(plan, params.batch, call.token_begin, call.token_end, cluster * tile_tokens, call.stream);
  const CUtensorMap map_q = row_map(call.q_idx, num_groups, tile_tokens);
  const CUtensorMap map_k = key_map(call.k_idx, geo, dim, 1, geo.block_size / cluster);
  // No more clusters than there can be items.
  const std::int64_t quads = std::max<std::int64_t>((geo.max_num_blocks() + 3) / 4, 1);
  const std::int64_t num_clusters = std::clamp<std::int64_t>(num_multiprocessors() / cluster, 1, plan.capacity * quads);
  with_size<64, 96, 128>(dim, [&](auto index_dim) {
    with_size<64, 128>(geo.block_size, [&](auto block) {
      with_size<1, 2>(cluster, [&](auto ctas) {
        using Traits = ScoreTraits<T, index_dim.value, block.value, ctas.value>;
        launch_clusters(sm90_score_kernel<Traits>, cluster, dim3(static_cast<unsigned>(num_clusters * cluster)), Traits::kThreads,
                        Traits::kSmemBytes, call.stream, Order::kAfter, map_q, map_k, params);
      });
    });
  });
}

ScoreCall whole_call(const core::BlockScoresParams& params) {
  return {&params.geo,
          &params.config,
          params.q_idx,
          params.k_idx,
          static_cast<float*>(params.scores.data),
          params.scores.stride[0],
          params.scores.stride[1],
          static_cast<std::int32_t>(params.scores.shape[2]),
          0,
          params.geo.total_q,
          true,
          params.context.stream};
}

}  // namespace

ScoreFewParams score_few_params(const ScoreCall& call) {
  const std::int64_t size = dtype_bytes(call.q_idx.dtype);
  ScoreFewParams params{};
  params.batch = batch_params(*call.geo);
  params.q_idx = call.q_idx.data;
  params.k_idx = call.k_idx.data;
  params.stride_q_token = call.q_idx.stride[0];
  params.stride_q_group = call.q_idx.stride[1];
  params.stride_k_token = call.k_idx.stride_token / size;
  params.stride_k_page = call.k_idx.stride_page / size;
  params.scores = call.scores;
  params.stride_token = call.stride_token;
  params.stride_group = call.stride_group;
  params.num_blocks = call.num_blocks;
  params.groups = Divisor::of(call.config->num_kv_heads);
  params.fill = call.fill;
  return params;
}

std::int64_t score_width(const core::Geometry& geo) { return std::max<std::int64_t>((geo.max_num_blocks() + 3) / 4 * 4, 4); }

bool score_is_few(const core::Geometry& geo, const MsaConfig& config) { return geo.max_seqlen_q * config.num_kv_heads <= kFewRows; }

Plan reserve_score(core::Arena& arena, const core::Geometry& geo, const MsaConfig& config, std::int64_t num_tokens) {
  if (score_is_few(geo, config)) return {};
  // The smaller tiles, since a smaller batch may use them.
  return reserve_plan(arena, geo, num_tokens, kTileRows / config.num_kv_heads);
}

void launch_score(const ScoreCall& call, const Plan& plan) {
  if (call.geo->num_seqs == 0 || call.num_blocks == 0) return;
  with_dtype(call.q_idx.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.capacity == 0) {
      launch_few<T>(call);
    } else {
      launch_tiles<T>(call, plan);
    }
  });
}

void block_scores_reserve(const core::BlockScoresParams& params) {
  reserve_score(*params.context.arena, params.geo, params.config, params.geo.total_q);
}

void block_scores(const core::BlockScoresParams& params) {
  const DeviceGuard guard(params.q_idx.device.index);
  launch_score(whole_call(params), reserve_score(*params.context.arena, params.geo, params.config, params.geo.total_q));
}

}  // namespace openmsa::cuda
