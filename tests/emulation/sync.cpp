// Where threads meet: barriers of the CTA, exchanges of a warp, mbarriers, what CTAs of a cluster do together.
#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace openmsa::emulation {

// ---- barriers ----

Votes sync_threads(bool vote) {
  Cta& cta = *engine.cta;
  CtaBarrier& barrier = cta.barriers[0];
  if (barrier.arrived == 0) barrier.votes = {0, 1, 0};
  barrier.votes.any |= vote ? 1 : 0;
  barrier.votes.all &= vote ? 1 : 0;
  barrier.votes.count += vote ? 1 : 0;
  const std::uint32_t generation = barrier.generation;
  if (static_cast<int>(++barrier.arrived) == cta.num_live)
    finish_barrier(barrier);
  else
    wait_for_change(barrier.generation, "__syncthreads", 0);
  return barrier.results[generation % 2];
}

namespace {

// Counts the thread in; true if it was the last one.
bool arrive_at_named(std::uint32_t id, std::uint32_t threads) {
  if (id == 0 || id >= 16) fail("uses named barrier " + std::to_string(id) + "; ids are 1 to 15");
  if (threads == 0 || threads % 32 != 0 || static_cast<int>(threads) > engine.num_threads) {
    fail("lets " + std::to_string(threads) + " threads meet at a named barrier");
  }
  CtaBarrier& barrier = engine.cta->barriers[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) {
    fail("expects " + std::to_string(threads) + " threads at named barrier " + std::to_string(id) + ", others " +
         std::to_string(barrier.expected));
  }
  if (++barrier.arrived < barrier.expected) return false;
  finish_barrier(barrier);
  return true;
}

}  // namespace

void named_barrier(std::uint32_t id, std::uint32_t threads) {
  if (!arrive_at_named(id, threads)) wait_for_change(engine.cta->barriers[id].generation, "named barrier", id);
}

void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  arrive_at_named(id, threads);
  let_others_in();
}

std::int32_t poll(const std::int32_t* word) {
  constexpr std::uint32_t kMostLooks = 256;
  Fiber& fiber = *engine.current;
  to_scheduler(fiber);
  fiber.looks = fiber.looked_at == word && fiber.looked_value != *word ? 0 : fiber.looks + 1;  // at one word or at several in turn
  fiber.looked_at = word;
  fiber.looked_value = *word;
  if (fiber.looks > kMostLooks)
    wait_for_change(reinterpret_cast<const std::uint32_t&>(*word), "looks at memory that stays", static_cast<std::uint32_t>(*word));
  return *word;
}

void meet_warp(const char* instruction, std::uint32_t mask, void* mine, WarpWork work) {
  Warp& warp = warp_of(*engine.current);
  const auto self = static_cast<unsigned>(lane());
  if ((mask >> self & 1) == 0) fail(std::string(instruction) + " by a lane that is not in its own mask");
  const auto open = std::find_if(warp.meetings.begin(), warp.meetings.end(),
                                 [&](const WarpMeeting& other) { return other.arrived != 0 && other.mask == mask; });
  const auto unused =
      std::find_if(warp.meetings.begin(), warp.meetings.end(), [](const WarpMeeting& other) { return other.arrived == 0; });
  WarpMeeting& meeting = open != warp.meetings.end() ? *open : *unused;
  if (meeting.arrived == 0) {
    meeting.instruction = instruction;
    meeting.mask = mask;
    meeting.work = work;
  } else if (std::strcmp(meeting.instruction, instruction) != 0) {
    fail(std::string("lanes of a warp meet in ") + meeting.instruction + " and " + instruction);
  }
  meeting.arrived |= 1u << self;
  meeting.lanes[self] = mine;
  if (meeting.arrived == (mask & warp.live))
    finish_meeting(meeting, warp.live);
  else
    wait_for_change(meeting.generation, instruction, mask);
}

// ---- mbarriers ----

