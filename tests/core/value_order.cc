#include "core/value_order.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

struct Order {
  explicit Order(double cost_growth) : order(blocks, model, cost_growth) {}

  void insert(CacheSlot slot, std::uint64_t used_at, std::int64_t uses, std::uint32_t position) {
    blocks[slot].used_at = used_at;
    blocks[slot].uses = uses;
    blocks[slot].position = position;
    order.insert(slot);
  }

  CachedBlocks blocks{8};
  ReuseModel model{100};
  ValueOrder order;
};

}  // namespace

TEST_CASE("the oldest goes first, whatever it is worth, where age rules") {
  // If this fails, a server that has learnt nothing yet is worse than one with LRU.
  Order order(0.001);
  CHECK(order.order.victim(VictimRule::kOldest, 500) == kNoSlot);
  order.insert(0, 300, 1, 0);
  order.insert(1, 100, 9, 50'000);
  order.insert(2, 200, 3, 700);
  for (const CacheSlot slot : {1, 2, 0}) {
    CHECK(order.order.victim(VictimRule::kOldest, 500) == slot);
    order.order.remove(slot);
  }
  CHECK(order.order.victim(VictimRule::kLeastValuable, 500) == kNoSlot);
}

TEST_CASE("of two blocks with the same prospects the one that costs less to compute goes first") {
  // If this fails, the end of a long prompt, which took the longest, is dropped like its beginning.
  for (const double growth : {0.0, 0.001}) {
    Order order(growth);
    order.insert(0, 100, 1, 8000);  // older, and nine times as dear
    order.insert(1, 300, 1, 0);
    CHECK(order.order.victim(VictimRule::kLeastValuable, 500) == (growth > 0.0 ? 1 : 0));
    CHECK(order.order.cost_of(0) == doctest::Approx(1.0 + 8000 * growth));
    CHECK(order.order.cost_of(1) == 1.0);
  }
}

TEST_CASE("what a class holds is looked at from both ends") {
  // If this fails, prompts that come once are kept until conversations that come back are dropped.
  Order order(0.0);
  for (int i = 0; i < 2000; ++i) {
    order.model.observe(1, 700, i % 4 > 0);
  }
  order.insert(0, 100, 1, 0);  // about to come back
  order.insert(1, 400, 1, 0);
  order.insert(2, 690, 1, 0);
  CHECK(order.order.victim(VictimRule::kLeastValuable, 700) == 2);
  CHECK(order.order.victim(VictimRule::kLeastValuable, 4000) == 0);  // they stayed away
}

TEST_CASE("a block that becomes a possible victim late goes where it is the oldest") {
  // If this fails, the beginning of a prompt outlives its end by a whole cache.
  Order order(0.0);
  order.insert(0, 200, 1, 0);
  order.insert(1, 300, 1, 0);
  order.insert(2, 100, 1, 0);
  CHECK(order.order.victim(VictimRule::kOldest, 500) == 2);
  CHECK_BREAKS(Order(-1.0));
}
