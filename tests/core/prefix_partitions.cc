// Owners of blocks in the prefix index, and partitions of their own.

#include <algorithm>
#include <random>
#include <set>

#include "tests/check_throws.h"
#include "tests/core/small_index.h"

using namespace kvledger;
using testing::Index;
using testing::IndexOf;
using testing::kAnna;
using testing::kBen;
using testing::kRoot;
using testing::kTeam;
using testing::Tokens;

namespace {

constexpr CacheOwner kAnnas{1};
constexpr CacheOwner kBens{2};
constexpr CacheOwner kTeams{3};

}  // namespace

TEST_CASE("blocks are counted for their owners, in whichever partition they lie") {
  // If this fails, a tenant's share of the cache is judged by wrong numbers.
  Index index;
  const PrefixNode first = index.cached(kRoot, kAnna, {1, 1, 1, 1}, 0, kAnnas);
  index.index.pin(first);
  index.cached(first, kAnna, {2, 2, 2, 2}, 1, kAnnas);
  index.cached(kRoot, kBen, {1, 1, 1, 1}, 2, kBens);
  for (int round = 0; round < 2; ++round) {
    CHECK(index.index.filled(kAnnas) == 2);
    CHECK(index.index.cached(kAnnas) == 1);
    CHECK(index.index.cached(kBens) == 1);
    CHECK(index.index.cached(kTeams) == 0);
    CHECK(index.index.cached() == 2);
    index.index.partition(kAnnas, 8);
    index.audit();
    index.index.merge(kAnnas);
  }
  CHECK(index.index.owner_of(kAnna) == kAnnas);
  CHECK_FALSE(index.index.owner_of(kTeam).has_value());
  index.audit();
}

TEST_CASE("a scope belongs to one owner as long as it has nodes") {
  // If this fails, a tenant's blocks are booked to two.
  Index index;
  const PrefixNode node = index.place(kRoot, kAnna, {1, 1, 1, 1}, kAnnas);
  CHECK_BREAKS(index.index.place(kRoot, kAnna, Tokens{2, 2, 2, 2}, kBens));
  CHECK_BREAKS(index.index.place(kRoot, kAnna, Tokens{1, 1, 1, 1}, kBens));
  index.index.unpin(node);
  index.place(kRoot, kAnna, {2, 2, 2, 2}, kBens);
  CHECK(index.index.owner_of(kAnna) == kBens);
  index.audit();
}

TEST_CASE("an owner's own partition gives its blocks alone, and nobody else takes them") {
  // If this fails, one tenant's flood drops what another one was promised to keep.
  Index index;
  index.cached(kRoot, kAnna, {1, 1, 1, 1}, 0, kAnnas);
  index.cached(kRoot, kAnna, {2, 2, 2, 2}, 1, kAnnas);
  index.cached(kRoot, kBen, {1, 1, 1, 1}, 2, kBens);
  index.index.partition(kAnnas, 8);
  CHECK(index.index.has_partition(kAnnas));
  CHECK(index.index.evict() == BlockId{2});
  CHECK_FALSE(index.index.evict().has_value());
  CHECK_FALSE(index.index.evict(kBens).has_value());
  CHECK(index.index.evict(kAnnas) == BlockId{0});
  index.index.merge(kAnnas);
  CHECK(index.index.evict(kBens) == BlockId{1});
  CHECK_BREAKS(index.index.merge(kAnnas));
  CHECK_BREAKS(index.index.partition(kAnnas, 0));
  index.index.partition(kAnnas, 8);
  CHECK_BREAKS(index.index.partition(kAnnas, 8));
  index.audit();
}

