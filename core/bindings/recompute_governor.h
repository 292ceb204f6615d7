// What Python sees of the recompute governor: two properties of the engine.

#pragma once

#include <pybind11/pybind11.h>

#include "core/recompute_governor.h"

namespace kvledger::bindings {

template <class Engine>
void bind_governor(pybind11::class_<Engine>& engine) {
  engine
      .def_property_readonly(
          "governor",
          [](const Engine& self) {
            const RecomputeGovernor& governor = self.engine().governor();
            return pybind11::make_tuple(governor.level(), governor.raised(), governor.lowered());
          },
          "How careful admission is, and how often that was raised and lowered.")
      .def_property_readonly(
          "recomputed_share", [](const Engine& self) { return self.engine().governor().wasted(); },
          "Of the recent work, the part that had been done before; core/recompute_governor.h.");
}

}  // namespace kvledger::bindings
