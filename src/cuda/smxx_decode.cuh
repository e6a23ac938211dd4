// Decode: attention of few query tokens over their selected blocks, alone (sparse_decode) or behind scoring and selection in the
// same launch (msa_attention).
//
// Roles     one CTA of 16 warps a multiprocessor, launched together (cooperative). A (query token, group) is a row of work, cut
//           into `splits` units of consecutive slots; a unit keeps O, its maximum and its sum in registers. The tile's 16 rows
//           are the group's heads, padded; in Q K^T a warp takes 8 keys, in P V 8 dims.
// Stages    score (smxx_score_few.cuh) -> grid barrier -> each CTA selects for its rows (smxx_select_few.cuh; the CTAs that share
//           a row repeat its selection, which costs less than another barrier) -> attend -> merge. Between its arrival at the grid
//           barrier and the end of its wait a CTA loads its first row's queries and page table. sparse_decode needs the barrier
//           for its cleared partials only, and waits before it merges.
// Loads     K and V by cp.async into one buffer each: the next K is on its way from the moment this block's scores are there, the
//           next V from the end of P V. More shared memory would be slower: loads in flight need room in the L1 (docs/kernels.md).
// Merge     every unit of a row that was split leaves an fp32 partial with maximum and sum. When a CTA has done all its units it
//           merges its share of each one's row's heads, in slot order, so that runs repeat bitwise. Every word of a partial is its
//           own flag: cleared to a NaN that no arithmetic gives, and read until it is something else. Nobody writes after waiting,
//           so nobody waits for ever.
// Shared    K and V 64 KB; P 4.3 KB, maxima and sums 2 KB, the row's queries 4 KB, ids and pages. The scratch of score and of select
//           lies over it.
// Registers at most 128 (512 threads).
// Empty     rows without a visible key give out = 0, lse = -inf; CTAs without work take part in the barrier only. The maximum of a unit
//           with keys starts at -FLT_MAX, that of one without is -inf: where all scores are -inf, it tells that there were any.
#pragma once

#include <cooperative_groups.h>

#include <cfloat>
#include <utility>

#include "cuda/divisor.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/smxx_score_few.cuh"
#include "cuda/smxx_select_few.cuh"
#include "cuda/softmax_sum.cuh"

namespace openmsa::cuda {

struct DecodeParams {
  BatchParams batch;
  const void* q;  // [T, Hq, D]
  const void* k;  // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  const void* v;
  std::int64_t stride_q_token, stride_q_head;                  // elements
  std::int64_t stride_k_token, stride_k_head, stride_k_block;  // from block to block: a page, or Bk tokens
  std::int64_t stride_v_token, stride_v_head, stride_v_block;
  const std::int32_t* block_ids;  // [T, Hkv, k]; not read where the kernel selects itself
  std::int64_t stride_id_token, stride_id_group;
  void* out;  // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;
  float* lse;  // [T, Hq] or null
  std::int64_t stride_lse_token;
  float* partial;                        // [units, 16, D], none if rows are whole
  float2* partial_stats;                 // [units, 16]: max (in log2 units; see Empty), sum
  std::int32_t token_begin, num_tokens;  // packed query tokens of this launch; rows count from its first
  std::int32_t group_size, top_k;
  Divisor groups;                           // Hkv
  Divisor splits;                           // units a row, at most top_k
  std::int32_t split_slots, longer_splits;  // slots of a unit; the first `longer_splits` of a row have one more
  float scale_log2;
};

template <typename T_, int kHeadDim_, int kBlock_>
struct DecodeTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_, kSteps = kHeadDim / 16;  // k16 steps of Q K^T
  static constexpr int kKeyWarps = kBlock / 8, kDimWarps = kHeadDim / 8;                // warps with work in Q K^T, in P V
  static constexpr int kPieces = kHeadDim / 8, kTileBytes = kBlock * kHeadDim * 2;      // 16-byte pieces of a row
  static constexpr int kPRow = kBlock + 8;  // padded: the rows of a fragment fall on different banks
  static constexpr int kPOffset = 2 * kTileBytes < (32 << 10) ? 32 << 10 : 2 * kTileBytes;  // room for select's scratch and pages
  static constexpr int kMaxOffset = kPOffset + 16 * kPRow * 2, kSumOffset = kMaxOffset + 1024, kIdsOffset = kSumOffset + 1024,
                       kQueryOffset = kIdsOffset + 256, kSmemBytes = kQueryOffset + kSteps * 512;
  // Where piece p of a row lies, such that ldmatrix's eight rows fall on different banks.
  static __device__ __forceinline__ int place(int row, int p) { return kHeadDim == 96 ? p ^ (row / 2 % 4) : p ^ (row % 8); }
};