TEST_CASE("a partition is there before and after its owner has blocks") {
  // If this fails, a tenant that was away for a moment comes back into the common partition.
  Index index;
  index.index.partition(kAnnas, 8);
  index.cached(kRoot, kAnna, {1, 1, 1, 1}, 0, kAnnas);
  CHECK_FALSE(index.index.evict().has_value());
  CHECK(index.index.evict(kAnnas) == BlockId{0});
  CHECK(index.index.nodes() == 0);
  CHECK(index.index.has_partition(kAnnas));
  index.audit();
  index.cached(kRoot, kAnna, {1, 1, 1, 1}, 1, kAnnas);
  std::vector<BlockId> freed;
  std::vector<BlockId> pinned;
  index.index.purge(kAnna, freed, pinned);
  CHECK(freed == std::vector{BlockId{1}});
  index.index.merge(kAnnas);
  CHECK_FALSE(index.index.has_partition(kAnnas));
  index.audit();
}

TEST_CASE("what others keep below a block does not keep it") {
  // If this fails, a team's blocks stay for as long as any tenant's hang below them, and a
  // partition that must give one has none to give.
  IndexOf<ReusePolicy> index;
  const PrefixNode one = index.place(kRoot, kTeam, {1, 1, 1, 1}, kTeams);
  const PrefixNode two = index.place(one, kTeam, {2, 2, 2, 2}, kTeams);
  index.index.fill(one, BlockId{0});
  index.index.fill(two, BlockId{1});
  const PrefixNode annas = index.cached(two, kAnna, {3, 3, 3, 3}, 2, kAnnas);
  index.index.unpin(two);
  index.index.unpin(one);
  CHECK(index.index.cached(kTeams) == 2);
  index.index.partition(kTeams, 8);
  index.audit();
  CHECK(index.index.evict(kTeams) == BlockId{1});  // the leaf of its partition first
  CHECK(index.index.evict(kTeams) == BlockId{0});
  CHECK_FALSE(index.index.evict(kTeams).has_value());
  CHECK(index.index.nodes() == 3);
  CHECK(index.index.block_of(annas) == BlockId{2});
  index.audit();
  index.index.pin(one);
  index.index.fill(one, BlockId{3});  // computed again
  index.index.unpin(one);
  index.index.merge(kTeams);
  index.audit();
  CHECK(index.index.evict() == BlockId{2});  // a leaf of both now
  CHECK(index.index.evict() == BlockId{3});
  CHECK(index.index.nodes() == 0);
  index.audit();
}

TEST_CASE_TEMPLATE("an owner's blocks keep their order when they move", Policy, LruPolicy,
                   ReusePolicy) {
  // If this fails, giving a tenant a partition drops what it used last.
  IndexOf<Policy> index;
  std::vector<PrefixNode> nodes;
  for (Token token = 0; token < 6; ++token) {
    const ScopeId scope = token % 2 == 0 ? kAnna : kBen;
    nodes.push_back(index.cached(kRoot, scope, {token, 0, 0, 0}, static_cast<std::uint32_t>(token),
                                 token % 2 == 0 ? kAnnas : kBens));
  }
  index.index.use(nodes[0]);
  index.index.partition(kAnnas, 8);
  CHECK(index.index.evict(kAnnas) == BlockId{2});
  index.index.use(nodes[0]);
  index.index.merge(kAnnas);
  CHECK(index.index.evict(kAnnas) == BlockId{1});
  CHECK(index.index.evict(kAnnas) == BlockId{3});
  index.audit();
}

TEST_CASE("an owner's blocks keep their order where less was used before") {
  // If this fails, a change of shares drops what a tenant used last and keeps what is old.
  Index index;
  index.index.partition(kAnnas, 8);
  for (std::uint32_t i = 0; i < 4; ++i) {
    index.cached(kRoot, kAnna, {static_cast<Token>(i), 0, 0, 0}, i, kAnnas);
  }
  index.index.merge(kAnnas);  // to where nothing was used yet
  index.index.partition(kAnnas, 8);
  for (std::uint32_t i = 0; i < 4; ++i) {
    CHECK(index.index.evict(kAnnas) == BlockId{i});
  }
  index.audit();
}

