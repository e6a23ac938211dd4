#include "support/tensor.hpp"

#include <algorithm>
#include <cstring>

namespace openmsa::test {

namespace {

constexpr std::int64_t kGuardBytes = 256;

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

std::byte* Tensor::element(std::int64_t i) const {
  std::int64_t offset = 0;
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    offset += i % view_.shape[axis] * view_.stride[axis];
    i /= view_.shape[axis];
  }
  return static_cast<std::byte*>(view_.data) + offset * dtype_bytes(view_.dtype);
}

double Tensor::get(std::int64_t i) const {
  const std::byte* p = element(i);
  switch (view_.dtype) {
    case DType::kF64: return *reinterpret_cast<const double*>(p);
    case DType::kF32: return *reinterpret_cast<const float*>(p);
    case DType::kBF16: return static_cast<float>(*reinterpret_cast<const BFloat16*>(p));
    case DType::kF16: return static_cast<float>(*reinterpret_cast<const Float16*>(p));
    case DType::kI32: return *reinterpret_cast<const std::int32_t*>(p);
  }
  return 0;
}

void Tensor::set(std::int64_t i, double value) {
  std::byte* p = element(i);
  switch (view_.dtype) {
    case DType::kF64: *reinterpret_cast<double*>(p) = value; break;
    case DType::kF32: *reinterpret_cast<float*>(p) = static_cast<float>(value); break;
    case DType::kBF16: *reinterpret_cast<BFloat16*>(p) = BFloat16(static_cast<float>(value)); break;
    case DType::kF16: *reinterpret_cast<Float16*>(p) = Float16(static_cast<float>(value)); break;
    case DType::kI32: *reinterpret_cast<std::int32_t*>(p) = static_cast<std::int32_t>(value); break;
  }
}

std::vector<double> Tensor::values() const {
  std::vector<double> values(static_cast<std::size_t>(numel()));
  for (std::int64_t i = 0; i < numel(); ++i) values[static_cast<std::size_t>(i)] = get(i);
  return values;
}

std::vector<float> Tensor::floats() const {
  std::vector<float> values(static_cast<std::size_t>(numel()));
  for (std::int64_t i = 0; i < numel(); ++i) values[static_cast<std::size_t>(i)] = static_cast<float>(get(i));
  return values;
}

Tensor Tensor::to(DType dtype) const {
  Tensor result(dtype, {view_.shape.begin(), view_.shape.begin() + view_.rank});
  for (std::int64_t i = 0; i < numel(); ++i) result.set(i, get(i));
  return result;
}

bool Tensor::guards_intact() const {
  Tensor copy = *this;
  const auto size = static_cast<std::size_t>(dtype_bytes(dtype()));
  for (std::int64_t i = 0; i < numel(); ++i) std::memset(copy.element(i), static_cast<int>(fill()), size);
  return copy.untouched();
}

bool Tensor::untouched() const {
  return std::all_of(lines_.begin(), lines_.end(), [this](const Line& line) {
    return std::all_of(std::begin(line.bytes), std::end(line.bytes), [this](std::byte b) { return b == fill(); });
  });
}

bool Tensor::same_bits(const Tensor& other) const {
  if (dtype() != other.dtype() || view_.rank != other.view_.rank || view_.shape != other.view_.shape) return false;
  const auto size = static_cast<std::size_t>(dtype_bytes(dtype()));
  for (std::int64_t i = 0; i < numel(); ++i) {
    if (std::memcmp(element(i), other.element(i), size) != 0) return false;
  }
  return true;
}

}  // namespace openmsa::test
