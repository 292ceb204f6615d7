// The parts of the extension module kvledger._core, one function for each file of bindings.
//
// Rules: arrays cross, not objects; no call back into Python; the GIL is released around work that
// takes longer than taking it again. Arguments are checked for shape and type here, with an
// exception that names them; what the core then checks is its own business.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>

namespace kvledger::bindings {

void bind_gguf(pybind11::module_& module);
void bind_books(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_kv_memory(pybind11::module_& module);
void bind_cpu_kernels(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_prefix_index(pybind11::module_& module);
void bind_step_books(pybind11::module_& module);

// A contiguous array of exactly this dtype.
template <class T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <class T>
std::span<const T> as_span(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// A numpy array over `values`, which live as long as `owner`.
template <class T>
pybind11::array_t<T> view_of(std::span<const T> values, pybind11::handle owner) {
  return pybind11::array_t<T>(static_cast<pybind11::ssize_t>(values.size()), values.data(), owner);
}

// Whether an array has exactly this dtype, byte order included. An argument of type Array<T> goes
// through numpy's general conversion even where there is nothing to convert; what every step calls
// takes a plain array and asks this.
template <class T>
bool holds(const pybind11::array& array) {
  const pybind11::dtype type = array.dtype();
  return type.num() == pybind11::dtype::num_of<T>() && type.byteorder() == '=';
}

// The values of an array that is contiguous and of this dtype; `sentence` is for any other one.
template <class T>
std::span<const T> span_of(const pybind11::array& array, const char* sentence) {
  if (!holds<T>(array) || (array.flags() & pybind11::array::c_style) == 0) {
    throw pybind11::type_error(sentence);
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

inline void require(bool condition, const char* sentence) {
  if (!condition) {
    throw pybind11::value_error(sentence);
  }
}

}  // namespace kvledger::bindings
