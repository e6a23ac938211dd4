// CUDA kernels on the CPU: every thread is a fiber, the CTAs of a cluster run at the same time and clusters one after the other, and
// what the hardware does for a kernel (barriers, warp exchanges, wgmma, bulk copies) is modelled as the PTX ISA words it. The headers
// under include/ stand in for those of the CUDA toolkit and of src/cuda/ptx, so that the kernels' own sources compile unchanged as
// plain C++.
//
// Found out  wrong results; deadlocks; shared memory read before it was written (it starts as NaN) or accessed out of bounds;
//            misaligned or impossible copies; threads of a warp or warpgroup that meet in different instructions; barriers that get too
//            many arrivals; arrivals and loads in shared memory of a CTA that may not have started or has ended. Timing::kLate also:
//            accumulators or tiles used before the wait for them, a tile overwritten while a store or a product still reads it,
//            ordinary stores that the copy engine or wgmma reads without a proxy fence.
// Not        data races between threads that no order of turns shows (threads change places only where they wait), bank conflicts,
//            time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace openmsa::emulation {

// When asynchronous work (wgmma, bulk copies) happens: as it is issued, or only once no thread can go on without it.
enum class Timing { kEarly, kLate };

struct Options {
  Timing timing = Timing::kEarly;
  std::uint32_t seed = 0;  // of the order in which threads get their turns: 0 ascending, else random, some left behind for long
  int num_multiprocessors = 3;  // what cudaDeviceGetAttribute says
  // CTAs run one after the other, so a grid whose CTAs wait for each other fails if it has several. With this it gets one CTA instead,
  // for a kernel that deals its work by gridDim: that one does it all, cut as the host cut it for many.
  bool fold_together = false;
};
Options& options();

// A kernel that breaks a rule of the hardware, or does not end. Names kernel, CTA and thread.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fail(const std::string& what);

struct Index {
  unsigned x, y, z;
};

inline constexpr int kMaxThreads = 1024;                              // of a CTA
inline constexpr std::size_t kMaxSmemBytes = std::size_t{227} << 10;  // of a CTA

// Runs `body` for every thread of the grid. `kernel` is the function that it calls, for messages. `together`: its CTAs may wait for
// each other (a cooperative launch). `cluster`: CTAs of a cluster, neighbours in x.
void run_grid(const void* kernel, Index grid, Index block, std::size_t smem_bytes, const std::function<void()>& body,
              bool together = false, unsigned cluster = 1);
extern unsigned largest_cluster;  // CTAs of one, in any grid since a test set this to 0

// ---- inside a kernel ----

struct Position {
  Index thread, block, block_dim, grid_dim;
};
extern Position position;  // of the thread that runs
int lane();

unsigned char* dynamic_shared();  // 1024-byte aligned
// 32-bit addresses of the shared window.
std::uint32_t shared_address(const void* pointer);
void* shared_pointer(std::uint32_t address, std::uint32_t bytes);  // fails where it is not the CTA's

// Barriers among threads.
struct Votes {
  int any, all, count;
};
Votes sync_threads(bool vote);
void named_barrier(std::uint32_t id, std::uint32_t threads);
void named_barrier_arrive(std::uint32_t id, std::uint32_t threads);  // and goes on

// A look at memory by a thread that looks until another one changed it: one that keeps looking in vain counts as waiting.
std::int32_t poll(const std::int32_t* word);

// The lanes of `mask` meet; the last one there calls `work` with what each lane brought (null for lanes outside), then all go on.
using WarpWork = void (*)(void* const (&lanes)[32], std::uint32_t mask);
void meet_warp(const char* instruction, std::uint32_t mask, void* mine, WarpWork work);

void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals);
void mbarrier_arrive(std::uint64_t* barrier);
void mbarrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes);
void mbarrier_complete(std::uint64_t* barrier, std::uint32_t bytes);
void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity);

// What CTAs of a cluster do together.
std::uint32_t cluster_rank();
void cluster_sync();
void mbarrier_arrive_remote(std::uint64_t* barrier, std::uint32_t rank);  // at the same place of another CTA

// Ordinary stores to shared memory before it become visible to asynchronous reads.
void fence_async();
// stmatrix wrote the 16 bytes there: every lane of the warp has to fence before asynchronous accesses.
void matrix_stored(std::uint32_t address);
// Shared memory as the copy engine and wgmma read and write it.
const void* async_source(std::uint32_t address, std::uint32_t bytes);
void async_store(std::uint32_t address, const void* data, std::uint32_t bytes);

// setmaxnreg. At the end of a CTA the warps of a warpgroup must agree, and all warpgroups together fit the register file.
void set_registers(int count);

// Asynchronous work of a thread: a load that ends on a barrier of its own, or a store that groups are kept of.
void issue_load(const std::function<void()>& load, std::uint32_t ctas = 0);  // for every CTA of the mask, or the calling one
void issue_store(std::function<void()> store);
void commit_stores();
void wait_stores(std::size_t pending_groups);

// cp.async of `bytes`, the first `live_bytes` of them read and the rest zeros: an ordinary store that nobody sees before the thread has
// waited for its group.
void issue_copy(std::uint32_t to, const void* source, std::uint32_t bytes, std::uint32_t live_bytes);
void commit_copies();
void wait_copies(std::size_t pending_groups);

// A wgmma that all 128 threads of a warpgroup take part in; see wgmma.cpp.
struct Wgmma {
  int n;
  bool half;  // fp16, else bf16
  bool a_in_registers;
  bool a_mn_major, b_mn_major;  // else K-major
  std::uint64_t a, b;           // descriptors
  bool accumulate;
};
void issue_wgmma(const Wgmma& wgmma, float* d, const std::uint32_t* a_registers);
void commit_wgmma();
void wait_wgmma(std::size_t pending_groups);

// wgmma.cpp: D of the warpgroup's thread t is d[t], its A fragment a[4 t .. 4 t + 3].
void run_wgmma(const Wgmma& wgmma, float* const* d, const std::uint32_t* a);

}  // namespace openmsa::emulation
