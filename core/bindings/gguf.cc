// GGUF files for Python: read_gguf() and the two classes it returns.
//
// Everything is converted at once, so the result refers to nothing in the buffer, which may be a
// mapped file that is closed afterwards. The GIL is released while the bytes are parsed.

#include "core/gguf.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "core/bindings/bindings.h"

namespace py = pybind11;

namespace kvledger::bindings {
namespace {

// The bytes of a Python object for as long as this lives; the object may not resize meanwhile.
class BufferView {
 public:
  explicit BufferView(const py::buffer& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  std::span<const std::byte> bytes() const noexcept {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

struct PythonTensor {
  py::str name;
  py::str type;
  py::tuple shape;
  std::uint64_t offset;
  std::uint64_t bytes;
};

struct PythonFile {
  std::uint32_t version;
  std::uint32_t alignment;
  py::dict metadata;
  py::list tensors;
};

py::str to_python(std::string_view text) {
  return py::str(text.data(), text.size());
}

py::object to_python(bool value) {
  return py::bool_(value);
}

template <class T>
py::object to_python(T number) {
  if constexpr (std::is_floating_point_v<T>) {
    return py::float_(static_cast<double>(number));
  } else {
    return py::int_(number);
  }
}

template <class T>
py::object to_python(const gguf::Packed<T>& array) {
  py::array_t<T> copy(static_cast<py::ssize_t>(array.size()));
  const std::span<const std::byte> bytes = array.bytes();
  if (!bytes.empty()) {
    std::memcpy(copy.mutable_data(), bytes.data(), bytes.size());
  }
  return copy;
}

py::object to_python(const gguf::Strings& strings) {
  py::list list(strings.size());
  for (std::size_t i = 0; i < strings.size(); ++i) {
    list[i] = to_python(strings[i]);
  }
  return list;
}

// The format counts dimensions from the contiguous one; numpy ends with it.
PythonTensor to_python(const gguf::Tensor& tensor) {
  const std::span<const std::uint64_t> dimensions = tensor.shape();
  py::tuple shape(dimensions.size());
  for (std::size_t i = 0; i < dimensions.size(); ++i) {
    shape[dimensions.size() - 1 - i] = py::int_(dimensions[i]);
  }
  return {to_python(tensor.name), to_python(gguf::traits(tensor.type).name), std::move(shape),
          tensor.offset, tensor.bytes};
}

PythonFile to_python(const gguf::File& file) {
  PythonFile result{file.version, file.alignment, py::dict(), py::list()};
  for (const gguf::MetadataEntry& entry : file.metadata) {
    result.metadata[to_python(entry.key)] =
        std::visit([](const auto& value) -> py::object { return to_python(value); }, entry.value);
  }
  for (const gguf::Tensor& tensor : file.tensors) {
    result.tensors.append(py::cast(to_python(tensor)));
  }
  return result;
}

PythonFile read_gguf(const py::buffer& buffer) {
  const BufferView view(buffer);
  gguf::Result result;
  {
    const py::gil_scoped_release release;
    result = gguf::read(view.bytes());
  }
  if (const auto* error = std::get_if<gguf::Error>(&result)) {
    throw py::value_error(error->sentence + " (byte " + std::to_string(error->offset) + ")");
  }
  return to_python(std::get<gguf::File>(result));
}

}  // namespace

void bind_gguf(py::module_& module) {
  py::class_<PythonTensor>(module, "GgufTensor", "Where one tensor of a GGUF file lies.")
      .def_readonly("name", &PythonTensor::name)
      .def_readonly("type", &PythonTensor::type, "How its elements are stored, such as \"Q4_1\".")
      .def_readonly("shape", &PythonTensor::shape,
                    "As numpy counts: the dimension that is contiguous in memory comes last.")
      .def_readonly("offset", &PythonTensor::offset, "From the beginning of the file.")
      .def_readonly("bytes", &PythonTensor::bytes, "Bytes that it occupies.");
  py::class_<PythonFile>(module, "GgufFile", "What a GGUF file says, without the tensors' data.")
      .def_readonly("version", &PythonFile::version)
      .def_readonly("alignment", &PythonFile::alignment, "Every tensor's offset is a multiple.")
      .def_readonly("metadata", &PythonFile::metadata,
                    "Values by key, in the order of the file: int, float, bool, str, list[str], "
                    "or a numpy array of the file's own type.")
      .def_readonly("tensors", &PythonFile::tensors, "In the order of the file.");
  module.def(
      "read_gguf", &read_gguf, py::arg("buffer"),
      "Reads what precedes the tensors' data of a GGUF file and checks that they lie in it.\n"
      "\n"
      "`buffer` holds the whole file; nothing returned refers to it. Raises ValueError with\n"
      "one sentence where the file is damaged or of a kind that cannot be read.");
}

}  // namespace kvledger::bindings