// One (token, group): what its queries see.
template <typename Traits>
struct DecodeRow {
  using T = typename Traits::T;
  Sequence sequence;
  int seq, token, group, visible, own_block;
  const T *k, *v;  // this thread's 16-byte column of its first key, in page or block 0

  // The queries go to shared memory, by cp.async, as A fragments of the k16 steps: a0 (r, 2c..), a1 (r+8, 2c..), a2 (r, 2c+8..),
  // a3 (r+8, 2c+8..).
  __device__ __forceinline__ void load(const DecodeParams& params, int row, uint4* smem_q) {
    const int own_token = params.groups.quotient(row);
    token = params.token_begin + own_token, group = row - own_token * params.groups.value;
    if (threadIdx.x < Traits::kSteps * 32) {
      const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, dim = threadIdx.x / 32 * 16 + 2 * c;
      const T* q = static_cast<const T*>(params.q) + std::int64_t{token} * params.stride_q_token + dim;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = r + i % 2 * 8;
        ptx::copy_async<4>(ptx::smem_address(smem_q + threadIdx.x) + 4 * i,
                           q + (group * params.group_size + min(head, params.group_size - 1)) * params.stride_q_head + i / 2 * 8,
                           head < params.group_size ? 4 : 0);
      }
    }
    ptx::copy_async_commit();
    seq = params.batch.sequence_of(token);
    params.batch.load(seq, &sequence);  // a broken one sees nothing
    const int position = sequence.first_position + token - sequence.query_begin;
    visible = sequence.num_visible(position);
    own_block = position < 0 ? -1 : position / Traits::kBlock;
    const std::int64_t key = (sequence.pages ? 0 : sequence.key_begin) + threadIdx.x / Traits::kPieces;
    const int dim = threadIdx.x % Traits::kPieces * 8;
    k = static_cast<const T*>(params.k) + group * params.stride_k_head + key * params.stride_k_token + dim;
    v = static_cast<const T*>(params.v) + group * params.stride_v_head + key * params.stride_v_token + dim;
  }
};

// A thread's slot of a row's list as the caller gave it, and the slot before.
struct DecodeSlot {
  int block, before;
};
__device__ __forceinline__ DecodeSlot decode_slot(const DecodeParams& params, int row) {
  const int slot = threadIdx.x, token = params.groups.quotient(row), group = row - token * params.groups.value;
  if (slot >= params.top_k) return {-1, -1};
  const std::int32_t* list =
      params.block_ids + (std::int64_t{params.token_begin} + token) * params.stride_id_token + group * params.stride_id_group;
  return {list[slot], slot > 0 ? list[slot - 1] : -1};
}

// The list goes to shared memory; a bad id is reported and becomes -1. `row` is what a fault names.
__device__ __forceinline__ void decode_check_ids(const DecodeParams& params, DecodeSlot at, int row, int visible, int* ids) {
  const int slot = threadIdx.x;
  if (slot >= params.top_k) return;
  int block = at.block;
  if (block < -1 || block * std::int64_t{params.batch.block_size} >= visible) {
    report(params.batch.fault, FaultCode::kBlockId, row, slot, block);
    block = -1;
  } else if (block >= 0 && slot > 0 && (at.before < 0 || at.before >= block)) {
    report(params.batch.fault, FaultCode::kBlockOrder, row, slot, block);
    block = -1;
  }
  ids[slot] = block;
}

// Behind select's scratch, under K and V.
inline constexpr int kDecodePagesOffset = (kSelectFewBytes + 15) / 16 * 16;

// O of heads r and r + 8, dims 8 warp + 2 c, with the heads' maxima (log2 units) and, over the quad's keys, sums.
struct DecodeAcc {
  float o[4], top[2], sum[2];
};

