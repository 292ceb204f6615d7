#include "core/cpu/instruction_set.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger::cpu {
namespace {

constexpr InstructionSet kAll[] = {InstructionSet::kPortable, InstructionSet::kAvx2,
                                   InstructionSet::kAvx512};

bool runs_here(InstructionSet set) noexcept {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx2) {
    // Clang cannot be asked for F16C; every processor with AVX2 has it.
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  }
  if (set == InstructionSet::kAvx512) {
    return runs_here(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") != 0 &&
           __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0;
  }
#endif
  return set == InstructionSet::kPortable;
}

}  // namespace

std::string_view name(InstructionSet set) noexcept {
  constexpr std::string_view kNames[] = {"portable", "avx2", "avx512"};
  return kNames[static_cast<std::size_t>(set)];
}

std::optional<InstructionSet> instruction_set_named(std::string_view text) noexcept {
  const auto found = std::find_if(std::begin(kAll), std::end(kAll),
                                  [text](InstructionSet set) { return name(set) == text; });
  return found == std::end(kAll) ? std::nullopt : std::optional(*found);
}

std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> sets;
  std::copy_if(std::begin(kAll), std::end(kAll), std::back_inserter(sets), &runs_here);
  return sets;
}

const KernelTable& kernel_table(InstructionSet set) {
  KVL_CHECK(runs_here(set));
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) {
    return avx512::table();
  }
  if (set == InstructionSet::kAvx2) {
    return avx2::table();
  }
#endif
  return portable::table();
}

}  // namespace kvledger::cpu
