// Shared memory, and the work that goes on beside the threads: bulk copies and products.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "state.hpp"

namespace openmsa::emulation {

// ---- shared memory ----

void make_shared(Cta& cta) {
  if (cta.region == nullptr) {
    void* region = mmap(nullptr, kRegionBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) throw std::bad_alloc();
    cta.region = static_cast<unsigned char*>(region);
    mprotect(cta.region + kPage, kRegionBytes / 2, PROT_READ | PROT_WRITE);
  }
  const std::size_t end = (kRawAddress + engine.smem_bytes + 1023) / 1024 * 1024;
  cta.zero = cta.slack_end() - end;
}

namespace {
constexpr unsigned char kCanary = 0xa5;
}

void fill_shared(Cta& cta) {
  std::memset(cta.zero, kCanary, kRawAddress);
  std::memset(cta.raw_begin(), 0xff, engine.smem_bytes);
  std::fill(cta.raw_begin() + engine.smem_bytes, cta.slack_end(), kCanary);
  cta.async.assign(engine.smem_bytes, 0xff);
  cta.statics.assign(static_cast<std::size_t>(__stop_openmsa_shared - __start_openmsa_shared), 0xff);
}

void check_shared(const Cta& cta) {
  const auto intact = [](const unsigned char* begin, const unsigned char* end) {
    return std::all_of(begin, end, [](unsigned char x) { return x == kCanary; });
  };
  if (!intact(cta.zero, cta.raw_begin())) fail("wrote below its dynamic shared memory");
  if (!intact(cta.raw_begin() + engine.smem_bytes, cta.slack_end())) fail("wrote past its dynamic shared memory");
}

void bring_statics(Cta& cta) {
  if (engine.resident == &cta) return;
  if (engine.resident != nullptr) std::copy(__start_openmsa_shared, __stop_openmsa_shared, engine.resident->statics.begin());
  std::copy(cta.statics.begin(), cta.statics.end(), __start_openmsa_shared);
  engine.resident = &cta;
}

unsigned char* dynamic_shared() { return engine.cta->raw_begin(); }

std::uint32_t shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  const Cta& cta = *engine.cta;
  if (byte >= cta.zero && byte < cta.slack_end()) return static_cast<std::uint32_t>(byte - cta.zero);
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
  if (address >= kRawAddress && address + bytes <= kRawAddress + engine.smem_bytes) return engine.cta->zero + address;
  const std::uint32_t index = (address - kStaticAddress) / kStaticPiece, offset = (address - kStaticAddress) % kStaticPiece;
  if (address < kStaticAddress || index >= engine.static_pieces.size() || offset + bytes > kStaticPiece) {
    fail("accesses " + std::to_string(bytes) + " bytes at shared address " + hex(address) +
         ", outside its shared memory (dynamic: " + hex(kRawAddress) + " to " + hex(kRawAddress + engine.smem_bytes) + ")");
  }
  return at_home(*engine.cta, engine.static_pieces[index] + offset);
}

namespace {
bool is_dynamic(std::uint32_t address) { return address < kStaticAddress; }
void publish() {
  Cta& cta = *engine.cta;
  std::memcpy(cta.async.data(), cta.raw_begin(), engine.smem_bytes);
  cta.fence_pending = false;
}
}  // namespace

// A copy of everything a thread would cost too much: the lanes of a warp mostly fence one after the other, so one copies for all;
// where it does not come, the next read does.
void fence_async() {
  if (options().timing == Timing::kLate) {
    engine.cta->fence_pending = true;
    if (lane() == 31) publish();
  }
  Warp& warp = warp_of(*engine.current);
  std::uint32_t missing = 0;
  for (const std::uint32_t chunk : warp.unfenced) missing |= engine.cta->unfenced[chunk] &= ~(1u << lane());
  if (missing == 0) warp.unfenced.clear();
  let_others_in();
}

void matrix_stored(std::uint32_t address) {
  const std::uint32_t chunk = address / kChunkBytes;
  std::uint32_t& unfenced = engine.cta->unfenced[chunk];
  if (unfenced == 0) warp_of(*engine.current).unfenced.push_back(chunk);
  unfenced = 0xffffffffu;
}

