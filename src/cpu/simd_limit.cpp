// Restricting run-time dispatch, so that a machine with AVX-512 can be measured and tested as one without it.
#include "cpu/targets.hpp"

#include <string>

#include "cpu/cpu.hpp"
#include "hwy/targets.h"
#include "openmsa/error.hpp"

namespace openmsa::cpu {

void limit_simd_target(const std::string& name) {
  if (name == "best") {
    hwy::SetSupportedTargetsForTest(0);
    return;
  }
  if (name != "avx2") {
    throw Error(ErrorCode::kInvalidArgument, "simd", "simd: '" + name + "' is not one of 'best', 'avx2'");
  }
#if HWY_ARCH_X86
  hwy::SetSupportedTargetsForTest(0);
  // Highway numbers its targets from the widest (lowest bit) down, so this keeps AVX2 and everything narrower.
  const std::int64_t targets = hwy::SupportedTargets() & ~(std::int64_t{HWY_AVX2} - 1);
  if ((targets & HWY_AVX2) != 0) {
    hwy::SetSupportedTargetsForTest(targets);
    return;
  }
#endif
  throw Error(ErrorCode::kUnsupported, "simd", "simd: this processor has no AVX2; leave the limit at 'best'");
}

}  // namespace openmsa::cpu
