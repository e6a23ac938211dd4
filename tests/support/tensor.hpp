// Tensor: owned memory of any storage dtype, with a guard on either side and, if asked for, padded rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "openmsa/tensor.hpp"

namespace openmsa::test {

class Tensor {
 public:
  Tensor() = default;
  // Every byte, guards and padding included, starts as the fill: NaN in the floating-point types and a large number in int32, so
  // that a result which was never written shows.
  // `row_padding`: unused elements after each row of the last axis, which makes the view strided.
  Tensor(DType dtype, std::vector<std::int64_t> shape, std::int64_t row_padding = 0);

  const TensorView& view() const { return view_; }
  DType dtype() const { return view_.dtype; }
  std::int64_t numel() const { return view_.numel(); }
  bool given() const { return view_.given(); }

  // Element number i in row-major order of the shape; a set value is rounded to the dtype by way of float (double for kF64).
  double get(std::int64_t i) const;
  void set(std::int64_t i, double value);
  // Number of element [a, b, ...] in that order.
  template <typename... Index>
  std::int64_t at(Index... index) const {
    const std::int64_t indices[] = {static_cast<std::int64_t>(index)...};
    std::int64_t i = 0;
    for (int axis = 0; axis < static_cast<int>(sizeof...(index)); ++axis) i = i * view_.shape[axis] + indices[axis];
    return i;
  }
  template <typename... Index>
  double operator()(Index... index) const {
    return get(at(index...));
  }

  // Row number `row` of the last axis, counted over all other axes.
  std::int64_t row_size() const { return view_.shape[view_.rank - 1]; }
  std::int64_t num_rows() const { return row_size() > 0 ? numel() / row_size() : 0; }
  void get_row(std::int64_t row, double* values) const;
  void set_row(std::int64_t row, const double* values);

  std::vector<double> values() const;
  std::vector<float> floats() const;
  // The same values in another dtype, in dense rows.
  Tensor to(DType dtype) const;

  // Moves the elements, in dense rows, to memory that ends (kAfter) or starts (kBefore) at a page nobody may touch, so that a read
  // past the border ends the process. The start is then aligned to the element size only. Copies share that memory.
  enum class Fence { kBefore, kAfter };
  void fence(Fence side);

  // True while guards and padding still hold the fill.
  bool guards_intact() const;
  // True while the whole tensor still holds the fill.
  bool untouched() const;
  // Same dtype, shape and elements bit for bit (NaNs included); padding and guards do not matter.
  bool same_bits(const Tensor& other) const;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::byte* row_data(std::int64_t row) const;
  std::byte fill() const { return std::byte{view_.dtype == DType::kI32 ? std::uint8_t{0x5a} : std::uint8_t{0xff}}; }
  std::byte* memory() const { return const_cast<std::byte*>(lines_.front().bytes); }

  std::vector<Line> lines_;
  std::shared_ptr<std::byte> fenced_;  // where the elements are after fence()
  TensorView view_;

 public:
  // Copies own their memory, so the view has to follow it.
  Tensor(const Tensor& other) : lines_(other.lines_), fenced_(other.fenced_), view_(other.view_) { rebase(other); }
  Tensor(Tensor&& other) noexcept = default;
  Tensor& operator=(Tensor other) noexcept {
    lines_.swap(other.lines_);
    fenced_.swap(other.fenced_);
    view_ = other.view_;
    return *this;
  }

 private:
  void rebase(const Tensor& other) {
    if (!lines_.empty() && !fenced_) view_.data = memory() + (static_cast<std::byte*>(other.view_.data) - other.memory());
  }
};

}  // namespace openmsa::test
