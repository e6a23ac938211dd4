// The emulator itself: kernels whose results are known, and kernels that break a rule and have to be caught.
#include "engine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace openmsa::cuda {
namespace {

using emulation::Failure;
using emulation::Timing;

template <typename... Args>
void start(void (*kernel)(Args...), unsigned grid, int threads, std::size_t smem_bytes, std::type_identity_t<Args>... args) {
  launch(kernel, dim3(grid), threads, smem_bytes, nullptr, Order::kAfter, args...);
}

template <typename F>
std::string failure_of(F&& f) {
  try {
    f();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "no failure";
}

// Every test runs with work done as it is issued and as late as possible, and in several orders of the threads.
class Emulation : public testing::TestWithParam<std::tuple<Timing, std::uint32_t>> {
 protected:
  void SetUp() override {
    emulation::options().timing = std::get<0>(GetParam());
    emulation::options().seed = std::get<1>(GetParam());
  }
  void TearDown() override { emulation::options() = {}; }
};
INSTANTIATE_TEST_SUITE_P(Orders, Emulation,
                         testing::Combine(testing::Values(Timing::kEarly, Timing::kLate), testing::Values(0, 1, 2)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Timing::kEarly ? "Early" : "Late") +
                                  std::to_string(std::get<1>(info.param));
                         });

__global__ void index_kernel(int* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  out[i] = i + static_cast<int>(gridDim.x) * 1000;
}

TEST_P(Emulation, EveryThreadRunsOnce) {
  std::vector<int> out(3 * 96, -1);
  start(index_kernel, 3, 96, 0, out.data());
  for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], i + 3000);
}

__global__ void exchange_kernel(int* out) {
  __shared__ int turned[64];
  const int thread = threadIdx.x, lane = thread % 32;
  turned[63 - thread] = thread;
  __syncthreads();
  int* row = out + thread * 12;
  row[0] = turned[thread];
  row[1] = __shfl_sync(0xffffffffu, thread, 5);
  row[2] = __shfl_xor_sync(0xffffffffu, thread, 3);
  row[3] = __shfl_up_sync(0xffffffffu, thread, 2);
  row[4] = __shfl_down_sync(0xffffffffu, thread, 2);
  row[5] = __shfl_sync(0xffffffffu, thread, 1, 8);
  row[6] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  row[7] = __any_sync(0xffffffffu, thread == 40) + 2 * __all_sync(0xffffffffu, thread < 40);
  row[8] = __syncthreads_or(thread == 7) + 2 * __syncthreads_and(thread < 63) + 4 * __syncthreads_count(thread < 10);
  row[9] = __reduce_max_sync(0xffffffffu, thread ^ 5);
  // Half warps on their own.
  row[10] = lane < 16 ? __shfl_xor_sync(0x0000ffffu, thread, 15) : __shfl_xor_sync(0xffff0000u, thread, 1);
  if (lane >= 20) return;
  row[11] = __popc(__ballot_sync(0xffffffffu, 1));  // of those that are left
}

TEST_P(Emulation, Exchanges) {
  std::vector<int> out(64 * 12);
  start(exchange_kernel, 1, 64, 0, out.data());
  for (int t = 0; t < 64; ++t) {
    const int* row = &out[static_cast<std::size_t>(t * 12)];
    const int lane = t % 32, warp = t - lane;
    EXPECT_EQ(row[0], 63 - t);
    EXPECT_EQ(row[1], warp + 5);
    EXPECT_EQ(row[2], t ^ 3);
    EXPECT_EQ(row[3], lane < 2 ? t : t - 2);
    EXPECT_EQ(row[4], lane > 29 ? t : t + 2);
    EXPECT_EQ(row[5], t / 8 * 8 + 1);
    EXPECT_EQ(static_cast<unsigned>(row[6]), 0x49249249u);
    EXPECT_EQ(row[7], t < 32 ? 2 : 1);
    EXPECT_EQ(row[8], 1 + 0 + 40);
    EXPECT_EQ(row[9], warp + 31);
    EXPECT_EQ(row[10], lane < 16 ? t ^ 15 : t ^ 1);
    EXPECT_EQ(row[11], lane < 20 ? 20 : 0);
  }
}

// Four consumer warps take turns at a ring that one producer lane fills.
constexpr int kStages = 3, kRounds = 20;
__global__ void ring_kernel(const int* source, int* out) {
  unsigned char* smem = ptx::dynamic_smem();
  auto* full = reinterpret_cast<std::uint64_t*>(smem + kStages * 128);
  std::uint64_t* empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 4) {
    if (lane != 0) return;
    for (int i = 0; i < kRounds; ++i) {
      if (i >= kStages) ptx::mbarrier_wait(&empty[i % kStages], (i / kStages - 1) & 1);
      ptx::mbarrier_arrive_expect(&full[i % kStages], 128);
      ptx::bulk_load(smem + i % kStages * 128, source + i * 32, 128, &full[i % kStages]);
    }
    return;
  }
  for (int i = 0; i < kRounds; ++i) {
    ptx::mbarrier_wait(&full[i % kStages], (i / kStages) & 1);
    out[(i * 4 + warp) * 32 + lane] = reinterpret_cast<const int*>(smem + i % kStages * 128)[lane];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&empty[i % kStages]);
  }
}

