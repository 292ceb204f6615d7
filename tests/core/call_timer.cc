#include "core/call_timer.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

Nanoseconds time_now = 0;
int readings = 0;

Nanoseconds hand_clock() noexcept {
  ++readings;
  return time_now;
}

void work(CallTimer& timer, Nanoseconds duration) {
  const auto call = timer.call();
  time_now += duration;
}

// Time between calls belongs to somebody else.
TEST_CASE("what calls take is added up, and nothing besides") {
  time_now = 100;
  CallTimer timer(&hand_clock);
  CHECK_EQ(timer.nanoseconds(), 0);
  work(timer, 7);
  time_now += 1000;
  work(timer, 5);
  CHECK_EQ(timer.nanoseconds(), 12);
}

// A call that calls another would otherwise count its time twice.
TEST_CASE("of calls within calls only the outermost counts and asks the clock") {
  time_now = 100;
  readings = 0;
  CallTimer timer(&hand_clock);
  {
    const auto outer = timer.call();
    time_now += 3;
    work(timer, 20);
    work(timer, 30);
    CHECK_EQ(timer.nanoseconds(), 0);
  }
  CHECK_EQ(timer.nanoseconds(), 53);
  CHECK_EQ(readings, 2);
}

// The simulation hands no clock in, and must not need one.
TEST_CASE("without a clock nothing is counted") {
  CallTimer timer(nullptr);
  work(timer, 20);
  CHECK_EQ(timer.nanoseconds(), 0);
}

}  // namespace
