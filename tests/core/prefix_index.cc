#include "core/prefix_index.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "core/lru_policy.h"
#include "core/reuse_policy.h"
#include "core/s3_fifo_policy.h"
#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr ScopeId kAnna{1};
constexpr ScopeId kBen{2};
constexpr ScopeId kTeam{0x80000000U};
constexpr ScopeId kPublic{0x80000001U};

using Tokens = std::vector<Token>;

template <class Policy>
std::unique_ptr<EvictionPolicy> make(CachedBlocks& blocks) {
  if constexpr (std::is_same_v<Policy, LruPolicy>) {
    return std::make_unique<Policy>(blocks);
  } else {
    return std::make_unique<Policy>(blocks, static_cast<std::int64_t>(blocks.size()));
  }
}

PrefixIndexSettings small_index() {
  return PrefixIndexSettings{.nodes = 64, .block_tokens = 4, .seed = 99};
}

struct Index {
  explicit Index(const PrefixIndexSettings& settings = small_index())
      : index(settings, make<LruPolicy>) {}

  PrefixNode place(PrefixNode parent, ScopeId scope, const Tokens& tokens) {
    const std::optional<PrefixNode> node = index.place(parent, scope, tokens);
    REQUIRE(node.has_value());
    return *node;
  }
  // A filled node, not pinned.
  PrefixNode cached(PrefixNode parent, ScopeId scope, const Tokens& tokens, std::uint32_t block) {
    const PrefixNode node = place(parent, scope, tokens);
    index.fill(node, BlockId{block});
    index.unpin(node);
    return node;
  }
  void audit() const { CHECK(index.audit().value_or("") == ""); }

  PrefixIndex index;
};

constexpr PrefixNode kRoot = PrefixIndex::root();

}  // namespace

TEST_CASE("a block is found by its tokens, behind its parent, in its scope") {
  // If this fails, a prompt is answered from other keys and values than its own.
  Index index;
  const PrefixNode first = index.cached(kRoot, kAnna, {1, 2, 3, 4}, 10);
  index.index.pin(first);
  const PrefixNode second = index.cached(first, kAnna, {5, 6, 7, 8}, 11);
  CHECK(index.index.find(kRoot, kAnna, Tokens{1, 2, 3, 4}) == first);
  CHECK(index.index.block_of(first) == BlockId{10});
  CHECK(index.index.find(first, kAnna, Tokens{5, 6, 7, 8}) == second);
  for (const Tokens& other :
       {Tokens{1, 2, 3, 5}, Tokens{1, 2, 3}, Tokens{1, 2, 3, 4, 0}, Tokens{}}) {
    CHECK_FALSE(index.index.find(kRoot, kAnna, other).has_value());
  }
  CHECK_FALSE(index.index.find(kRoot, kAnna, Tokens{5, 6, 7, 8}).has_value());
  CHECK_FALSE(index.index.find(second, kAnna, Tokens{5, 6, 7, 8}).has_value());
  CHECK_FALSE(index.index.find(kRoot, kBen, Tokens{1, 2, 3, 4}).has_value());
  index.audit();
}

TEST_CASE("nothing rests on hashes") {
  // If this fails, whoever finds two texts with one hash reads somebody else's context (B06, B07).
  PrefixIndexSettings settings = small_index();
  settings.hash_mask = 0;
  Index index(settings);
  std::uint32_t block = 0;
  for (const ScopeId scope : {kAnna, kBen, kTeam}) {
    for (Token token = 0; token < 10; ++token) {
      index.cached(kRoot, scope, {token, token + 1, 7, 7}, block++);
    }
  }
  block = 0;
  for (const ScopeId scope : {kAnna, kBen, kTeam}) {
    for (Token token = 0; token < 10; ++token) {
      const auto found = index.index.find(kRoot, scope, Tokens{token, token + 1, 7, 7});
      REQUIRE(found.has_value());
      CHECK(index.index.block_of(*found) == BlockId{block++});
    }
    CHECK_FALSE(index.index.find(kRoot, scope, Tokens{3, 3, 7, 7}).has_value());
  }
  CHECK(index.index.mismatches() > 0);
  index.audit();
}

TEST_CASE("a walk goes from a shared scope to its own once, and nowhere else") {
  // If this fails, what a tenant added to a shared beginning is found by another one.
  Index index;
  const PrefixNode shared = index.place(kRoot, kTeam, {1, 1, 1, 1});
  index.index.fill(shared, BlockId{0});
  const PrefixNode annas = index.place(shared, kAnna, {2, 2, 2, 2});
  const PrefixNode bens = index.place(shared, kBen, {2, 2, 2, 2});
  CHECK(annas != bens);
  CHECK_FALSE(index.index.find(annas, kBen, Tokens{3, 3, 3, 3}).has_value());
  CHECK_BREAKS(index.index.place(annas, kBen, Tokens{3, 3, 3, 3}));
  CHECK_BREAKS(index.index.place(annas, kTeam, Tokens{3, 3, 3, 3}));
  CHECK_BREAKS(index.index.place(shared, kPublic, Tokens{3, 3, 3, 3}));
  index.place(annas, kAnna, {3, 3, 3, 3});
  index.audit();
}

