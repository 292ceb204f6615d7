#include "core/bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The C++ core: scheduler, block pool and ledger; CPU kernels; the GGUF reader. "
      "See core/ for the contracts.";
  kvledger::bindings::bind_gguf(module);
  kvledger::bindings::bind_machine(module);
  kvledger::bindings::bind_kv_memory(module);
  kvledger::bindings::bind_step_books(module);
  kvledger::bindings::bind_books(module);
  kvledger::bindings::bind_engine(module);
  kvledger::bindings::bind_cpu_kernels(module);
  kvledger::bindings::bind_prefix_index(module);
}
