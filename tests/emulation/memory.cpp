// Shared memory, and the work that goes on beside the threads: bulk copies and products.
#include <algorithm>
#include <cstring>
#include <utility>

#include "state.hpp"

namespace openmsa::emulation {

// ---- shared memory ----

unsigned char* dynamic_shared() { return raw_begin(); }

std::uint32_t shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte >= engine.zero && byte < slack_end()) return static_cast<std::uint32_t>(byte - engine.zero);
  if (byte < __start_openmsa_shared || byte >= __stop_openmsa_shared) fail("takes the shared address of memory that is not shared");
  const unsigned char* piece = byte - reinterpret_cast<std::uintptr_t>(byte) % kStaticPiece;
  auto& pieces = engine.static_pieces;
  const auto found = std::find(pieces.begin(), pieces.end(), piece);
  const auto index = static_cast<std::uint32_t>(found - pieces.begin());
  if (found == pieces.end()) pieces.push_back(piece);
  const std::uint32_t address = kStaticAddress + index * kStaticPiece;
  if (address >= kSharedEnd) fail("takes the address of too much static shared memory");
  return address + static_cast<std::uint32_t>(byte - piece);
}

void* shared_pointer(std::uint32_t address, std::uint32_t bytes) {
  if (address >= kRawAddress && address + bytes <= kRawAddress + engine.smem_bytes) return engine.zero + address;
  const std::uint32_t index = (address - kStaticAddress) / kStaticPiece, offset = (address - kStaticAddress) % kStaticPiece;
  if (address < kStaticAddress || index >= engine.static_pieces.size() || offset + bytes > kStaticPiece) {
    fail("accesses " + std::to_string(bytes) + " bytes at shared address " + hex(address) +
         ", outside its shared memory (dynamic: " + hex(kRawAddress) + " to " + hex(kRawAddress + engine.smem_bytes) + ")");
  }
  return const_cast<unsigned char*>(engine.static_pieces[index]) + offset;
}

namespace {
bool is_dynamic(std::uint32_t address) { return address < kStaticAddress; }
void publish() {
  std::memcpy(engine.async.data(), raw_begin(), engine.smem_bytes);
  engine.fence_pending = false;
}
}  // namespace

// A copy of everything a thread would cost too much: the lanes of a warp mostly fence one after the other, so one copies for all;
// where it does not come, the next read does.
void fence_async() {
  if (options().timing == Timing::kLate) {
    engine.fence_pending = true;
    if (lane() == 31) publish();
  }
  Warp& warp = engine.cta.warps[static_cast<std::size_t>(engine.current->number / 32)];
  std::uint32_t missing = 0;
  for (const std::uint32_t chunk : warp.unfenced) missing |= engine.unfenced[chunk] &= ~(1u << lane());
  if (missing == 0) warp.unfenced.clear();
  let_others_in();
}

void matrix_stored(std::uint32_t address) {
  const std::uint32_t chunk = address / kChunkBytes;
  if (engine.unfenced[chunk] == 0)
    engine.cta.warps[static_cast<std::size_t>(engine.current->number / 32)].unfenced.push_back(chunk);
  engine.unfenced[chunk] = 0xffffffffu;
}

namespace {
void check_fenced(std::uint32_t address, std::uint32_t bytes) {
  for (std::uint32_t at = address; at < address + bytes; at += kChunkBytes) {
    if (engine.unfenced[at / kChunkBytes] == 0) continue;
    fail("asynchronous access to shared address " + hex(at) + ", which stmatrix wrote; lanes " +
         hex(engine.unfenced[at / kChunkBytes]) + " of that warp have no fence between");
  }
}
}  // namespace

const void* async_source(std::uint32_t address, std::uint32_t bytes) {
  void* source = shared_pointer(address, bytes);
  check_fenced(address, bytes);
  if (options().timing == Timing::kEarly || !is_dynamic(address)) return source;
  if (engine.fence_pending) publish();
  return engine.async.data() + (address - kRawAddress);
}

void async_store(std::uint32_t address, const void* data, std::uint32_t bytes) {
  check_fenced(address, bytes);
  std::memcpy(shared_pointer(address, bytes), data, bytes);
  if (is_dynamic(address)) std::memcpy(engine.async.data() + (address - kRawAddress), data, bytes);
}

// ---- asynchronous work ----

void issue_load(std::function<void()> load) {
  if (options().timing == Timing::kEarly)
    load();
  else
    engine.cta.loads.push_back(std::move(load));
  let_others_in();
}

