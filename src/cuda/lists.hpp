// Selection lists seen from the keys' side: who chose a block.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

// Work of the attend kernel: some of the tokens that chose a block.
struct AttendItem {
  std::int32_t seq, block, group;  // whose keys
  std::int32_t begin, count;       // which entries
};

// An entry is (token of the chunk) << kSlotBits | slot in the token's list.
inline constexpr int kSlotBits = 6;

}  // namespace openmsa::cuda
