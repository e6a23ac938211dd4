#include "openmsa/tensor.hpp"

#include <algorithm>

#include "core/checked.hpp"

namespace openmsa {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF64: return "float64";
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
  }
  return "unknown";
}

TensorView make_view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  if (shape.size() == 0 || shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error(ErrorCode::kInvalidArgument, "shape",
                "shape has " + std::to_string(shape.size()) + " axes; a tensor view has 1 to " + std::to_string(kMaxRank));
  }
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  view.device = device;
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.shape[i] < 0) {
      throw Error(ErrorCode::kInvalidArgument, "shape",
                  "axis " + std::to_string(i) + " has length " + std::to_string(view.shape[i]) + "; lengths are 0 or more");
    }
    view.stride[i] = stride;
    stride = core::checked_mul(stride, std::max<std::int64_t>(view.shape[i], 1));
  }
  return view;
}

}  // namespace openmsa
