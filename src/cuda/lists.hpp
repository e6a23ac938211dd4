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

// Where the union of a tile's lists serves a (token, group), it says so in a word of `taken`: bit s stands for slot s. Of all those
// slots it leaves one partial, in the first of them. If it serves the token alone, the word is kTakenAll, and out and lse are
// written directly.
inline constexpr std::uint32_t kTakenAll = 0xffffffffu;

}  // namespace openmsa::cuda
