// The emulator itself: CTAs of a cluster at the same time, what they do in each other's shared memory, and what they do wrong there.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/tile.cuh"
#include "openmsa/error.hpp"
#include "orders.hpp"

namespace openmsa::cuda {
namespace {

class EmulatedCluster : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedCluster);

constexpr std::size_t kSmemBytes = 8400;  // so that canaries come before the page that nobody may touch

struct Grid {
  int cluster, ctas, threads;
  Order order = Order::kAfter;
};

template <typename... Args>
std::string failure_of(const Grid& grid, void (*kernel)(Args...), std::type_identity_t<Args>... args) {
  try {
    launch_clusters(kernel, grid.cluster, dim3(static_cast<unsigned>(grid.ctas)), grid.threads, kSmemBytes, nullptr, grid.order,
                    args...);
  } catch (const emulation::Failure& failure) {
    return failure.what();
  }
  return "no failure";
}

template <typename... Args>
void expect_failure(const char* words, const Grid& grid, void (*kernel)(Args...), std::type_identity_t<Args>... args) {
  const std::string text = failure_of(grid, kernel, args...);
  EXPECT_NE(text.find(words), std::string::npos) << "expected \"" << words << "\", got \"" << text << "\"";
}

__global__ void rank_kernel(int* out) {
  ptx::cluster_sync();
  int* row = out + (blockIdx.x * blockDim.x + threadIdx.x) * 3;
  row[0] = static_cast<int>(ptx::cluster_rank());
  row[1] = static_cast<int>(blockIdx.x);
  row[2] = static_cast<int>(gridDim.x);
}

TEST_P(EmulatedCluster, Ranks) {
  for (const int cluster : {1, 2, 3, 4, 8}) {
    std::vector<int> out(static_cast<std::size_t>(2 * cluster * 40 * 3), -1);
    EXPECT_EQ(failure_of({cluster, 2 * cluster, 40}, rank_kernel, out.data()), "no failure");
    for (int i = 0; i < 2 * cluster * 40; ++i) {
      const int* row = out.data() + i * 3;
      EXPECT_EQ(row[0], i / 40 % cluster);
      EXPECT_EQ(row[1], i / 40);
      EXPECT_EQ(row[2], 2 * cluster);
    }
  }
}

TEST_P(EmulatedCluster, LaunchesRefused) {
  int out = 0;
  for (const Grid& grid : {Grid{2, 3, 32}, Grid{9, 9, 32}}) EXPECT_THROW(failure_of(grid, rank_kernel, &out), Error);
  expect_failure("launched together in clusters", {2, 2, 32, Order::kTogether}, rank_kernel, &out);
}

// ---- the barrier of the cluster ----

// In every round all threads show a number, and add what those of the same place in all CTAs show.
__global__ void meet_kernel(bool before, bool after, int rounds, int* shown, int* out) {
  const int ctas = static_cast<int>(gridDim.x), threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    before ? ptx::cluster_sync() : __syncthreads();  // all have read
    shown[static_cast<int>(blockIdx.x) * threads + thread] = round + thread;
    after ? ptx::cluster_sync() : __syncthreads();
    for (int from = 0; from < ctas; ++from) sum += shown[from * threads + thread];
  }
  out[static_cast<int>(blockIdx.x) * threads + thread] = sum;
}

bool met(bool before, bool after, int ctas, int rounds) {
  constexpr int kThreads = 64;
  std::vector<int> shown(static_cast<std::size_t>(ctas * kThreads)), out(shown.size());
  EXPECT_EQ(failure_of({ctas, ctas, kThreads}, meet_kernel, before, after, rounds, shown.data(), out.data()), "no failure");
  for (int i = 0; i < ctas * kThreads; ++i) {
    if (out[static_cast<std::size_t>(i)] != ctas * (rounds * (i % kThreads) + rounds * (rounds - 1) / 2)) return false;
  }
  return true;
}

TEST_P(EmulatedCluster, Barrier) {
  for (const int ctas : {1, 2, 4, 8}) EXPECT_TRUE(met(true, true, ctas, 3)) << ctas;
  EXPECT_TRUE(met(true, true, 4, 20));
  EXPECT_FALSE(met(true, false, 4, 20));
  // Threads that take turns evenly hide this.
  if (emulation::options().seed != 0) {
    EXPECT_FALSE(met(false, true, 4, 20));
  }
}

