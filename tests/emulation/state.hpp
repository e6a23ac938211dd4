// What the emulator keeps of the CTA that runs: its fibers, warps, warpgroups, barriers and shared memory. For the sources of the
// emulator alone; kernels and tests see engine.hpp.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "engine.hpp"

// Static shared memory of all kernels, see cuda_runtime.h; the linker knows where that is. Null where no kernel has any.
extern "C" {
extern unsigned char __start_openmsa_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_openmsa_shared[] __attribute__((weak, visibility("hidden")));
}

namespace openmsa::emulation {

inline constexpr std::uint32_t kRawAddress =
    0x400;  // of dynamic shared memory, after what the hardware keeps; its end stays below:
inline constexpr std::uint32_t kStaticAddress = 0x3a000;  // where static shared memory that somebody takes the address of is put
inline constexpr std::uint32_t kSharedEnd = 0x40000;      // descriptors hold 18 bits
inline constexpr std::uint32_t kStaticPiece = 1024, kChunkBytes = 16;
inline constexpr std::size_t kPage = 4096, kRegionBytes = std::size_t{512} << 10;

// The word of an mbarrier.
struct Barrier {
  std::uint64_t magic : 8, phase : 1, count : 14, pending : 14;
  std::int64_t bytes : 27;
};
static_assert(sizeof(Barrier) == 8);
inline constexpr std::uint64_t kMagic = 0x9b;

inline Barrier load_barrier(const std::uint64_t* word) {
  Barrier barrier;
  std::memcpy(&barrier, word, sizeof barrier);
  return barrier;
}
inline void store_barrier(std::uint64_t* word, const Barrier& barrier) { std::memcpy(word, &barrier, sizeof barrier); }

// Lanes that wait for each other. Several masks may be waited for at a time.
struct WarpMeeting {
  const char* instruction = nullptr;
  std::uint32_t mask = 0, arrived = 0, generation = 0;
  void* lanes[32] = {};
  WarpWork work = nullptr;
};

struct Warp {
  std::uint32_t live = 0;  // lanes that have not returned
  std::array<WarpMeeting, 32> meetings;
  std::vector<std::uint32_t> unfenced;  // chunks of shared memory that stmatrix wrote and not all lanes fenced
};

struct PendingWgmma {
  Wgmma wgmma;
  std::array<float*, 128> d;
  std::vector<std::uint32_t> a;
};

struct Warpgroup {
  Wgmma wgmma{};
  int arrived = 0;
  std::uint32_t generation = 0;
  std::array<float*, 128> d{};
  std::array<std::uint32_t, 512> a{};
  std::deque<PendingWgmma> pending;
  std::uint64_t executed = 0;
};

struct CtaBarrier {
  std::uint32_t expected = 0, arrived = 0, generation = 0;
  Votes votes{};
  std::array<Votes, 2> results{};  // by the parity of the generation
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  char* stack = nullptr;
  bool started = false;  // waits in its loop for a body
  bool done = true;
  int number = 0;
  Index thread{};
  // What it waits for: a counter to leave `seen`, an mbarrier to leave a phase, or asynchronous work to reach a number. Null: nothing.
  const std::uint32_t* counter = nullptr;
  std::uint32_t seen = 0;
  const std::uint64_t* barrier = nullptr;
  std::uint32_t parity = 0;
  const std::uint64_t* reached = nullptr;
  std::uint64_t target = 0;
  const char* waits_in = nullptr;
  std::uint32_t waits_id = 0;
  int registers = 0;                        // as setmaxnreg left them; 0: untouched
  const std::int32_t* looked_at = nullptr;  // see poll()
  std::int32_t looked_value = 0;
  std::uint32_t looks = 0;  // in a row that saw the same
  // Asynchronous work of its own.
  std::uint64_t wgmmas = 0, wgmmas_awaited = 0;
  std::deque<std::uint64_t> wgmma_groups;
  std::vector<std::function<void()>> stores;
  std::deque<std::vector<std::function<void()>>> store_groups;
  std::uint64_t store_groups_done = 0;
  std::vector<std::function<void()>> copies;
  std::deque<std::vector<std::function<void()>>> copy_groups;
};

struct Cta {
  int num_threads = 0, num_live = 0;
  std::array<Warp, kMaxThreads / 32> warps;
  std::array<Warpgroup, kMaxThreads / 128> warpgroups;
  std::array<CtaBarrier, 16> barriers;
  std::deque<std::function<void()>> loads;
  int starved_begin = 0, starved_end = 0;  // threads that get no turn while others can go on
};

struct Engine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  Cta cta;
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
  const void* kernel = nullptr;
  bool running = false;
  // Shared memory: host address `zero` + a shared address; a page that nobody may touch follows it closely.
  unsigned char* region = nullptr;
  unsigned char* zero = nullptr;
  std::size_t smem_bytes = 0;
  std::vector<unsigned char> async;  // what asynchronous reads see
  bool fence_pending = false;
  std::array<std::uint32_t, kSharedEnd / kChunkBytes> unfenced{};  // by chunk: lanes whose fence is missing
  std::vector<const unsigned char*> static_pieces;
  std::uint32_t random = 0;
};
extern Engine engine;

inline unsigned char* raw_begin() { return engine.zero + kRawAddress; }
inline unsigned char* slack_end() { return engine.region + kPage + kRegionBytes / 2; }

std::string hex(std::uint64_t x);

// Ways for the current fiber to let others run: at any time with a seed; until a counter changes; until asynchronous work got so far.
void to_scheduler(Fiber& fiber);
void let_others_in();
void wait_for_change(const std::uint32_t& counter, const char* in, std::uint32_t id);
void wait_until(const std::uint64_t& reached, std::uint64_t target);

void finish_barrier(CtaBarrier& barrier);
void finish_meeting(WarpMeeting& meeting, std::uint32_t live);
void run_store_group(Fiber& fiber);  // the oldest

}  // namespace openmsa::emulation
