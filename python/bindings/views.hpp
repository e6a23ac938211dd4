// Python arrays as TensorViews: PyTorch tensors and NumPy arrays, read through their Python attributes. That costs about 0.3 us
// a tensor, a fifth of a DLPack capsule, knows bfloat16 in both worlds, and needs the headers of neither.
#pragma once

#include <nanobind/nanobind.h>

#include "openmsa/tensor.hpp"

namespace openmsa::python {

// A view of `object`, which must outlive it. Throws Error naming `name` for anything but a tensor or array of rank 1 to 4 whose
// dtype the library knows; strides and sizes are checked by the library itself. Needs the GIL.
TensorView view_of(nanobind::handle object, const char* name);

// The same, with None for "not given".
TensorView optional_view_of(nanobind::handle object, const char* name);

}  // namespace openmsa::python