// Slots [begin, end) of a row, none of them empty. `places`: a slot's page, or block of packed keys; -1 if that was reported.
template <typename Traits>
__device__ __forceinline__ void decode_attend(const DecodeParams& params, const DecodeRow<Traits>& row, const int* ids,
                                              const int* places, int begin, int end, unsigned char* smem, DecodeAcc& acc) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  T* smem_p = reinterpret_cast<T*>(smem + Traits::kPOffset);
  float* smem_max = reinterpret_cast<float*>(smem + Traits::kMaxOffset);  // [16 heads][16 warps]
  const uint4* smem_q = reinterpret_cast<const uint4*>(smem + Traits::kQueryOffset);
  const std::uint32_t tile_k = ptx::smem_address(smem), tile_v = tile_k + Traits::kTileBytes;
  const std::uint32_t tile_p = tile_k + Traits::kPOffset + (lane % 16 * Traits::kPRow + lane / 16 * 8) * 2;  // this lane's row
  const auto live_keys_of = [&](int slot) { return places[slot] < 0 ? 0 : min(row.visible - ids[slot] * kBlock, kBlock); };

  // One commit group, also where there is nothing to load. A thread copies one 16-byte column of every 32nd key.
  const auto load = [&](int slot, const T* source, std::int64_t stride_token, std::int64_t stride_block, std::uint32_t tile) {
    if (slot < end && places[slot] >= 0 && threadIdx.x < 32 * Traits::kPieces) {
      const int key = threadIdx.x / Traits::kPieces, piece = threadIdx.x % Traits::kPieces, live_keys = live_keys_of(slot);
      std::uint32_t target = tile + (key * Traits::kPieces + Traits::place(key, piece)) * 16;
      source += places[slot] * stride_block;
#pragma unroll
      for (int i = 0; i < kBlock / 32; ++i) {
        // Rows nobody sees become zero without being read: their P is zero, and 0 x NaN must not leak.
        ptx::copy_async<16>(target, source, key + 32 * i < live_keys ? 16 : 0);
        source += 32 * stride_token, target += 32 * Traits::kPieces * 16;
      }
    }
    ptx::copy_async_commit();
  };
  const auto load_k = [&](int slot) { load(slot, row.k, params.stride_k_token, params.stride_k_block, tile_k); };
  const auto load_v = [&](int slot) { load(slot, row.v, params.stride_v_token, params.stride_v_block, tile_v); };

  load_k(begin);
  load_v(begin);
  uint4 q[Traits::kSteps];  // under the first loads; every warp takes all of it
