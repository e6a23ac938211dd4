// Exact top-k over one warp: ranks (score descending, block id ascending) as unsigned 64-bit keys.
//
// No sorting networks: a candidate's rank is the number of larger ones, counted by reading the warp's candidate list as broadcasts
// from shared memory. A sort of 32 keys is 15 dependent shuffles, the count 16 independent loads.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

inline constexpr std::uint64_t kNoKey = 0;  // loses against every real candidate

// The 32-bit half of a key: larger is better. Forced blocks come first, then scores, then NaN; 0 is left for "none".
__device__ __forceinline__ std::uint32_t rank_order(float score, bool forced) {
  const std::uint32_t bits = __float_as_uint(score + 0.f);  // -0 becomes +0
  // Order-preserving: flip all bits of negatives, the sign of the others; -inf becomes 0x007fffff.
  std::uint32_t order = bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000u);
  if (score != score) order = 1;
  return forced ? 0xffffffffu : order;
}
// The score an order came from: +inf for forced blocks, -inf where there is none to compare with (NaN, nothing).
__device__ __forceinline__ float order_score(std::uint32_t order) {
  if (order == 0xffffffffu) return INFINITY;
  if (order <= 1) return -INFINITY;
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
// Equal scores rank by ascending id.
__device__ __forceinline__ std::uint64_t rank_key(std::uint32_t order, int id) {
  return std::uint64_t{order} << 32 | static_cast<std::uint32_t>(~id);
}

// Exclusive prefix sum over the warp; the sum of all lanes goes to `total`.
__device__ __forceinline__ int warp_prefix(int value, int* total) {
  int sum = value;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, sum, o);
    if (static_cast<int>(threadIdx.x % 32) >= o) sum += x;
  }
  *total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - value;
}

// The best k keys seen so far, in shared memory owned by one warp. kItems = 1 holds k <= 16, kItems = 2 k <= 32.
template <int kItems>
struct WarpTopK {
  static constexpr int kCapacity = 32 * kItems;
  static constexpr int kWords = kCapacity + 16;  // 64-bit words of shared memory a warp needs
  std::uint64_t* keys;                           // [kCapacity], 16-byte aligned; the first `count` are valid, in no order
  float* lane_maxima;                            // [32], 16-byte aligned
  int count;
  std::uint64_t threshold;  // the k-th best so far; kNoKey until k were seen

  __device__ __forceinline__ explicit WarpTopK(std::uint64_t* memory)
      : keys(memory), lane_maxima(reinterpret_cast<float*>(memory + kCapacity)), count(0), threshold(kNoKey) {}

  // Cuts the list down to the best k. Uniform over the warp, like all that follows.
  __device__ __forceinline__ void shrink(int k) {
    const int lane = threadIdx.x % 32;
    std::uint64_t mine[kItems];
    int rank[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      mine[i] = i * 32 + lane < count ? keys[i * 32 + lane] : kNoKey;
      rank[i] = mine[i] == kNoKey ? kCapacity : 0;
    }
#pragma unroll
    for (int j = 0; j < kCapacity; j += 2) {
      const ulonglong2 other = *reinterpret_cast<const ulonglong2*>(keys + j);
#pragma unroll
      for (int i = 0; i < kItems; ++i) rank[i] += (j < count && other.x > mine[i]) + (j + 1 < count && other.y > mine[i]);
    }
    __syncwarp();
    int kept = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const std::uint32_t chosen = __ballot_sync(0xffffffffu, rank[i] < k);
      if (rank[i] < k) keys[kept + __popc(chosen & ((1u << lane) - 1))] = mine[i];
      kept += __popc(chosen);
      const std::uint32_t last = __ballot_sync(0xffffffffu, rank[i] == k - 1);
      if (last != 0) threshold = __shfl_sync(0xffffffffu, mine[i], __ffs(last) - 1);
    }
    count = kept;
    __syncwarp();
  }

  // The k-th largest of the lanes' values, -inf if it is.
  __device__ __forceinline__ float kth_of_lanes(float value, int k) {
    const int lane = threadIdx.x % 32;
    lane_maxima[lane] = value;
    __syncwarp();
    int at_least = 0;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      const float4 other = *reinterpret_cast<const float4*>(lane_maxima + j);
      at_least += (other.x >= value) + (other.y >= value) + (other.z >= value) + (other.w >= value);
    }
    // The largest value that k lanes reach.
    const std::uint32_t order = at_least >= k ? rank_order(value, false) : 0u;
    return order_score(__reduce_max_sync(0xffffffffu, order));
  }

  // Adds the scores of a chunk: kCount a lane, the i-th with id first_id + (i / kRun * 32 + lane) * kRun + i % kRun, of which ids
  // below `end` count (the others hold -inf, forced blocks +inf). Chunks come by ascending id, so that an equal score never replaces
  // an older one. `row` is where the scores came from, to fetch the few that pass once more.
  template <int kCount, int kRun, typename Forced>
  __device__ __forceinline__ void add(const float (&scores)[kCount], const float* row, int first_id, int end, int k,
                                      Forced forced) {
    const int lane = threadIdx.x % 32;
    auto id_of = [&](int i) { return first_id + (i / kRun * 32 + lane) * kRun + i % kRun; };
    // Plain float compares do the bulk of the work: NaN never passes one. Where too few ordinary scores exist to bound the k-th
    // best (short rows, rows of NaN or -inf) everything passes and the keys decide.
    float lane_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) lane_max = fmaxf(lane_max, scores[i]);
    float bound;
    if (threshold == kNoKey) {
      // k different scores reach the k-th largest of the lanes' maxima, so it bounds the k-th best from below.
      bound = kth_of_lanes(lane_max, k);
    } else {
      bound = order_score(static_cast<std::uint32_t>(threshold >> 32));
      // A forced block beats a score of +inf, so that +inf alone is no reason to stop.
      if (bound > -INFINITY && bound < INFINITY && !__any_sync(0xffffffffu, lane_max > bound)) return;
    }
    std::uint32_t passed = 0;
    if (bound > -INFINITY) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) passed |= scores[i] >= bound ? 1u << i : 0u;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) passed |= id_of(i) < end ? 1u << i : 0u;
    }
    int total;
    const int before = warp_prefix(__popc(passed), &total);
    // As many rounds as it takes to pass all candidates through the free places; nearly always one.
    for (int first = 0; first < total;) {
      const int room = min(kCapacity - count, total - first);
      int position = before - first;
      for (std::uint32_t rest = passed; rest != 0; rest &= rest - 1, ++position) {
        if (position < 0 || position >= room) continue;
        const int i = __ffs(rest) - 1, id = id_of(i);
        keys[count + position] = rank_key(rank_order(row[id], forced(id)), id);
      }
      __syncwarp();
      count += room;
      first += room;
      shrink(k);
    }
  }

  // Writes the ids in ascending order, -1 in the tail.
  __device__ __forceinline__ void store(std::int32_t* ids, int k) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int slot = i * 32 + lane;
      const std::uint32_t mine = slot < count ? static_cast<std::uint32_t>(keys[slot]) : 0u;  // ~id: larger is a smaller id
      int rank = 0;
#pragma unroll
      for (int j = 0; j < 16 * kItems; ++j) rank += j<count&& static_cast<std::uint32_t>(keys[j])> mine;
      if (slot < count) ids[rank] = static_cast<int>(~mine);
      if (slot >= count && slot < k) ids[slot] = -1;
    }
  }
};

}  // namespace openmsa::cuda
