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
#include "cuda/ptx/register.cuh"
#include "cuda/ptx/tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "openmsa/error.hpp"
#include "orders.hpp"

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

class Emulation : public emulation::InOrders {};
OPENMSA_IN_ORDERS(Emulation);

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
    const int* row = out.data() + t * 12;
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

// Thread t copies four floats, the last one not live, twice; `pending` groups may still be under way when it reads the second.
template <int kPending>
__global__ void copy_kernel(const float* source, float* out) {
  const int thread = threadIdx.x;
  auto* mine = reinterpret_cast<float*>(ptx::dynamic_smem()) + thread * 8;
  for (int i = 0; i < 2; ++i) {
    ptx::copy_async<16>(ptx::smem_address(mine + 4 * i), source + (2 * thread + i) * 4, 12);
    ptx::copy_async_commit();
  }
  ptx::copy_async_wait<kPending>();
  for (int i = 0; i < 8; ++i) out[thread * 8 + i] = mine[i];
}

TEST_P(Emulation, CopiesOfAThread) {
  alignas(16) static float source[32 * 8];
  for (int i = 0; i < 32 * 8; ++i) source[i] = static_cast<float>(i);
  std::vector<float> out(32 * 8, -1.f), early(32 * 8, -1.f);
  start(copy_kernel<0>, 1, 32, 1024, source, out.data());
  start(copy_kernel<1>, 1, 32, 1024, source, early.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const float expected = i % 4 == 3 ? 0.f : source[i];
    EXPECT_EQ(out[i], expected);
    if (i / 4 % 2 == 0 || emulation::options().timing == Timing::kEarly) {
      EXPECT_EQ(early[i], expected);
    } else {
      EXPECT_TRUE(std::isnan(early[i])) << "a copy was there before the wait for it";
    }
  }
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

// ---- matrices in registers ----

__global__ void matrix_kernel(const float* a, const float* b, float* d, std::uint32_t* loaded) {
  unsigned char* smem = ptx::dynamic_smem();
  const int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
  // A [16][16] and B [8][16], rows of 32 bytes.
  const auto pair = [](const float* from) { return pack2<__half>(from[0], from[1]); };
  const std::uint32_t address = ptx::smem_address(smem);
  ptx::stmatrix_x4(address + (lane % 16) * 32 + lane / 16 * 16, pair(a + row * 16 + column), pair(a + (row + 8) * 16 + column),
                   pair(a + row * 16 + column + 8), pair(a + (row + 8) * 16 + column + 8));
  // The four 8x8 matrices of A, each turned round and all in one column.
  ptx::stmatrix_x4_trans(address + 1024 + lane * 16, pair(a + row * 16 + column), pair(a + (row + 8) * 16 + column),
                         pair(a + row * 16 + column + 8), pair(a + (row + 8) * 16 + column + 8));
  __syncwarp();
  std::uint32_t x[4], y[4];
  ptx::ldmatrix_x4(x, address + (lane % 16) * 32 + lane / 16 * 16);
  ptx::ldmatrix_x4_trans(y, address + 1024 + lane * 16);
  float sum[4] = {1.f, 1.f, 1.f, 1.f};
  ptx::mma_16816<__half>(sum, x[0], x[1], x[2], x[3], pair(b + row * 16 + column), pair(b + row * 16 + column + 8));
  for (int i = 0; i < 4; ++i) {
    d[(row + i / 2 * 8) * 8 + column + i % 2] = sum[i];
    loaded[lane * 8 + i] = x[i];
    loaded[lane * 8 + 4 + i] = y[i];
  }
}

TEST_P(Emulation, MatricesInRegisters) {
  std::vector<float> a(256), b(128), d(128);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 13) - 6.f;
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 7) - 3.f;
  std::vector<std::uint32_t> loaded(256);
  start(matrix_kernel, 1, 32, 2048, a.data(), b.data(), d.data(), loaded.data());
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      float sum = 1.f;
      for (std::size_t k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[j * 16 + k];
      EXPECT_EQ(d[i * 8 + j], sum) << i << " " << j;
    }
  }
  // Turned round twice is as before.
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(loaded[i], loaded[i / 8 * 8 + i % 4]);
}