namespace {
void check_fenced(std::uint32_t address, std::uint32_t bytes) {
  for (std::uint32_t at = address; at < address + bytes; at += kChunkBytes) {
    const std::uint32_t unfenced = engine.cta->unfenced[at / kChunkBytes];
    if (unfenced == 0) continue;
    fail("asynchronous access to shared address " + hex(at) + ", which stmatrix wrote; lanes " + hex(unfenced) +
         " of that warp have no fence between");
  }
}
}  // namespace

const void* async_source(std::uint32_t address, std::uint32_t bytes) {
  void* source = shared_pointer(address, bytes);
  check_fenced(address, bytes);
  if (options().timing == Timing::kEarly || !is_dynamic(address)) return source;
  if (engine.cta->fence_pending) publish();
  return engine.cta->async.data() + (address - kRawAddress);
}

void async_store(std::uint32_t address, const void* data, std::uint32_t bytes) {
  check_fenced(address, bytes);
  std::memcpy(shared_pointer(address, bytes), data, bytes);
  if (is_dynamic(address)) std::memcpy(engine.cta->async.data() + (address - kRawAddress), data, bytes);
}

// ---- asynchronous work ----

namespace {
void run_load(const Load& load) {
  Cta& before = *engine.cta;
  enter(*load.target);
  if (load.target->num_live == 0)
    fail("a bulk load fills shared memory of CTA " + std::to_string(load.target->rank) + " of the cluster, which has ended");
  load.run();
  enter(before);
}
}  // namespace

void issue_load(const std::function<void()>& load, std::uint32_t ctas) {
  if (ctas == 0) ctas = 1u << engine.cta->rank;
  for (std::uint32_t rank = 0; ctas >> rank != 0; ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    Load piece{&peer(rank, "loads into"), load};
    if (options().timing == Timing::kEarly)
      run_load(piece);
    else
      engine.loads.push_back(std::move(piece));
  }
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

bool same_instruction(const Wgmma& a, const Wgmma& b) {
  return a.n == b.n && a.half == b.half && a.a_in_registers == b.a_in_registers && a.a_mn_major == b.a_mn_major &&
         a.b_mn_major == b.b_mn_major && (a.a_in_registers || a.a == b.a) && a.b == b.b && a.accumulate == b.accumulate;
}

}  // namespace

void issue_wgmma(const Wgmma& wgmma, float* d, const std::uint32_t* a_registers) {
  Fiber& fiber = *engine.current;
  Warpgroup& group = warpgroup_of(fiber);
  if (engine.num_threads < fiber.number / 128 * 128 + 128) fail("wgmma by a warpgroup of fewer than 128 threads");
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

// ---- work that nobody can go on without ----

namespace {
void run_pending_wgmma(Warpgroup& group) {
  const PendingWgmma pending = std::move(group.pending.front());
  group.pending.pop_front();
  run_wgmma(pending.wgmma, pending.d.data(), pending.a.data());
  ++group.executed;
}
}  // namespace

void run_store_group(Fiber& fiber) {
  for (const auto& store : fiber.store_groups.front()) store();
  fiber.store_groups.pop_front();
  ++fiber.store_groups_done;
}

bool do_asynchronous_work() {
  std::vector<Fiber*> products, stores;  // of products, a thread of each warpgroup
  for (int i = 0; i < num_fibers(); ++i) {
    Fiber& fiber = fiber_of(i);
    if (fiber.done || fiber.reached == nullptr || ready(fiber)) continue;
    if (fiber.reached == &fiber.store_groups_done)
      stores.push_back(&fiber);
    else if (products.empty() || &warpgroup_of(*products.back()) != &warpgroup_of(fiber))
      products.push_back(&fiber);
  }
  const std::size_t count = engine.loads.size() + products.size() + stores.size();
  if (count == 0) return false;
  std::size_t choice = next_random() % count;
  if (choice < products.size()) {
    enter(*products[choice]->cta);
    run_pending_wgmma(warpgroup_of(*products[choice]));
  } else if ((choice -= products.size()) < stores.size()) {
    enter(*stores[choice]->cta);
    run_store_group(*stores[choice]);
  } else {
    const auto next = engine.loads.begin() + static_cast<std::ptrdiff_t>(choice - stores.size());
    const Load load = std::move(*next);
    engine.loads.erase(next);
    run_load(load);
  }
  return true;
}

}  // namespace openmsa::emulation
