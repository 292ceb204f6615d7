#include "core/s3_fifo_policy.h"

#include "tests/check_throws.h"
#include "tests/core/policy_cache.h"

using namespace kvledger;

namespace {

// Of ten blocks in these tests, the small queue is one.
using Cache = testing::PolicyCache<S3FifoPolicy>;

}  // namespace

TEST_CASE("what came once goes before what was used, and what returns is kept") {
  // If this fails, the reference that the default policy is held against is none.
  Cache cache(10);
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
  Cache cache(10);
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

TEST_CASE("what is in when it is purged is not remembered") {
  // If this fails, a purge leaves traces of what it took.
  Cache cache(10);
  cache.enter(0, 100);
  cache.policy.withdrawn(0);
  cache.policy.leaving(0, Departure::kPurged);
  cache.enter(0, 100);
  cache.enter(1, 101);
  CHECK(cache.evict() == 0);
}
