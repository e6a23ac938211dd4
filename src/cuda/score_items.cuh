// How sm90_score's clusters share the work of a plan: items are (tile, key segment), a segment being one of num_segments equal
// parts of what the tile sees. Nothing is handed out at run time: cluster c's item of round r follows from c and r.
#pragma once

#include "cuda/params.hpp"

namespace openmsa::cuda {

struct ScoreParams {
  BatchParams batch;
  const QueryTile* tiles;  // longest first, of kCluster * tile_tokens tokens
  const PlanSum* sum;
  float* scores;                            // [tokens, Hkv, num_blocks], its first token being packed token `token_begin`
  std::int64_t stride_token, stride_group;  // elements
  std::int32_t token_begin;
  std::int32_t num_blocks;   // width of scores
  std::int32_t num_groups;   // Hkv, at most 256
  std::int32_t tile_tokens;  // tokens a CTA: 256 / Hkv rounded down
  // Number of (token, group) pairs that the next launch merges beside this one, or null, and the multiprocessor time of a pair.
  const std::int32_t* beside_pairs;
  float beside_pair_us;
  bool fill;  // write -inf from the last visible block to the width (select does not look there)
};

// How many of the clusters score; the others leave their multiprocessors to the kernel that is launched behind, such that both end
// together. The same in every CTA.
template <typename Traits>
__device__ __forceinline__ int scoring_clusters(const ScoreParams& params) {
  const int clusters = static_cast<int>(gridDim.x) / Traits::kCluster;
  if (params.beside_pairs == nullptr) return clusters;
  constexpr float kFlopsPerUs = 6.44e6f;  // a multiprocessor's
  constexpr float kBlockUs = 2.f * Traits::kCluster * Traits::kRows * Traits::kBlock * Traits::kIndexDim / kFlopsPerUs;
  constexpr float kMostBeside = 0.6f;  // from there on memory bounds a merge
  const float own = float(params.sum->total) * kBlockUs, other = float(*params.beside_pairs) * params.beside_pair_us;
  return clusters - static_cast<int>(fminf(other / (own + other + 1.f), kMostBeside) * float(clusters));
}

struct ScoreSchedule {
  int num_tiles, num_segments, num_clusters;
  bool by_segment;

  __device__ __forceinline__ int num_rounds() const { return (num_tiles * num_segments + num_clusters - 1) / num_clusters; }

