// What one wgmma computes: operands out of 128-byte-swizzled shared memory as the PTX ISA lays them out ("Asynchronous Warpgroup Level
// Matrix Shared Memory Layout"), products exact, sums in fp32.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "engine.hpp"
#include "openmsa/half.hpp"

namespace openmsa::emulation {
namespace {

constexpr int kM = 64, kK = 16, kMaxN = 256;

struct Descriptor {
  std::uint32_t start, leading, stride;
};

Descriptor decode(std::uint64_t bits) {
  if (bits >> 62 != 1) fail("a wgmma descriptor without the 128-byte swizzle, which alone is modelled");
  if ((bits >> 49 & 7) != 0) fail("a wgmma descriptor with a base offset");
  const auto field = [&](int at) { return static_cast<std::uint32_t>(bits >> at & 0x3fff) << 4; };
  const Descriptor descriptor{field(0), field(16), field(32)};
  // Without a base offset the swizzle pattern starts at 1024-byte boundaries; inside one, only the row's own 128 bytes may be stepped.
  if (descriptor.start % 1024 >= 128) {
    fail("a wgmma tile starts at shared address " + std::to_string(descriptor.start) + ", not in the first row of an atom");
  }
  return descriptor;
}

std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

float widen(std::uint16_t bits, bool half) {
  if (!half) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  Float16 value;
  value.bits = bits;
  return static_cast<float>(value);
}

// Element (i, k), i along M or N, of an operand with `extent` rows goes to out[i * stride_i + k * stride_k]. Both layouts keep 8
// elements (16 bytes) together, along k where K-major, else along i.
void read_operand(const Descriptor& tile, bool mn_major, int extent, bool half, float* out, int stride_i, int stride_k) {
  const auto chunk = [&](std::uint32_t offset, float* first, int step) {
    std::uint16_t values[8];
    std::memcpy(values, async_source(swizzled(tile.start + offset), 16), 16);
    for (int j = 0; j < 8; ++j) first[j * step] = widen(values[j], half);
  };
  if (mn_major) {
    // Atoms of 64 elements x 8 k: `leading` apart along i, `stride` apart along k.
    for (int k = 0; k < kK; ++k) {
      for (int i = 0; i < extent; i += 8) {
        chunk(static_cast<std::uint32_t>(i / 64) * tile.leading + static_cast<std::uint32_t>(i % 64 * 2) +
                  static_cast<std::uint32_t>(k / 8) * tile.stride + static_cast<std::uint32_t>(k % 8 * 128),
              out + i * stride_i + k * stride_k, stride_i);
      }
    }
  } else {
    // Groups of 8 rows of 128 bytes, `stride` apart; all 16 k lie in a row.
    for (int i = 0; i < extent; ++i) {
      for (int k = 0; k < kK; k += 8) {
        chunk(static_cast<std::uint32_t>(i / 8) * tile.stride + static_cast<std::uint32_t>(i % 8 * 128 + k * 2),
              out + i * stride_i + k * stride_k, stride_k);
      }
    }
  }
}

}  // namespace

void run_wgmma(const Wgmma& wgmma, float* const* d, const std::uint32_t* a_registers) {
  static std::array<float, kM * kK> a;
  static std::array<float, kK * kMaxN> b;
  const int n = wgmma.n;
  if (wgmma.a_in_registers) {
    for (int t = 0; t < 128; ++t) {
      for (int r = 0; r < 4; ++r) {
        const int row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8, k = t % 4 * 2 + r / 2 * 8;
        const std::uint32_t pair = a_registers[4 * t + r];
        a.data()[row * kK + k] = widen(static_cast<std::uint16_t>(pair), wgmma.half);
        a.data()[row * kK + k + 1] = widen(static_cast<std::uint16_t>(pair >> 16), wgmma.half);
      }
    }
  } else {
    read_operand(decode(wgmma.a), wgmma.a_mn_major, kM, wgmma.half, a.data(), kK, 1);
  }
  read_operand(decode(wgmma.b), wgmma.b_mn_major, n, wgmma.half, b.data(), 1, n);

  std::array<float, kMaxN> sums;
  for (int row = 0; row < kM; ++row) {
    std::fill_n(sums.begin(), n, 0.f);
    for (int k = 0; k < kK; ++k) {
      const float x = a.data()[row * kK + k];
      const float* y = b.data() + k * n;
      for (int j = 0; j < n; ++j) sums[static_cast<std::size_t>(j)] += x * y[j];
    }
    // The row's quad of threads, and which half of their registers it is.
    float* const* quad = d + row / 16 * 32 + row % 8 * 4;
    const int half = row % 16 / 8 * 2;
    for (int j = 0; j < n; ++j) {
      float& result = quad[j % 8 / 2][j / 8 * 4 + half + j % 2];
      const float sum = sums[static_cast<std::size_t>(j)];
      result = wgmma.accumulate ? result + sum : sum;
    }
  }
}

}  // namespace openmsa::emulation
