// The wrappers of src/cuda/ptx/mma.cuh over the emulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/barrier.cuh"

namespace openmsa::cuda::ptx {

template <typename T>
struct MmaLane {
  float* d;
  std::uint32_t a[4], b[2];
};

template <typename T>
void mma_16816(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
               std::uint32_t b1) {
  MmaLane<T> mine{d, {a0, a1, a2, a3}, {b0, b1}};
  emulation::meet_warp("mma", 0xffffffffu, &mine, [](void* const(&lanes)[32], std::uint32_t) {
    const auto lane = [&](int i) { return static_cast<MmaLane<T>*>(lanes[i]); };
    const auto half = [](std::uint32_t pair, int i) {
      T value;
      value.bits = static_cast<std::uint16_t>(pair >> 16 * i);
      return static_cast<float>(value);
    };
    float a[16][16], b[16][8];  // [row][k], [k][column]
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 8; ++j) a[i / 4 + j / 2 % 2 * 8][i % 4 * 2 + j % 2 + j / 4 * 8] = half(lane(i)->a[j / 2], j % 2);
      for (int j = 0; j < 4; ++j) b[i % 4 * 2 + j % 2 + j / 2 * 8][i / 4] = half(lane(i)->b[j / 2], j % 2);
    }
    for (int row = 0; row < 16; ++row) {
      float sums[8] = {};
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
      }
      for (int column = 0; column < 8; ++column) lane(row % 8 * 4 + column / 2)->d[row / 8 * 2 + column % 2] += sums[column];
    }
  });
}

template <bool kTransposed>
void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  struct Lane {
    std::uint32_t address, r[4];
  } mine{address, {}};
  emulation::meet_warp("ldmatrix", 0xffffffffu, &mine, [](void* const(&lanes)[32], std::uint32_t) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row) {
        const std::uint32_t from = static_cast<Lane*>(lanes[matrix * 8 + row])->address;
        if (from % 16 != 0) emulation::fail("ldmatrix of a row that is not 16-byte aligned");
        std::memcpy(rows[row], emulation::shared_pointer(from, 16), 16);
      }
      for (int i = 0; i < 32; ++i) {
        const int x = i / 4, y = i % 4 * 2;
        const std::uint32_t low = kTransposed ? rows[y][x] : rows[x][y], high = kTransposed ? rows[y + 1][x] : rows[x][y + 1];
        static_cast<Lane*>(lanes[i])->r[matrix] = low | high << 16;
      }
    }
  });
  std::memcpy(r, mine.r, sizeof r);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) { load_matrices<true>(r, address); }

template <int kBytes>
void copy_async(std::uint32_t smem, const void* source, int live_bytes) {
  emulation::issue_copy(smem, source, kBytes, static_cast<std::uint32_t>(live_bytes));
}
inline void copy_async_commit() { emulation::commit_copies(); }
template <int kPending>
void copy_async_wait() {
  emulation::wait_copies(kPending);
}

inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}

inline uint4 load_stream(const void* source) { return __ldg(static_cast<const uint4*>(source)); }

}  // namespace openmsa::cuda::ptx
