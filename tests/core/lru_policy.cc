#include "core/lru_policy.h"

#include "tests/check_throws.h"

using namespace kvledger;

TEST_CASE("the block used longest ago goes first") {
  // If this fails, the reference that the default policy is held against is none.
  CachedBlocks blocks(4);
  LruPolicy policy(blocks);
  CHECK(policy.victim() == kNoSlot);
  std::uint64_t now = 0;
  for (CacheSlot slot = 0; slot < 4; ++slot) {
    policy.entered(slot, ++now);
    policy.offered(slot);
  }
  CHECK(policy.victim() == 0);
  policy.used(0, ++now);
  CHECK(policy.victim() == 1);
  policy.withdrawn(1);
  CHECK(policy.victim() == 2);
  policy.used(1, ++now);  // held: it has no place to move in
  policy.offered(1);
  policy.withdrawn(2);
  policy.leaving(2, Departure::kEvicted);
  CHECK(policy.victim() == 3);
  CHECK_FALSE(policy.takes_leaves_only());
}
