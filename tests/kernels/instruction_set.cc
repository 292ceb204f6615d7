#include "core/cpu/instruction_set.h"

#include <algorithm>

#include "tests/check_throws.h"

namespace kvledger::cpu {

// The last one is what a server runs with: an order that changed would silently be slow.
TEST_CASE("supported instruction sets begin with the portable one and get better") {
  const std::vector<InstructionSet> sets = supported_instruction_sets();
  REQUIRE(!sets.empty());
  CHECK(sets.front() == InstructionSet::kPortable);
  CHECK(std::is_sorted(sets.begin(), sets.end()));
  for (const InstructionSet set : sets) {
    const KernelTable& table = kernel_table(set);
    CHECK((table.attend != nullptr));
    CHECK((table.linear != nullptr));
    CHECK((table.read != nullptr));
  }
}

// Settings name a set by its word.
TEST_CASE("instruction sets are found by name") {
  for (const InstructionSet set : supported_instruction_sets()) {
    CHECK(instruction_set_named(name(set)) == set);
  }
  CHECK_FALSE(instruction_set_named("sse9").has_value());
  CHECK_FALSE(instruction_set_named("").has_value());
}

}  // namespace kvledger::cpu
