#include "state.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace openmsa::emulation {

unsigned largest_cluster = 0;
Position position;

Options& options() {
  static Options the;
  return the;
}

constexpr std::size_t kStackBytes = std::size_t{256} << 10;

std::string hex(std::uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

Engine engine;

std::string kernel_name() {
  Dl_info info{};
  if (dladdr(engine.kernel, &info) == 0 || info.dli_sname == nullptr) return "a kernel";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : info.dli_sname;
}

std::string where() {
  if (!engine.running) return "";
  const Index& block = engine.current != nullptr ? engine.current->cta->block : position.block;
  std::string text = " [" + kernel_name() + ", CTA " + std::to_string(block.x) + (block.y > 0 ? "," + std::to_string(block.y) : "");
  if (engine.current != nullptr) text += ", thread " + std::to_string(engine.current->number);
  return text + "]";
}

// A crash tells where it was before it ends the process.
void report_crash(int) {
  if (!engine.running) return;
  const std::string text = "crash (no such memory, out of an array's bounds, or not aligned to the access)" + where() + "\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

void catch_crashes() {
  static std::array<char, std::size_t{64} << 10> stack;
  stack_t alternative{};
  alternative.ss_sp = stack.data();
  alternative.ss_size = stack.size();
  sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_handler = report_crash;
  action.sa_flags = static_cast<int>(SA_ONSTACK | SA_RESETHAND);
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE}) sigaction(signal, &action, nullptr);
}

std::uint32_t next_random() {
  engine.random ^= engine.random << 13;
  engine.random ^= engine.random >> 17;
  engine.random ^= engine.random << 5;
  return engine.random;
}

// ---- switching ----

void to_scheduler(Fiber& fiber) {
  if (_setjmp(fiber.context) == 0) _longjmp(engine.scheduler, 1);
}

void leave(Fiber& fiber);

// What variables start as that a kernel does not set: NaN, as far as they come to lie here.
__attribute__((noinline)) void poison_stack() {
  constexpr std::size_t kBytes = std::size_t{8} << 10;
  auto* bytes = static_cast<volatile unsigned char*>(__builtin_alloca(kBytes));
  std::memset(const_cast<unsigned char*>(bytes), 0xff, kBytes);
}

// A fiber outlives the thread that it is: after one body it waits for the next.
void fiber_main() {
  for (;;) {
    Fiber& fiber = *engine.current;
    if (options().timing == Timing::kLate) poison_stack();
    try {
      (*engine.body)();
      leave(fiber);
    } catch (...) {
      if (!engine.error) engine.error = std::current_exception();
    }
    fiber.done = true;
    to_scheduler(fiber);
  }
}

void enter(Cta& cta) {
  engine.cta = &cta;
  position.block = cta.block;
}

void resume(Fiber& fiber) {
  bring_statics(*fiber.cta);
  enter(*fiber.cta);
  engine.current = &fiber;
  position.thread = fiber.thread;
  if (_setjmp(engine.scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    setcontext(&fiber.start);
  }
  engine.current = nullptr;
}

void prepare_fiber(Fiber& fiber) {
  if (fiber.stack == nullptr) {
    void* stack = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    mprotect(stack, kPage, PROT_NONE);
    fiber.stack = static_cast<char*>(stack) + kPage;
  }
  if (fiber.started) return;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack;
  fiber.start.uc_stack.ss_size = kStackBytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, fiber_main, 0);
}

// What a thread waits for may lie in its CTA's static shared memory.
template <typename T>
const T* place_of(const Fiber& fiber, const T* pointer) {
  return reinterpret_cast<const T*>(at_home(*fiber.cta, reinterpret_cast<const unsigned char*>(pointer)));
}

bool ready(const Fiber& fiber) {
  if (fiber.counter != nullptr) return *place_of(fiber, fiber.counter) != fiber.seen;
  if (fiber.barrier != nullptr) return load_barrier(place_of(fiber, fiber.barrier)).phase != fiber.parity;
  if (fiber.reached != nullptr) return *fiber.reached >= fiber.target;
  return true;
}