TEST_P(Emulation, RingOfStages) {
  alignas(16) static int source[kRounds * 32];
  for (int i = 0; i < kRounds * 32; ++i) source[i] = i * 3;
  std::vector<int> out(kRounds * 4 * 32, -1);
  start(ring_kernel, 1, 160, 1024, source, out.data());
  for (int i = 0; i < kRounds * 4 * 32; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], (i / 128 * 32 + i % 32) * 3);
}

// ---- wgmma ----

// D [64, N] = A [64, 64] B^T, both operands through the copy engine. B lies as [N, 64] (K-major) or [64, N] (MN-major).
template <typename T, int kN, bool kRegisters, ptx::Major kMajorB>
__global__ void wgmma_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const T* a,
                             float* out) {
  constexpr bool kTransposed = kMajorB == ptx::Major::kMN;
  unsigned char* smem_a = ptx::dynamic_smem();
  unsigned char* smem_b = smem_a + 64 * 128;
  auto* full = reinterpret_cast<std::uint64_t*>(smem_b + 2 * 64 * 128);
  const int thread = threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_barrier_init();
    ptx::mbarrier_arrive_expect(full, 64 * 128 + (kTransposed ? (kN + 63) / 64 * 64 : kN) * 128);
    ptx::tma_load_3d(smem_a, &map_a, full, 0, 0, 0);
    if (kTransposed) {
      for (int h = 0; h < (kN + 63) / 64; ++h) ptx::tma_load_3d(smem_b + h * 64 * 128, &map_b, full, h * 64, 0, 0);
    } else {
      ptx::tma_load_3d(smem_b, &map_b, full, 0, 0, 0);
    }
  }
  __syncthreads();
  ptx::mbarrier_wait(full, 0);
  const std::uint64_t desc_a = ptx::smem_descriptor(ptx::smem_address(smem_a), 16, 1024);
  const std::uint64_t desc_b = ptx::smem_descriptor(ptx::smem_address(smem_b), kTransposed ? 64 * 128 : 16, 1024);
  float d[kN / 2];
  ptx::wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    const std::uint64_t b = ptx::smem_descriptor_step(desc_b, kTransposed ? step * 16 * 128 : step * 32);
    if constexpr (kRegisters) {
      std::uint32_t fragment[4];
      for (int i = 0; i < 4; ++i) {
        const T* pair = a + (row + i % 2 * 8) * 64 + step * 16 + column + i / 2 * 8;
        fragment[i] = pack2<T>(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
      }
      ptx::WgmmaRS<T, kN>::template run<kMajorB>(d, fragment, b, step > 0);
    } else {
      ptx::WgmmaSS<T, kN>::template run<kMajorB>(d, ptx::smem_descriptor_step(desc_a, step * 32), b, step > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int j = 0; j < kN / 8; ++j) {
    for (int c = 0; c < 4; ++c) out[(row + c / 2 * 8) * kN + j * 8 + column + c % 2] = d[4 * j + c];
  }
}

template <typename T, int kN, bool kRegisters, ptx::Major kMajorB>
void expect_product() {
  constexpr DType kDType = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  constexpr bool kTransposed = kMajorB == ptx::Major::kMN;
  std::mt19937 random(kN);
  struct alignas(16) Row {
    T values[8];
  };
  std::vector<Row> a_rows(64 * 8), b_rows(kN * 8);
  T *a = a_rows.front().values, *b = b_rows.front().values;
  for (int i = 0; i < 64 * 64; ++i) a[i] = T(static_cast<float>(static_cast<int>(random() % 17) - 8));
  for (int i = 0; i < kN * 64; ++i) b[i] = T(static_cast<float>(static_cast<int>(random() % 17) - 8));
  const CUtensorMap map_a = make_tensor_map(a, kDType, {64, 64, 1}, {128, 16}, {64, 64, 1});
  const CUtensorMap map_b = kTransposed ? make_tensor_map(b, kDType, {kN, 64, 1}, {kN * 2, 16}, {64, 64, 1})
                                        : make_tensor_map(b, kDType, {64, kN, 1}, {128, 16}, {64, kN, 1});
  std::vector<float> out(64 * kN, NAN);
  start(wgmma_kernel<T, kN, kRegisters, kMajorB>, 1, 128, 3 * 64 * 128 + 64, map_a, map_b, a, out.data());
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < kN; ++j) {
      float sum = 0.f;
      for (int k = 0; k < 64; ++k)
        sum += static_cast<float>(a[i * 64 + k]) * static_cast<float>(kTransposed ? b[k * kN + j] : b[j * 64 + k]);
      ASSERT_EQ(out[static_cast<std::size_t>(i * kN + j)], sum) << i << " " << j;
    }
  }
}

TEST_P(Emulation, Wgmma) {
  expect_product<__nv_bfloat16, 64, false, ptx::Major::kK>();
  expect_product<__half, 96, false, ptx::Major::kK>();
  expect_product<__nv_bfloat16, 128, false, ptx::Major::kK>();
  expect_product<__half, 64, false, ptx::Major::kMN>();
  expect_product<__nv_bfloat16, 96, false, ptx::Major::kMN>();
  expect_product<__half, 128, false, ptx::Major::kMN>();
  expect_product<__nv_bfloat16, 64, true, ptx::Major::kK>();
  expect_product<__half, 128, true, ptx::Major::kK>();
  expect_product<__half, 96, true, ptx::Major::kMN>();
  expect_product<__nv_bfloat16, 128, true, ptx::Major::kMN>();
}

}  // namespace
}  // namespace openmsa::cuda
