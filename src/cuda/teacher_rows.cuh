// The teacher's values between the kernel that writes them and the one that meets them with the student's.
#pragma once

#include "cuda/lists.hpp"

namespace openmsa::cuda {

// Where an item's visits have their teacher: one after the other, so that the student loads a stage's in one piece.
__device__ __forceinline__ int teacher_row(const std::uint32_t* entries, const AttendItem& item, int slots, int chunk) {
  return entries ? item.begin : (item.group * slots + item.block) * chunk + item.begin;
}
// Where in its row the value of a key is, for visit `at` of the item: the student's quads read rows two apart on banks 8 apart.
__device__ __forceinline__ int teacher_column(int at, int key) { return key ^ (at / 2 % 4 * 8); }

}  // namespace openmsa::cuda