void wait_for_change(const std::uint32_t& counter, const char* in, std::uint32_t id) {
  Fiber& fiber = *engine.current;
  fiber.counter = &counter;
  fiber.seen = counter;
  fiber.waits_in = in;
  fiber.waits_id = id;
  to_scheduler(fiber);
  fiber.counter = nullptr;
}

// With a seed, others may come in between anything that they can notice.
void let_others_in() {
  if (options().seed != 0 && next_random() % 8 == 0) to_scheduler(*engine.current);
}

// Until asynchronous work got that far.
void wait_until(const std::uint64_t& reached, std::uint64_t target) {
  Fiber& fiber = *engine.current;
  if (reached >= target) return;
  fiber.reached = &reached;
  fiber.target = target;
  to_scheduler(fiber);
  fiber.reached = nullptr;
}

// ---- barriers among threads ----

void finish_barrier(CtaBarrier& barrier) {
  barrier.results[barrier.generation % 2] = barrier.votes;
  barrier.arrived = 0;
  ++barrier.generation;
}

void finish_meeting(WarpMeeting& meeting, std::uint32_t live) {
  if (meeting.work != nullptr) meeting.work(meeting.lanes, meeting.mask & live);
  meeting.arrived = 0;
  std::fill(std::begin(meeting.lanes), std::end(meeting.lanes), nullptr);
  ++meeting.generation;
}

// Threads that return are waited for no longer.
void leave_barrier(CtaBarrier& barrier, int num_live) {
  if (barrier.arrived > 0 && static_cast<int>(barrier.arrived) == num_live) finish_barrier(barrier);
}

void leave(Fiber& fiber) {
  if (fiber.wgmmas_awaited != fiber.wgmmas) fail("returns with a wgmma that it did not wait for");
  if (!fiber.stores.empty()) fail("returns with a bulk store that it did not commit");
  if (std::any_of(fiber.store_groups.begin(), fiber.store_groups.end(), [](const auto& group) { return !group.empty(); }))
    fail("returns while bulk stores may still read shared memory: wait for their groups");
  Cta& cta = *fiber.cta;
  leave_barrier(cta.barriers[0], --cta.num_live);
  leave_barrier(engine.cluster, --engine.num_live);
  Warp& warp = warp_of(fiber);
  warp.live &= ~(1u << fiber.number % 32);
  for (WarpMeeting& meeting : warp.meetings) {
    if (meeting.arrived != 0 && meeting.arrived == (meeting.mask & warp.live)) finish_meeting(meeting, warp.live);
  }
}

// ---- the scheduler ----

std::string describe_wait(const Fiber& fiber) {
  if (fiber.barrier != nullptr) {
    const Barrier barrier = load_barrier(place_of(fiber, fiber.barrier));
    std::string text = "mbarrier ";
    const auto* byte = reinterpret_cast<const unsigned char*>(fiber.barrier);
    const unsigned char* zero = fiber.cta->zero;
    if (byte >= zero && byte < zero + kSharedEnd)
      text += "at dynamic offset " + std::to_string(byte - zero - kRawAddress);
    else
      text += "at " + hex(reinterpret_cast<std::uintptr_t>(byte));
    return text + " parity " + std::to_string(fiber.parity) + " (phase " + std::to_string(barrier.phase) + ", " +
           std::to_string(barrier.pending) + " of " + std::to_string(barrier.count) + " arrivals and " +
           std::to_string(barrier.bytes) + " bytes missing)";
  }
  return std::string(fiber.waits_in) + " " + hex(fiber.waits_id);
}

[[noreturn]] void fail_deadlock() {
  std::string text = "deadlock; waiting:";
  for (int i = 0; i < num_fibers();) {
    const Fiber& fiber = fiber_of(i++);
    if (fiber.done) continue;
    const std::string wait = describe_wait(fiber);
    int last = fiber.number;
    for (; i < num_fibers(); ++i, ++last) {
      const Fiber& next = fiber_of(i);
      if (next.done || next.cta != fiber.cta || describe_wait(next) != wait) break;
    }
    text += "\n  " + (engine.num_ctas > 1 ? "CTA " + std::to_string(fiber.cta->block.x) + " " : "") + "threads " +
            std::to_string(fiber.number) + (last > fiber.number ? " to " + std::to_string(last) : "") + ": " + wait;
  }
  engine.current = nullptr;
  fail(text);
}

