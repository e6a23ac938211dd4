// Which SIMD targets the engine is compiled for; include before any Highway header.
#pragma once

// SVE and RVV are left out: their vectors have no size at compile time, so the register tiles of gemm-inl.h cannot hold them
// (such machines run the NEON or baseline code). SSSE3 adds nothing over SSE4 and the SSE2 baseline.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