#pragma unroll
  for (int i = 0; i < Traits::kSteps; ++i) q[i] = smem_q[i * 32 + lane];
  for (int slot = begin; slot < end; ++slot) {
    const int live_keys = live_keys_of(slot);
    if (slot == begin) {
      ptx::copy_async_wait<1>();
    } else {
      ptx::copy_async_wait<0>();
    }
    __syncthreads();  // K is there; P and V of the block before have been read
    if (slot > begin) load_v(slot);
    if (live_keys == 0) {  // a reported page
      load_k(slot + 1);
      continue;
    }
    float s[4] = {0.f, 0.f, 0.f, 0.f};
    if (warp < Traits::kKeyWarps) {
      float t[4] = {0.f, 0.f, 0.f, 0.f};
      const int key = warp * 8 + lane % 8;
#pragma unroll
      for (int i = 0; i < Traits::kSteps; i += 2) {
        const int piece = i * 2 + lane / 8;
        std::uint32_t b[4];  // b0, b1 of step i and of step i + 1
        ptx::ldmatrix_x4(b, tile_k + (key * Traits::kPieces + Traits::place(key, piece)) * 16);
        ptx::mma_16816<T>(s, q[i].x, q[i].y, q[i].z, q[i].w, b[0], b[1]);
        ptx::mma_16816<T>(t, q[i + 1].x, q[i + 1].y, q[i + 1].z, q[i + 1].w, b[2], b[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) s[j] = warp * 8 + c * 2 + j % 2 < live_keys ? s[j] + t[j] : -INFINITY;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(s[2 * h], s[2 * h + 1]);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        if (c == 0) smem_max[(r + 8 * h) * 16 + warp] = top;
      }
    }
    __syncthreads();  // maxima are there, K has been read
    load_k(slot + 1);
    float correction[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4* maxima = reinterpret_cast<const float4*>(smem_max + (r + 8 * h) * 16);
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < Traits::kKeyWarps / 4; ++i) {
        const float4 x = maxima[i];
        top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
      }
      top = fmaxf(acc.top[h], top * params.scale_log2);
      correction[h] = exp2_approx(acc.top[h] - top);  // 0 from -FLT_MAX
      acc.top[h] = top;
      acc.sum[h] *= correction[h];
      if (warp < Traits::kKeyWarps) {
        const float p0 = exp2_approx(fmaf(s[2 * h], params.scale_log2, -top));
        const float p1 = exp2_approx(fmaf(s[2 * h + 1], params.scale_log2, -top));
        acc.sum[h] += p0 + p1;
        *reinterpret_cast<std::uint32_t*>(smem_p + (r + 8 * h) * Traits::kPRow + warp * 8 + c * 2) = pack2<T>(p0, p1);
      }
    }
    ptx::copy_async_wait<1>();
    __syncthreads();  // P and V are there
    if (warp < Traits::kDimWarps) {
      float even[4], odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int j = 0; j < 4; ++j) even[j] = acc.o[j] * correction[j / 2];
#pragma unroll
      for (int step = 0; step < kBlock / 32; ++step) {
        const int key = step * 32 + lane;
        std::uint32_t w[4];
        ptx::ldmatrix_x4_trans(w, tile_v + (key * Traits::kPieces + Traits::place(key, warp)) * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t a[4];
          ptx::ldmatrix_x4(a, tile_p + (step * 32 + half * 16) * 2);
          ptx::mma_16816<T>(half == 0 ? even : odd, a[0], a[1], a[2], a[3], w[2 * half], w[2 * half + 1]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) acc.o[j] = even[j] + odd[j];
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void decode_write(const DecodeParams& params, int token, int group, int head, int dim, float a,
                                             float b) {
  using T = typename Traits::T;
  if (head >= params.group_size) return;
  *reinterpret_cast<std::uint32_t*>(static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
                                    (group * params.group_size + head) * params.stride_out_head + dim) = pack2<T>(a, b);
}

__device__ __forceinline__ void decode_write_lse(const DecodeParams& params, int token, int group, int head, float top, float sum) {
  if (params.lse == nullptr || head >= params.group_size) return;
  params.lse[std::int64_t{token} * params.stride_lse_token + group * params.group_size + head] =
      sum == 0.f ? -INFINITY : (top + log2f(sum)) * 0.6931471805599453f;
}

// What a word of a partial is before its unit has written it: a NaN, and not the one that arithmetic gives (0x7fffffff).
inline constexpr std::uint32_t kUnwritten = 0xffffffffu;

// The partials of this CTA's units become unwritten; a grid barrier must follow before anybody reads them.
template <typename Traits>
__device__ __forceinline__ void decode_clear(const DecodeParams& params) {
  if (params.splits.value == 1) return;
  const uint4 unwritten = {kUnwritten, kUnwritten, kUnwritten, kUnwritten};
  for (int unit = blockIdx.x; unit < params.num_tokens * params.groups.value * params.splits.value; unit += gridDim.x) {
    uint4* partial = reinterpret_cast<uint4*>(params.partial + std::int64_t{unit} * 16 * Traits::kHeadDim);
    for (int i = threadIdx.x; i < 4 * Traits::kHeadDim; i += kFewThreads) partial[i] = unwritten;
    if (threadIdx.x < 8) reinterpret_cast<uint4*>(params.partial_stats + unit * 16)[threadIdx.x] = unwritten;
  }
}

// A unit's share of its row's merge: every `splits`-th of the row's 64-dim parts of heads, a warp each, over the partials in slot
// order. No barrier of the CTA: the warps without a share go on.
template <typename Traits>
__device__ __forceinline__ void decode_merge(const DecodeParams& params, int unit) {
  constexpr int kHeadDim = Traits::kHeadDim, kParts = (kHeadDim + 63) / 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = params.splits.value;  // 2..32, so 16 warps take all parts
  const int index = params.splits.quotient(unit), split = unit - index * count, share = warp * count + split;
  const int head = share / kParts, part = share % kParts, dim = part * 64 + lane * 2;
  if (head >= params.group_size) return;
  const std::int64_t first_row = std::int64_t{index} * count * 16 + head;
  const float* partial = params.partial + first_row * kHeadDim + dim;
  float2 stats = {-INFINITY, 0.f};
  float top = -INFINITY, offset = 0.f, weight = 0.f, sum = 0.f;
  float2 acc = {0.f, 0.f};
  for (int i0 = 0; i0 < count; i0 += 16) {
    float2 x[16];
    bool unwritten;
    do {
      if (lane < count) stats = ptx::look(params.partial_stats + first_row + lane * 16);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[i] = i0 + i < count && dim < kHeadDim
                   ? ptx::look(reinterpret_cast<const float2*>(partial + std::int64_t{i0 + i} * 16 * kHeadDim))
                   : float2{0.f, 0.f};
      }
      unwritten = ptx::holds(stats, kUnwritten);
#pragma unroll
      for (int i = 0; i < 16; ++i) unwritten = unwritten || ptx::holds(x[i], kUnwritten);
    } while (__any_sync(0xffffffffu, unwritten));
    if (i0 == 0) {
      top = stats.x;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
      offset = top == -INFINITY ? 0.f : top;
      weight = exp2_approx(stats.x - offset);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float w = __shfl_sync(0xffffffffu, weight, i0 + i);
      sum = fmaf(w, __shfl_sync(0xffffffffu, stats.y, i0 + i), sum);
      acc.x = fmaf(w, x[i].x, acc.x), acc.y = fmaf(w, x[i].y, acc.y);
    }
  }
  const int row_token = params.groups.quotient(index), group = index - row_token * params.groups.value;
  const int token = params.token_begin + row_token;
  sum = softmax_sum(sum, top != -INFINITY);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  if (dim < kHeadDim) decode_write<Traits>(params, token, group, head, dim, acc.x * inverse, acc.y * inverse);
  if (part == 0 && lane == 0) decode_write_lse(params, token, group, head, offset, sum);
}

// The units of this CTA. `ready` returns when rows may be selected, `cleared` when the partials of all CTAs were. `select` fills ids
// (shared memory) for a row, for the first warp to read; where it takes its time (kCachePages) the first row's page table waits for
// it in shared memory.
template <typename Traits, bool kCachePages, typename Ready, typename Cleared, typename Select>
__device__ __forceinline__ void decode_units(const DecodeParams& params, unsigned char* smem, Ready ready, Cleared cleared,
                                             Select select) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  int *ids = reinterpret_cast<int*>(smem + Traits::kIdsOffset), *places = ids + 32;
  uint4* smem_q = reinterpret_cast<uint4*>(smem + Traits::kQueryOffset);
  float* smem_sum = reinterpret_cast<float*>(smem + Traits::kSumOffset);
  const int splits = params.splits.value, num_units = params.num_tokens * params.groups.value * splits;
  int* page_row = reinterpret_cast<int*>(smem + kDecodePagesOffset);
  constexpr int kCachedPages = (Traits::kPOffset - kDecodePagesOffset) / 4;
  int cached = 0, index = params.splits.quotient(blockIdx.x);
  DecodeRow<Traits> row;
  if (static_cast<int>(blockIdx.x) < num_units) {
    row.load(params, index, smem_q);
    if (kCachePages && row.sequence.pages) cached = min((row.visible + Traits::kBlock - 1) / Traits::kBlock, kCachedPages);
#pragma unroll 1
    for (int i = threadIdx.x; i < cached; i += kFewThreads)
      ptx::copy_async<4>(ptx::smem_address(page_row + i), row.sequence.pages + i, 4);
    ptx::copy_async_commit();
  }
  ready();
  ptx::copy_async_wait<0>();
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    if (unit != static_cast<int>(blockIdx.x)) {
      index = params.splits.quotient(unit);
      row.load(params, index, smem_q);
      ptx::copy_async_wait<0>();
    }
    const int split = unit - index * splits;
    const int begin = split * params.split_slots + min(split, params.longer_splits);
    const int end = begin + params.split_slots + (split < params.longer_splits ? 1 : 0);
    __syncthreads();  // the list of the row before has been read, this one's queries and pages are there
    select(row, index, split == 0, ids);
    if (threadIdx.x < static_cast<unsigned>(params.top_k)) {
      const int block = ids[threadIdx.x];
      places[threadIdx.x] = block < 0 || !row.sequence.pages ? block
                            : block < cached                 ? params.batch.checked_page(row.seq, block, page_row[block])
                                                             : params.batch.page(row.sequence, row.seq, block);
    }
    cached = 0;  // K comes to lie over it
    __syncthreads();
    int stop = begin;
    while (stop < end && ids[stop] >= 0) ++stop;  // a hole in a list is a reported fault; what follows it in the unit is left out
    const float lowest = begin < stop ? -FLT_MAX : -INFINITY;
    DecodeAcc acc{{}, {lowest, lowest}, {}};
    if (begin < stop) decode_attend<Traits>(params, row, ids, places, begin, stop, smem, acc);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      acc.sum[h] += __shfl_xor_sync(0xffffffffu, acc.sum[h], 1);
      acc.sum[h] += __shfl_xor_sync(0xffffffffu, acc.sum[h], 2);
      if (c == 0 && warp < Traits::kKeyWarps) smem_sum[(r + 8 * h) * 16 + warp] = acc.sum[h];
    }
    __syncthreads();
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = 0.f;
#pragma unroll
      for (int w = 0; w < Traits::kKeyWarps; ++w) sum[h] += smem_sum[(r + 8 * h) * 16 + w];
    }
    const int dim = warp * 8 + c * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = r + 8 * h;
      if (splits == 1) {
        sum[h] = softmax_sum(sum[h], begin < stop);
        const float inverse = sum[h] == 0.f ? 0.f : 1.f / sum[h];
        if (warp < Traits::kDimWarps)
          decode_write<Traits>(params, row.token, row.group, head, dim, acc.o[2 * h] * inverse, acc.o[2 * h + 1] * inverse);
        if (warp == 0 && c == 0) decode_write_lse(params, row.token, row.group, head, acc.top[h], sum[h]);
      } else {
        if (warp < Traits::kDimWarps) {
          ptx::store_relaxed(reinterpret_cast<float2*>(params.partial + (std::int64_t{unit} * 16 + head) * Traits::kHeadDim + dim),
                             float2{acc.o[2 * h], acc.o[2 * h + 1]});
        }
        if (warp == 0 && c == 0) ptx::store_relaxed(params.partial_stats + unit * 16 + head, float2{acc.top[h], sum[h]});
      }
    }
  }
  if (splits == 1) return;
  cleared();
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) decode_merge<Traits>(params, unit);
}

