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
  const Index& block = position.block;
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

void resume(Fiber& fiber) {
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

bool ready(const Fiber& fiber) {
  if (fiber.counter != nullptr) return *fiber.counter != fiber.seen;
  if (fiber.barrier != nullptr) return load_barrier(fiber.barrier).phase != fiber.parity;
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

// A thread that returns is waited for no longer.
void leave(Fiber& fiber) {
  if (fiber.wgmmas_awaited != fiber.wgmmas) fail("returns with a wgmma that it did not wait for");
  if (!fiber.stores.empty()) fail("returns with a bulk store that it did not commit");
  if (std::any_of(fiber.store_groups.begin(), fiber.store_groups.end(), [](const auto& group) { return !group.empty(); }))
    fail("returns while bulk stores may still read shared memory: wait for their groups");
  Cta& cta = engine.cta;
  --cta.num_live;
  CtaBarrier& all = cta.barriers[0];
  if (all.arrived > 0 && static_cast<int>(all.arrived) == cta.num_live) finish_barrier(all);
  Warp& warp = cta.warps[static_cast<std::size_t>(fiber.number / 32)];
  warp.live &= ~(1u << fiber.number % 32);
  for (WarpMeeting& meeting : warp.meetings) {
    if (meeting.arrived != 0 && meeting.arrived == (meeting.mask & warp.live)) finish_meeting(meeting, warp.live);
  }
}

// ---- the scheduler ----

std::string describe_wait(const Fiber& fiber) {
  if (fiber.barrier != nullptr) {
    const Barrier barrier = load_barrier(fiber.barrier);
    std::string text = "mbarrier ";
    const auto* byte = reinterpret_cast<const unsigned char*>(fiber.barrier);
    if (byte >= engine.zero && byte < engine.zero + kSharedEnd)
      text += "at dynamic offset " + std::to_string(byte - engine.zero - kRawAddress);
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
  for (int i = 0; i < engine.cta.num_threads;) {
    const Fiber& fiber = *engine.fibers[static_cast<std::size_t>(i)];
    if (fiber.done) {
      ++i;
      continue;
    }
    const std::string wait = describe_wait(fiber);
    int end = i + 1;
    while (end < engine.cta.num_threads && !engine.fibers[static_cast<std::size_t>(end)]->done &&
           describe_wait(*engine.fibers[static_cast<std::size_t>(end)]) == wait) {
      ++end;
    }
    text += "\n  threads " + std::to_string(i) + (end > i + 1 ? " to " + std::to_string(end - 1) : "") + ": " + wait;
    i = end;
  }
  engine.current = nullptr;
  fail(text);
}

// A warpgroup, a warp or a thread.
void starve_somebody() {
  Cta& cta = engine.cta;
  constexpr int kSizes[] = {128, 32, 1};
  const int size = kSizes[next_random() % 3];
  cta.starved_begin = static_cast<int>(next_random() % static_cast<std::uint32_t>(cta.num_threads)) / size * size;
  cta.starved_end = std::min(cta.starved_begin + size, cta.num_threads);
}

void run_pending_wgmma(Warpgroup& group) {
  const PendingWgmma pending = std::move(group.pending.front());
  group.pending.pop_front();
  run_wgmma(pending.wgmma, pending.d.data(), pending.a.data());
  ++group.executed;
}

void run_store_group(Fiber& fiber) {
  for (const auto& store : fiber.store_groups.front()) store();
  fiber.store_groups.pop_front();
  ++fiber.store_groups_done;
}

// Nobody can go on: one piece of what is under way gets done, any load or what somebody waits for.
bool do_asynchronous_work() {
  Cta& cta = engine.cta;
  std::vector<Warpgroup*> products;
  std::vector<Fiber*> stores;
  for (int i = 0; i < cta.num_threads; ++i) {
    Fiber& fiber = *engine.fibers[static_cast<std::size_t>(i)];
    if (fiber.done || fiber.reached == nullptr || ready(fiber)) continue;
    Warpgroup& group = cta.warpgroups[static_cast<std::size_t>(i / 128)];
    if (fiber.reached == &fiber.store_groups_done)
      stores.push_back(&fiber);
    else if (products.empty() || products.back() != &group)
      products.push_back(&group);
  }
  const std::size_t count = cta.loads.size() + products.size() + stores.size();
  if (count == 0) return false;
  std::size_t choice = next_random() % count;
  if (choice < products.size()) {
    run_pending_wgmma(*products[choice]);
  } else if ((choice -= products.size()) < stores.size()) {
    run_store_group(*stores[choice]);
  } else {
    const auto next = cta.loads.begin() + static_cast<std::ptrdiff_t>(choice - stores.size());
    const std::function<void()> load = std::move(*next);
    cta.loads.erase(next);
    load();
  }
  return true;
}

void start_shared(std::size_t bytes) {
  if (engine.region == nullptr) {
    void* region = mmap(nullptr, kRegionBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) throw std::bad_alloc();
    engine.region = static_cast<unsigned char*>(region);
    mprotect(engine.region + kPage, kRegionBytes / 2, PROT_READ | PROT_WRITE);
  }
  engine.smem_bytes = bytes;
  const std::size_t end = (kRawAddress + bytes + 1023) / 1024 * 1024;
  engine.zero = engine.region + kPage + kRegionBytes / 2 - end;
  engine.async.resize(bytes);
  engine.static_pieces.clear();
}

constexpr unsigned char kCanary = 0xa5;

void fill_shared() {
  std::memset(engine.zero, kCanary, kRawAddress);
  std::memset(raw_begin(), 0xff, engine.smem_bytes);
  std::memset(engine.async.data(), 0xff, engine.smem_bytes);
  std::fill(__start_openmsa_shared, __stop_openmsa_shared, static_cast<unsigned char>(0xff));
  std::fill(raw_begin() + engine.smem_bytes, slack_end(), kCanary);
  engine.fence_pending = false;
  engine.unfenced.fill(0);
}

void check_shared() {
  const auto intact = [](const unsigned char* begin, const unsigned char* end) {
    return std::all_of(begin, end, [](unsigned char x) { return x == kCanary; });
  };
  if (!intact(engine.zero, raw_begin())) fail("wrote below its dynamic shared memory");
  if (!intact(raw_begin() + engine.smem_bytes, slack_end())) fail("wrote past its dynamic shared memory");
}

void check_registers() {
  const Cta& cta = engine.cta;
  // What setmaxnreg moves is what the CTA started with: an equal share a thread, in steps of 8.
  const int start = cta.num_threads * (65536 / cta.num_threads / 8 * 8);
  int total = 0;
  bool all_set = true;
  for (int i = 0; i < cta.num_threads; ++i) {
    const int registers = engine.fibers[static_cast<std::size_t>(i)]->registers;
    const int first = i / 128 * 128;
    if (registers != engine.fibers[static_cast<std::size_t>(first)]->registers) {
      fail("setmaxnreg by a part of the warpgroup from thread " + std::to_string(first) + " on");
    }
    total += registers;
    all_set = all_set && registers > 0;
  }
  if (all_set && total > start) fail("asks for " + std::to_string(total) + " registers, of " + std::to_string(start));
}

void run_cta(Index block_dim) {
  Cta& cta = engine.cta;
  const int num_threads = static_cast<int>(block_dim.x * block_dim.y * block_dim.z);
  cta = Cta{};
  cta.num_threads = cta.num_live = num_threads;
  while (static_cast<int>(engine.fibers.size()) < num_threads) engine.fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = *engine.fibers[static_cast<std::size_t>(i)];
    prepare_fiber(fiber);
    fiber.done = false;
    fiber.number = i;
    const auto n = static_cast<unsigned>(i);
    fiber.thread = {n % block_dim.x, n / block_dim.x % block_dim.y, n / (block_dim.x * block_dim.y)};
    fiber.counter = nullptr;
    fiber.barrier = nullptr;
    fiber.reached = nullptr;
    fiber.registers = 0;
    fiber.looked_at = nullptr;
    fiber.wgmmas = fiber.wgmmas_awaited = 0;
    fiber.wgmma_groups.clear();
    fiber.stores.clear();
    fiber.copies.clear();
    fiber.copy_groups.clear();
    fiber.store_groups.clear();
    cta.warps[static_cast<std::size_t>(i / 32)].live |= 1u << i % 32;
  }
  fill_shared();
  const bool shuffled = options().seed != 0;
  for (;;) {
    bool progress = false, live = false, starved = false;
    const std::uint32_t turn = shuffled ? next_random() : 0;
    if (shuffled && cta.starved_end == 0 && next_random() % 8 == 0) starve_somebody();
    for (int n = 0; n < num_threads; ++n) {
      int i = n;
      if (shuffled) {
        i = static_cast<int>((static_cast<std::uint32_t>(n) + turn) % static_cast<std::uint32_t>(num_threads));
        if ((turn >> 31) != 0) i = num_threads - 1 - i;
      }
      Fiber& fiber = *engine.fibers[static_cast<std::size_t>(i)];
      if (fiber.done) continue;
      live = true;
      if (!ready(fiber)) continue;
      if (i >= cta.starved_begin && i < cta.starved_end) {
        starved = true;
        continue;
      }
      progress = true;
      if (shuffled && next_random() % 4 == 0) continue;  // its turn will come
      resume(fiber);
      if (engine.error) return;
    }
    if (!live) break;
    if (progress) continue;
    if (starved && next_random() % 2 == 0) {
      cta.starved_begin = cta.starved_end = 0;
    } else if (!do_asynchronous_work()) {
      if (!starved) fail_deadlock();
      cta.starved_begin = cta.starved_end = 0;
    }
  }
  if (!cta.loads.empty()) fail("ends with a bulk load under way that nobody waited for");
  check_shared();
  check_registers();
}

void fail(const std::string& what) { throw Failure(what + where()); }

void run_grid(const void* kernel, Index grid, Index block, std::size_t smem_bytes, const std::function<void()>& body,
              bool together) {
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
      for (const auto& fiber : engine.fibers) {
        if (!fiber->done) fiber->started = false;
        fiber->done = true;
      }
    }
  } finish;
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  position = {{}, {}, block, grid};
  if (threads == 0 || threads > static_cast<std::size_t>(kMaxThreads)) fail("has " + std::to_string(threads) + " threads a CTA");
  if (std::size_t{grid.x} * grid.y * grid.z == 0) fail("has an empty grid");
  if (smem_bytes > kMaxSmemBytes) fail("asks for " + std::to_string(smem_bytes) + " bytes of shared memory, of 227 KiB");
  if (together && std::size_t{grid.x} * grid.y * grid.z > 1) {
    if (!options().fold_together) fail("is launched together in more than one CTA, which run one after the other here");
    grid = position.grid_dim = {1, 1, 1};
  }
  start_shared(smem_bytes);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        position.block = {x, y, z};
        run_cta(block);
        if (engine.error) std::rethrow_exception(std::exchange(engine.error, nullptr));
      }
    }
  }
}

void set_registers(int count) { engine.current->registers = count; }

int lane() { return engine.current->number % 32; }

}  // namespace openmsa::emulation
