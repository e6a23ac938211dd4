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

// Choices from the input; zeros once it is used up, so that every prefix is a valid input.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() { return used_ < size_ ? data_[used_++] : std::uint8_t{0}; }
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