// ---- copies ----

// The box at (x, y) of a [6, 96] tensor, as rows of 128 bytes without the swizzle, and back to `stored` at the same place.
__global__ void box_kernel(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int x, int y,
                           std::uint16_t* box) {
  unsigned char* smem = ptx::dynamic_smem();
  auto* full = reinterpret_cast<std::uint64_t*>(smem + 1024);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_barrier_init();
    ptx::mbarrier_arrive_expect(full, 512);
    ptx::tma_load_4d(smem + 512, &from, full, x, y, 0, 0);
  }
  __syncthreads();
  ptx::mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < 256; i += 32) {
    const int row = i / 64, chunk = i % 64 / 8;
    // Half an atom further on: the pattern belongs to the address, not to the box.
    box[i] = reinterpret_cast<const std::uint16_t*>(smem + 512 + row * 128 + (chunk ^ (row + 4)) * 16)[i % 8];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&to, smem + 512, x, y);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

TEST_P(Emulation, BoxesAtTheBorders) {
  struct alignas(16) Tensor {
    std::uint16_t rows[6][96];
  };
  static Tensor source, stored;
  for (int i = 0; i < 6 * 96; ++i) source.rows[i / 96][i % 96] = static_cast<std::uint16_t>(i + 1);
  const CUtensorMap from = make_tensor_map(&source, DType::kF16, {96, 6, 1, 1}, {192, 16, 16}, {64, 4, 1, 1});
  const CUtensorMap to = make_tensor_map(&stored, DType::kF16, {96, 6}, {192}, {64, 4});
  for (const auto& [x, y] : {std::pair{0, 0}, {64, 4}, {-3, -2}, {32, 2}, {0, 6}}) {
    stored = {};
    std::vector<std::uint16_t> box(256, 0xffff);
    start(box_kernel, 1, 32, 2048, from, to, x, y, box.data());
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 64; ++j) {
        const bool inside = y + i >= 0 && y + i < 6 && x + j >= 0 && x + j < 96;
        EXPECT_EQ(box[static_cast<std::size_t>(i * 64 + j)], inside ? source.rows[y + i][x + j] : 0) << x << " " << y;
      }
    }
    for (int i = 0; i < 6; ++i) {
      for (int j = 0; j < 96; ++j) {
        const bool copied = i >= y && i < y + 4 && j >= x && j < x + 64;
        EXPECT_EQ(stored.rows[i][j], copied ? source.rows[i][j] : 0) << x << " " << y;
      }
    }
  }
}

TEST_P(Emulation, TensorMapsThatTheDriverRefuses) {
  alignas(16) static std::uint16_t data[4096];
  EXPECT_NO_THROW(make_tensor_map(data, DType::kF16, {64, 4}, {128}, {64, 4}));
  EXPECT_THROW(make_tensor_map(data + 4, DType::kF16, {64, 4}, {128}, {64, 4}), Error) << "address";
  EXPECT_THROW(make_tensor_map(data, DType::kF16, {64, 4}, {136}, {64, 4}), Error) << "stride";
  EXPECT_THROW(make_tensor_map(data, DType::kF16, {64, 4}, {128}, {128, 4}), Error) << "row longer than the swizzle";
  EXPECT_THROW(make_tensor_map(data, DType::kF16, {64, 400}, {128}, {64, 257}), Error) << "box";
}

// ---- kernels that break a rule ----

TEST_P(Emulation, DeadlocksSayWhoWaitsWhere) {
  const std::string text = failure_of([] {
    start(
        +[](int) {
          auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + 64);
          if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 3);
          __syncthreads();
          if (threadIdx.x < 32) ptx::mbarrier_wait(barrier, 0);
          if (threadIdx.x == 40) ptx::mbarrier_arrive_expect(barrier, 16);
          if (threadIdx.x >= 64) ptx::named_barrier(3, 64);
        },
        2, 96, 128, 0);
  });
  EXPECT_NE(text.find("deadlock"), std::string::npos) << text;
  EXPECT_NE(text.find("threads 0 to 31: mbarrier at dynamic offset 64 parity 0 (phase 0, 2 of 3 arrivals and 16 bytes missing)"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("threads 64 to 95: named barrier 0x3"), std::string::npos) << text;
  EXPECT_NE(text.find("CTA 0"), std::string::npos) << text;
  // The next kernel is none the worse.
  std::vector<int> out(32);
  start(index_kernel, 1, 32, 0, out.data());
  EXPECT_EQ(out[31], 1031);
}

