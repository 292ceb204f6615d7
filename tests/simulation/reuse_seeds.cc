#include "tests/check_throws.h"
#include "tests/simulation/reuse.h"

using namespace kvledger;
using namespace kvledger::simulation;

TEST_CASE("whoever reuses whatever, every context is right and every block somebody's") {
  // If this fails, somebody was given another's context, or pays for it.
  ReuseOutcome all;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    REQUIRE_NOTHROW(all.add(ReuseSimulator(seed).run(400)));
  }
  CHECK(all.reused_own > 1000);
  CHECK(all.reused_shared > 100);
  CHECK(all.tails > 10);
  CHECK(all.caught_up > 0);
  CHECK(all.preemptions > 10);
  CHECK(all.purged_in_use > 10);
  CHECK(all.evicted > 100);
  CHECK(all.at_limit > 100);
  MESSAGE(all.computed << " tokens computed, " << all.reused_own << " and " << all.reused_shared
                       << " reused, " << all.tails << " tails, " << all.caught_up << " caught up, "
                       << all.preemptions << " preemptions, " << all.evicted << " evicted");
}

TEST_CASE("almost no room, many samples and shares that change break nothing") {
  // If this fails, some order of ordinary events ends the server.
  ReuseOutcome all;
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    CAPTURE(seed);
    REQUIRE_NOTHROW(all.add(ReuseSimulator(seed, true).run(200)));
  }
  CHECK(all.preemptions > 500);
  CHECK(all.reused_own > 1000);
  CHECK(all.evicted > 1000);
}