void issue_store(std::function<void()> store) {
  if (options().timing == Timing::kEarly) {
    store();
    store = [] {};
  }
  engine.current->stores.push_back(std::move(store));
  let_others_in();
}

void commit_stores() { engine.current->store_groups.push_back(std::exchange(engine.current->stores, {})); }

void wait_stores(std::size_t pending_groups) {
  Fiber& fiber = *engine.current;
  const std::size_t groups = fiber.store_groups.size();
  if (groups <= pending_groups) return;
  const std::uint64_t target = fiber.store_groups_done + groups - pending_groups;
  // What is empty or done takes no time.
  while (fiber.store_groups_done < target && (options().timing == Timing::kEarly || fiber.store_groups.front().empty())) {
    run_store_group(fiber);
  }
  wait_until(fiber.store_groups_done, target);
}

void issue_copy(std::uint32_t to, const void* source, std::uint32_t bytes, std::uint32_t live_bytes) {
  if (to % bytes != 0 || reinterpret_cast<std::uintptr_t>(source) % bytes != 0 || live_bytes > bytes) {
    fail("cp.async of " + std::to_string(bytes) + " bytes that are not aligned, or of more than it writes");
  }
  void* target = shared_pointer(to, bytes);
  auto copy = [=] {
    std::memset(target, 0, bytes);
    if (live_bytes > 0) std::memcpy(target, source, live_bytes);
  };
  if (options().timing == Timing::kEarly)
    copy();
  else
    engine.current->copies.push_back(std::move(copy));
}

void commit_copies() { engine.current->copy_groups.push_back(std::exchange(engine.current->copies, {})); }

void wait_copies(std::size_t pending_groups) {
  auto& groups = engine.current->copy_groups;
  for (; groups.size() > pending_groups; groups.pop_front()) {
    for (const auto& copy : groups.front()) copy();
  }
  let_others_in();
}

namespace {

Warpgroup& warpgroup_of(const Fiber& fiber) { return engine.cta.warpgroups[static_cast<std::size_t>(fiber.number / 128)]; }

bool same_instruction(const Wgmma& a, const Wgmma& b) {
  return a.n == b.n && a.half == b.half && a.a_in_registers == b.a_in_registers && a.a_mn_major == b.a_mn_major &&
         a.b_mn_major == b.b_mn_major && (a.a_in_registers || a.a == b.a) && a.b == b.b && a.accumulate == b.accumulate;
}

}  // namespace

void issue_wgmma(const Wgmma& wgmma, float* d, const std::uint32_t* a_registers) {
  Fiber& fiber = *engine.current;
  Warpgroup& group = warpgroup_of(fiber);
  if (engine.cta.num_threads < fiber.number / 128 * 128 + 128) fail("wgmma by a warpgroup of fewer than 128 threads");
  if (group.arrived == 0)
    group.wgmma = wgmma;
  else if (!same_instruction(group.wgmma, wgmma))
    fail("threads of a warpgroup meet in different wgmmas, or with different descriptors");
  const auto t = static_cast<std::size_t>(fiber.number % 128);
  group.d[t] = d;
  if (a_registers != nullptr) std::copy_n(a_registers, 4, &group.a[4 * t]);
  ++fiber.wgmmas;
  if (++group.arrived < 128) {
    wait_for_change(group.generation, "wgmma", static_cast<std::uint32_t>(wgmma.n));
    return;
  }
  group.arrived = 0;
  ++group.generation;
  if (options().timing == Timing::kEarly) {
    run_wgmma(wgmma, group.d.data(), group.a.data());
    ++group.executed;
  } else {
    PendingWgmma pending{wgmma, group.d, {}};
    if (a_registers != nullptr) pending.a.assign(group.a.begin(), group.a.end());
    group.pending.push_back(std::move(pending));
  }
}

void commit_wgmma() { engine.current->wgmma_groups.push_back(engine.current->wgmmas); }

void wait_wgmma(std::size_t pending_groups) {
  Fiber& fiber = *engine.current;
  Warpgroup& group = warpgroup_of(fiber);
  while (fiber.wgmma_groups.size() > pending_groups) {
    fiber.wgmmas_awaited = fiber.wgmma_groups.front();
    fiber.wgmma_groups.pop_front();
  }
  wait_until(group.executed, fiber.wgmmas_awaited);
}

}  // namespace openmsa::emulation
