// Usage: reuse_simulation [SEEDS [STEPS [FIRST [harsh]]]]
//
// Runs seeds FIRST, FIRST + 1, ... with STEPS steps each. A failure prints its seed and ends with
// status 1; the same seed and steps run it again, step by step the same.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include "core/check.h"
#include "tests/simulation/reuse.h"

namespace {

using namespace kvledger;
using namespace kvledger::simulation;

long long number(int argc, char** argv, int index, long long fallback) {
  return index < argc ? std::atoll(argv[index]) : fallback;
}

}  // namespace

int main(int argc, char** argv) {
  const long long seeds = number(argc, argv, 1, 1);
  const long long steps = number(argc, argv, 2, 1000);
  const long long first = number(argc, argv, 3, 1);
  set_check_handler([](const CheckFailure& failure) { throw Violation(failure.message()); });
  ReuseOutcome all;
  for (long long seed = first; seed < first + seeds; ++seed) {
    auto simulator = std::make_unique<ReuseSimulator>(static_cast<std::uint64_t>(seed), argc > 4);
    try {
      all.add(simulator->run(steps));
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "seed %lld failed: %s\n", seed, failure.what());
      // Its books are broken; taking it down would fail again and hide the first failure.
      static_cast<void>(simulator.release());
      return 1;
    }
  }
  const auto l = [](auto value) { return static_cast<long long>(value); };
  std::printf(
      "%lld seeds from %lld: %lld steps, %lld requests, %lld tokens computed, %lld reused of own "
      "and %lld of shared scopes, %lld tails, %lld caught up, %lld preemptions, %lld evictions, "
      "%lld purges (%lld of scopes in use), %lld steps at a limit\n",
      seeds, first, l(all.steps), l(all.requests), l(all.computed), l(all.reused_own),
      l(all.reused_shared), l(all.tails), l(all.caught_up), l(all.preemptions), l(all.evicted),
      l(all.purges), l(all.purged_in_use), l(all.at_limit));
  return 0;
}