// `start` with one thread or more that has to fail with the given words.
template <typename... Args>
void expect_failure(const char* words, int threads, std::size_t smem_bytes, void (*kernel)(Args...),
                    std::type_identity_t<Args>... args) {
  const std::string text = failure_of([&] { start(kernel, 1, threads, smem_bytes, args...); });
  EXPECT_NE(text.find(words), std::string::npos) << "expected \"" << words << "\", got \"" << text << "\"";
}

TEST_P(Emulation, BarriersMisused) {
  expect_failure(
      "all 1 arrivals", 1, 64,
      +[](int) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem());
        ptx::mbarrier_init(barrier, 1);
        ptx::mbarrier_arrive_expect(barrier, 32);
        ptx::mbarrier_arrive(barrier);
      },
      0);
  expect_failure(
      "not initialised", 1, 64, +[](int) { ptx::mbarrier_wait(reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem()), 0); }, 0);
  expect_failure(
      "threads at named barrier 1, others", 128, 0, +[](int) { ptx::named_barrier(1, threadIdx.x < 64 ? 96 : 128); }, 0);
  expect_failure(
      "meet in", 32, 0,
      +[](int) {
        if (threadIdx.x < 16)
          __syncwarp();
        else
          __shfl_sync(0xffffffffu, 1, 0);
      },
      0);
  expect_failure(
      "takes no part", 32, 0,
      +[](int) {
        if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 20);
      },
      0);
  expect_failure(
      "not in its own mask", 32, 0, +[](int) { __syncwarp(0x0000ffffu); }, 0);
}

TEST_P(Emulation, SharedMemoryMisused) {
  expect_failure(
      "outside its shared memory", 1, 64, +[](int) { ptx::load_shared(ptx::smem_address(ptx::dynamic_smem()) + 64); }, 0);
  expect_failure(
      "past its dynamic shared memory", 1, 64, +[](int) { ptx::dynamic_smem()[64] = 1; }, 0);
  expect_failure(
      "below its dynamic shared memory", 1, 64, +[](int) { ptx::dynamic_smem()[-1] = 1; }, 0);
  expect_failure(
      "not aligned", 1, 64, +[](int) { ptx::load_shared(ptx::smem_address(ptx::dynamic_smem()) + 2); }, 0);
  expect_failure(
      "not 16-byte aligned", 32, 4096,
      +[](int) { ptx::stmatrix_x4(ptx::smem_address(ptx::dynamic_smem()) + threadIdx.x * 24, 0, 0, 0, 0); }, 0);
  EXPECT_THROW(start(
                   +[](int) {}, 1, 32, std::size_t{228} << 10, 0),
               Error)
      << "more than a CTA may have";
  EXPECT_THROW(start(
                   +[](int) {}, 0, 32, 0, 0),
               Error)
      << "no CTA";
  EXPECT_THROW(start(
                   +[](int) {}, 1, 1025, 0, 0),
               Error)
      << "too many threads";
  expect_failure(
      "registers, of 65536", 512, 0, +[](int) { threadIdx.x < 128 ? ptx::shrink_registers<40>() : ptx::grow_registers<160>(); }, 0);
  expect_failure(
      "setmaxnreg by a part", 128, 0,
      +[](int) {
        if (threadIdx.x < 32) ptx::shrink_registers<24>();
      },
      0);
}

// No CTA sees what the one before left in static shared memory.
__global__ void static_kernel(int* out) {
  __shared__ int words[2];
  __shared__ std::uint64_t barrier;
  out[blockIdx.x] = words[blockIdx.x];
  words[0] = words[1] = 7;
  ptx::mbarrier_init(&barrier, 1);
  ptx::mbarrier_arrive(&barrier);
  ptx::mbarrier_wait(&barrier, 0);
  out[2 + blockIdx.x] = static_cast<int>(ptx::load_shared(ptx::smem_address(&words[1])));
}

