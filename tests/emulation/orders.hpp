// Tests that run with asynchronous work done as it is issued and as late as possible, and with threads in several orders.
#pragma once

#include <gtest/gtest.h>

#include <ostream>

#include "engine.hpp"

namespace openmsa::emulation {

inline std::string name_of(const Options& options) {
  return (options.timing == Timing::kEarly ? "Early" : "Late") + std::to_string(options.seed);
}
inline void PrintTo(const Options& options, std::ostream* out) { *out << name_of(options); }

class InOrders : public testing::TestWithParam<Options> {
 protected:
  void SetUp() override { options() = GetParam(); }
  void TearDown() override { options() = {}; }
};

#define OPENMSA_IN_ORDERS(suite)                                                          \
  INSTANTIATE_TEST_SUITE_P(                                                               \
      Orders, suite,                                                                      \
      testing::Values(openmsa::emulation::Options{openmsa::emulation::Timing::kEarly},    \
                      openmsa::emulation::Options{openmsa::emulation::Timing::kEarly, 1}, \
                      openmsa::emulation::Options{openmsa::emulation::Timing::kLate},     \
                      openmsa::emulation::Options{openmsa::emulation::Timing::kLate, 2}), \
      [](const testing::TestParamInfo<openmsa::emulation::Options>& info) { return openmsa::emulation::name_of(info.param); })

// Two of them, for kernels of many threads, which take their time.
#define OPENMSA_IN_TWO_ORDERS(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(                                                               \
      Orders, suite,                                                                      \
      testing::Values(openmsa::emulation::Options{openmsa::emulation::Timing::kEarly, 1}, \
                      openmsa::emulation::Options{openmsa::emulation::Timing::kLate, 2}), \
      [](const testing::TestParamInfo<openmsa::emulation::Options>& info) { return openmsa::emulation::name_of(info.param); })

}  // namespace openmsa::emulation