template <typename Traits>
__global__ void __launch_bounds__(kFewThreads, 1) smxx_decode_kernel(const __grid_constant__ DecodeParams params) {
  OPENMSA_DYNAMIC_SMEM(smem);
  const auto grid = cooperative_groups::this_grid();
  decode_clear<Traits>(params);
  unsigned token = 0;
  if (params.splits.value > 1) token = grid.barrier_arrive();
  int listed = params.splits.quotient(blockIdx.x);
  DecodeSlot slot =
      listed < params.num_tokens * params.groups.value ? decode_slot(params, listed) : DecodeSlot{};  // under the loads of its row
  decode_units<Traits, false>(
      params, smem, [] {}, [&] { grid.barrier_wait(std::move(token)); },
      [&](const DecodeRow<Traits>& row, int index, bool, int* ids) {
        if (index != listed) slot = decode_slot(params, index);
        listed = index;
        decode_check_ids(params, slot, row.token * params.groups.value + row.group, row.visible, ids);
        __syncwarp();
      });
}

template <typename Traits, typename ScoreTraits>
__global__ void __launch_bounds__(kFewThreads, 1)
    smxx_msa_decode_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ ScoreFewParams score,
                           const __grid_constant__ SelectParams choice) {
  OPENMSA_DYNAMIC_SMEM(smem);
  static_assert(kDecodePagesOffset + 4096 <= Traits::kPOffset);
  const auto grid = cooperative_groups::this_grid();
  decode_clear<Traits>(params);
  few_score<ScoreTraits>(score, smem);
  unsigned token = grid.barrier_arrive();
  decode_units<Traits, true>(
      params, smem, [&] { grid.barrier_wait(std::move(token)); }, [] {},
      [&](const DecodeRow<Traits>& row, int, bool first_split, int* ids) {
        const SelectToken seen{row.token, (row.visible + Traits::kBlock - 1) / Traits::kBlock, row.own_block};
        SelectRow where = select_row(choice, seen, row.group);
        std::int32_t* list = where.ids;
        where.ids = ids;
        select_few(choice, where, smem);
        if (first_split && choice.block_ids != nullptr && threadIdx.x < static_cast<unsigned>(choice.top_k))
          list[threadIdx.x] = ids[threadIdx.x];
      });
}

}  // namespace openmsa::cuda
