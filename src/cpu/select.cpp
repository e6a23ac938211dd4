// The k best blocks of each row, exactly: score descending, id ascending, NaN below -inf, forced blocks always in.
//
// The forced blocks are a prefix and a suffix of the visible ones, so the free candidates are one range [begin, end), scanned
// twice. Pass 1 takes the maxima of kNumGroups interleaved groups; the r-th largest of these maxima is a lower bound for the r-th
// best score (r groups have a member that good). Pass 2 looks at the few scores that reach the bound, and inserts them into a
// sorted list whose last entry soon raises it. Rows that rise towards the end, the worst case of a plain running threshold, cost
// no more than others.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/select.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h: compiled once per SIMD target.
#include "hwy/highway.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cpu/select.hpp"

HWY_BEFORE_NAMESPACE();
namespace openmsa::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::int32_t kMaxTopK = 64;

// A candidate as one integer that sorts as the contract ranks: the score's bits, made monotonic, above the complement of the id.
// Adding zero turns -0 into +0, which must tie. Never called with NaN.
inline std::int64_t rank_key(float score, std::int64_t id) {
  const auto bits = std::bit_cast<std::int32_t>(score + 0.0f);
  const std::int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(ordered)) << 32 |
                                   (0xffffffffu - static_cast<std::uint32_t>(id)));
}
inline std::int32_t rank_id(std::int64_t key) { return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key)); }
inline float rank_score(std::int64_t key) {
  const auto ordered = static_cast<std::int32_t>(key >> 32);
  return std::bit_cast<float>(ordered ^ ((ordered >> 31) & 0x7fffffff));
}

// The `room` best candidates seen so far, best first.
struct BestList {
  std::int64_t keys[kMaxTopK];
  std::int32_t room;
  std::int32_t count = 0;
  float threshold;  // not full: a lower bound for the room-th best score; full: the last entry's score

  bool full() const { return count == room; }
  void insert(float score, std::int64_t id) {
    const std::int64_t key = rank_key(score, id);
    if (full() && key < keys[room - 1]) return;
    std::int32_t at = full() ? room - 1 : count++;
    for (; at > 0 && keys[at - 1] < key; --at) keys[at] = keys[at - 1];
    keys[at] = key;
    if (full()) threshold = rank_score(keys[room - 1]);
  }
};

// A value that at least `rank` of the scores reach; -inf if the groups do not tell.
HWY_INLINE float lower_bound_of_rank(const float* HWY_RESTRICT scores, std::int64_t num_scores, std::int32_t rank) {
  const hn::ScalableTag<float> df;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(df));
  constexpr std::int64_t kMaxVectors = 8;
  // About two groups per wanted block: fewer groups let more scores through pass 2, more groups cost more here.
  const std::int64_t num_vectors = std::clamp<std::int64_t>((2 * std::int64_t{rank} + lanes - 1) / lanes, 1, kMaxVectors);
  const std::int64_t num_groups = num_vectors * lanes;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  if (rank > num_groups || num_scores < 2 * num_groups) return kLowest;

  HWY_ALIGN float maxima[kMaxVectors * HWY_LANES(float)];
  for (std::int64_t v = 0; v < num_vectors; v += 2) {
    // Two chains at a time; with an odd count the last vector is done twice, which is harmless.
    const std::int64_t w = std::min(v + 1, num_vectors - 1);
    auto max_v = hn::Set(df, kLowest), max_w = max_v;
    for (std::int64_t i = 0; i + num_groups <= num_scores; i += num_groups) {
      const auto x = hn::LoadU(df, scores + i + v * lanes);
      const auto y = hn::LoadU(df, scores + i + w * lanes);
      max_v = hn::IfThenElse(hn::Gt(x, max_v), x, max_v);  // false for NaN, whatever a target's Max does with one
      max_w = hn::IfThenElse(hn::Gt(y, max_w), y, max_w);
    }
    hn::Store(max_v, df, maxima + v * lanes);
    hn::Store(max_w, df, maxima + w * lanes);
  }
  // The rank-th largest maximum: the largest one that at least `rank` of them reach. Counting has no branches to mispredict.
  float bound = kLowest;
  for (std::int64_t candidate = 0; candidate < num_groups; ++candidate) {
    const auto c = hn::Set(df, maxima[candidate]);
    std::size_t reach = 0;
    for (std::int64_t v = 0; v < num_vectors; ++v) reach += hn::CountTrue(df, hn::Ge(hn::Load(df, maxima + v * lanes), c));
    if (reach >= static_cast<std::size_t>(rank)) bound = std::max(bound, maxima[candidate]);
  }
  return bound;
}

// Offers scores[i .. i + lanes) that reach the threshold to the list. Once the list is full an equal score cannot enter: its id is
// higher than those inside.
template <class DF>
HWY_INLINE void offer_vector(DF df, const float* HWY_RESTRICT scores, std::int64_t i, std::int64_t begin, BestList& best) {
  const auto x = hn::LoadU(df, scores + i);
  const auto threshold = hn::Set(df, best.threshold);
  const auto pass = best.full() ? hn::Gt(x, threshold) : hn::Ge(x, threshold);
  if (HWY_LIKELY(hn::AllFalse(df, pass))) return;
  std::uint64_t bits[(HWY_LANES(float) + 63) / 64] = {};
  hn::StoreMaskBits(df, pass, reinterpret_cast<std::uint8_t*>(bits));
  for (std::size_t word = 0; word < std::size(bits); ++word) {
    for (std::uint64_t rest = bits[word]; rest != 0; rest &= rest - 1) {
      const std::int64_t at = i + static_cast<std::int64_t>(word * 64) + std::countr_zero(rest);
      best.insert(scores[at], begin + at);
    }
  }
}

