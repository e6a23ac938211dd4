#include "api/check.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/thread_pool.hpp"
#include "cuda/device.hpp"

namespace openmsa::api {
namespace {

// More threads than any machine has would only turn a typo into thousands of idle threads and their scratch.
constexpr std::int32_t kMaxThreads = 1024;

bool is_known(DType dtype) { return static_cast<std::uint8_t>(dtype) <= static_cast<std::uint8_t>(DType::kI64); }

std::string dtype_list(std::uint32_t dtypes) {
  std::string text;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32, DType::kI64}) {
    if ((dtypes & core::dtype_bit(dtype)) == 0) continue;
    if (!text.empty()) text += ", ";
    text += dtype_name(dtype);
  }
  return text;
}

std::string axes_text(std::initializer_list<Axis> axes) {
  std::string text = "[";
  for (const Axis& axis : axes) text += (text.size() > 1 ? ", " : "") + std::string(axis.label);
  return text + "]";
}

std::string device_text(const Device& device) {
  switch (device.type) {
    case DeviceType::kCpu: return "cpu";
    case DeviceType::kCuda: return "cuda:" + std::to_string(device.index);
  }
  return "an unknown device";
}

bool same_device(const Device& a, const Device& b) {
  return a.type == b.type && (a.type == DeviceType::kCpu || a.index == b.index);
}

// Elements from the first to one past the last, by the strides; false on overflow of the bytes they make.
bool span_of(const TensorView& view, std::int64_t* elements) {
  std::int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(view.shape[i] - 1, view.stride[i], &reach) || __builtin_add_overflow(last, reach, &last))
      return false;
  }
  std::int64_t bytes = 0;
  if (__builtin_add_overflow(last, std::int64_t{1}, elements)) return false;
  return !__builtin_mul_overflow(*elements, dtype_bytes(view.dtype), &bytes);
}

bool numel_of(const TensorView& view, std::int64_t* numel) {
  *numel = 1;
  if (std::find(view.shape.begin(), view.shape.begin() + view.rank, 0) != view.shape.begin() + view.rank) {
    *numel = 0;
    return true;
  }
  std::int64_t bytes = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (__builtin_mul_overflow(*numel, view.shape[i], numel)) return false;
  }
  return !__builtin_mul_overflow(*numel, dtype_bytes(view.dtype), &bytes);
}

// True if walking the axes can reach one element twice: each stride must step over everything that smaller strides reach.
bool overlaps_itself(const TensorView& view) {
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> axes;  // stride, shape
  int num_axes = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    // Kept in order by insertion: gcc 12 warns of out-of-bounds reads inside std::sort on an array this short.
    int at = num_axes++;
    const std::pair<std::int64_t, std::int64_t> axis{view.stride[i], view.shape[i]};
    for (; at > 0 && axis < axes[at - 1]; --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }
  std::int64_t reach = 0;
  for (int i = 0; i < num_axes; ++i) {
    if (axes[i].first <= reach) return true;
    reach += (axes[i].second - 1) * axes[i].first;
  }
  return false;
}

// Axes with at most one element never use their stride, so callers may leave anything there; kernels multiply it all the same, by the
// element's size too. Such an axis steps over the axes inside it as in a dense tensor, or not at all where that leads too far.
// A tensor without elements, whose pointer may be null, gets strides that lead nowhere: every row is at its pointer.
TensorView with_harmless_strides(TensorView view, bool is_empty) {
  std::int64_t dense = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (is_empty) view.stride[i] = i + 1 == view.rank ? 1 : 0;
    if (!is_empty && view.shape[i] == 1) view.stride[i] = dense;
    std::int64_t bytes = 0;
    const bool too_far = __builtin_mul_overflow(view.stride[i], view.shape[i], &dense) ||
                         __builtin_mul_overflow(dense, dtype_bytes(view.dtype), &bytes);
    if (too_far || dense < 0) dense = 0;
  }
  return view;
}

struct Extent {
  std::uintptr_t begin = 0, end = 0;
};