TEST_CASE("what others use does not age an owner's blocks in its own partition") {
  // If this fails, a tenant can tell from its own evictions what its neighbours do.
  std::vector<std::vector<BlockId>> orders;
  for (const int others : {0, 40}) {
    PrefixIndexSettings settings = testing::small_index();
    settings.nodes = 256;
    IndexOf<ReusePolicy> index(settings);
    index.index.partition(kAnnas, 32);
    const PrefixNode bens = index.cached(kRoot, kBen, {1, 1, 1, 1}, 1000, kBens);
    std::mt19937_64 random(7);
    std::mt19937_64 neighbour(8);
    std::vector<BlockId> order;
    std::uint32_t block = 0;
    Token once = 1000;
    for (int i = 0; i < 8000; ++i) {
      for (int other = static_cast<int>(neighbour() % 40); other < others; ++other) {
        index.index.use(bens);
      }
      const Token token = random() % 4 == 0 ? static_cast<Token>(random() % 24) : once++;
      const PrefixNode node = index.place(kRoot, kAnna, {token, 0, 0, 0}, kAnnas);
      if (index.index.block_of(node)) {
        index.index.use(node);
      } else {
        if (index.index.filled(kAnnas) == 32) {
          order.push_back(*index.index.evict(kAnnas));
        }
        index.index.fill(node, BlockId{block++});
      }
      index.index.unpin(node);
    }
    index.audit();
    orders.push_back(order);
  }
  // By age alone blocks would go in the order they came, but for what is used again.
  CHECK_FALSE(std::is_sorted(orders[0].begin(), orders[0].end()));
  CHECK(orders[0] == orders[1]);
}

TEST_CASE_TEMPLATE("a partition gives all that nobody has pinned", Policy, LruPolicy, S3FifoPolicy,
                   ReusePolicy) {
  // If this fails, a request waits for memory that only the index still holds.
  PrefixIndexSettings settings = testing::small_index();
  settings.nodes = 400;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t count) { return random() % count; };
    IndexOf<Policy> index(settings);
    std::vector<std::vector<PrefixNode>> running;  // who pins a node pins those above it
    std::uint32_t block = 0;
    for (int request = 0; request < 120; ++request) {
      if (below(3) == 0) {
        const CacheOwner owner{static_cast<std::uint32_t>(1 + below(3))};
        index.index.has_partition(owner) ? index.index.merge(owner)
                                         : index.index.partition(owner, 16);
      }
      std::vector<PrefixNode> path;
      PrefixNode at = kRoot;
      const std::uint64_t shared = below(4);
      const bool is_annas = below(2) == 0;
      for (std::uint64_t depth = 0; depth < shared + below(4) + 1; ++depth) {
        const bool is_shared = depth < shared;
        at = index.place(at,
                         is_shared  ? kTeam
                         : is_annas ? kAnna
                                    : kBen,
                         {static_cast<Token>(below(2)), 0, 0, 0},
                         is_shared  ? kTeams
                         : is_annas ? kAnnas
                                    : kBens);
        path.push_back(at);
      }
      for (const PrefixNode node : path) {
        if (!index.index.block_of(node) && below(8) > 0) {
          index.index.fill(node, BlockId{block++});
        }
      }
      running.push_back(path);
      while (running.size() > 5) {
        for (const PrefixNode node : running.front()) {
          index.index.unpin(node);
        }
        running.erase(running.begin());
      }
      if (below(4) == 0) {
        index.index.evict(CacheOwner{static_cast<std::uint32_t>(1 + below(3))});
      }
    }
    index.audit();
    for (const CacheOwner owner : {kTeams, kAnnas, kBens}) {
      const std::int64_t others = index.index.cached() - index.index.cached(owner);
      const bool is_own = index.index.has_partition(owner);
      while (index.index.evict(owner)) {
      }
      CHECK(index.index.cached(owner) == 0);
      CHECK((!is_own || index.index.cached() == others));
      index.audit();
    }
    CHECK(index.index.cached() == 0);
  }
}