// The `room` best of blocks [begin, end), ids ascending, into ids; returns how many (all of them if they fit). all_scores[b] is
// block b's score.
std::int32_t select_range(const float* HWY_RESTRICT all_scores, std::int64_t begin, std::int64_t end, std::int32_t room,
                          std::int32_t* HWY_RESTRICT ids) {
  const std::int64_t num_scores = end - begin;
  if (num_scores <= room) {
    for (std::int64_t i = 0; i < num_scores; ++i) ids[i] = static_cast<std::int32_t>(begin + i);
    return static_cast<std::int32_t>(num_scores);
  }
  if (room == 0) return 0;

  const float* HWY_RESTRICT scores = all_scores + begin;
  BestList best;
  best.room = room;
  best.threshold = lower_bound_of_rank(scores, num_scores, room);
  const hn::ScalableTag<float> df;
  const hn::CappedTag<float, 1> df1;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(df));
  std::int64_t i = 0;
  for (; i + lanes <= num_scores; i += lanes) offer_vector(df, scores, i, begin, best);
  for (; i < num_scores; ++i) offer_vector(df1, scores, i, begin, best);

  for (std::int32_t n = 0; n < best.count; ++n) ids[n] = rank_id(best.keys[n]);
  // Too few numbers among the scores: the places left go to NaN blocks, lowest id first.
  std::int32_t count = best.count;
  for (i = 0; count < room; ++i) {
    if (std::isnan(scores[i])) ids[count++] = static_cast<std::int32_t>(begin + i);
  }
  std::sort(ids, ids + room);
  return room;
}

void select_tokens(const MsaConfig& config, const core::Geometry& geo, const ScoreRows& rows, std::int64_t token_begin,
                   std::int64_t token_end, const TensorView& block_ids) {
  std::int32_t seq = geo.seq_of_token(token_begin);
  for (std::int64_t t = token_begin; t < token_end; ++t) {
    while (t >= geo.cu_seqlens_q[seq + 1]) ++seq;
    const std::int64_t position = geo.position(seq, t - geo.query_begin(seq));
    const std::int64_t num_visible_blocks = (geo.num_visible(seq, position) + geo.block_size - 1) / geo.block_size;
    // With a given q_start the query's own block may lie past the last visible one; the window of local blocks stays with it.
    const std::int64_t own_block = num_visible_blocks > 0 ? position / geo.block_size : 0;
    const std::int64_t init_end = std::min<std::int64_t>(config.num_init_blocks, num_visible_blocks);
    const std::int64_t local_begin =
        std::clamp<std::int64_t>(own_block - config.num_local_blocks + 1, init_end, num_visible_blocks);
    const auto room = static_cast<std::int32_t>(config.top_k - init_end - (num_visible_blocks - local_begin));

    for (std::int32_t g = 0; g < config.num_kv_heads; ++g) {
      const float* const scores = rows.data + (t - rows.token_begin) * rows.stride_token + g * rows.stride_head;
      std::int32_t* const ids = static_cast<std::int32_t*>(block_ids.data) + t * block_ids.stride[0] + g * block_ids.stride[1];
      std::int32_t count = 0;
      for (std::int64_t b = 0; b < init_end; ++b) ids[count++] = static_cast<std::int32_t>(b);
      count += select_range(scores, init_end, local_begin, room, ids + count);
      for (std::int64_t b = local_begin; b < num_visible_blocks; ++b) ids[count++] = static_cast<std::int32_t>(b);
      std::fill(ids + count, ids + config.top_k, -1);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace openmsa::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace openmsa::cpu {

HWY_EXPORT(select_tokens);

void select_rows(const MsaConfig& config, const core::Geometry& geo, const ScoreRows& rows, std::int64_t token_end,
                 const TensorView& block_ids, std::int32_t num_threads) {
  // About 64 rows a task: some tens of microseconds, well above the cost of handing one out.
  const std::int64_t tokens_per_task = std::max<std::int64_t>(1, 64 / config.num_kv_heads);
  const std::int64_t num_tasks = (token_end - rows.token_begin + tokens_per_task - 1) / tokens_per_task;
  core::parallel_for(num_threads, num_tasks, [&](std::int64_t task, std::int32_t) {
    const std::int64_t begin = rows.token_begin + task * tokens_per_task;
    HWY_DYNAMIC_DISPATCH(select_tokens)(config, geo, rows, begin, std::min(begin + tokens_per_task, token_end), block_ids);
  });
}

void select_blocks(const core::SelectBlocksParams& params) {
  const ScoreRows rows{.data = static_cast<const float*>(params.scores.data),
                       .token_begin = 0,
                       .stride_token = params.scores.stride[0],
                       .stride_head = params.scores.stride[1]};
  select_rows(params.config, params.geo, rows, params.geo.total_q, params.block_ids, params.context.num_threads);
}

}  // namespace openmsa::cpu
#endif  // HWY_ONCE