TEST_P(EmulatedCluster, BarrierMisused) {
  expect_failure(
      "meet in", {2, 2, 32}, +[](int) { threadIdx.x < 16 ? ptx::cluster_sync() : __syncwarp(); }, 0);
  const std::string text = failure_of(
      {2, 4, 64},
      +[](int) {
        ptx::cluster_sync();
        if (blockIdx.x == 3 && threadIdx.x < 32) ptx::named_barrier(3, 64);
        ptx::cluster_sync();
      },
      0);
  EXPECT_NE(text.find("CTA 2 threads 0 to 63: barrier of the cluster 0x1\n  CTA 3 threads 0 to 31: named barrier 0x3\n"
                      "  CTA 3 threads 32 to 63: barrier of the cluster 0x1"),
            std::string::npos)
      << text;
  // Who has returned is waited for no longer.
  const auto leave = +[](int) {
    ptx::cluster_sync();
    if (blockIdx.x == 1 || threadIdx.x >= 32) return;
    ptx::cluster_sync();
    ptx::cluster_sync();
  };
  EXPECT_EQ(failure_of({2, 2, 64}, leave, 0), "no failure");
}

// ---- what every CTA has of its own ----

__global__ void own_kernel(int* out) {
  __shared__ int count[2];
  __shared__ std::uint64_t barrier;
  const int rank = static_cast<int>(ptx::cluster_rank()), thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    count[1] = count[0];  // nothing was there
    count[0] = 0;
    ptx::mbarrier_init(&barrier, static_cast<std::uint32_t>(rank + 2));
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  // So many meetings of its own.
  for (int i = 0; i <= rank; ++i) {
    if (thread == 0) ++count[0];
    __syncthreads();
    ptx::named_barrier(1, 64);
  }
  // So many arrivals from the CTA before.
  const int next = (rank + 1) % 4;
  if (thread <= next) ptx::mbarrier_arrive_cluster(&barrier, static_cast<std::uint32_t>(next));
  if (thread == 0) ptx::mbarrier_arrive(&barrier);
  ptx::mbarrier_wait(&barrier, 0);
  if (thread == 63) {
    out[rank * 2] = count[0];
    out[rank * 2 + 1] = count[1];
  }
  ptx::cluster_sync();
}

TEST_P(EmulatedCluster, WhatACtaHasOfItsOwn) {
  std::vector<int> out(8);
  EXPECT_EQ(failure_of({4, 4, 64}, own_kernel, out.data()), "no failure");
  EXPECT_EQ(out, (std::vector<int>{1, -1, 2, -1, 3, -1, 4, -1}));
  expect_failure(
      "past its dynamic shared memory [", {2, 2, 1}, +[](int) { ptx::dynamic_smem()[blockIdx.x * kSmemBytes] = 1; }, 0);
  expect_failure(
      "registers, of 65536", {2, 4, 512},
      +[](int) {
        if (blockIdx.x == 3) emulation::set_registers(136);
      },
      0);
}

// ---- arrivals at each other's barriers ----

TEST_P(EmulatedCluster, ArrivalsMisused) {
  // Each arrives at the barrier of another; CTAs before `first` have none.
  const auto arrive = +[](unsigned first, std::uint32_t offset, std::uint32_t to) {
    auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem());
    if (blockIdx.x >= first) ptx::mbarrier_init(barrier, 1);
    ptx::cluster_sync();
    ptx::mbarrier_arrive_cluster(barrier + offset / sizeof *barrier, (ptx::cluster_rank() + to) % 4);
    ptx::cluster_sync();
  };
  EXPECT_EQ(failure_of({4, 4, 1}, arrive, 0, 0, 1), "no failure");
  expect_failure("of the cluster, which has 2", {2, 2, 1}, arrive, 0, 0, 2);
  expect_failure("arrives on a barrier that was not initialised", {4, 4, 1}, arrive, 1, 0, 1);
  expect_failure("outside its shared memory", {4, 4, 1}, arrive, 0, kSmemBytes, 1);
  expect_failure(
      "not shared", {2, 2, 1},
      +[](std::uint64_t* global) {
        ptx::cluster_sync();
        ptx::mbarrier_arrive_cluster(global, 1);
      },
      std::vector<std::uint64_t>(1).data());
  expect_failure(
      "which may not have started", {2, 2, 1},
      +[](int) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem());
        ptx::mbarrier_init(barrier, 1);
        __syncthreads();
        ptx::mbarrier_arrive_cluster(barrier, 1 - ptx::cluster_rank());
      },
      0);
  std::int32_t gone = 0;
  expect_failure(
      "arrives on a barrier in shared memory of CTA 1 of the cluster, which has ended", {2, 2, 1},
      +[](std::int32_t* ended) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem());
        ptx::mbarrier_init(barrier, 1);
        ptx::cluster_sync();
        if (blockIdx.x == 1) return (void)atomicAdd(ended, 1);
        while (emulation::poll(ended) == 0) {
        }
        ptx::mbarrier_arrive_cluster(barrier, 1);
      },
      &gone);
}

// ---- bulk loads for several CTAs ----

constexpr int kStages = 2, kRounds = 10, kBoxBytes = 1024, kMost = 4;