Extent extent_of(const TensorView& view) {
  std::int64_t numel = 0, elements = 0;
  if (view.data == nullptr || !numel_of(view, &numel) || numel == 0 || !span_of(view, &elements)) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  return {begin, begin + static_cast<std::uintptr_t>(elements * dtype_bytes(view.dtype))};
}

// Interleaved slices of one buffer share a range of addresses but no element: both repeat with a common period, inside which their
// pieces do not meet. A piece is what the axes from `outer` on span: a row (out = buffer[..., :D], q = buffer[..., D:]), or a page
// (k_pages = buffer[:, 0], v_pages = buffer[:, 1]).
bool pieces_interleave(const TensorView& a, const TensorView& b, int outer) {
  std::int64_t period = 0;
  const auto piece_bytes = [&period, outer](const TensorView& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) {
      if (i < std::min(outer, view.rank - 1)) {
        if (view.shape[i] > 1) period = std::gcd(period, view.stride[i] * dtype_bytes(view.dtype));
      } else {
        last += (view.shape[i] - 1) * view.stride[i];
      }
    }
    return (last + 1) * dtype_bytes(view.dtype);
  };
  const std::int64_t piece_a = piece_bytes(a), piece_b = piece_bytes(b);
  if (period == 0) return false;
  const auto start_a = reinterpret_cast<std::uintptr_t>(a.data), start_b = reinterpret_cast<std::uintptr_t>(b.data);
  const std::uintptr_t unsigned_period = static_cast<std::uintptr_t>(period);
  // Offset of b's piece after a's inside one period; b must begin after a ends and end before a begins again.
  const auto offset =
      static_cast<std::int64_t>((start_b % unsigned_period + unsigned_period - start_a % unsigned_period) % unsigned_period);
  return offset >= piece_a && offset + piece_b <= period;
}

bool share_memory(const TensorView& a, const TensorView& b) {
  const Extent ea = extent_of(a), eb = extent_of(b);
  if (ea.begin >= eb.end || eb.begin >= ea.end) return false;
  for (int outer = 1; outer < kMaxRank; ++outer) {
    if (pieces_interleave(a, b, outer)) return false;
  }
  return true;
}

}  // namespace

void refuse(const std::string& argument, const std::string& text, ErrorCode code) {
  const bool is_element = !text.empty() && text.front() == '[';  // "block_ids[3][0][1] is ..."
  throw Error(code, argument, argument + (is_element ? "" : " ") + text);
}

std::string shape_text(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < std::clamp(view.rank, 0, kMaxRank); ++i) text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

Checker::Checker(const RunOptions& options, Mode mode) : options_(options), mode_(mode) {
  if (static_cast<std::uint8_t>(options.backend) > static_cast<std::uint8_t>(Backend::kCuda)) {
    refuse("options.backend", "is " + std::to_string(static_cast<int>(options.backend)) +
                                  ", which is no backend; use kAuto, kReference, kCpu or kCuda.");
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    refuse("options.num_threads", "is " + std::to_string(options.num_threads) + "; it must be in 0.." +
                                      std::to_string(kMaxThreads) + ", where 0 means one per processor.");
  }
  entries_.reserve(16);
}

TensorView Checker::tensor(const char* name, const TensorView& view, std::uint32_t dtypes, std::initializer_list<Axis> axes,
                           Role role) {
  return check(name, view, dtypes, axes, role, mode_ == Mode::kRun);
}

TensorView Checker::lengths(const char* name, const TensorView& view, std::initializer_list<Axis> axes) {
  return check(name, view, core::dtype_bit(DType::kI32), axes, Role::kInput, true);
}

TensorView Checker::optional_tensor(const char* name, const TensorView& view, std::uint32_t dtypes,
                                    std::initializer_list<Axis> axes, Role role) {
  if (view.rank == 0 && view.data == nullptr) return {};
  return tensor(name, view, dtypes, axes, role);
}

