// Stands in for the tile kernel of src/cuda's header, which runs in clusters of CTAs and is not emulated: its union mode in scalar
// loops, behind the real dense_launch.cu. So the routing around it (smxx_union, smxx_invert, smxx_combine) runs against the oracle.
//
// As there  what is read, by way of the tensor maps; which rows go where, as lists.hpp has it; keys that a row does not see have
//           probability 0 rather than being skipped, so NaN in their values reaches smxx_repair.
// Checked   that work, entries and `taken` are what the kernel relies on (tiles.hpp).
// Not       anything of how the kernel does it: pipeline, barriers, products, its way of exponentials; no other mode.
#pragma once

#include <vector>

#include "copies.hpp"
#include "cuda/dense_params.hpp"
#include "cuda/ptx/convert.cuh"
#include "tiles.hpp"

namespace openmsa::cuda {

template <typename T_, int kHeadDim_, int kBlock_, DenseMode kMode_>
struct DenseTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr bool kUnion = kMode_ == DenseMode::kUnion;
  static constexpr int kThreads = 1, kSmemBytes = 0;
};

// One row of a tensor, dims innermost; zeros outside the tensor, as the copy engine fills them in.
template <typename T, int kHeadDim>
void read_row(const CUtensorMap& map, const emulation::Coordinates& at, float* row) {
  const unsigned char* source = map.data;
  bool inside = map.rank != 0 && map.size[0] == kHeadDim;
  for (std::uint32_t axis = 1; axis < map.rank; ++axis) {
    inside = inside && at[axis] >= 0 && static_cast<std::uint64_t>(at[axis]) < map.size[axis];
    if (inside) source += at[axis] * static_cast<std::int64_t>(map.stride_bytes[axis]);
  }
  for (int d = 0; d < kHeadDim; ++d) row[d] = inside ? static_cast<float>(reinterpret_cast<const T*>(source)[d]) : 0.f;
}

template <typename Traits>
void attend_union_tile(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v, const DenseParams& params,
                       int index) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim, kBlock = Traits::kBlock;
  const QueryTile tile = params.tiles[index / params.num_groups];
  const int group = index % params.num_groups, num_slots = params.num_entries[index] * kBlock;
  Sequence sequence;
  params.batch.load(tile.seq, &sequence);
  const std::uint32_t* entries = params.entries + std::int64_t{index} * kMaxUnion;
  const auto key_of = [&](int slot) { return static_cast<int>(entries[slot / kBlock] & 0xffffffu) * kBlock + slot % kBlock; };

  std::vector<float> keys(static_cast<std::size_t>(num_slots * kHeadDim)), values(keys.size()), scores(keys.size() / kHeadDim);
  for (int slot = 0; slot < num_slots; ++slot) {
    const int key = key_of(slot), page = params.batch.page(sequence, tile.seq, key / kBlock);
    const emulation::Coordinates at{0, sequence.pages ? key % kBlock : sequence.key_begin + key, group, page};
    read_row<T, kHeadDim>(map_k, at, &keys[static_cast<std::size_t>(slot * kHeadDim)]);
    // Past the sequence's end the kernel clears the values.
    if (key < sequence.seqlen_k) read_row<T, kHeadDim>(map_v, at, &values[static_cast<std::size_t>(slot * kHeadDim)]);
  }

  for (int row = 0; row < (tile.end - tile.first) << params.log_group; ++row) {
    const int token = tile.first + (row >> params.log_group), row_head = row & ((1 << params.log_group) - 1);
    if (row_head >= params.group_size) continue;
    const int packed = sequence.query_begin + token, head = group * params.group_size + row_head;
    const int visible = sequence.num_visible(sequence.first_position + token);
    float q[kHeadDim], best = -INFINITY, sum = 0.f, acc[kHeadDim] = {};
    read_row<T, kHeadDim>(map_q, {0, head, packed}, q);
    for (int slot = 0; slot < num_slots; ++slot) {
      const bool chosen = (entries[slot / kBlock] >> (24 + token - tile.first) & 1) != 0;
      float& score = scores[static_cast<std::size_t>(slot)];
      score = chosen && key_of(slot) < visible ? 0.f : -INFINITY;
      if (score == 0.f) {
        for (int d = 0; d < kHeadDim; ++d) score += q[d] * keys[static_cast<std::size_t>(slot * kHeadDim + d)];
        score *= params.scale;
      }
      best = fmaxf(best, score);
    }
    const float offset = best == -INFINITY ? 0.f : best;
    for (int slot = 0; slot < num_slots; ++slot) {
      const float p = expf(scores[static_cast<std::size_t>(slot)] - offset);
      sum += p;
      for (int d = 0; d < kHeadDim; ++d) acc[d] += p * values[static_cast<std::size_t>(slot * kHeadDim + d)];
    }

    const std::int64_t pair = std::int64_t{packed - params.chunk_begin} * params.num_groups + group;
    const std::uint32_t taken = params.taken[pair];
    const float lse = sum == 0.f ? -INFINITY : offset + logf(sum);
    T* target = nullptr;
    if (taken == kTakenAll) {
      target = static_cast<T*>(params.out) + packed * params.stride_out_token + head * params.stride_out_head;
      if (params.lse) params.lse[packed * params.stride_lse_token + head] = lse;
    } else if (taken != 0) {
      const std::int64_t partial = ((pair * params.top_k + __ffs(static_cast<int>(taken)) - 1) << params.log_group) + row_head;
      target = static_cast<T*>(params.partial) + partial * kHeadDim;
      params.partial_lse[partial] = lse;
    }
    for (int d = 0; target && d < kHeadDim; ++d) target[d] = T(sum == 0.f ? 0.f : acc[d] / sum);
  }
}

// One thread a CTA.
template <typename Traits>
__global__ void sm90_dense_kernel(const CUtensorMap map_q, const CUtensorMap map_k, const CUtensorMap map_v,
                                  const DenseParams params) {
  if constexpr (Traits::kUnion) {
    if (blockIdx.x == 0) emulation::check_work(params);
    for (int i = static_cast<int>(blockIdx.x); i < *params.num_work; i += static_cast<int>(gridDim.x)) {
      emulation::check_tile(params, params.work[i]);
      attend_union_tile<Traits>(map_q, map_k, map_v, params, params.work[i]);
    }
  } else {
    emulation::fail("only the union mode of the tile kernel has a stand-in");
  }
}

}  // namespace openmsa::cuda
