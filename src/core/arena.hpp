// Arena: hands out pieces of a Workspace. Without memory behind it, it only counts: the same allocation code then answers
// workspace_bytes(), so the size asked for and the size used cannot drift apart.
#pragma once

#include <cstddef>

#include "core/checked.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa::core {

class Arena {
 public:
  Arena() = default;  // counting only: take() returns null
  Arena(void* data, std::size_t bytes) : data_(static_cast<std::byte*>(data)), capacity_(bytes) {}

  // Room for `count` elements of T, aligned to Workspace::kAlignment, uninitialised. Throws kOutOfWorkspace past the capacity.
  template <typename T>
  T* take(std::size_t count) {
    return reinterpret_cast<T*>(take_bytes(checked_mul<std::size_t>(count, sizeof(T))));
  }

  std::size_t used() const { return used_; }

 private:
  std::byte* take_bytes(std::size_t bytes);

  std::byte* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
};

}  // namespace openmsa::core
