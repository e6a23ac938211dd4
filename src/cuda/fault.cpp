#include "cuda/fault.hpp"

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda/device.hpp"
#include "cuda/launch.hpp"
#include "openmsa/error.hpp"

namespace openmsa::cuda {
namespace {

constexpr std::int32_t kMaxDevices = 64;
std::mutex mutex;
std::array<Fault*, kMaxDevices> records{};

std::string describe(const Fault& fault, const char** argument) {
  const auto text = [](std::int64_t x) { return std::to_string(x); };
  const std::string where = text(fault.where), first = text(fault.first), second = text(fault.second);
  switch (static_cast<FaultCode>(fault.code)) {
    case FaultCode::kCuSeqlensQ:
    case FaultCode::kCuSeqlensK:
      *argument = static_cast<FaultCode>(fault.code) == FaultCode::kCuSeqlensQ ? "batch.cu_seqlens_q" : "batch.cu_seqlens_k";
      return "has sequence " + where + " from " + first + " to " + second +
             "; offsets start at 0, never decrease, and end at the number of tokens. Build them as 0 followed by the running sum "
             "of "
             "lengths.";
    case FaultCode::kSeqlensK:
      *argument = "batch.seqlens_k";
      return "has " + first + " at entry " + where + "; a length is at least 0 and fits the page table, which has " + second +
             " pages a sequence. Pass a wider page_table or correct the length.";
    case FaultCode::kMaxSeqlen:
      *argument = "batch.max_seqlen_k";
      return "(or max_seqlen_q) is exceeded by sequence " + where + " with " + first + " queries and " + second +
             " keys; no sequence may be longer. Give the true maxima.";
    case FaultCode::kPageId:
      *argument = "batch.page_table";
      return "[" + where + "][" + first + "] is " + second + "; the id of a live page must lie in the pool. Correct the table.";
    case FaultCode::kBlockId:
      *argument = "block_ids";
      return "row " + where + " (query token * Hkv + group) slot " + first + " is " + second +
             "; an id must be a block with a key that the query sees, or -1 in the tail. Select causally.";
    case FaultCode::kBlockOrder:
      *argument = "block_ids";
      return "row " + where + " (query token * Hkv + group) slot " + first + " is " + second +
             "; a list is strictly ascending, with -1 only in its tail. Sort it.";
    case FaultCode::kSlot:
      *argument = "slots";
      return "[" + first + "] is " + where + ", beyond the " + second +
             " pages of the pool; a slot is page * block_size + place in the page, or negative for a row that is left out. Correct "
             "it.";
    case FaultCode::kNone: break;
  }
  return "unknown fault";
}

}  // namespace

Fault* device_fault(std::int32_t device) {
  const std::lock_guard lock(mutex);
  Fault*& record = records.at(static_cast<std::size_t>(device));
  if (record == nullptr) {
    const DeviceGuard guard(device);
    std::int32_t* claim = fault_claim();
    check(cudaHostAlloc(reinterpret_cast<void**>(&record), sizeof(Fault), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    *record = Fault{.code = 0, .ready = 0, .generation = 1, .claim = claim, .where = 0, .first = 0, .second = 0};
  }
  return record;  // unified addressing: the same pointer on the device
}

void throw_device_fault(std::int32_t device) {
  volatile Fault* record = device_fault(device);
  if (record->ready == 0) return;
  const Fault found{record->code, 1, 0, nullptr, record->where, record->first, record->second};
  record->ready = 0;
  // Only now may the next fault be reported.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  record->generation = record->generation + 1;
  const char* argument = "";
  const std::string text = describe(found, &argument);
  throw Error(ErrorCode::kInvalidArgument, argument,
              std::string(argument) + ": " + text + " (Found on the GPU by an earlier call, whose results are undefined.)");
}

}  // namespace openmsa::cuda