  // The item that `cluster` takes in a round; false if none.
  __device__ __forceinline__ bool item(int round, int cluster, int* tile, int* segment) const {
    if (by_segment) {
      // Long contexts: all clusters walk the same keys at the same time, so that the L2 holds them. Tiles are longest first; the
      // turn (about 5/8 of a round) keeps a cluster from having the long ones each time.
      const int p = round * num_clusters + (cluster + round % num_clusters * (num_clusters * 5 / 8)) % num_clusters;
      *segment = p / num_tiles;
      *tile = p - *segment * num_tiles;
      return p < num_tiles * num_segments;
    }
    // Short contexts: longest items first, dealt to and fro.
    const int p = round * num_clusters + (round % 2 == 0 ? cluster : num_clusters - 1 - cluster);
    *tile = p / num_segments;
    *segment = p - *tile * num_segments;
    return p < num_tiles * num_segments;
  }
};

// Lengths are in quads, four blocks, whose scores leave together. All lanes of a warp call; the same in every CTA.
__device__ inline ScoreSchedule score_schedule(const PlanSum& sum, int quad_keys, int num_clusters) {
  // Up to this many keys the order of the items does not matter to the L2; longer segments would let clusters drift apart in it.
  constexpr int kNearKeys = 65536, kMaxSegmentKeys = 32768;
  constexpr float kItemKeys = 80;  // what Q's load and the pipeline's filling cost, in keys
  ScoreSchedule schedule{sum.num_tiles, 1, num_clusters, false};
  if (sum.num_tiles == 0) return schedule;
  const int longest = (sum.longest + 3) / 4;
  const float item_cost = kItemKeys / float(quad_keys);
  const float mean = fminf((float(sum.total) / float(sum.num_tiles) + 1.5f) * 0.25f, float(longest));
  schedule.by_segment = longest > kNearKeys / quad_keys;
  const int least = max((longest + kMaxSegmentKeys / quad_keys - 1) / (kMaxSegmentKeys / quad_keys), 1);
  // The number of segments whose busiest cluster has least to do: a candidate a lane, twice. Dealt to and fro, an odd number of
  // rounds gives somebody a long item without a short one; in the order of segments chance may give somebody two.
  const int lane = threadIdx.x % 32;
  unsigned best = ~0u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int extra = lane + 32 * i, segments = least + extra;
    if (segments > max(longest, 1)) continue;
    const int rounds = (sum.num_tiles * segments + num_clusters - 1) / num_clusters;
    const float share = 1.f / float(segments), rounding = float((longest + segments - 1) / segments) - float(longest) * share;
    const float uneven = schedule.by_segment ? 2.f : float(rounds % 2);
    const float cost = float(rounds) * (mean * share + item_cost) + rounding + uneven * (float(longest) - mean) * share;
    // Positive floats order as their bits do; the last six give way to the candidate.
    best = min(best, (__float_as_uint(cost) & ~63u) | static_cast<unsigned>(extra));
  }
  best = __reduce_min_sync(0xffffffffu, best);
  schedule.num_segments = least + static_cast<int>(best == ~0u ? 0u : best & 63u);
  return schedule;
}

// An item as one CTA sees it. The later CTA of a cluster may have no tokens, and still loads keys for both.
struct ScoreItem {
  std::int32_t num_tokens;  // -1: no more items
  std::int32_t first_token, first_position, seqlen_k;
  std::int32_t first_stage, end_stage;  // the first of them begins a quad
  std::int32_t fill_from;               // first column to fill with -inf, to the width
};

struct ScoreSource {
  Sequence sequence;
  int seq, num_blocks;  // blocks that the tile sees
};

// False if there is nothing to do, or the sequence is broken (the plan has reported it). All CTAs of a cluster agree.
template <typename Traits>
__device__ __forceinline__ bool load_score_item(const ScoreParams& params, int num_segments, int tile_index, int segment, int rank,
                                                ScoreSource* source, ScoreItem* item) {
  constexpr int kQuadKeys = 4 * Traits::kBlock;
  const QueryTile tile = params.tiles[tile_index];
  if (tile.seq < 0 || !params.batch.load<false>(tile.seq, &source->sequence)) return false;
  const Sequence& sequence = source->sequence;
  source->seq = tile.seq;
  const int first = tile.first + rank * params.tile_tokens;
  item->num_tokens = max(min(tile.end - first, params.tile_tokens), 0);
  item->first_token = sequence.query_begin + first;
  item->first_position = sequence.first_position + first;
  item->seqlen_k = sequence.seqlen_k;
  const int visible = sequence.num_visible(sequence.first_position + tile.end - 1);
  source->num_blocks = (visible + Traits::kBlock - 1) / Traits::kBlock;
  const std::int64_t quads = (visible + kQuadKeys - 1) / kQuadKeys;
  const bool last = segment == num_segments - 1;
  item->first_stage = static_cast<int>(quads * segment / num_segments) * Traits::kQuadStages;
  item->end_stage = last ? (visible + Traits::kKeys - 1) / Traits::kKeys
                         : static_cast<int>(quads * (segment + 1) / num_segments) * Traits::kQuadStages;
  item->fill_from = last && params.fill ? static_cast<int>(quads) * 4 : params.num_blocks;
  return item->end_stage > item->first_stage || item->fill_from < params.num_blocks;
}

}  // namespace openmsa::cuda
