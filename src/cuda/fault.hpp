// Faults found on the device. Index data on a GPU is checked where it is used, without making the host wait: the first fault goes to a
// record in pinned host memory, and the next call on that device (or check_device()) throws it.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

enum class FaultCode : std::int32_t {
  kNone = 0,
  kCuSeqlensQ,  // (sequence, its begin, its end)
  kCuSeqlensK,
  kSeqlensK,    // (sequence, its length, max_pages)
  kMaxSeqlen,   // (sequence, queries, keys): longer than the batch's max_seqlen_q or max_seqlen_k
  kPageId,      // (sequence, block, page id)
  kBlockId,     // (packed query token * Hkv + group, slot, id): out of range or beyond the causal limit
  kBlockOrder,  // the same: not ascending, or after a -1
  kSlot,        // (slot, its row, num_pages): beyond the pool
};

struct Fault {
  std::int32_t code;        // FaultCode
  std::int32_t ready;       // 1 once the fields are there
  std::int32_t generation;  // faults told so far plus 1; the host counts
  std::int32_t* claim;      // in device memory: the last generation that somebody reported in
  std::int64_t where, first, second;
};

#if defined(__CUDACC__) || defined(OPENMSA_EMULATED)
// Out of line: it never runs in a sound program, and inlined it would cost every kernel registers. One reporter a generation gets
// through, by an atomic in device memory: the bus to host memory need not know any.
__device__ __noinline__ inline void report(volatile Fault* fault, FaultCode code, std::int64_t where, std::int32_t first,
                                           std::int32_t second) {
  if (atomicMax(fault->claim, fault->generation) >= fault->generation) return;
  fault->code = static_cast<std::int32_t>(code);
  fault->where = where;
  fault->first = first;
  fault->second = second;
  __threadfence_system();
  fault->ready = 1;
}
#endif

// The record of a device, made on first use.
Fault* device_fault(std::int32_t device);

std::int32_t* fault_claim();  // on the current device

}  // namespace openmsa::cuda
