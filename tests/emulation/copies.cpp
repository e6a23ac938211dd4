#include "copies.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "engine.hpp"

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* size,
                                const cuuint64_t* stride_bytes, const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool good = rank >= 1 && rank <= 5 && data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  for (cuuint32_t axis = 0; good && axis < rank; ++axis) {
    good =
        size[axis] >= 1 && size[axis] <= std::uint64_t{1} << 32 && box[axis] >= 1 && box[axis] <= 256 && element_strides[axis] == 1;
    if (axis > 0) good = good && stride_bytes[axis - 1] % 16 == 0 && stride_bytes[axis - 1] < std::uint64_t{1} << 40;
  }
  // The driver takes rows shorter than 128 bytes too; no kernel here has them, and their layout is not modelled.
  if (!good || !swizzled || box[0] * 2 != 128) return CUDA_ERROR_INVALID_VALUE;
  *map = CUtensorMap{};
  map->data = static_cast<unsigned char*>(data);
  map->rank = rank;
  for (cuuint32_t axis = 0; axis < rank; ++axis) {
    map->size[axis] = size[axis];
    map->box[axis] = box[axis];
    if (axis > 0) map->stride_bytes[axis] = stride_bytes[axis - 1];
  }
  return CUDA_SUCCESS;
}

namespace openmsa::emulation {
namespace {

constexpr std::uint32_t kRowBytes = 128, kChunkBytes = 16;
constexpr std::int64_t kChunk = kChunkBytes / 2;  // elements

std::uint32_t box_bytes(const CUtensorMap& map) {
  std::uint32_t bytes = 2;
  for (std::uint32_t axis = 0; axis < map.rank; ++axis) bytes *= map.box[axis];
  return bytes;
}

std::uint32_t check_box(const CUtensorMap& map, const void* smem, int rank) {
  if (map.rank == 0) fail("copies through a tensor map that was not encoded");
  if (static_cast<int>(map.rank) != rank) {
    fail("copies a box of " + std::to_string(rank) + " axes through a tensor map of " + std::to_string(map.rank));
  }
  const std::uint32_t address = shared_address(smem);
  if (address % 128 != 0) fail("copies a box at shared address " + std::to_string(address) + ", which is not 128-byte aligned");
  shared_pointer(address, box_bytes(map));
  return address;
}

// Calls f(shared address, global pointer, number of elements inside the tensor) for every 16-byte chunk of the box.
template <typename F>
void for_each_chunk(const CUtensorMap& map, std::uint32_t address, const Coordinates& at, F&& f) {
  std::int64_t rows = 1;
  for (std::uint32_t axis = 1; axis < map.rank; ++axis) rows *= map.box[axis];
  for (std::int64_t row = 0; row < rows; ++row) {
    unsigned char* source = map.data;
    bool inside = true;
    std::int64_t rest = row;
    for (std::uint32_t axis = 1; axis < map.rank; ++axis) {
      const std::int64_t i = at[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside = inside && i >= 0 && i < static_cast<std::int64_t>(map.size[axis]);
      if (inside) source += i * static_cast<std::int64_t>(map.stride_bytes[axis]);
    }
    for (std::uint32_t c = 0; c < kRowBytes / kChunkBytes; ++c) {
      const std::uint32_t linear = address + static_cast<std::uint32_t>(row) * kRowBytes + c * kChunkBytes;
      const std::int64_t x = at[0] + c * kChunk;
      std::array<bool, kChunk> live{};
      for (std::int64_t e = 0; e < kChunk; ++e) {
        live[static_cast<std::size_t>(e)] = inside && x + e >= 0 && x + e < static_cast<std::int64_t>(map.size[0]);
      }
      f(linear ^ (linear >> 7 & 7) << 4, source + (inside ? x * 2 : 0), live);
    }
  }
}

// On the barrier of the CTA that the copy fills.
void complete(std::uint32_t barrier, std::uint32_t bytes) {
  mbarrier_complete(static_cast<std::uint64_t*>(shared_pointer(barrier, sizeof(std::uint64_t))), bytes);
}

}  // namespace

void load_box(void* smem, const CUtensorMap& map, std::uint64_t* barrier, int rank, const Coordinates& at, std::uint32_t ctas) {
  const std::uint32_t address = check_box(map, smem, rank), word = shared_address(barrier);
  issue_load(
      [=, map = map] {
        for_each_chunk(map, address, at, [](std::uint32_t target, const unsigned char* source, const auto& live) {
          std::uint16_t values[kChunk] = {};
          for (std::size_t e = 0; e < live.size(); ++e) {
            if (live[e]) std::memcpy(&values[e], source + 2 * e, 2);
          }
          async_store(target, values, sizeof values);
        });
        complete(word, box_bytes(map));
      },
      ctas);
}

void store_box(const CUtensorMap& map, const void* smem, int rank, const Coordinates& at) {
  const std::uint32_t address = check_box(map, smem, rank);
  issue_store([=, map = map] {
    for_each_chunk(map, address, at, [](std::uint32_t from, unsigned char* target, const auto& live) {
      std::uint16_t values[kChunk];
      std::memcpy(values, async_source(from, sizeof values), sizeof values);
      for (std::size_t e = 0; e < live.size(); ++e) {
        if (live[e]) std::memcpy(target + 2 * e, &values[e], 2);
      }
    });
  });
}

void load_bytes(void* smem, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
  const std::uint32_t address = shared_address(smem), word = shared_address(barrier);
  if (address % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
    fail("a bulk copy of " + std::to_string(bytes) + " bytes whose size or address is no multiple of 16");
  }
  shared_pointer(address, bytes);
  issue_load([=] {
    async_store(address, global, bytes);
    complete(word, bytes);
  });
}

}  // namespace openmsa::emulation