namespace {

Barrier checked_barrier(const std::uint64_t* word, const char* what) {
  const Barrier barrier = load_barrier(word);
  if (barrier.magic != kMagic) fail(std::string(what) + " a barrier that was not initialised or was overwritten");
  return barrier;
}

void settle(std::uint64_t* word, Barrier barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
  }
  store_barrier(word, barrier);
}

void arrive(std::uint64_t* word, std::uint32_t bytes) {
  Barrier barrier = checked_barrier(word, "arrives on");
  if (barrier.pending == 0) fail("arrives on a barrier that has all " + std::to_string(barrier.count) + " arrivals of the phase");
  barrier.bytes += static_cast<std::int64_t>(bytes);
  --barrier.pending;
  settle(word, barrier);
  let_others_in();
}

}  // namespace

void mbarrier_init(std::uint64_t* word, std::uint32_t arrivals) {
  if (arrivals == 0 || arrivals >= 1u << 14) fail("initialises a barrier for " + std::to_string(arrivals) + " arrivals");
  if (reinterpret_cast<std::uintptr_t>(word) % 8 != 0) fail("initialises a barrier that is not 8-byte aligned");
  Barrier barrier{};
  barrier.magic = kMagic;
  barrier.count = barrier.pending = arrivals;
  store_barrier(word, barrier);
}

void mbarrier_arrive(std::uint64_t* word) { arrive(word, 0); }
void mbarrier_arrive_expect(std::uint64_t* word, std::uint32_t bytes) {
  if (bytes >= 1u << 20) fail("expects " + std::to_string(bytes) + " bytes on a barrier; 2^20 - 1 is the most");
  arrive(word, bytes);
}

void mbarrier_complete(std::uint64_t* word, std::uint32_t bytes) {
  Barrier barrier = checked_barrier(word, "completes a copy on");
  barrier.bytes -= static_cast<std::int64_t>(bytes);
  settle(word, barrier);
}

void mbarrier_wait(std::uint64_t* word, std::uint32_t parity) {
  if (parity > 1) fail("waits for parity " + std::to_string(parity));
  if (checked_barrier(word, "waits for").phase != parity) return;
  Fiber& fiber = *engine.current;
  fiber.barrier = word;
  fiber.parity = parity;
  to_scheduler(fiber);
  fiber.barrier = nullptr;
}

// ---- clusters ----

std::uint32_t cluster_rank() { return engine.cta->rank; }

void cluster_sync() {
  meet_warp("barrier.cluster", 0xffffffffu, nullptr, nullptr);
  CtaBarrier& barrier = engine.cluster;
  if (static_cast<int>(++barrier.arrived) == engine.num_live)
    finish_barrier(barrier);
  else
    wait_for_change(barrier.generation, "barrier of the cluster", barrier.generation);
  engine.cta->peers_started = true;
}

Cta& peer(std::uint32_t rank, const char* does) {
  const auto refuse = [&](const std::string& why) {
    fail(std::string(does) + " shared memory of CTA " + std::to_string(rank) + " of the cluster, which " + why);
  };
  if (rank >= static_cast<std::uint32_t>(engine.num_ctas)) refuse("has " + std::to_string(engine.num_ctas));
  Cta& cta = *engine.ctas[rank];
  if (&cta == engine.cta) return cta;
  if (!engine.cta->peers_started) refuse("may not have started: the caller's CTA has not been through the cluster's barrier yet");
  if (cta.num_live == 0) refuse("has ended");
  return cta;
}

void mbarrier_arrive_remote(std::uint64_t* barrier, std::uint32_t rank) {
  const std::uint32_t address = shared_address(barrier);
  Cta& mine = *engine.cta;
  enter(peer(rank, "arrives on a barrier in"));
  auto* word = static_cast<std::uint64_t*>(shared_pointer(address, sizeof *barrier));
  enter(mine);
  mbarrier_arrive(word);
}

}  // namespace openmsa::emulation
