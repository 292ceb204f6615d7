#include "core/eviction_memory.h"

#include <algorithm>
#include <list>
#include <random>

#include "tests/check_throws.h"

using namespace kvledger;

TEST_CASE("what was evicted is remembered until newer ones take its place") {
  // If this fails, a block that keeps returning counts as new each time.
  EvictionMemory memory(2);
  CHECK_FALSE(memory.remember({.path = 1, .used_at = 10, .uses = 3}).has_value());
  CHECK_FALSE(memory.remember({.path = 2, .used_at = 20, .uses = 1}).has_value());
  const auto forgotten = memory.remember({.path = 3, .used_at = 30, .uses = 2});
  REQUIRE(forgotten.has_value());
  CHECK(forgotten->path == 1);
  CHECK(forgotten->uses == 3);
  CHECK_FALSE(memory.recall(1).has_value());
  const auto recalled = memory.recall(3);
  REQUIRE(recalled.has_value());
  CHECK(recalled->used_at == 30);
  CHECK_FALSE(memory.recall(3).has_value());
  CHECK(memory.size() == 1);
}

TEST_CASE("room that was recalled is used again, and paths need not differ in their low bits") {
  // If this fails, a memory that is used for hours holds less and less.
  std::mt19937_64 random(5);
  EvictionMemory memory(50);
  std::list<std::uint64_t> model;  // the oldest first
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t path = (random() % 90) << 40;
    const auto known = std::find(model.begin(), model.end(), path);
    const auto recalled = memory.recall(path);
    REQUIRE(recalled.has_value() == (known != model.end()));
    if (recalled) {
      model.erase(known);
    }
    if (random() % 3 > 0) {
      const auto forgotten = memory.remember({.path = path, .used_at = 0, .uses = 1});
      REQUIRE(forgotten.has_value() == (model.size() == 50));
      if (forgotten) {
        REQUIRE(forgotten->path == model.front());
        model.pop_front();
      }
      model.push_back(path);
    }
    REQUIRE(memory.size() == static_cast<std::int64_t>(model.size()));
  }
}

TEST_CASE("a round comes by every place once, and tells those that are taken") {
  // If this fails, some evicted blocks are never counted as staying away, or count twice.
  EvictionMemory memory(4);
  CHECK(memory.next_in_round() == nullptr);
  for (const std::uint64_t path : {1, 2, 3}) {
    memory.remember({.path = path, .used_at = 0, .uses = 1});
  }
  REQUIRE(memory.recall(2).has_value());
  for (int round = 0; round < 3; ++round) {
    std::vector<std::uint64_t> paths;
    for (int place = 0; place < 4; ++place) {
      if (EvictedBlock* block = memory.next_in_round()) {
        paths.push_back(block->path);
        CHECK(block->passed == static_cast<std::uint64_t>(round));
        ++block->passed;
      }
    }
    std::sort(paths.begin(), paths.end());
    CHECK(paths == std::vector<std::uint64_t>{1, 3});
  }
  CHECK(memory.recall(1)->passed == 3);
}
