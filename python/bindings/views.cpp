#include "views.hpp"

#include <nanobind/stl/string.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "openmsa/error.hpp"

namespace nb = nanobind;

namespace openmsa::python {
namespace {

[[noreturn]] void fail(const char* name, const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, name, std::string(name) + " " + text);
}

// Attribute names, interned once: building a str for each look-up would cost more than the look-up. Never freed, on purpose:
// they live as long as the interpreter.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* strides = PyUnicode_InternFromString("strides");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* array_interface = PyUnicode_InternFromString("__array_interface__");
};
const Names& names() {
  static const Names* all = new Names();
  return *all;
}

nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

nb::object call_method(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_CallNoArgs(attribute(object, name).ptr());
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

std::optional<DType> dtype_from_name(const std::string& name) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return std::nullopt;
}

// "torch.bfloat16" and "bfloat16" alike.
std::string dtype_text(nb::handle dtype) {
  const std::string text = nb::cast<std::string>(nb::str(dtype));
  const std::size_t dot = text.rfind('.');
  return dot == std::string::npos ? text : text.substr(dot + 1);
}

DType dtype_of(nb::handle object, const char* name) {
  // dtype objects are singletons in PyTorch and nearly so in NumPy. The map keeps a reference to each it has seen, so an
  // address cannot be reused by another object.
  static std::mutex mutex;
  static auto* known = new std::unordered_map<PyObject*, DType>();
  const nb::object dtype = attribute(object, names().dtype);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(dtype.ptr()); found != known->end()) return found->second;
  }
  const std::string text = dtype_text(dtype);
  const std::optional<DType> result = dtype_from_name(text);
  if (!result) {
    fail(name, "has dtype " + text +
                   "; known are float32, bfloat16, float16 (float64 with the reference backend) and, for index "
                   "data, int32 (int64 for slots), in native byte order. Convert it first.");
  }
  const std::lock_guard lock(mutex);
  if (known->size() < 64 && known->emplace(dtype.ptr(), *result).second) Py_INCREF(dtype.ptr());
  return *result;
}

void read_sizes(nb::handle tuple, std::array<std::int64_t, kMaxRank>& out, int rank) {
  for (int i = 0; i < rank; ++i) {
    PyObject* item = PyTuple_GetItem(tuple.ptr(), i);  // borrowed
    if (!item) throw nb::python_error();
    out[i] = PyLong_AsLongLong(item);
    if (out[i] == -1 && PyErr_Occurred()) throw nb::python_error();
  }
}

void read_shape(nb::handle object, const char* name, TensorView& view) {
  const nb::object shape = attribute(object, names().shape);
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0) throw nb::python_error();
  if (rank < 1 || rank > kMaxRank) {
    fail(name, "has rank " + std::to_string(rank) + "; tensors here have rank 1 to " + std::to_string(kMaxRank) + ".");
  }
  view.rank = static_cast<int>(rank);
  read_sizes(shape, view.shape, view.rank);
}

void* pointer_of(nb::handle integer) {
  void* pointer = PyLong_AsVoidPtr(integer.ptr());
  if (!pointer && PyErr_Occurred()) throw nb::python_error();
  return pointer;
}

TensorView view_of_torch(nb::handle tensor, const char* name) {
  TensorView view;
  if (attribute(tensor, names().is_cpu).ptr() != Py_True) {
    if (attribute(tensor, names().is_cuda).ptr() != Py_True) {
      fail(name, "lies on device '" + nb::cast<std::string>(nb::str(nb::getattr(tensor, "device"))) +
                     "'; move it to the CPU or to a CUDA device.");
    }
    view.device.type = DeviceType::kCuda;
    view.device.index = nb::cast<std::int32_t>(call_method(tensor, names().get_device));
  }
  view.dtype = dtype_of(tensor, name);
  read_shape(tensor, name, view);
  read_sizes(call_method(tensor, names().stride), view.stride, view.rank);
  view.data = pointer_of(call_method(tensor, names().data_ptr));
  return view;
}

TensorView view_of_numpy(nb::handle array, const char* name) {
  TensorView view;
  view.dtype = dtype_of(array, name);
  read_shape(array, name, view);
  read_sizes(attribute(array, names().strides), view.stride, view.rank);
  const std::int64_t size = dtype_bytes(view.dtype);
  for (int i = 0; i < view.rank; ++i) {
    if (view.stride[i] % size != 0) {
      fail(name, "has a stride of " + std::to_string(view.stride[i]) + " bytes in axis " + std::to_string(i) +
                     ", not a multiple of the element size " + std::to_string(size) + ". Pass a copy.");
    }
    view.stride[i] /= size;
  }
  const nb::dict interface = nb::cast<nb::dict>(attribute(array, names().array_interface));
  view.data = pointer_of(nb::cast<nb::tuple>(interface["data"])[0]);
  return view;
}

}  // namespace

TensorView view_of(nb::handle object, const char* name) {
  if (PyObject_HasAttr(object.ptr(), names().data_ptr)) return view_of_torch(object, name);
  if (PyObject_HasAttr(object.ptr(), names().array_interface)) return view_of_numpy(object, name);
  fail(name, "is a " + nb::cast<std::string>(nb::inst_name(object)) + "; expected a PyTorch tensor or a NumPy array.");
}

TensorView optional_view_of(nb::handle object, const char* name) { return object.is_none() ? TensorView{} : view_of(object, name); }

}  // namespace openmsa::python
