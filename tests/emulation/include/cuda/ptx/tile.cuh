// The wrappers of src/cuda/ptx/tile.cuh over the emulator.
#pragma once

#include "copies.hpp"
#include "cuda/ptx/barrier.cuh"

#define OPENMSA_DYNAMIC_SMEM(name) unsigned char* name = ::openmsa::emulation::dynamic_shared()

namespace openmsa::cuda::ptx {

inline unsigned char* dynamic_smem() { return emulation::dynamic_shared(); }
inline unsigned char* dynamic_smem_aligned_late() { return emulation::dynamic_shared(); }

template <bool kTransposed>
void store_matrices(std::uint32_t address, const std::uint32_t (&a)[4]) {
  struct Lane {
    std::uint32_t address;
    const std::uint32_t* a;
  } mine{address, a};
  emulation::meet_warp("stmatrix", 0xffffffffu, &mine, [](void* const(&lanes)[32], std::uint32_t) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t rows[8][8];
      for (int i = 0; i < 32; ++i) {
        const int x = i / 4, y = i % 4 * 2;
        const std::uint32_t pair = static_cast<Lane*>(lanes[i])->a[matrix];
        (kTransposed ? rows[y][x] : rows[x][y]) = static_cast<std::uint16_t>(pair);
        (kTransposed ? rows[y + 1][x] : rows[x][y + 1]) = static_cast<std::uint16_t>(pair >> 16);
      }
      for (int row = 0; row < 8; ++row) {
        const std::uint32_t to = static_cast<Lane*>(lanes[matrix * 8 + row])->address;
        if (to % 16 != 0) emulation::fail("stmatrix to a row that is not 16-byte aligned");
        std::memcpy(emulation::shared_pointer(to, 16), rows[row], 16);
        emulation::matrix_stored(to);
      }
    }
  });
}
inline void stmatrix_x4(std::uint32_t address, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3) {
  store_matrices<false>(address, {a0, a1, a2, a3});
}
inline void stmatrix_x4_trans(std::uint32_t address, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3) {
  store_matrices<true>(address, {a0, a1, a2, a3});
}

inline int not_hoisted(int value) { return value; }

template <typename T>
T load_shared_as(std::uint32_t address) {
  T value;
  if (address % sizeof value != 0) emulation::fail("ld.shared of an address that is not aligned");
  std::memcpy(&value, emulation::shared_pointer(address, sizeof value), sizeof value);
  return value;
}
inline float2 load_shared_float2(std::uint32_t address) { return load_shared_as<float2>(address); }
inline int2 load_shared_int2(std::uint32_t address) { return load_shared_as<int2>(address); }

inline void bulk_load(void* smem, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
  emulation::load_bytes(smem, global, bytes, barrier);
}

}  // namespace openmsa::cuda::ptx