TEST_P(Emulation, StaticSharedMemory) {
  std::vector<int> out(4);
  start(static_kernel, 2, 1, 0, out.data());
  EXPECT_EQ(out, (std::vector<int>{-1, -1, 7, 7}));
  expect_failure(
      "that is not shared", 1, 0, +[](int* global) { ptx::smem_address(global); }, out.data());
}

TEST_P(Emulation, CopiesMisused) {
  alignas(16) static std::uint16_t data[4096];
  const CUtensorMap map = make_tensor_map(data, DType::kF16, {64, 4}, {128}, {64, 4});
  expect_failure(
      "not 128-byte aligned", 1, 4096, +[](CUtensorMap m, int) { ptx::tma_store_2d(&m, ptx::dynamic_smem() + 64, 0, 0); }, map, 0);
  expect_failure(
      "outside its shared memory", 1, 512, +[](CUtensorMap m, int) { ptx::tma_store_2d(&m, ptx::dynamic_smem() + 128, 0, 0); }, map,
      0);
  expect_failure(
      "tensor map of 2", 1, 4096,
      +[](CUtensorMap m, int) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + 2048);
        ptx::mbarrier_init(barrier, 1);
        ptx::tma_load_3d(ptx::dynamic_smem(), &m, barrier, 0, 0, 0);
      },
      map, 0);
  expect_failure(
      "did not commit", 1, 4096, +[](CUtensorMap m, int) { ptx::tma_store_2d(&m, ptx::dynamic_smem(), 0, 0); }, map, 0);
  expect_failure(
      "wait for their groups", 1, 4096,
      +[](CUtensorMap m, int) {
        ptx::tma_store_2d(&m, ptx::dynamic_smem(), 0, 0);
        ptx::bulk_commit();
      },
      map, 0);
  expect_failure(
      "multiple of 16", 1, 4096,
      +[](const std::uint16_t* source) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + 2048);
        ptx::bulk_load(ptx::dynamic_smem(), source, 24, barrier);
      },
      data);
  expect_failure(
      "8 bytes missing", 1, 4096,
      +[](const std::uint16_t* source) {
        auto* barrier = reinterpret_cast<std::uint64_t*>(ptx::dynamic_smem() + 2048);
        ptx::mbarrier_init(barrier, 1);
        ptx::mbarrier_arrive_expect(barrier, 40);
        ptx::bulk_load(ptx::dynamic_smem(), source, 32, barrier);
        ptx::mbarrier_wait(barrier, 0);
      },
      data);
}

enum class Mistake { kNone, kNoFence, kReadBeforeWait, kOverwrittenBeforeWait, kNoWait, kDivergent, kNotAnAtom };

// Every element of D is the sum of 16 ones, where nothing goes wrong.
__global__ void mistaken_kernel(Mistake mistake, float* out) {
  unsigned char* smem = ptx::dynamic_smem();
  auto* words = reinterpret_cast<std::uint32_t*>(smem);
  const int thread = threadIdx.x;
  for (int i = thread; i < 64 * 32; i += 128) words[i] = 0x3f803f80u;
  if (mistake != Mistake::kNoFence) ptx::fence_async_proxy();
  __syncthreads();
  const std::uint32_t address = ptx::smem_address(smem) + (mistake == Mistake::kNotAnAtom ? 256 : 0);
  const std::uint64_t tile = ptx::smem_descriptor(address, 16, 1024);
  float d[32];
  ptx::wgmma_fence();
  ptx::WgmmaSS<__nv_bfloat16, 64>::run<ptx::Major::kK>(
      d, tile, ptx::smem_descriptor_step(tile, mistake == Mistake::kDivergent && thread >= 32 ? 32 : 0), 0);
  ptx::wgmma_commit();
  if (mistake == Mistake::kOverwrittenBeforeWait) {
    for (int i = thread; i < 64 * 32; i += 128) words[i] = 0;
    ptx::fence_async_proxy();
    __syncthreads();
  }
  float early = 0.f;
  if (mistake == Mistake::kReadBeforeWait) early = d[5];
  if (mistake != Mistake::kNoWait) ptx::wgmma_wait<0>();
  out[thread] = mistake == Mistake::kReadBeforeWait ? early : d[5];
}

