#include "core/split_time.h"

#include <random>
#include <vector>

#include "tests/check_throws.h"

using namespace kvledger;

TEST_CASE("time is divided evenly among those who hold the block then") {
  // If this fails, one request of a tenant pays for another.
  SplitTime time(1, 100);
  const Nanoseconds second = time.join(110);  // the first alone: 10
  CHECK(time.leave(0, 130) == 10 + 10);
  CHECK(time.leave(second, 137) == 10 + 7);
  CHECK(time.holders() == 0);
  CHECK(time.unpaid(137) == 0);
}

TEST_CASE("what cannot be divided is paid by the last") {
  // If this fails, nanoseconds vanish and the books do not add up.
  SplitTime time(3, 0);
  CHECK(time.leave(0, 10) == 3);
  CHECK(time.unpaid(10) == 7);
  CHECK(time.leave(0, 10) == 3);
  CHECK(time.leave(0, 10) == 4);
}

TEST_CASE("all payments together are exactly the time that passed") {
  // If this fails, a tenant's statement is not the sum of its receipts.
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    Nanoseconds now = static_cast<Nanoseconds>(random() % 1000);
    const Nanoseconds opened = now;
    const auto first = static_cast<std::uint32_t>(1 + random() % 3);
    SplitTime time(first, now);
    std::vector<Nanoseconds> stamps(first, 0);
    Nanoseconds paid = 0;
    while (!stamps.empty()) {
      now += static_cast<Nanoseconds>(random() % 50);
      CHECK(time.unpaid(now) == now - opened - paid);
      if (stamps.size() < 9 && random() % 3 == 0) {
        stamps.push_back(time.join(now));
        continue;
      }
      const std::size_t who = random() % stamps.size();
      const Nanoseconds due = time.leave(stamps[who], now);
      CHECK(due >= 0);
      paid += due;
      stamps.erase(stamps.begin() + static_cast<std::ptrdiff_t>(who));
    }
    CHECK(paid == now - opened);
  }
}

TEST_CASE("nobody leaves who does not hold it, and no clock runs back") {
  // If this fails, somebody pays for time that was not there.
  SplitTime time(1, 100);
  CHECK_BREAKS(time.join(99));
  CHECK_BREAKS(time.leave(50, 120));
  SplitTime nobodys;
  CHECK_BREAKS(nobodys.leave(0, 0));
}
