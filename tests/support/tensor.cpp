#include "support/tensor.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace openmsa::test {

namespace {

constexpr std::int64_t kGuardBytes = 256;

template <typename T>
double widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<float>(value);
  } else {
    return static_cast<double>(value);
  }
}

template <typename T>
T narrow(double value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Calls function with a value of the C++ type that stores `dtype`.
template <typename Function>
void with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF64: function(double{}); break;
    case DType::kF32: function(float{}); break;
    case DType::kBF16: function(BFloat16{}); break;
    case DType::kF16: function(Float16{}); break;
    case DType::kI32: function(std::int32_t{}); break;
    case DType::kI64: function(std::int64_t{}); break;
  }
}

// n elements. The dtype is looked at once: under sanitizers the calls and choices of every element took more than the oracle.
void load(const std::byte* data, DType dtype, std::int64_t n, double* values) {
  with_type(dtype, [&]<typename T>(T) {
    const T* const elements = reinterpret_cast<const T*>(data);
    for (std::int64_t i = 0; i < n; ++i) values[i] = widen(elements[i]);
  });
}

void store(std::byte* data, DType dtype, std::int64_t n, const double* values) {
  with_type(dtype, [&]<typename T>(T) {
    T* const elements = reinterpret_cast<T*>(data);
    for (std::int64_t i = 0; i < n; ++i) elements[i] = narrow<T>(values[i]);
  });
}

}  // namespace

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, std::int64_t row_padding) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    const std::int64_t size = shape[static_cast<std::size_t>(axis)];
    view_.shape[axis] = size;
    view_.stride[axis] = stride;
    stride *= axis == view_.rank - 1 ? size + row_padding : size;
  }
  const std::int64_t bytes = 2 * kGuardBytes + stride * dtype_bytes(dtype);
  Line line;
  std::fill(std::begin(line.bytes), std::end(line.bytes), fill());
  lines_.assign(static_cast<std::size_t>((bytes + 63) / 64), line);
  view_.data = memory() + kGuardBytes;
}

std::byte* Tensor::row_data(std::int64_t row) const {
  std::int64_t offset = 0;
  for (int axis = view_.rank - 2; axis >= 0; --axis) {
    offset += row % view_.shape[axis] * view_.stride[axis];
    row /= view_.shape[axis];
  }
  return static_cast<std::byte*>(view_.data) + offset * dtype_bytes(view_.dtype);
}

double Tensor::get(std::int64_t i) const {
  double value = 0;
  load(row_data(i / row_size()) + i % row_size() * dtype_bytes(dtype()), dtype(), 1, &value);
  return value;
}

void Tensor::set(std::int64_t i, double value) {
  store(row_data(i / row_size()) + i % row_size() * dtype_bytes(dtype()), dtype(), 1, &value);
}

void Tensor::get_row(std::int64_t row, double* values) const { load(row_data(row), dtype(), row_size(), values); }

void Tensor::set_row(std::int64_t row, const double* values) { store(row_data(row), dtype(), row_size(), values); }

std::vector<double> Tensor::values() const {
  std::vector<double> values(static_cast<std::size_t>(numel()));
  for (std::int64_t row = 0; row < num_rows(); ++row) get_row(row, values.data() + row * row_size());
  return values;
}

std::vector<float> Tensor::floats() const {
  const std::vector<double> wide = values();
  return {wide.begin(), wide.end()};
}

Tensor Tensor::to(DType dtype) const {
  Tensor result(dtype, {view_.shape.begin(), view_.shape.begin() + view_.rank});
  const std::vector<double> wide = values();
  for (std::int64_t row = 0; row < num_rows(); ++row) result.set_row(row, wide.data() + row * row_size());
  return result;
}

void Tensor::fence(Fence side) {
  *this = to(dtype());
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto bytes = static_cast<std::size_t>(numel() * dtype_bytes(dtype()));
  const std::size_t inside = (bytes + page - 1) / page * page, mapped = inside + 2 * page;
  void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  auto* base = static_cast<std::byte*>(mapping);
  if (inside > 0 && mprotect(base + page, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  fenced_ = std::shared_ptr<std::byte>(base, [mapped](std::byte* p) { munmap(p, mapped); });
  std::byte* data = base + page + (side == Fence::kAfter ? inside - bytes : 0);
  if (bytes > 0) std::memcpy(data, view_.data, bytes);
  view_.data = data;
}

bool Tensor::guards_intact() const {
  Tensor copy = *this;
  const auto bytes = static_cast<std::size_t>(row_size() * dtype_bytes(dtype()));
  for (std::int64_t row = 0; row < num_rows(); ++row) std::memset(copy.row_data(row), static_cast<int>(fill()), bytes);
  return copy.untouched();
}

bool Tensor::untouched() const {
  Line filled;
  std::fill(std::begin(filled.bytes), std::end(filled.bytes), fill());
  return std::all_of(lines_.begin(), lines_.end(),
                     [&](const Line& line) { return std::memcmp(line.bytes, filled.bytes, sizeof(filled.bytes)) == 0; });
}

bool Tensor::same_bits(const Tensor& other) const {
  if (dtype() != other.dtype() || view_.rank != other.view_.rank || view_.shape != other.view_.shape) return false;
  const auto bytes = static_cast<std::size_t>(row_size() * dtype_bytes(dtype()));
  for (std::int64_t row = 0; row < num_rows(); ++row) {
    if (std::memcmp(row_data(row), other.row_data(row), bytes) != 0) return false;
  }
  return true;
}

}  // namespace openmsa::test
