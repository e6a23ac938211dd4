// The 16-bit conversions over every bit pattern and at every rounding border.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "openmsa/half.hpp"

namespace openmsa {
namespace {

// Decoded from the format's definition: sign, exponent of the given width, mantissa.
double decode(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const std::uint32_t exponent_mask = (1u << exponent_bits) - 1, mantissa_mask = (1u << mantissa_bits) - 1;
  const auto exponent = static_cast<int>(bits >> mantissa_bits & exponent_mask);
  const double mantissa = bits & mantissa_mask;
  const int bias = static_cast<int>(exponent_mask >> 1);
  double value;
  if (exponent == static_cast<int>(exponent_mask)) {
    value = mantissa == 0 ? INFINITY : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return (bits >> 15) != 0 ? -value : value;
}

template <typename Half>
void check_every_pattern(int exponent_bits, int mantissa_bits) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    Half half;
    half.bits = static_cast<std::uint16_t>(bits);
    const auto value = static_cast<float>(half);
    const double expected = decode(bits, exponent_bits, mantissa_bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Half(value)))) << std::hex << bits;
    } else {
      ASSERT_EQ(value, expected) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << std::hex << bits;
      ASSERT_EQ(Half(value).bits, bits) << "not the same after a round trip";
    }
  }
}

// Between any two neighbours lies one border: the middle goes to the even one, anything off it to the nearer one.
template <typename Half>
void check_every_border(std::uint32_t infinity_bits, int exponent_bits, int mantissa_bits) {
  for (std::uint32_t bits = 0; bits < infinity_bits; ++bits) {
    const double low = decode(bits, exponent_bits, mantissa_bits);
    // The value one step above the largest finite one decides what rounds to infinity.
    const double step = bits == 0                   ? decode(1, exponent_bits, mantissa_bits)
                        : bits + 1 == infinity_bits ? low - decode(bits - 1, exponent_bits, mantissa_bits)
                                                    : decode(bits + 1, exponent_bits, mantissa_bits) - low;
    const auto middle = static_cast<float>(low + step / 2);
    ASSERT_EQ(middle, low + step / 2) << "the border is exact in fp32";
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      ASSERT_EQ(Half(s * middle).bits, sign | (bits + (bits & 1))) << std::hex << bits;
      ASSERT_EQ(Half(s * std::nextafter(middle, 0.0f)).bits, sign | bits) << std::hex << bits;
      ASSERT_EQ(Half(s * std::nextafter(middle, INFINITY)).bits, sign | (bits + 1)) << std::hex << bits;
    }
  }
}

TEST(Half, BFloat16EveryPattern) { check_every_pattern<BFloat16>(8, 7); }
TEST(Half, Float16EveryPattern) { check_every_pattern<Float16>(5, 10); }
TEST(Half, BFloat16EveryBorder) { check_every_border<BFloat16>(0x7f80, 8, 7); }
TEST(Half, Float16EveryBorder) { check_every_border<Float16>(0x7c00, 5, 10); }

TEST(Half, ExtremesOfFp32) {
  EXPECT_EQ(Float16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(Float16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(Float16(-std::numeric_limits<float>::denorm_min()).bits, 0x8000);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(BFloat16(-INFINITY).bits, 0xff80);
  EXPECT_EQ(Float16(-INFINITY).bits, 0xfc00);
  // NaNs whose payload lies in the low bits alone must not turn into infinity.
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::bit_cast<float>(0xff800001u)))));
}

}  // namespace
}  // namespace openmsa
