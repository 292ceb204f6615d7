#include "core/books.h"

#include <span>

#include "core/bindings/bindings.h"

namespace py = pybind11;

namespace kvledger::bindings {

void bind_books(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(StateRow, blocks, seconds, nanos);
  PYBIND11_NUMPY_DTYPE(AccountRow, account, open_requests, held, reserved, cached, held_seconds,
                       reserved_seconds, cached_seconds, closed_seconds, held_nanos, reserved_nanos,
                       cached_nanos, closed_nanos);
  const auto array = [](auto member) {
    return [member](const py::object& self) {
      const auto& rows = self.cast<const Books&>().*member;
      return view_of(std::span(rows), self);
    };
  };
  py::class_<Books>(module, "Books", "The ledger at one moment; see core/books.h.")
      .def_readonly("elapsed", &Books::elapsed)
      .def_property_readonly("states", array(&Books::states))
      .def_property_readonly("accounts", array(&Books::accounts))
      .def_readonly("empty_slots", &Books::empty_slots);
}

}  // namespace kvledger::bindings
