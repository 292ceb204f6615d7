// The prefix index beside a model of it, through random events.

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/check_throws.h"
#include "tests/core/small_index.h"

using namespace kvledger;
using testing::kPublic;
using testing::kTeam;
using testing::Tokens;

namespace {

// The index as simple as it can be: every node by its whole path.
struct Model {
  using Path = std::vector<std::pair<ScopeId, Tokens>>;
  struct Node {
    PrefixNode node;
    std::optional<BlockId> block;
    int pins = 0;
  };
  std::map<Path, Node> nodes;
  std::set<CacheOwner> partitioned;

  // Tenants own themselves, a team has an account of its own, and what is public is tenant 0's.
  static CacheOwner owner_of(ScopeId scope) {
    return CacheOwner{scope == kTeam ? 10 : scope == kPublic ? 0 : scope.value()};
  }
  static CacheOwner owner_of(const Path& path) { return owner_of(path.back().first); }
  // Owners without a partition lie in one: that of owner 99, who has nothing.
  CacheOwner partition_of(CacheOwner owner) const {
    return partitioned.contains(owner) ? owner : CacheOwner{99};
  }
  // Whether something below a node that lies in its partition is filled, or pinned.
  bool has_below(const Path& path, bool only_pinned) const {
    for (auto at = nodes.upper_bound(path); at != nodes.end(); ++at) {
      if (at->first.size() <= path.size() ||
          !std::equal(path.begin(), path.end(), at->first.begin())) {
        break;
      }
      if (partition_of(owner_of(at->first)) == partition_of(owner_of(path)) &&
          (at->second.pins > 0 || (!only_pinned && at->second.block))) {
        return true;
      }
    }
    return false;
  }
  bool has_children(const Path& path) const {
    const auto after = nodes.upper_bound(path);
    return after != nodes.end() && after->first.size() > path.size() &&
           std::equal(path.begin(), path.end(), after->first.begin());
  }
  void forget_useless(Path path) {
    while (!path.empty()) {
      const auto found = nodes.find(path);
      if (found == nodes.end() || found->second.block || found->second.pins > 0 ||
          has_children(path)) {
        return;
      }
      nodes.erase(found);
      path.pop_back();
    }
  }
};

template <class Policy>
class Comparison {
 public:
  explicit Comparison(std::uint64_t seed)
      : random_(seed),
        index_({.nodes = 48, .block_tokens = 2, .seed = seed}, testing::make<Policy>) {}

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      one();
      if (i % 64 == 0) {
        REQUIRE(index_.audit().value_or("") == "");
      }
      REQUIRE(index_.nodes() == static_cast<std::int64_t>(model_.nodes.size()));
      check_counts();
    }
  }

 private:
  static constexpr bool kLeavesOnly = std::is_same_v<Policy, ReusePolicy>;

  std::uint64_t below(std::uint64_t count) { return random_() % count; }

  CacheOwner any_owner() {
    const std::uint64_t which = below(5);
    return CacheOwner{which < 3 ? static_cast<std::uint32_t>(which) : which == 3 ? 10U : 77U};
  }

  void check_counts() {
    std::map<CacheOwner, std::int64_t> filled;
    std::map<CacheOwner, std::int64_t> cached;
    std::int64_t all = 0;
    for (const auto& [path, node] : model_.nodes) {
      const CacheOwner owner = Model::owner_of(path);
      filled[owner] += node.block ? 1 : 0;
      cached[owner] += node.block && node.pins == 0 ? 1 : 0;
      all += node.block && node.pins == 0 ? 1 : 0;
    }
    for (const std::uint32_t owner : {0U, 1U, 2U, 10U, 77U}) {
      REQUIRE(index_.filled(CacheOwner{owner}) == filled[CacheOwner{owner}]);
      REQUIRE(index_.cached(CacheOwner{owner}) == cached[CacheOwner{owner}]);
    }
    REQUIRE(index_.cached() == all);
  }

  void move(CacheOwner owner) {
    REQUIRE(index_.has_partition(owner) == model_.partitioned.contains(owner));
    if (model_.partitioned.erase(owner) > 0) {
      index_.merge(owner);
    } else {
      index_.partition(owner, 8);
      model_.partitioned.insert(owner);
    }
    REQUIRE(index_.audit().value_or("") == "");
  }

  // What nobody has pinned, nor anything below it, can be had of a partition to the last block.
  void drain(CacheOwner owner) {
    const auto left = [&] {
      std::int64_t count = 0;
      for (const auto& [path, node] : model_.nodes) {
        const bool is_there =
            model_.partition_of(Model::owner_of(path)) == model_.partition_of(owner);
        const bool is_kept = kLeavesOnly && model_.has_below(path, true);
        count += is_there && node.block && node.pins == 0 && !is_kept ? 1 : 0;
      }
      return count;
    };
    for (std::int64_t expected = left(); expected > 0; --expected) {
      REQUIRE(evict(owner));
    }
    REQUIRE(left() == 0);
    REQUIRE_FALSE(evict(owner));
  }

  const Model::Path& any_path() {
    auto at = model_.nodes.begin();
    std::advance(at, below(model_.nodes.size()));
    return at->first;
  }

  void one() {
    const std::uint64_t kind = below(100);
    if (kind < 40 || model_.nodes.empty()) {
      place();
    } else if (kind < 60) {
      unpin(any_path());
    } else if (kind < 75) {
      fill_or_use(any_path());
    } else if (kind < 80) {
      pin(any_path());
    } else if (kind < 94) {
      evict(any_owner());
    } else if (kind < 96) {
      move(any_owner());
    } else if (kind < 97) {
      drain(any_owner());
    } else {
      const std::uint64_t which = below(5);
      purge(which < 3 ? ScopeId{static_cast<std::uint32_t>(which)} : which == 3 ? kTeam : kPublic);
    }
  }

  void place() {
    Model::Path path;
    PrefixNode parent = PrefixIndex::root();
    if (!model_.nodes.empty() && below(4) > 0) {
      const Model::Path& before = any_path();
      if (model_.nodes.at(before).pins > 0) {
        path = before;
        parent = model_.nodes.at(before).node;
      }
    }
    const bool may_share = path.empty() || is_shared(path.back().first);
    ScopeId scope{static_cast<std::uint32_t>(below(3))};
    if (may_share && below(2) == 0) {
      scope = !path.empty() ? path.back().first : below(2) == 0 ? kTeam : kPublic;
    } else if (!may_share) {
      scope = path.back().first;
    }
    const Tokens tokens{static_cast<Token>(below(3)), static_cast<Token>(below(2))};
    path.emplace_back(scope, tokens);
    const auto known = model_.nodes.find(path);
    const auto found = index_.find(parent, scope, tokens);
    REQUIRE(found.has_value() == (known != model_.nodes.end()));
    const std::optional<PrefixNode> placed =
        index_.place(parent, scope, tokens, Model::owner_of(scope));
    if (known != model_.nodes.end()) {
      REQUIRE(found == known->second.node);
      REQUIRE(placed == found);
      ++known->second.pins;
    } else if (model_.nodes.size() == 48) {
      REQUIRE_FALSE(placed.has_value());
    } else {
      REQUIRE(placed.has_value());
      REQUIRE(serials_.insert(placed->serial).second);
      model_.nodes[path] = Model::Node{*placed, std::nullopt, 1};
    }
  }

  void pin(const Model::Path& path) {
    Model::Node& node = model_.nodes.at(path);
    index_.pin(node.node);
    ++node.pins;
  }

  void unpin(Model::Path path) {
    Model::Node& node = model_.nodes.at(path);
    if (node.pins == 0) {
      return;
    }
    --node.pins;
    index_.unpin(node.node);
    model_.forget_useless(path);
  }

  void fill_or_use(const Model::Path& path) {
    Model::Node& node = model_.nodes.at(path);
    REQUIRE(index_.block_of(node.node) == node.block);
    if (node.block) {
      index_.use(node.node);
    } else {
      node.block = BlockId{next_block_++};
      index_.fill(node.node, *node.block);
    }
  }

  // Whether there was one.
  bool evict(CacheOwner owner) {
    const bool is_common = !model_.partitioned.contains(owner) && below(2) == 0;
    const std::optional<BlockId> block = is_common ? index_.evict() : index_.evict(owner);
    bool possible = false;
    std::optional<Model::Path> whose;
    for (const auto& [path, node] : model_.nodes) {
      const bool may_go =
          node.block && node.pins == 0 &&
          model_.partition_of(Model::owner_of(path)) == model_.partition_of(owner) &&
          !(kLeavesOnly && model_.has_below(path, false));
      possible = possible || may_go;
      if (block && node.block == block) {
        REQUIRE(may_go);
        whose = path;
      }
    }
    REQUIRE(block.has_value() == possible);
    REQUIRE(block.has_value() == whose.has_value());
    if (whose) {
      model_.nodes.at(*whose).block.reset();
      model_.forget_useless(*whose);
    }
    return possible;
  }

  void purge(ScopeId scope) {
    std::vector<BlockId> freed;
    std::vector<BlockId> pinned;
    index_.purge(scope, freed, pinned);
    std::set<BlockId> expected_freed;
    std::set<BlockId> expected_pinned;
    std::vector<Model::Path> parents;
    for (auto at = model_.nodes.begin(); at != model_.nodes.end();) {
      const bool goes = std::any_of(at->first.begin(), at->first.end(),
                                    [&](const auto& step) { return step.first == scope; });
      if (!goes) {
        ++at;
        continue;
      }
      if (at->second.pins > 0) {
        gone_.push_back(at->second.node);
      }
      if (at->second.block) {
        (at->second.pins > 0 ? expected_pinned : expected_freed).insert(*at->second.block);
      }
      parents.push_back(at->first);
      at = model_.nodes.erase(at);
    }
    for (Model::Path& path : parents) {
      path.pop_back();
      model_.forget_useless(path);
    }
    REQUIRE(std::set(freed.begin(), freed.end()) == expected_freed);
    REQUIRE(std::set(pinned.begin(), pinned.end()) == expected_pinned);
    for (const PrefixNode node : gone_) {
      REQUIRE_FALSE(index_.knows(node));
      index_.unpin(node);  // its sequence does not know yet
    }
    gone_.clear();
    REQUIRE(freed.size() == expected_freed.size());
    REQUIRE(pinned.size() == expected_pinned.size());
  }

  std::mt19937_64 random_;
  PrefixIndex index_;
  Model model_;
  std::set<std::uint64_t> serials_;
  std::vector<PrefixNode> gone_;  // purged while they were pinned
  std::uint32_t next_block_ = 0;
};

}  // namespace

TEST_CASE_TEMPLATE("the index does what a simple one does", Policy, LruPolicy, S3FifoPolicy,
                   ReusePolicy) {
  // If this fails, some order of events leaves a block that nobody finds, or finds a wrong one, or
  // keeps one that could go.
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Comparison<Policy>(seed).run(3000);
  }
}
