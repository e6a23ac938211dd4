// What joins the kernels of the index branch's KL loss: the student's normaliser of a token out of those of its visits, and the loss
// out of the items' sums.
//
// Roles   lse: a warp a (token, group), lanes go over its slots. loss: one CTA, in double, every addition in one order.
// Bytes   lse: 4 a visit. loss: 4 * Bk/16 an item
// Empty   a (token, group) without visits gets -inf, which nobody reads; without items the loss is 0.
#pragma once

#include "cuda/items.hpp"
#include "cuda/ptx/convert.cuh"

namespace openmsa::cuda {

struct IndexLseParams {
  SlotLists lists;
  const float* partial;  // [chunk tokens, Hkv, slots]: log-sum-exp of a visit, in log2 units
  float* lse;            // [chunk tokens, Hkv]
};

inline constexpr int kIndexLseThreads = 256;

__global__ void __launch_bounds__(kIndexLseThreads) smxx_index_lse_kernel(const __grid_constant__ IndexLseParams params) {
  const SlotLists& lists = params.lists;
  const int lane = threadIdx.x % 32;
  const std::int64_t pair = (std::int64_t{blockIdx.x} * kIndexLseThreads + threadIdx.x) / 32;
  if (pair >= std::int64_t{lists.chunk_tokens} * lists.num_groups) return;
  const int end = lists.slot_end(pair);
  const float* partial = params.partial + pair * lists.slots;
  float best = -INFINITY, sum = 0.f;
  for (int slot = lane; slot < end; slot += 32) {
    if (lists.has_visit(pair, slot)) best = fmaxf(best, partial[slot]);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, o));
  const float offset = best == -INFINITY ? 0.f : best;
  for (int slot = lane; slot < end; slot += 32) {
    if (lists.has_visit(pair, slot)) sum += exp2_approx(partial[slot] - offset);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (lane == 0) params.lse[pair] = offset + log2_approx(sum);
}

struct IndexLossParams {
  const float* item_loss;         // [num_items, values]
  const std::int32_t* num_items;  // [1]
  std::int32_t values;
  bool first, last;  // chunk of the call
  double* total;     // [1]: of the chunks so far
  float* loss;       // [1]
  double weight;
};

inline constexpr int kIndexLossThreads = 1024;

__global__ void __launch_bounds__(kIndexLossThreads) smxx_index_loss_kernel(const __grid_constant__ IndexLossParams params) {
  __shared__ double sums[kIndexLossThreads];
  const int thread = threadIdx.x;
  const std::int64_t count = std::int64_t{*params.num_items} * params.values;
  double sum = 0.0;
  for (std::int64_t i = thread; i < count; i += kIndexLossThreads) sum += params.item_loss[i];
  sums[thread] = sum;
  __syncthreads();
  for (int half = kIndexLossThreads / 2; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  if (thread != 0) return;
  const double total = params.first ? sums[0] : *params.total + sums[0];
  *params.total = total;
  if (params.last) *params.loss = static_cast<float>(total * params.weight);
}

}  // namespace openmsa::cuda
