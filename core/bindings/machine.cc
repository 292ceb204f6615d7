#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "core/bindings/bindings.h"
#include "core/cpu/instruction_set.h"

namespace py = pybind11;

namespace kvledger::bindings {

void bind_machine(py::module_& module) {
  module.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (const cpu::InstructionSet set : cpu::supported_instruction_sets()) {
          names.emplace_back(cpu::name(set));
        }
        return names;
      },
      "Instruction sets of the CPU kernels that this machine runs, the best one last.");
}

}  // namespace kvledger::bindings