// A warpgroup, a warp, a thread, or a CTA of several.
void starve_somebody() {
  const int sizes[] = {128, 32, 1, engine.num_threads};
  const int size = sizes[next_random() % (engine.num_ctas > 1 ? 4 : 3)];
  const int i = static_cast<int>(next_random() % static_cast<std::uint32_t>(num_fibers()));
  const int first = i / engine.num_threads * engine.num_threads;  // of its CTA
  engine.starved_begin = first + (i - first) / size * size;
  engine.starved_end = std::min(engine.starved_begin + size, first + engine.num_threads);
}

void check_registers(const Cta& cta) {
  // What setmaxnreg moves is what the CTA started with: an equal share a thread, in steps of 8.
  const int start = engine.num_threads * (65536 / engine.num_threads / 8 * 8);
  int total = 0;
  bool all_set = true;
  for (int i = 0; i < engine.num_threads; ++i) {
    const int registers = cta.fibers[static_cast<std::size_t>(i)]->registers;
    const int first = i / 128 * 128;
    if (registers != cta.fibers[static_cast<std::size_t>(first)]->registers) {
      fail("setmaxnreg by a part of the warpgroup from thread " + std::to_string(first) + " on");
    }
    total += registers;
    all_set = all_set && registers > 0;
  }
  if (all_set && total > start) fail("asks for " + std::to_string(total) + " registers, of " + std::to_string(start));
}

void start_cta(std::uint32_t rank, Index block) {
  Cta& cta = *engine.ctas[rank];
  static_cast<CtaState&>(cta) = CtaState{};
  cta.block = block;
  cta.rank = rank;
  cta.num_live = engine.num_threads;
  while (static_cast<int>(cta.fibers.size()) < engine.num_threads) cta.fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < engine.num_threads; ++i) {
    Fiber& fiber = *cta.fibers[static_cast<std::size_t>(i)];
    prepare_fiber(fiber);
    engine.fibers.push_back(&fiber);
    fiber.cta = &cta;
    fiber.done = false;
    fiber.number = i;
    const auto n = static_cast<unsigned>(i);
    const Index& block_dim = position.block_dim;
    fiber.thread = {n % block_dim.x, n / block_dim.x % block_dim.y, n / (block_dim.x * block_dim.y)};
    fiber.counter = nullptr;
    fiber.barrier = nullptr;
    fiber.reached = nullptr;
    fiber.registers = 0;
    fiber.looked_at = nullptr, fiber.looks = 0;
    fiber.wgmmas = fiber.wgmmas_awaited = 0;
    fiber.wgmma_groups.clear();
    fiber.stores.clear();
    fiber.copies.clear();
    fiber.copy_groups.clear();
    fiber.store_groups.clear();
    cta.warps[static_cast<std::size_t>(i / 32)].live |= 1u << i % 32;
  }
  fill_shared(cta);
}

// Threads get their turns until all have returned, or one failed.
void take_turns() {
  const int total = num_fibers();
  const bool shuffled = options().seed != 0;
  for (;;) {
    bool progress = false, live = false, starved = false;
    const std::uint32_t turn = shuffled ? next_random() : 0;
    if (shuffled && engine.starved_end == 0 && next_random() % 8 == 0) starve_somebody();
    for (int n = 0; n < total; ++n) {
      int i = n;
      if (shuffled) {
        i = static_cast<int>((static_cast<std::uint32_t>(n) + turn) % static_cast<std::uint32_t>(total));
        if ((turn >> 31) != 0) i = total - 1 - i;
      }
      Fiber& fiber = fiber_of(i);
      if (fiber.done) continue;
      live = true;
      if (!ready(fiber)) continue;
      if (i >= engine.starved_begin && i < engine.starved_end) {
        starved = true;
        continue;
      }
      progress = true;
      if (shuffled && next_random() % 4 == 0) continue;  // its turn will come
      resume(fiber);
      if (engine.error) return;
    }
    if (!live) return;
    if (progress) continue;
    if (starved && next_random() % 2 == 0) {
      engine.starved_begin = engine.starved_end = 0;
    } else if (!do_asynchronous_work()) {
      if (!starved) fail_deadlock();
      engine.starved_begin = engine.starved_end = 0;
    }
  }
}

