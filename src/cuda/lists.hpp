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

// Where the union of a tile's lists serves a (token, group), it says so in a word of `taken`: bit s stands for slot s, and kTakenAll
// for all that the list has. It finishes what it serves: to what it found it adds the partials of the token's other slots.
inline constexpr std::uint32_t kTakenAll = 0xffffffffu;

}  // namespace openmsa::cuda
