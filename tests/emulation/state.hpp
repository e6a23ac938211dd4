// What the emulator keeps of the CTAs that run, those of one cluster: their fibers, warps, warpgroups, barriers and shared memory. For
// the sources of the emulator alone; kernels and tests see engine.hpp.
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

struct Cta;

struct Fiber {
  Cta* cta = nullptr;
  jmp_buf context;
  ucontext_t start;
  char* stack = nullptr;
  bool started = false;  // waits in its loop for a body
  bool done = true;
  int number = 0;  // in its CTA
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

// What begins afresh with every CTA.
struct CtaState {
  Index block{};
  std::uint32_t rank = 0;  // in the cluster
  int num_live = 0;
  bool peers_started = false;  // it has been through the cluster's barrier
  std::array<Warp, kMaxThreads / 32> warps;
  std::array<Warpgroup, kMaxThreads / 128> warpgroups;
  std::array<CtaBarrier, 16> barriers;
  bool fence_pending = false;
  std::array<std::uint32_t, kSharedEnd / kChunkBytes> unfenced{};  // by chunk: lanes whose fence is missing
};

struct Cta : CtaState {
  std::vector<std::unique_ptr<Fiber>> fibers;
  // Shared memory: host address `zero` + a shared address; a page that nobody may touch follows it closely.
  unsigned char* region = nullptr;
  unsigned char* zero = nullptr;
  std::vector<unsigned char> async;    // what asynchronous reads see
  std::vector<unsigned char> statics;  // static shared memory, while another CTA's is in its place

  unsigned char* raw_begin() const { return zero + kRawAddress; }
  unsigned char* slack_end() const { return region + kPage + kRegionBytes / 2; }
};

// A bulk load under way, and the CTA that it fills.
struct Load {
  Cta* target;
  std::function<void()> run;
};

struct Engine {
  std::vector<std::unique_ptr<Cta>> ctas;  // of the largest cluster so far
  int num_ctas = 0, num_threads = 0;       // of a cluster, of a CTA
  std::vector<Fiber*> fibers;              // of the cluster, CTA after CTA
  Cta* cta = nullptr;                      // whose thread or asynchronous work runs
  Cta* resident = nullptr;                 // whose static shared memory is in its place
  Fiber* current = nullptr;
  jmp_buf scheduler;
  int num_live = 0;  // threads of the cluster
  CtaBarrier cluster;
  std::deque<Load> loads;
  int starved_begin = 0, starved_end = 0;  // threads that get no turn while others can go on, CTA after CTA
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
  const void* kernel = nullptr;
  bool running = false;
  std::size_t smem_bytes = 0;
  std::vector<const unsigned char*> static_pieces;
  std::uint32_t random = 0;
};
extern Engine engine;

inline Warp& warp_of(const Fiber& fiber) { return fiber.cta->warps[static_cast<std::size_t>(fiber.number / 32)]; }
inline Warpgroup& warpgroup_of(const Fiber& fiber) { return fiber.cta->warpgroups[static_cast<std::size_t>(fiber.number / 128)]; }

std::string hex(std::uint64_t x);

// Ways for the current fiber to let others run: at any time with a seed; until a counter changes; until asynchronous work got so far.
void to_scheduler(Fiber& fiber);
void let_others_in();
void wait_for_change(const std::uint32_t& counter, const char* in, std::uint32_t id);
void wait_until(const std::uint64_t& reached, std::uint64_t target);

inline Fiber& fiber_of(int i) { return *engine.fibers[static_cast<std::size_t>(i)]; }
inline int num_fibers() { return static_cast<int>(engine.fibers.size()); }
bool ready(const Fiber& fiber);
std::uint32_t next_random();

void finish_barrier(CtaBarrier& barrier);
void finish_meeting(WarpMeeting& meeting, std::uint32_t live);
void run_store_group(Fiber& fiber);  // the oldest
// Nobody can go on: one piece of what is under way gets done, any load or what somebody waits for. False: nothing is.
bool do_asynchronous_work();

// Shared memory of CTAs: made and filled for a grid and a CTA, looked through at the CTA's end; static shared memory put in its place;
// where that of a CTA is now.
void make_shared(Cta& cta);
void fill_shared(Cta& cta);
void check_shared(const Cta& cta);
void bring_statics(Cta& cta);
inline unsigned char* at_home(const Cta& cta, const unsigned char* pointer) {
  const bool away = engine.resident != &cta && pointer >= __start_openmsa_shared && pointer < __stop_openmsa_shared;
  return const_cast<unsigned char*>(away ? cta.statics.data() + (pointer - __start_openmsa_shared) : pointer);
}

void enter(Cta& cta);                             // what follows is done for that CTA
Cta& peer(std::uint32_t rank, const char* does);  // a CTA of the cluster whose shared memory is there, else fails

}  // namespace openmsa::emulation
