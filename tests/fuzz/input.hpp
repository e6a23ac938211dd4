// What the fuzz targets share: reading choices from the fuzzer's bytes, and calls that either run or are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "openmsa/openmsa.hpp"

namespace openmsa::fuzz {

inline void require(bool condition, const char* rule) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", rule);
  std::abort();
}

// Choices from the input. Once it is used up they go on for ever: as zeros, so that every prefix is a valid input that can be made
// smaller, or, if the last byte is odd, as a stream that the last bytes seed, so that short inputs reach deep choices too.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
    if (size == 0 || data[size - 1] % 2 == 0) return;
    for (std::size_t i = size > 4 ? size - 4 : 0; i < size; ++i) stream_ = stream_ << 8 | data[i];
  }

  std::uint8_t byte() {
    if (used_ < size_) return data_[used_++];
    stream_ ^= stream_ << 13;  // xorshift64, which keeps a zero zero
    stream_ ^= stream_ >> 7;
    stream_ ^= stream_ << 17;
    return static_cast<std::uint8_t>(stream_ >> 24);
  }
  bool flag() { return (byte() & 1) != 0; }
  // One byte's worth of choice.
  std::int32_t range(std::int32_t low, std::int32_t high) { return low + byte() % (high - low + 1); }
  std::uint64_t word() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }
  // Mostly near the given value, sometimes anything.
  std::int32_t int32_near(std::int32_t value) {
    switch (byte() % 16) {
      case 0: return static_cast<std::int32_t>(static_cast<std::uint32_t>(word()));
      case 1: return std::numeric_limits<std::int32_t>::max() - byte();
      case 2: return std::numeric_limits<std::int32_t>::min() + byte();
      case 3: return -1;
      case 4: return value + range(-3, 3);
      case 5: return range(-2, 40);
      default: return value;
    }
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t used_ = 0;
  std::uint64_t stream_ = 0;
};

// True if it ran, false if it was refused; any other exception or fault ends the process.
template <typename Function>
bool runs(const Function& function) {
  try {
    function();
    return true;
  } catch (const Error& error) {
    require(error.what()[0] != '\0', "an error has a text");
    return false;
  }
}

}  // namespace openmsa::fuzz