TEST_P(Emulation, WgmmaMisused) {
  const bool late = GetParam().timing == Timing::kLate;
  const auto right = [](Mistake mistake) {
    std::vector<float> out(128, NAN);
    start(mistaken_kernel, 1, 128, 64 * 128, mistake, out.data());
    return std::all_of(out.begin(), out.end(), [](float x) { return x == 16.f; });
  };
  EXPECT_TRUE(right(Mistake::kNone));
  // Work done as it is issued hides these.
  EXPECT_EQ(right(Mistake::kNoFence), !late);
  EXPECT_EQ(right(Mistake::kReadBeforeWait), !late);
  EXPECT_EQ(right(Mistake::kOverwrittenBeforeWait), !late);
  std::vector<float> out(128);
  expect_failure("did not wait for", 128, 64 * 128, mistaken_kernel, Mistake::kNoWait, out.data());
  expect_failure("different descriptors", 128, 64 * 128, mistaken_kernel, Mistake::kDivergent, out.data());
  expect_failure("not in the first row of an atom", 128, 64 * 128, mistaken_kernel, Mistake::kNotAnAtom, out.data());
}

// A store by one lane, of what the others wrote and fenced, or did not yet fence.
__global__ void stored_matrix_kernel(const __grid_constant__ CUtensorMap map, bool synchronised) {
  unsigned char* smem = ptx::dynamic_smem();
  const std::uint32_t address = ptx::smem_address(smem), lane = threadIdx.x;
  ptx::stmatrix_x4(address + lane / 8 * 128 + lane % 8 * 16, lane, lane, lane, lane);
  ptx::fence_async_proxy();
  if (synchronised) __syncwarp();
  if (lane == 0) {
    ptx::tma_store_2d(&map, smem, 0, 0);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

TEST_P(Emulation, StoresOfWhatLanesDidNotFence) {
  alignas(16) static std::uint16_t data[256];
  const CUtensorMap map = make_tensor_map(data, DType::kF16, {64, 4}, {128}, {64, 4});
  EXPECT_NO_THROW(start(stored_matrix_kernel, 1, 32, 512, map, true));
  if (GetParam().timing == Timing::kEarly && GetParam().seed == 0) {
    expect_failure("have no fence between", 32, 512, stored_matrix_kernel, map, false);
  }
}

// A load is not there before somebody has waited for it; early, it hides that.
TEST_P(Emulation, LoadsReadBeforeTheWait) {
  alignas(16) static int source[4] = {7, 7, 7, 7};
  std::vector<int> out(1);
  start(
      +[](const int* from, int* to) {
        unsigned char* smem = ptx::dynamic_smem();
        auto* barrier = reinterpret_cast<std::uint64_t*>(smem + 64);
        ptx::mbarrier_init(barrier, 1);
        ptx::mbarrier_arrive_expect(barrier, 16);
        ptx::bulk_load(smem, from, 16, barrier);
        *to = *reinterpret_cast<const int*>(smem);
        ptx::mbarrier_wait(barrier, 0);
      },
      1, 1, 128, source, out.data());
  EXPECT_EQ(out[0], GetParam().timing == Timing::kLate ? -1 : 7);
}

// A crash names its kernel, too.
TEST(EmulationDeathTest, CrashesSayWhere) {
  const auto write = [](std::uint64_t* target) {
    start(
        +[](std::uint64_t* to) {
          if (threadIdx.x == 3) *to = 1;
        },
        1, 32, 0, target);
  };
  EXPECT_DEATH(write(nullptr), "crash .*CTA 0, thread 3");
  alignas(8) std::uint32_t values[3];
  EXPECT_DEATH(write(reinterpret_cast<std::uint64_t*>(values + 1)), "crash .*CTA 0, thread 3") << "not aligned";
}

}  // namespace
}  // namespace openmsa::cuda
