#include <memory>

#include "tests/check_throws.h"
#include "tests/simulation/index_operations.h"

using namespace kvledger;
using namespace kvledger::simulation;

namespace {

void run(EvictionOrder order) {
  IndexOutcome all;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    CAPTURE(seed);
    auto operations = std::make_unique<IndexOperations>(seed, order);
    try {
      all.add(operations->run(400));
    } catch (const std::exception& failure) {
      static_cast<void>(operations.release());  // its books are broken
      FAIL(failure.what());
    }
  }
  CHECK(all.found_own > 1500);
  CHECK(all.found_shared > 150);
  CHECK(all.tails > 40);
  CHECK(all.caught_up > 8);
  CHECK(all.evicted > 1000);
  CHECK(all.refused > 1000);
  CHECK(all.preempted > 250);
  CHECK(all.forked > 80);
  CHECK(all.split > 200);
  CHECK(all.stayed > 10);
  CHECK(all.purged > 80);
  CHECK(all.shares > 100);
}

}  // namespace

TEST_CASE("index, pool and ledger do what a simple model says, and evict the oldest") {
  // If this fails, somebody is found another's block, loses one too early, or pays for too much.
  run(EvictionOrder::kByAge);
}

TEST_CASE("index, pool and ledger do what a simple model says, whatever the policy evicts") {
  // If this fails, the default policy takes a block that is in use or guaranteed to somebody.
  run(EvictionOrder::kDefault);
}
