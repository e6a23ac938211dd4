// The copy engine: boxes of tensors between global memory and 128-byte-swizzled shared memory, and plain runs of bytes.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace openmsa::emulation {

using Coordinates = std::array<std::int32_t, 5>;  // elements, innermost axis first

// For every CTA of the cluster in the mask `ctas`, or the calling one.
void load_box(void* smem, const CUtensorMap& map, std::uint64_t* barrier, int rank, const Coordinates& at, std::uint32_t ctas = 0);
void store_box(const CUtensorMap& map, const void* smem, int rank, const Coordinates& at);
void load_bytes(void* smem, const void* global, std::uint32_t bytes, std::uint64_t* barrier);

}  // namespace openmsa::emulation
