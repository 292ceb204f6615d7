#include "core/s3_fifo_policy.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// A cache of ten blocks, the small queue one of them.
struct Cache {
  Cache() : blocks(10), policy(blocks, 10) {}

  void enter(CacheSlot slot, std::uint64_t path) {
    blocks[slot].path = path;
    policy.entered(slot, ++now);
    policy.offered(slot);
  }
  CacheSlot evict() {
    const CacheSlot slot = policy.victim();
    if (slot != kNoSlot) {
      policy.withdrawn(slot);
      policy.leaving(slot, Departure::kEvicted);
    }
    return slot;
  }

  CachedBlocks blocks;
  S3FifoPolicy policy;
  std::uint64_t now = 0;
};

}  // namespace

TEST_CASE("what came once goes before what was used, and what returns is kept") {
  // If this fails, the reference that the default policy is held against is none.
  Cache cache;
  for (CacheSlot slot = 0; slot < 4; ++slot) {
    cache.enter(slot, 100 + slot);
  }
  cache.policy.used(0, ++cache.now);
  cache.policy.used(0, ++cache.now);
  CHECK(cache.evict() == 1);  // 0 moves to the main queue
  CHECK(cache.evict() == 2);
  cache.enter(1, 101);  // remembered: it enters the main queue
  cache.enter(2, 999);
  CHECK(cache.evict() == 3);
  CHECK(cache.evict() == 2);
  CHECK(cache.evict() == 0);  // nothing is small any more
  CHECK(cache.evict() == 1);
  CHECK(cache.evict() == kNoSlot);
}

TEST_CASE("held blocks are passed over, and what is held cannot keep the others in") {
  // If this fails, a server whose small queue is held says that it has no memory.
  Cache cache;
  cache.enter(0, 100);
  cache.enter(1, 101);
  for (int i = 0; i < 2; ++i) {
    cache.policy.used(1, ++cache.now);
  }
  cache.policy.withdrawn(0);
  CHECK(cache.evict() == 1);
  CHECK(cache.evict() == kNoSlot);
  cache.policy.offered(0);
  CHECK(cache.evict() == 0);
}

TEST_CASE("what was purged is not remembered") {
  // If this fails, a tenant that returns after a purge is treated by what it did before.
  Cache cache;
  cache.enter(0, 100);
  cache.policy.withdrawn(0);
  cache.policy.leaving(0, Departure::kPurged);
  cache.enter(0, 100);
  cache.enter(1, 101);
  CHECK(cache.evict() == 0);
}