// The cluster that begins with CTA `first`.
void run_cluster(Index first) {
  engine.cluster = {};
  engine.num_live = engine.num_ctas * engine.num_threads;
  engine.fibers.clear();
  engine.starved_begin = engine.starved_end = 0;
  engine.loads.clear();
  engine.resident = nullptr;
  for (int rank = 0; rank < engine.num_ctas; ++rank) {
    const auto n = static_cast<std::uint32_t>(rank);
    start_cta(n, {first.x + n, first.y, first.z});
  }
  enter(*engine.ctas.front());
  take_turns();
  if (engine.error) return;
  if (!engine.loads.empty()) {
    enter(*engine.loads.front().target);
    fail("ends with a bulk load under way that nobody waited for");
  }
  for (int rank = 0; rank < engine.num_ctas; ++rank) {
    Cta& cta = *engine.ctas[static_cast<std::size_t>(rank)];
    enter(cta);
    check_shared(cta);
    check_registers(cta);
  }
}

void fail(const std::string& what) { throw Failure(what + where()); }

void run_grid(const void* kernel, Index grid, Index block, std::size_t smem_bytes, const std::function<void()>& body, bool together,
              unsigned cluster) {
  if (engine.running) throw Failure("a kernel cannot launch another");
  [[maybe_unused]] static const bool once = (catch_crashes(), true);
  engine.kernel = kernel;
  engine.body = &body;
  engine.error = nullptr;
  engine.random = options().seed * 2654435761u | 1u;
  engine.running = true;
  // Fibers that are left in the middle of a kernel that failed have to start afresh.
  struct Finish {
    ~Finish() {
      engine.running = false;
      engine.body = nullptr;
      for (const auto& cta : engine.ctas) {
        for (const auto& fiber : cta->fibers) {
          if (!fiber->done) fiber->started = false;
          fiber->done = true;
        }
      }
    }
  } finish;
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  position = {{}, {}, block, grid};
  if (threads == 0 || threads > static_cast<std::size_t>(kMaxThreads)) fail("has " + std::to_string(threads) + " threads a CTA");
  if (std::size_t{grid.x} * grid.y * grid.z == 0) fail("has an empty grid");
  if (smem_bytes > kMaxSmemBytes) fail("asks for " + std::to_string(smem_bytes) + " bytes of shared memory, of 227 KiB");
  if (together && cluster > 1) fail("is launched together in clusters, which is not emulated");
  if (together && std::size_t{grid.x} * grid.y * grid.z > 1) {
    if (!options().fold_together) fail("is launched together in more than one CTA, which run one after the other here");
    grid = position.grid_dim = {1, 1, 1};
  }
  engine.num_ctas = static_cast<int>(cluster);
  largest_cluster = std::max(largest_cluster, cluster);
  engine.num_threads = static_cast<int>(threads);
  engine.smem_bytes = smem_bytes;
  engine.static_pieces.clear();
  while (engine.ctas.size() < cluster) engine.ctas.push_back(std::make_unique<Cta>());
  for (unsigned rank = 0; rank < cluster; ++rank) make_shared(*engine.ctas[rank]);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster) {
        run_cluster({x, y, z});
        if (engine.error) std::rethrow_exception(std::exchange(engine.error, nullptr));
      }
    }
  }
}

void set_registers(int count) { engine.current->registers = count; }

int lane() { return engine.current->number % 32; }

}  // namespace openmsa::emulation
