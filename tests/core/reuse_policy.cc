#include "core/reuse_policy.h"

#include <algorithm>
#include <random>

#include "tests/check_throws.h"
#include "tests/core/policy_cache.h"

using namespace kvledger;

namespace {

using Cache = testing::PolicyCache<ReusePolicy>;

}  // namespace

TEST_CASE("before anything was learnt the oldest of those used least goes first") {
  // If this fails, a server that has just started keeps what nobody needs.
  Cache cache(4);
  for (CacheSlot slot = 0; slot < 4; ++slot) {
    cache.enter(slot, 100 + slot);
    cache.now += 10;
  }
  cache.policy.used(0, ++cache.now);
  CHECK(cache.evict() == 1);
  CHECK(cache.evict() == 2);
  cache.policy.withdrawn(3);
  CHECK(cache.evict() == 0);
  CHECK(cache.evict() == kNoSlot);
  cache.policy.offered(3);
  CHECK(cache.evict() == 3);
  CHECK(cache.policy.takes_leaves_only());
}

TEST_CASE("a block that returns counts as used before, unless it was purged") {
  // If this fails, what returns again and again is always the first to go.
  Cache cache(4);
  cache.enter(0, 100);
  REQUIRE(cache.evict() == 0);
  cache.enter(0, 100);
  CHECK(cache.blocks[0].uses == 2);
  cache.policy.withdrawn(0);
  cache.policy.leaving(0, Departure::kPurged);
  cache.enter(0, 100);
  CHECK(cache.blocks[0].uses == 1);
}

TEST_CASE("what comes back after a pause is kept for it, what passes once is not") {
  // If this fails, a flood of prompts that come once washes the conversations out.
  constexpr CacheSlot kSize = 100;
  Cache cache(kSize);
  std::vector<CacheSlot> free;
  for (CacheSlot slot = 0; slot < kSize; ++slot) {
    free.push_back(slot);
  }
  std::vector<CacheSlot> where(50, kNoSlot);  // of 50 conversations' blocks
  std::uint64_t once = 1000;
  int hits = 0;
  int turns = 0;
  const auto room = [&] {
    if (free.empty()) {
      const CacheSlot slot = cache.evict();
      REQUIRE(slot != kNoSlot);
      const std::uint64_t path = cache.blocks[slot].path;
      if (path < where.size()) {
        where[path] = kNoSlot;
      }
      free.push_back(slot);
    }
    const CacheSlot slot = free.back();
    free.pop_back();
    return slot;
  };
  // Each conversation has a turn every 50 x 5 uses: with LRU none would ever hit.
  for (int round = 0; round < 200; ++round) {
    for (std::uint64_t talk = 0; talk < where.size(); ++talk) {
      for (int i = 0; i < 4; ++i) {
        cache.enter(room(), once++);
      }
      const bool hit = where[talk] != kNoSlot;
      turns += round >= 100 ? 1 : 0;
      hits += round >= 100 && hit ? 1 : 0;
      if (hit) {
        cache.policy.used(where[talk], ++cache.now);
      } else {
        where[talk] = room();
        cache.enter(where[talk], talk);
      }
    }
  }
  CHECK(hits > turns * 9 / 10);
}

TEST_CASE("a scan of blocks that come once does not push out those that come back") {
  // If this fails, one long document empties the cache of a whole service. LRU would keep none.
  constexpr CacheSlot kSize = 100;
  Cache cache(kSize);
  std::mt19937_64 random(4);
  std::vector<CacheSlot> where(50, kNoSlot);  // of 50 blocks that come back
  std::uint64_t once = 1000;
  CacheSlot taken = 0;
  const auto visit = [&](std::uint64_t path) {
    if (path < where.size() && where[path] != kNoSlot) {
      cache.policy.used(where[path], ++cache.now);
      return;
    }
    CacheSlot slot = taken;
    if (taken < kSize) {
      ++taken;
    } else {
      slot = cache.evict();
      if (cache.blocks[slot].path < where.size()) {
        where[cache.blocks[slot].path] = kNoSlot;
      }
    }
    cache.enter(slot, path);
    if (path < where.size()) {
      where[path] = slot;
    }
  };
  for (int i = 0; i < 40000; ++i) {
    visit(random() % 4 == 0 ? random() % where.size() : once++);
  }
  REQUIRE(cache.policy.rule() == VictimRule::kLeastValuable);
  for (CacheSlot i = 0; i < 3 * kSize; ++i) {
    visit(once++);
  }
  CHECK(std::count(where.begin(), where.end(), kNoSlot) <= 5);
}

TEST_CASE("what comes from another policy is judged by what that one wrote of it") {
  // If this fails, a tenant that gets a partition loses what it uses most.
  Cache cache(4);
  cache.blocks[0] = CachedBlock{.path = 1, .used_at = 900, .uses = 7};
  cache.blocks[1] = CachedBlock{.path = 2, .used_at = 500, .uses = 1};
  for (const CacheSlot slot : {0, 1}) {
    cache.policy.adopted(slot, 1000);
    cache.policy.offered(slot);
  }
  CHECK(cache.blocks[0].uses == 7);
  CHECK(cache.evict() == 1);
  cache.policy.withdrawn(0);
  cache.policy.leaving(0, Departure::kMoved);
  cache.now = 1000;
  cache.enter(2, 1);
  CHECK(cache.blocks[2].uses == 1);  // it went elsewhere: not remembered here
}

TEST_CASE("the cost of a token grows by attention's share of the work") {
  // If this fails, the default is that of no model.
  CHECK(kDefaultCostGrowth == doctest::Approx(3.26e-4).epsilon(0.01));
  CHECK(cost_growth(32, 4096, 6'980'000'000) == doctest::Approx(3.76e-5).epsilon(0.01));
}
