#include "core/recompute_governor.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// So many tokens in steps of 512, `again` of each hundred computed again.
void work(RecomputeGovernor& governor, std::int64_t tokens, std::int64_t again) {
  for (std::int64_t i = 0; i < tokens / 512; ++i) {
    governor.count(512, 512 * again / 100);
  }
}

}  // namespace

TEST_CASE("work done twice makes admission more careful, step by step, up to the last level") {
  // If this fails, a server that recomputes goes on as it is.
  RecomputeGovernor governor;
  CHECK(governor.level() == 0);
  const double calm = governor.deviations();
  work(governor, 512, 10);
  CHECK(governor.level() == 1);
  CHECK(governor.deviations() > calm);
  work(governor, RecomputeGovernor::kPause - 512, 10);
  CHECK(governor.level() == 1);  // the last move is still to show
  work(governor, 512, 10);
  CHECK(governor.level() == 2);
  work(governor, 1 << 20, 10);
  CHECK(governor.level() == RecomputeGovernor::kLevels - 1);
  CHECK(governor.raised() == RecomputeGovernor::kLevels - 1);
  CHECK(governor.lowered() == 0);
}

TEST_CASE("it calms down when the waste is gone, not already when it is less") {
  // If this fails, the level swings with every preemption, or stays up for ever.
  RecomputeGovernor governor;
  work(governor, 1 << 18, 10);
  const std::int64_t high = governor.level();
  work(governor, 1 << 20, 1);  // less than too much, more than healthy
  CHECK(governor.wasted() == doctest::Approx(0.01).epsilon(0.05));
  CHECK(governor.level() == high);
  work(governor, 1 << 20, 0);
  CHECK(governor.level() == 0);
  CHECK(governor.lowered() == high);
  CHECK(governor.wasted() < RecomputeGovernor::kHealthy);
}

TEST_CASE("a step without work changes nothing, and one cannot do more again than at all") {
  // If this fails, an idle server becomes careless, or wrong books pass.
  RecomputeGovernor governor;
  work(governor, 1 << 18, 10);
  const double wasted = governor.wasted();
  const std::int64_t level = governor.level();
  for (int i = 0; i < 1000; ++i) {
    governor.count(0, 0);
  }
  CHECK(governor.wasted() == wasted);
  CHECK(governor.level() == level);
  CHECK_BREAKS(governor.count(1, 2));
  CHECK_BREAKS(governor.count(1, -1));
}
