// The emulator itself: grids whose CTAs may wait for each other, waits for memory, arrivals at named barriers.
#include <cooperative_groups.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/global.cuh"
#include "orders.hpp"

namespace openmsa::cuda {
namespace {

class EmulatedGrid : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedGrid);

template <typename... Args>
std::string failure_of(void (*kernel)(Args...), unsigned grid, int threads, Order order, std::type_identity_t<Args>... args) {
  try {
    launch(kernel, dim3(grid), threads, 0, nullptr, order, args...);
  } catch (const emulation::Failure& failure) {
    return failure.what();
  }
  return "no failure";
}

__global__ void together_kernel(int* out) {
  unsigned token = cooperative_groups::this_grid().barrier_arrive();
  cooperative_groups::this_grid().barrier_wait(std::move(token));
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<int>(gridDim.x);
}

TEST_P(EmulatedGrid, LaunchedTogetherIsOneCta) {
  std::vector<int> out(4, -1);
  EXPECT_EQ(failure_of(together_kernel, 1, 64, Order::kTogether, out.data()), "no failure");
  EXPECT_EQ(out, (std::vector<int>{1, -1, -1, -1}));
  const std::string text = failure_of(together_kernel, 4, 64, Order::kTogether, out.data());
  EXPECT_NE(text.find("together"), std::string::npos) << text;
  emulation::options().fold_together = true;
  EXPECT_EQ(failure_of(together_kernel, 4, 64, Order::kTogether, out.data()), "no failure");
  EXPECT_EQ(out, (std::vector<int>{1, -1, -1, -1}));
}

TEST_P(EmulatedGrid, BarrierOfTheGridMisused) {
  const std::string text = failure_of(
      +[](int) { cooperative_groups::this_grid().barrier_wait(threadIdx.x + 5); }, 1, 32, Order::kTogether, 0);
  EXPECT_NE(text.find("without having arrived"), std::string::npos) << text;
}

__global__ void counting_kernel(std::int32_t* counter, int counted, int* out) {
  if (threadIdx.x < 64 && static_cast<int>(threadIdx.x) >= 64 - counted) atomicAdd(counter, 1);
  if (threadIdx.x < 64) return;
  while (emulation::poll(counter) < 64) {
  }
  out[threadIdx.x - 64] = *counter;
}

constexpr std::uint32_t kUnwritten = 0xffffffffu;

// 32 threads write a pair each, the first `written` of them; a warp reads all, two at a look.
__global__ void pairs_kernel(float2* pairs, int written, float* sums) {
  if (threadIdx.x < 32) {
    if (static_cast<int>(threadIdx.x) < written) ptx::store_relaxed(pairs + threadIdx.x, float2{1.f, 2.f});
    return;
  }
  float sum = 0.f;
  for (int i = 0; i < 32; i += 2) {
    float2 x[2];
    do {
      x[0] = ptx::look(pairs + i), x[1] = ptx::look(pairs + i + 1);
    } while (ptx::holds(x[0], kUnwritten) || ptx::holds(x[1], kUnwritten));
    sum += x[0].x + x[0].y + x[1].x + x[1].y;
  }
  sums[threadIdx.x - 32] = sum;
}

TEST_P(EmulatedGrid, WaitsForWordsThatAreTheirOwnFlags) {
  const auto run = [](int written, std::vector<float>& sums) {
    std::vector<std::uint32_t> words(64, kUnwritten);
    return failure_of(pairs_kernel, 1, 64, Order::kAfter, reinterpret_cast<float2*>(words.data()), written, sums.data());
  };
  std::vector<float> sums(32, 0.f);
  EXPECT_EQ(run(32, sums), "no failure");
  EXPECT_EQ(sums, std::vector<float>(32, 96.f));
  const std::string text = run(30, sums);  // both of the last look are missing
  EXPECT_NE(text.find("threads 32 to 63: looks at memory that stays 0xffffffff"), std::string::npos) << text;
}

TEST_P(EmulatedGrid, WaitsForMemory) {
  std::int32_t counter = 0;
  std::vector<int> out(64, -1);
  EXPECT_EQ(failure_of(counting_kernel, 1, 128, Order::kAfter, &counter, 64, out.data()), "no failure");
  EXPECT_EQ(out, std::vector<int>(64, 64));
  counter = 0;
  const std::string text = failure_of(counting_kernel, 1, 128, Order::kAfter, &counter, 63, out.data());
  EXPECT_NE(text.find("threads 64 to 127: looks at memory that stays 0x3f"), std::string::npos) << text;
}

// Warps 0 and 1 take turns, as sm90_score's warpgroups do.
__global__ void turns_kernel(int rounds, int* log) {
  __shared__ int written;
  const std::uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) written = 0;
  __syncthreads();
  if (warp == 1) ptx::named_barrier_arrive(1, 64);
  for (int i = 0; i < rounds; ++i) {
    ptx::named_barrier(1 + warp, 64);
    if (threadIdx.x % 32 == 0) log[written++] = static_cast<int>(warp);
    __syncwarp();
    ptx::named_barrier_arrive(2 - warp, 64);
  }
  if (warp == 0) ptx::named_barrier(1, 64);
}

TEST_P(EmulatedGrid, TurnsByNamedBarriers) {
  std::vector<int> log(20, -1);
  EXPECT_EQ(failure_of(turns_kernel, 1, 64, Order::kAfter, 10, log.data()), "no failure");
  for (int i = 0; i < 20; ++i) EXPECT_EQ(log[static_cast<std::size_t>(i)], i % 2);
  const std::string text = failure_of(
      +[](int) {
        if (threadIdx.x < 32) ptx::named_barrier_arrive(1, 96);
        if (threadIdx.x >= 64) ptx::named_barrier(1, 96);
      },
      1, 96, Order::kAfter, 0);
  EXPECT_NE(text.find("threads 64 to 95: named barrier 0x1"), std::string::npos) << text;
}

}  // namespace
}  // namespace openmsa::cuda