TEST_CASE("a node that is gone is not taken for one that came after it") {
  // If this fails, a walk goes on below a node of another tenant that lies where its own lay.
  PrefixIndexSettings settings = small_index();
  settings.nodes = 1;
  Index index(settings);
  const PrefixNode annas = index.cached(kRoot, kAnna, {1, 1, 1, 1}, 5);
  CHECK_FALSE(index.index.place(kRoot, kBen, Tokens{1, 1, 1, 1}).has_value());
  CHECK(index.index.evict() == BlockId{5});
  const PrefixNode bens = index.cached(kRoot, kBen, {1, 1, 1, 1}, 6);
  CHECK(bens.slot == annas.slot);
  CHECK_FALSE(index.index.knows(annas));
  CHECK_BREAKS(index.index.find(annas, kAnna, Tokens{2, 2, 2, 2}));
  CHECK_BREAKS(index.index.block_of(annas));
  CHECK_BREAKS(index.index.pin(annas));
  index.index.unpin(annas);  // of a sequence that outlives its node
  CHECK(index.index.block_of(bens) == BlockId{6});
  index.audit();
}

TEST_CASE("blocks that are pinned stay, whatever is needed") {
  // If this fails, a sequence computes over a block that holds somebody else's tokens by now.
  Index index;
  const PrefixNode held = index.place(kRoot, kAnna, {1, 1, 1, 1});
  index.index.fill(held, BlockId{1});
  index.cached(kRoot, kAnna, {2, 2, 2, 2}, 2);
  CHECK(index.index.evict() == BlockId{2});
  CHECK_FALSE(index.index.evict().has_value());
  index.index.unpin(held);
  CHECK(index.index.evict() == BlockId{1});
  CHECK(index.index.nodes() == 0);
  index.audit();
}

TEST_CASE("a place that is never filled is forgotten") {
  // If this fails, prompts that are never computed use the index up.
  Index index;
  const PrefixNode first = index.place(kRoot, kAnna, {1, 1, 1, 1});
  const PrefixNode second = index.place(first, kAnna, {2, 2, 2, 2});
  index.index.unpin(first);
  CHECK(index.index.nodes() == 2);
  index.index.unpin(second);
  CHECK(index.index.nodes() == 0);
  index.audit();
}

TEST_CASE("purging a scope leaves nothing of it, nor below it") {
  // If this fails, a tenant that was told its data is gone is still answered from it, or others
  // are.
  Index index;
  const PrefixNode shared = index.cached(kRoot, kTeam, {1, 1, 1, 1}, 0);
  index.index.pin(shared);
  index.cached(shared, kAnna, {2, 2, 2, 2}, 1);
  const PrefixNode held = index.place(shared, kBen, {3, 3, 3, 3});
  index.index.fill(held, BlockId{2});
  const PrefixNode other = index.cached(kRoot, kAnna, {4, 4, 4, 4}, 3);
  std::vector<BlockId> freed;
  std::vector<BlockId> pinned;
  index.index.purge(kTeam, freed, pinned);
  CHECK(freed == std::vector{BlockId{1}});
  std::sort(pinned.begin(), pinned.end());
  CHECK(pinned == std::vector{BlockId{0}, BlockId{2}});
  CHECK(index.index.nodes() == 1);
  CHECK(index.index.knows(other));
  CHECK_FALSE(index.index.find(kRoot, kTeam, Tokens{1, 1, 1, 1}).has_value());
  index.index.unpin(held);
  index.audit();
  index.index.purge(kAnna, freed, pinned);
  CHECK(index.index.nodes() == 0);
  index.index.purge(kBen, freed, pinned);  // nothing there
  index.audit();
}

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
      : random_(seed), index_({.nodes = 48, .block_tokens = 2, .seed = seed}, make<Policy>) {}

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      one();
      if (i % 64 == 0) {
        REQUIRE(index_.audit().value_or("") == "");
      }
      REQUIRE(index_.nodes() == static_cast<std::int64_t>(model_.nodes.size()));
    }
  }

 private:
  std::uint64_t below(std::uint64_t count) { return random_() % count; }

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
    } else if (kind < 97) {
      evict();
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
    const std::optional<PrefixNode> placed = index_.place(parent, scope, tokens);
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

  void evict() {
    const std::optional<BlockId> block = index_.evict();
    const bool leaves_only = std::is_same_v<Policy, ReusePolicy>;
    bool possible = false;
    std::optional<Model::Path> whose;
    for (const auto& [path, node] : model_.nodes) {
      const bool may_go =
          node.block && node.pins == 0 && !(leaves_only && model_.has_children(path));
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
  // If this fails, some order of events leaves a block that nobody finds, or finds a wrong one.
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Comparison<Policy>(seed).run(3000);
  }
}
