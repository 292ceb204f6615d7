// Which of the compiled instruction sets this machine runs, chosen once at start.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/cpu/isa/table.h"

namespace kvledger::cpu {

enum class InstructionSet : std::uint8_t {
  kPortable = 0,
  kAvx2 = 1,    // with FMA and F16C
  kAvx512 = 2,  // F, BW, DQ and VL
};

// "portable", "avx2", "avx512".
std::string_view name(InstructionSet set) noexcept;
std::optional<InstructionSet> instruction_set_named(std::string_view text) noexcept;

// Those that this machine runs, the best one last.
std::vector<InstructionSet> supported_instruction_sets();

// Kernels of a supported instruction set.
const KernelTable& kernel_table(InstructionSet set);

}  // namespace kvledger::cpu
