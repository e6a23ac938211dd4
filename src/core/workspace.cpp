#include "openmsa/workspace.hpp"

#include <cstdint>
#include <new>
#include <utility>

#include "core/arena.hpp"

namespace openmsa {

Workspace::Workspace(std::size_t bytes)
    : data_(bytes > 0 ? ::operator new (bytes, std::align_val_t{kAlignment}) : nullptr), bytes_(bytes), owns_(true) {}

Workspace::Workspace(void* data, std::size_t bytes, Device device) : data_(data), bytes_(bytes), device_(device) {
  if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) {
    throw Error(ErrorCode::kInvalidArgument, "workspace",
                "workspace memory is not aligned to " + std::to_string(kAlignment) + " bytes; allocate it with that alignment");
  }
}

Workspace::Workspace(Workspace&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      owns_(std::exchange(other.owns_, false)) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(owns_, other.owns_);
  return *this;
}

Workspace::~Workspace() {
  if (owns_ && data_ != nullptr) ::operator delete (data_, std::align_val_t{kAlignment});
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kAuto: return "auto";
    case Backend::kReference: return "reference";
    case Backend::kCpu: return "cpu";
    case Backend::kCuda: return "cuda";
  }
  return "unknown";
}

namespace core {

std::byte* Arena::take_bytes(std::size_t bytes) {
  const std::size_t rounded = checked_add(bytes, Workspace::kAlignment - 1) / Workspace::kAlignment * Workspace::kAlignment;
  const std::size_t begin = used_;
  used_ = checked_add(used_, rounded);
  if (data_ == nullptr) return nullptr;
  if (used_ > capacity_) {
    throw Error(ErrorCode::kOutOfWorkspace, "options.workspace",
                "options.workspace holds " + std::to_string(capacity_) + " bytes, but at least " + std::to_string(used_) +
                    " are needed; allocate workspace_bytes(args) bytes");
  }
  return data_ + begin;
}

}  // namespace core
}  // namespace openmsa
