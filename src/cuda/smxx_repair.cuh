// Mends rows of attention into which a value leaked that its query does not see.
//
// The fast kernels mask by probability 0, and 0 x NaN (or 0 x Inf) is NaN: a NaN in V at a later position of a query's own block, in a
// block that only a neighbour of its tile chose, or in an unwritten slot reaches the row. Such a value meets all heads of the group in
// the same dims, so one head tells: a finite first head means that nothing leaked.
//
// Roles   look: half a warp a (query token, group), 16 bytes a lane. mend: the whole CTA, one row of G heads after the other; thread t
//         has head t/16 and 8 dims, and scores keys t%32 for heads t/32 and t/32 + 8. Neighbouring tokens go to different CTAs, since
//         what leaks leaks into neighbours.
// Bytes   D * 2 a (query token, group) while nothing leaked: less than 1/500 of the time of the attention before it.
// Mend    invisible keys are skipped, not multiplied; newest keys first, and over as soon as every NaN is found to be deserved. lse is
//         right already, as V has no part in it.
#pragma once

#include "cuda/params.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/softmax_sum.cuh"

namespace openmsa::cuda {

struct RepairParams {
  BatchParams batch;
  const void* q;  // [T, Hq, D]
  const void* k;  // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  const void* v;
  std::int64_t stride_q_token, stride_q_head;  // elements
  std::int64_t stride_k_token, stride_k_head, stride_k_page;
  std::int64_t stride_v_token, stride_v_head, stride_v_page;
  const std::int32_t* block_ids;  // [T, Hkv, k]; null: every visible key
  std::int64_t stride_id_token, stride_id_group;
  void* out;  // [T, Hq, D]
  std::int64_t stride_out_token, stride_out_head;
  std::int32_t num_groups, group_size, head_dim, top_k;
  float scale_log2;  // softmax_scale * log2(e)
};

inline constexpr int kRepairThreads = 256, kRepairLoads = 4;            // loads in flight a lane
inline constexpr int kRepairRows = kRepairThreads / 16 * kRepairLoads;  // rows a look
inline constexpr int kRepairKeys = 32;                                  // keys a step; divides every block size
// No tile of dense attention spans more query tokens, so nothing further behind a query's position leaks into it.
inline constexpr int kRepairReach = 256;

template <typename T_>
struct RepairTraits;
template <>
struct RepairTraits<__nv_bfloat16> {
  static constexpr std::uint32_t kInfinity = 0x7f80;
};
template <>
struct RepairTraits<__half> {
  static constexpr std::uint32_t kInfinity = 0x7c00;
};

// Whether one of the 8 values is NaN or, with kOrInfinity, infinite.
template <typename T, bool kOrInfinity>
__device__ __forceinline__ bool repair_find(const uint4& piece) {
  constexpr std::uint32_t kLimit = RepairTraits<T>::kInfinity - (kOrInfinity ? 1 : 0);
  bool found = false;
#pragma unroll
  for (const std::uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
    found |= (pair & 0x7fffu) > kLimit || (pair >> 16 & 0x7fffu) > kLimit;
  }
  return found;
}

template <typename T>
struct RepairShared {
  float q[16][128];
  __align__(16) T k[kRepairKeys][128 + 8];  // padded: the rows of 8 lanes fall on different banks
  __align__(16) T v[kRepairKeys][128];
  float p[16][kRepairKeys], rescale[16], sum[16];
  bool found[kRepairRows];
};

template <typename T>
__device__ void repair_row(const RepairParams& params, RepairShared<T>& smem, int token, int group) {
  const BatchParams& batch = params.batch;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, pieces = params.head_dim / 8;
  const int seq = batch.sequence_of(token);
  Sequence sequence;
  if (!batch.load<false>(seq, &sequence)) return;
  const int visible = sequence.num_visible(sequence.first_position + token - sequence.query_begin);
  const T* keys = static_cast<const T*>(params.k) + group * params.stride_k_head;
  const T* values = static_cast<const T*>(params.v) + group * params.stride_v_head;
  // Kernels before this one reported what is broken; here it is passed over.
  const auto page_of = [&](int block) {
    if (!sequence.pages) return 0;
    const int page = sequence.pages[block];
    return page < batch.num_pages ? page : -1;
  };
  const auto value_row = [&](int key) {
    const int block = key / batch.block_size;
    const std::int64_t row = sequence.pages ? key % batch.block_size : std::int64_t{sequence.key_begin} + key;
    return values + page_of(block) * params.stride_v_page + row * params.stride_v_token;
  };

  if (!params.block_ids) {
    // A dense row can be long: unless something bad stands where a tile looked beyond this query, its NaNs are deserved.
    const int end = min((visible + kRepairReach + batch.block_size - 1) / batch.block_size * batch.block_size, sequence.seqlen_k);
    bool leaks = false;
    for (int i = visible * pieces + thread; i < end * pieces; i += kRepairThreads) {
      if (page_of(i / pieces / batch.block_size) < 0) continue;
      leaks |= repair_find<T, true>(*reinterpret_cast<const uint4*>(value_row(i / pieces) + i % pieces * 8));
    }
    if (!__syncthreads_or(leaks)) return;
  }

  const int head = thread / 16, piece = thread % 16;  // of this thread's 8 results
  const bool live = head < params.group_size && piece < pieces;
  T* out = static_cast<T*>(params.out) + std::int64_t{token} * params.stride_out_token +
           (group * params.group_size + head) * params.stride_out_head + piece * 8;
  std::uint32_t wanted = 0;  // which of them are NaN
  if (live) {
#pragma unroll
    for (int i = 0; i < 8; ++i) wanted |= isnan(static_cast<float>(out[i])) ? 1u << i : 0u;
  }
  for (int i = thread; i < params.group_size * params.head_dim; i += kRepairThreads) {
    const int h = i / params.head_dim, d = i % params.head_dim;
    smem.q[h][d] = static_cast<float>(static_cast<const T*>(
        params.q)[std::int64_t{token} * params.stride_q_token + (group * params.group_size + h) * params.stride_q_head + d]);
  }

  float acc[8] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};  // heads warp and warp + 8
  const std::int32_t* ids =
      params.block_ids ? params.block_ids + std::int64_t{token} * params.stride_id_token + group * params.stride_id_group : nullptr;
  const int num_blocks = (visible + batch.block_size - 1) / batch.block_size;
  bool sees_key = false;
  for (int slot = (ids ? params.top_k : num_blocks) - 1; slot >= 0; --slot) {
    const int block = ids ? ids[slot] : slot;
    if (block < 0 || block >= num_blocks) continue;
    const int page = page_of(block);
    if (page < 0) continue;
    sees_key = true;
    const std::int64_t row = sequence.pages ? 0 : sequence.key_begin + std::int64_t{block} * batch.block_size;
    const T* k = keys + page * params.stride_k_page + row * params.stride_k_token;
    const T* v = values + page * params.stride_v_page + row * params.stride_v_token;
    const int num_keys = min(visible - block * batch.block_size, batch.block_size);
    for (int first = (num_keys - 1) / kRepairKeys * kRepairKeys; first >= 0; first -= kRepairKeys) {
      const int count = min(num_keys - first, kRepairKeys);
      for (int i = thread; i < count * pieces; i += kRepairThreads) {
        const int key = i / pieces, column = i % pieces * 8;
        *reinterpret_cast<uint4*>(&smem.k[key][column]) =
            *reinterpret_cast<const uint4*>(k + (first + key) * params.stride_k_token + column);
        *reinterpret_cast<uint4*>(&smem.v[key][column]) =
            *reinterpret_cast<const uint4*>(v + (first + key) * params.stride_v_token + column);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = warp + 8 * i;
        if (h >= params.group_size) continue;
        float score = 0.f;
        for (int d = 0; d < params.head_dim; d += 8) {
          T piece_k[8];
          *reinterpret_cast<uint4*>(piece_k) = *reinterpret_cast<const uint4*>(&smem.k[lane][d]);
#pragma unroll
          for (int j = 0; j < 8; ++j) score = fmaf(smem.q[h][d + j], static_cast<float>(piece_k[j]), score);
        }
        score = lane < count ? score * params.scale_log2 : -INFINITY;
        const float before = row_max[i];
        float most = score;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
        row_max[i] = fmaxf(before, most);
        const float offset = row_max[i] == -INFINITY ? 0.f : row_max[i];
        const float p = exp2f(score - offset), rescale = exp2f(before - offset);
        float sum = p;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
        row_sum[i] = fmaf(row_sum[i], rescale, sum);
        smem.p[h][lane] = p;
        if (lane == 0) smem.rescale[h] = rescale;
      }
      __syncthreads();
      std::uint32_t found = 0;
      if (live) {
        const float rescale = smem.rescale[head];
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[j] *= rescale;
        for (int key = 0; key < count; ++key) {
          T piece_v[8];
          *reinterpret_cast<uint4*>(piece_v) = *reinterpret_cast<const uint4*>(&smem.v[key][piece * 8]);
#pragma unroll
          for (int j = 0; j < 8; ++j) acc[j] = fmaf(smem.p[head][key], static_cast<float>(piece_v[j]), acc[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) found |= isnan(acc[j]) ? 1u << j : 0u;
      }
      if (__syncthreads_and((wanted & ~found) == 0)) return;  // what is NaN ought to be
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane == 0) smem.sum[warp + 8 * i] = row_sum[i];
  }
  __syncthreads();
  if (live) {
    const float sum = softmax_sum(smem.sum[head], sees_key), inverse = sum == 0.f ? 0.f : 1.f / sum;
    *reinterpret_cast<uint4*>(out) =
        uint4{pack2<T>(acc[0] * inverse, acc[1] * inverse), pack2<T>(acc[2] * inverse, acc[3] * inverse),
              pack2<T>(acc[4] * inverse, acc[5] * inverse), pack2<T>(acc[6] * inverse, acc[7] * inverse)};
  }
}

template <typename T>
__global__ void __launch_bounds__(kRepairThreads, 2) smxx_repair_kernel(const __grid_constant__ RepairParams params) {
  __shared__ RepairShared<T> smem;
  ptx::grid_dependency_wait();
  const int piece = threadIdx.x % 16, half = threadIdx.x / 16;
  const std::int64_t num_rows = std::int64_t{params.batch.total_q} * params.num_groups;
  const auto per_cta = static_cast<int>((num_rows + gridDim.x - 1) / gridDim.x);
  for (int base = 0; base < per_cta; base += kRepairRows) {
    // Row n of this CTA is number n * gridDim.x + blockIdx.x of the batch.
    const auto row_of = [&](int n) { return std::int64_t{base + n} * gridDim.x + blockIdx.x; };
    uint4 pieces[kRepairLoads];
#pragma unroll
    for (int i = 0; i < kRepairLoads; ++i) {
      const std::int64_t row = row_of(i * (kRepairThreads / 16) + half);
      pieces[i] = uint4{0, 0, 0, 0};
      if (row < num_rows && piece * 8 < params.head_dim) {
        pieces[i] =
            *reinterpret_cast<const uint4*>(static_cast<const T*>(params.out) + row / params.num_groups * params.stride_out_token +
                                            row % params.num_groups * params.group_size * params.stride_out_head + piece * 8);
      }
    }
    bool found = false;
#pragma unroll
    for (int i = 0; i < kRepairLoads; ++i) found |= repair_find<T, false>(pieces[i]);
    if (!__syncthreads_or(found)) continue;
#pragma unroll
    for (int i = 0; i < kRepairLoads; ++i) {
      const std::uint32_t lanes = __ballot_sync(0xffffffffu, repair_find<T, false>(pieces[i]));
      if (piece == 0) smem.found[i * (kRepairThreads / 16) + half] = (half % 2 == 0 ? lanes & 0xffffu : lanes >> 16) != 0;
    }
    __syncthreads();
    for (int n = 0; n < kRepairRows; ++n) {
      if (!smem.found[n]) continue;
      const std::int64_t row = row_of(n);
      repair_row<T>(params, smem, static_cast<int>(row / params.num_groups), static_cast<int>(row % params.num_groups));
      __syncthreads();
    }
  }
}

}  // namespace openmsa::cuda
