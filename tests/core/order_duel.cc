#include "core/order_duel.h"

#include <algorithm>
#include <list>
#include <random>
#include <unordered_map>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr std::int64_t kNews = 1000;

// Uses of a model's and a duel's blocks; each path's uses are counted for ever.
struct Play {
  explicit Play(std::int64_t capacity) : duel(capacity, kNews, model, 0.0) {}

  // Blocks `from` to `from + count`, at random, between three times as many that come once.
  void visit(std::uint64_t from, std::uint64_t count, int uses, bool learns = true) {
    for (int i = 0; i < uses; ++i) {
      use(random() % 4 == 0 ? from + random() % count : next_once++, learns);
    }
  }
  void use(std::uint64_t path, bool learns) {
    path |= stamp;
    const auto [found, is_new] = seen.try_emplace(path, CachedBlock{});
    CachedBlock& block = found->second;
    ++now;
    if (!is_new && learns) {
      model.observe(block.uses, now - block.used_at, true);
    } else if (learns) {
      model.pass(1, 0, 2000);  // of somebody who stayed away
    }
    block.path = path;
    ++block.uses;
    block.used_at = now;
    duel.use(block, now);
  }

  std::mt19937_64 random{11};
  ReuseModel model{kNews};
  OrderDuel duel;
  std::unordered_map<std::uint64_t, CachedBlock> seen;
  std::uint64_t stamp = 0;
  std::uint64_t next_once = 1'000'000;
  std::uint64_t now = 0;
};

}  // namespace

TEST_CASE("a shadow that goes by age is LRU") {
  // If this fails, what was learnt is held against something weaker than LRU.
  const ReuseModel model(kNews);
  ShadowCache shadow(20, model, 0.0, VictimRule::kOldest);
  std::list<std::uint64_t> lru;  // the oldest first
  std::mt19937_64 random(2);
  for (std::uint64_t now = 1; now < 20000; ++now) {
    CachedBlock block;
    block.path = random() % 40 << (now / 5000 * 16);
    block.uses = 1 + static_cast<std::int64_t>(random() % 10);
    const auto known = std::find(lru.begin(), lru.end(), block.path);
    REQUIRE(shadow.use(block, now) == (known != lru.end()));
    if (known != lru.end()) {
      lru.erase(known);
    } else if (lru.size() == 20) {
      lru.pop_front();
    }
    lru.push_back(block.path);
  }
}

TEST_CASE("values are followed once they have won, and left when they lose") {
  // If this fails, the default policy is worse than LRU where it has learnt the wrong thing.
  Play play(200);
  CHECK(play.duel.winner() == VictimRule::kOldest);
  play.visit(0, 100, 300);
  CHECK(play.duel.winner() == VictimRule::kOldest);  // too little to go by
  play.visit(0, 100, 20000);
  CHECK(play.duel.winner() == VictimRule::kLeastValuable);
  // Now what was used often stays away, and what is new comes back at once; nobody learns it.
  for (std::uint64_t path = 1000; path < 40000; ++path) {
    play.use(path, false);
    if (path % 2 == 0) {
      play.use(path - 100, false);
    }
  }
  CHECK(play.duel.winner() == VictimRule::kOldest);
}

TEST_CASE("where both orders do the same, age rules") {
  // If this fails, chance decides.
  Play play(200);
  play.visit(0, 5, 20000);
  CHECK(play.duel.winner() == VictimRule::kOldest);
}

TEST_CASE("a large cache is judged by a part of the blocks, the same ones always") {
  // If this fails, a large server keeps books of shadows as large as itself, or judges by nothing.
  constexpr std::int64_t kCapacity = 4 * 16384;
  for (const bool is_sampled : {false, true}) {
    Play play(kCapacity);
    play.stamp = is_sampled ? 0 : std::uint64_t{1} << 32;
    play.visit(0, 10000, 600000);
    CHECK((play.duel.winner() == VictimRule::kLeastValuable) == is_sampled);
  }
}
