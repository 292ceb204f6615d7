// Usage: index_simulation [SEEDS [OPERATIONS [FIRST]]]
//
// Runs seeds FIRST, FIRST + 1, ... with OPERATIONS each, with evictions by age and then with the
// default policy. A failure prints its seed and ends with status 1; the same seed and operations
// run it again, one by one the same.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include "core/check.h"
#include "tests/simulation/index_operations.h"

namespace {

using namespace kvledger;
using namespace kvledger::simulation;

long long number(int argc, char** argv, int index, long long fallback) {
  return index < argc ? std::atoll(argv[index]) : fallback;
}

void print(const char* order, const IndexOutcome& all) {
  const auto l = [](auto value) { return static_cast<long long>(value); };
  std::printf(
      "%s: %lld operations, %lld requests, %lld tokens found in own and %lld in shared scopes, "
      "%lld tails, %lld caught up, %lld evicted, %lld refused, %lld preempted, %lld forked, %lld "
      "split, %lld stayed, %lld purged, %lld shares\n",
      order, l(all.operations), l(all.requests), l(all.found_own), l(all.found_shared),
      l(all.tails), l(all.caught_up), l(all.evicted), l(all.refused), l(all.preempted),
      l(all.forked), l(all.split), l(all.stayed), l(all.purged), l(all.shares));
}

}  // namespace

int main(int argc, char** argv) {
  const long long seeds = number(argc, argv, 1, 1);
  const long long operations = number(argc, argv, 2, 1000);
  const long long first = number(argc, argv, 3, 1);
  set_check_handler([](const CheckFailure& failure) { throw Violation(failure.message()); });
  for (const EvictionOrder order : {EvictionOrder::kByAge, EvictionOrder::kDefault}) {
    const char* const name = order == EvictionOrder::kByAge ? "by age" : "default";
    IndexOutcome all;
    for (long long seed = first; seed < first + seeds; ++seed) {
      auto run = std::make_unique<IndexOperations>(static_cast<std::uint64_t>(seed), order);
      try {
        all.add(run->run(operations));
      } catch (const std::exception& failure) {
        std::fprintf(stderr, "%s, seed %lld failed: %s\n", name, seed, failure.what());
        // Its books are broken; taking it down would fail again and hide the first failure.
        static_cast<void>(run.release());
        return 1;
      }
    }
    print(name, all);
  }
  return 0;
}