TensorView Checker::check(const char* name, const TensorView& view, std::uint32_t dtypes, std::initializer_list<Axis> axes,
                          Role role, bool needs_memory) {
  // Texts are built where they are needed alone: a decode step calls this dozens of times and takes microseconds.
  if (view.rank == 0 && view.data == nullptr) refuse(name, "is not given; it must be a tensor of shape " + axes_text(axes) + ".");
  if (!is_known(view.dtype) || (dtypes & core::dtype_bit(view.dtype)) == 0) {
    refuse(name, std::string("has dtype ") + dtype_name(view.dtype) + "; it must be one of: " + dtype_list(dtypes) +
                     ". Convert it before the call.");
  }
  if (view.rank != static_cast<int>(axes.size())) {
    refuse(name, "has rank " + std::to_string(view.rank) + ", shape " + shape_text(view) + "; it must have rank " +
                     std::to_string(axes.size()) + ": " + axes_text(axes) + ". Reshape it.");
  }
  int i = 0;
  for (const Axis& axis : axes) {
    const std::int64_t size = view.shape[i++];
    if (size >= 0 && (axis.size == kAnySize || size == axis.size)) continue;
    const std::string found = "has shape " + shape_text(view) + "; axis " + std::to_string(i - 1) + " (" + axis.label + ") ";
    if (size < 0) refuse(name, found + "is negative. Sizes are 0 or more.");
    refuse(name, found + "is " + std::to_string(size) + " but must be " + std::to_string(axis.size) + " = " + axis.source +
                     ". Pass a tensor of shape " + axes_text(axes) + ".");
  }
  std::int64_t numel = 0, span = 0;
  if (!numel_of(view, &numel)) {
    refuse(name, "has shape " + shape_text(view) + ", whose size in bytes overflows 64 bits. Use smaller shapes.");
  }
  const TensorView checked = with_harmless_strides(view, numel == 0);
  for (i = 0; i < checked.rank; ++i) {
    if (checked.stride[i] < 0) {
      refuse(name, "has stride " + std::to_string(checked.stride[i]) + " on axis " + std::to_string(i) +
                       "; strides must not be negative. Make a contiguous copy.");
    }
  }
  if (checked.stride[checked.rank - 1] != 1) {
    refuse(name, "has stride " + std::to_string(checked.stride[checked.rank - 1]) +
                     " on its last axis; it must be 1 (elements side by side). Make a contiguous copy.");
  }
  if (numel > 0) {
    if (!span_of(checked, &span)) {
      refuse(name, "has shape " + shape_text(view) + " and strides that reach beyond 64 bits. Use smaller shapes or strides.");
    }
    if (role == Role::kOutput && overlaps_itself(checked)) {
      refuse(name,
             "has strides by which two of its elements lie at one address; an output must not overlap itself. Pass a tensor "
             "that owns all its elements.");
    }
    const auto address = reinterpret_cast<std::uintptr_t>(view.data);
    const auto size = static_cast<std::uintptr_t>(dtype_bytes(view.dtype));
    if (view.data == nullptr && needs_memory) {
      refuse(name, "has shape " + shape_text(view) + " but its data pointer is null. Pass the address of its first element.");
    }
    if (address % size != 0) {
      refuse(name, "has a data pointer that is not aligned to its element size of " + std::to_string(size) + " bytes; " +
                       dtype_name(view.dtype) + " must start at a multiple of it. Copy it to aligned memory.");
    }
    if (address > UINTPTR_MAX - static_cast<std::uintptr_t>(span) * size) {
      refuse(name,
             "has shape " + shape_text(view) + " and strides that reach past the end of the address space. Use the true shape.");
    }
  }
  entries_.push_back({name, checked, role});
  return checked;
}