// In every round each CTA loads a box, 8 rows of 64 numbers, for all; a stage is full with all of them, and empty once the warps of all
// CTAs have read it.
__global__ void multicast_kernel(const __grid_constant__ CUtensorMap map, std::uint16_t* out) {
  const int ctas = static_cast<int>(gridDim.x), thread = threadIdx.x, lane = thread % 32;
  const int rank = static_cast<int>(ptx::cluster_rank());
  unsigned char* smem = ptx::dynamic_smem();
  auto* full = reinterpret_cast<std::uint64_t*>(smem + kStages * ctas * kBoxBytes);
  std::uint64_t* empty = full + kStages;
  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 2 * static_cast<std::uint32_t>(ctas));
    }
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  if (thread == 64) {
    for (int i = 0; i < kRounds; ++i) {
      ptx::mbarrier_wait(&empty[i % kStages], (i / kStages + 1) & 1);
      ptx::mbarrier_arrive_expect(&full[i % kStages], static_cast<std::uint32_t>(ctas * kBoxBytes));
      ptx::tma_load_4d_multicast(smem + (i % kStages * ctas + rank) * kBoxBytes, &map, &full[i % kStages],
                                 static_cast<std::uint16_t>((1 << ctas) - 1), 0, (i * ctas + rank) * 8, 0, 0);
    }
  }
  if (thread < 64) {
    for (int i = 0; i < kRounds; ++i) {
      ptx::mbarrier_wait(&full[i % kStages], (i / kStages) & 1);
      const auto* stage = reinterpret_cast<const std::uint16_t*>(smem + i % kStages * ctas * kBoxBytes);
      for (int row = 0; row < ctas * 8; ++row) {
        out[((rank * kRounds + i) * ctas * 8 + row) * 64 + thread] = stage[row * 64 + (thread / 8 ^ row % 8) * 8 + thread % 8];
      }
      __syncwarp();
      if (lane < ctas) ptx::mbarrier_arrive_cluster(&empty[i % kStages], static_cast<std::uint32_t>(lane));
    }
  }
  ptx::cluster_sync();
}

CUtensorMap numbers_map() {
  struct alignas(16) Numbers {
    std::uint16_t rows[kRounds * kMost * 8][64];
  };
  static Numbers numbers;
  for (int i = 0; i < kRounds * kMost * 8 * 64; ++i) numbers.rows[i / 64][i % 64] = static_cast<std::uint16_t>(i);
  return make_tensor_map(&numbers, DType::kF16, {64, kRounds * kMost * 8, 1, 1}, {128, 16, 16}, {64, 8, 1, 1});
}

TEST_P(EmulatedCluster, LoadsForSeveralCtas) {
  for (const int ctas : {1, 2, 4}) {
    const int size = kRounds * ctas * 8 * 64;
    std::vector<std::uint16_t> out(static_cast<std::size_t>(ctas * size), 0xffff);
    EXPECT_EQ(failure_of({ctas, ctas, 96}, multicast_kernel, numbers_map(), out.data()), "no failure");
    for (int i = 0; i < ctas * size; ++i) ASSERT_EQ(out[static_cast<std::size_t>(i)], static_cast<std::uint16_t>(i % size)) << i;
  }
}

TEST_P(EmulatedCluster, LoadsForSeveralCtasMisused) {
  // CTA 0 loads for `ctas`; both wait, for a box each.
  const auto load = +[](CUtensorMap map, std::uint16_t ctas) {
    auto* full = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + kBoxBytes);
    ptx::mbarrier_init(full, 1);
    ptx::cluster_sync();
    ptx::mbarrier_arrive_expect(full, kBoxBytes);
    if (blockIdx.x == 0) ptx::tma_load_4d_multicast(ptx::dynamic_smem(), &map, full, ctas, 0, 0, 0, 0);
    ptx::mbarrier_wait(full, 0);
  };
  EXPECT_EQ(failure_of({2, 2, 1}, load, numbers_map(), std::uint16_t{3}), "no failure");
  expect_failure("loads into shared memory of CTA 2 of the cluster, which has 2", {2, 2, 1}, load, numbers_map(), std::uint16_t{7});
  expect_failure("CTA 1 threads 0: mbarrier at dynamic offset 1024 parity 0 (phase 0, 0 of 1 arrivals and 1024 bytes missing)",
                 {2, 2, 1}, load, numbers_map(), std::uint16_t{1});
  if (emulation::options().timing == emulation::Timing::kEarly) return;
  std::int32_t loading = 0;
  expect_failure(
      "fills shared memory of CTA 1 of the cluster, which has ended", {2, 2, 1},
      +[](CUtensorMap map, std::int32_t* flag) {
        auto* full = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + kBoxBytes);
        ptx::mbarrier_init(full, 1);
        ptx::cluster_sync();
        if (blockIdx.x == 1) {
          while (emulation::poll(flag) == 0) {
          }
          return;
        }
        ptx::tma_load_4d_multicast(ptx::dynamic_smem(), &map, full, 2, 0, 0, 0, 0);
        atomicAdd(flag, 1);
        ptx::mbarrier_wait(full, 0);
      },
      numbers_map(), &loading);
}

}  // namespace
}  // namespace openmsa::cuda