namespace {

// Asked once: which GPUs this build can use does not change while a process runs.
const cuda::DeviceStatus& gpu_status() {
  static const cuda::DeviceStatus status = cuda::device_status();
  return status;
}

// Kernels read rows of 16-bit elements as 16-byte pieces, by plain loads and by the copy engine alike.
void check_gpu_alignment(const char* name, const TensorView& view) {
  constexpr std::int64_t kBytes = 16;
  if (dtype_bytes(view.dtype) != 2 || view.numel() == 0) return;
  if (reinterpret_cast<std::uintptr_t>(view.data) % kBytes != 0) {
    refuse(name,
           "has an address that is not a multiple of 16 bytes, which GPU kernels need. Pass a tensor of its own, not a view at an "
           "odd offset.");
  }
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.shape[i] <= 1 || view.stride[i] * 2 % kBytes == 0) continue;
    refuse(name, "has a stride of " + std::to_string(view.stride[i]) + " elements in axis " + std::to_string(i) +
                     "; GPU kernels need a multiple of 8 (16 bytes). Pass a contiguous copy.");
  }
}

}  // namespace

Backend Checker::device(bool any_alignment) const {
  const Entry& first = entries_.front();
  for (const Entry& entry : entries_) {
    if (same_device(entry.view.device, first.view.device)) continue;
    refuse(entry.name, "is on " + device_text(entry.view.device) + ", but " + first.name + " is on " +
                           device_text(first.view.device) + "; all tensors of a call must be on one device. Move one of them.");
  }
  const Backend backend = options_.backend;
  const DeviceType type = first.view.device.type;
  if (backend == Backend::kCuda || (backend == Backend::kAuto && type == DeviceType::kCuda)) {
    if (type != DeviceType::kCuda) {
      refuse("options.backend",
             std::string("is cuda, but ") + first.name +
                 " is on the CPU; that backend works on GPU memory. Move the tensors to a GPU, or use backend auto.");
    }
    const cuda::DeviceStatus& gpu = gpu_status();
    if (!gpu.available) {
      refuse(first.name,
             "is on " + device_text(first.view.device) + ", but no GPU can be used: " + gpu.detail +
                 ". Move the tensors to the CPU and use backend auto or cpu.",
             ErrorCode::kDevice);
    }
    for (const Entry& entry : entries_) {
      if (!any_alignment) check_gpu_alignment(entry.name, entry.view);
    }
    return Backend::kCuda;
  }
  if (type != DeviceType::kCpu) {
    refuse(first.name, "is on " + device_text(first.view.device) + ", but options.backend is " + backend_name(backend) +
                           ", which works on CPU memory. Move the tensors to the CPU.");
  }
  return backend == Backend::kAuto ? Backend::kCpu : backend;
}

void Checker::overlap() const {
  for (const Entry& output : entries_) {
    if (output.role != Role::kOutput) continue;
    for (const Entry& other : entries_) {
      if (&output == &other || !share_memory(output.view, other.view)) continue;
      refuse(output.name, std::string("shares memory with ") + other.name +
                              "; an output must not overlap any other tensor of the call. Give it memory of its own.");
    }
  }
  const Workspace* workspace = options_.workspace;
  if (workspace == nullptr) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(workspace->data());
  for (const Entry& entry : entries_) {
    const Extent extent = extent_of(entry.view);
    if (extent.begin >= begin + workspace->bytes() || begin >= extent.end) continue;
    refuse("options.workspace", std::string("shares memory with ") + entry.name + "; scratch is overwritten. Use separate memory.");
  }
}

std::uint32_t Checker::result_dtypes() const {
  const std::uint32_t f32 = core::dtype_bit(DType::kF32);
  return options_.backend == Backend::kReference ? f32 | core::dtype_bit(DType::kF64) : f32;
}

std::int32_t Checker::num_threads() const { return options_.num_threads > 0 ? options_.num_threads : core::hardware_threads(); }

void check_same_dtype(const char* name, const TensorView& other, const char* base_name, const TensorView& base) {
  if (other.dtype == base.dtype) return;
  refuse(name, std::string("has dtype ") + dtype_name(other.dtype) + ", but " + base_name + " has " + dtype_name(base.dtype) +
                   "; they must have one dtype. Convert one of them.");
}

}  // namespace openmsa::api
