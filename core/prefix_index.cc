#include "core/prefix_index.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr std::int64_t kBlockTokensMax = 4096;
// Children that are compared token by token for the likest.
constexpr int kChildrenCompared = 16;

// Odd constants with bits everywhere, apart from each other.
constexpr std::uint64_t kTokenFactor = 0x9e3779b97f4a7c15;
constexpr std::uint64_t kScopeFactor = 0xd1b54a32d192ed03;
constexpr std::uint64_t kPathFactor = 0x8cb92ba72f3d8dd7;

__extension__ typedef unsigned __int128 Product;

// Both halves of a product, folded: every bit of either changes about half of the result's.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
  const Product product = Product{a} * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

bool may_follow(ScopeId before, ScopeId scope) noexcept {
  return scope == before || (is_shared(before) && !is_shared(scope));
}

}  // namespace

PrefixIndex::PrefixIndex(const PrefixIndexSettings& settings, const MakePolicy& make_policy)
    : settings_(settings) {
  KVL_CHECK_GT(settings.nodes, 0);
  KVL_CHECK_LT(settings.nodes, std::int64_t{kNoSlot});
  KVL_CHECK_GT(settings.block_tokens, 0);
  KVL_CHECK_LE(settings.block_tokens, kBlockTokensMax);
  const auto count = static_cast<std::size_t>(settings.nodes);
  blocks_.resize(count);
  nodes_.resize(count);
  tokens_.resize(count * static_cast<std::size_t>(settings.block_tokens));
  buckets_.resize(std::bit_ceil(2 * count), kNoSlot);
  free_.reserve(count);
  for (std::size_t slot = count; slot-- > 0;) {
    free_.push_back(static_cast<CacheSlot>(slot));
  }
  policy_ = make_policy(blocks_);
  KVL_CHECK(policy_ != nullptr);
}

bool PrefixIndex::knows(PrefixNode node) const noexcept {
  return node.slot < nodes_.size() && node.serial != 0 && nodes_[node.slot].serial == node.serial;
}

bool PrefixIndex::may_place(PrefixNode parent, ScopeId scope) const noexcept {
  return parent == root() || (knows(parent) && nodes_[parent.slot].pins > 0 &&
                              may_follow(nodes_[parent.slot].scope, scope));
}

PrefixIndex::Node& PrefixIndex::at(PrefixNode node) {
  KVL_CHECK(knows(node));
  return nodes_[node.slot];
}

const PrefixIndex::Node& PrefixIndex::at(PrefixNode node) const {
  KVL_CHECK(knows(node));
  return nodes_[node.slot];
}

PrefixIndex::Hashes PrefixIndex::hash(PrefixNode parent, ScopeId scope,
                                      std::span<const Token> tokens) const noexcept {
  std::uint64_t hash = settings_.seed ^ (kScopeFactor * (scope.value() + 1)) ^ tokens.size();
  std::size_t i = 0;
  for (; i + 1 < tokens.size(); i += 2) {
    const auto low = static_cast<std::uint32_t>(tokens[i]);
    const auto high = static_cast<std::uint32_t>(tokens[i + 1]);
    hash = mix(hash ^ (std::uint64_t{high} << 32 | low), kTokenFactor ^ settings_.seed);
  }
  if (i < tokens.size()) {
    hash = mix(hash ^ static_cast<std::uint32_t>(tokens[i]), kTokenFactor ^ settings_.seed);
  }
  const std::uint64_t before = parent == root() ? 0 : blocks_[parent.slot].path;
  return Hashes{mix(hash ^ parent.serial, kScopeFactor) & settings_.hash_mask,
                mix(hash ^ before, kPathFactor) & settings_.hash_mask};
}

CacheSlot& PrefixIndex::bucket(std::uint64_t key) noexcept {
  return buckets_[key & (buckets_.size() - 1)];
}

// Equal keys are only a reason to look: what counts is parent, scope and every token.
CacheSlot PrefixIndex::search(PrefixNode parent, ScopeId scope, std::span<const Token> tokens,
                              std::uint64_t key) const noexcept {
  for (CacheSlot slot = buckets_[key & (buckets_.size() - 1)]; slot != kNoSlot;
       slot = nodes_[slot].same_bucket) {
    const Node& node = nodes_[slot];
    if (node.key != key) {
      continue;
    }
    const Token* own = tokens_.data() + slot * static_cast<std::size_t>(settings_.block_tokens);
    if (node.parent == parent.slot && node.scope == scope && node.tokens == tokens.size() &&
        std::equal(tokens.begin(), tokens.end(), own)) {
      return slot;
    }
    ++mismatches_;
  }
  return kNoSlot;
}

std::optional<PrefixNode> PrefixIndex::find(PrefixNode parent, ScopeId scope,
                                            std::span<const Token> tokens) const {
  KVL_CHECK(parent == root() || knows(parent));
  const CacheSlot slot = search(parent, scope, tokens, hash(parent, scope, tokens).key);
  return slot == kNoSlot ? std::nullopt : std::optional(PrefixNode{nodes_[slot].serial, slot});
}

std::optional<PrefixNode> PrefixIndex::place(PrefixNode parent, ScopeId scope,
                                             std::span<const Token> tokens) {
  KVL_CHECK(!tokens.empty());
  KVL_CHECK_LE(static_cast<std::int64_t>(tokens.size()), settings_.block_tokens);
  KVL_CHECK(may_place(parent, scope));
  const Hashes hashes = hash(parent, scope, tokens);
  if (const CacheSlot slot = search(parent, scope, tokens, hashes.key); slot != kNoSlot) {
    const PrefixNode found{nodes_[slot].serial, slot};
    pin(found);
    return found;
  }
  if (free_.empty()) {
    return std::nullopt;
  }
  first_of_scope_.try_emplace(scope, kNoSlot);  // where memory ends, nothing has changed yet
  const CacheSlot slot = free_.back();
  free_.pop_back();
  Node& node = nodes_[slot];
  node = Node{};
  node.serial = ++serials_;
  node.key = hashes.key;
  node.parent = parent.slot;
  node.scope = scope;
  node.tokens = static_cast<std::uint32_t>(tokens.size());
  node.pins = 1;
  blocks_[slot] = CachedBlock{};
  blocks_[slot].path = hashes.path;
  std::copy(tokens.begin(), tokens.end(),
            tokens_.begin() + slot * static_cast<std::ptrdiff_t>(settings_.block_tokens));
  link(slot);
  ++nodes_in_use_;
  return PrefixNode{node.serial, slot};
}

std::optional<PrefixIndex::Likeness> PrefixIndex::likest(PrefixNode parent, ScopeId scope,
                                                         std::span<const Token> tokens) const {
  CacheSlot child = parent == root() ? first_of_root_ : at(parent).first_child;
  Likeness best;
  for (int i = 0; i < kChildrenCompared && child != kNoSlot; ++i) {
    const Node& node = nodes_[child];
    if (node.is_filled && node.scope == scope) {
      const Token* own = tokens_.data() + child * static_cast<std::size_t>(settings_.block_tokens);
      const auto differ = std::mismatch(tokens.begin(), tokens.end(), own, own + node.tokens).first;
      const std::int64_t alike = differ - tokens.begin();
      if (alike > best.tokens) {
        best = Likeness{PrefixNode{node.serial, child}, alike};
      }
    }
    child = node.next_sibling;
  }
  return best.tokens == 0 ? std::nullopt : std::optional(best);
}

void PrefixIndex::link(CacheSlot slot) {
  Node& node = nodes_[slot];
  CacheSlot& first = bucket(node.key);
  node.same_bucket = first;
  first = slot;

  CacheSlot& eldest = node.parent == kNoSlot ? first_of_root_ : nodes_[node.parent].first_child;
  node.next_sibling = eldest;
  if (eldest != kNoSlot) {
    nodes_[eldest].previous_sibling = slot;
  }
  eldest = slot;

  CacheSlot& of_scope = first_of_scope_.at(node.scope);
  node.next_of_scope = of_scope;
  if (of_scope != kNoSlot) {
    nodes_[of_scope].previous_of_scope = slot;
  }
  of_scope = slot;
  if (node.parent != kNoSlot) {
    offer_if_possible(node.parent);  // it is no leaf now
  }
}

void PrefixIndex::unlink(CacheSlot slot) {
  const Node& node = nodes_[slot];
  CacheSlot* link = &bucket(node.key);
  while (*link != slot) {
    link = &nodes_[*link].same_bucket;
  }
  *link = node.same_bucket;

  CacheSlot& eldest = node.parent == kNoSlot ? first_of_root_ : nodes_[node.parent].first_child;
  (node.previous_sibling == kNoSlot ? eldest : nodes_[node.previous_sibling].next_sibling) =
      node.next_sibling;
  if (node.next_sibling != kNoSlot) {
    nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
  }

  if (node.previous_of_scope != kNoSlot) {
    nodes_[node.previous_of_scope].next_of_scope = node.next_of_scope;
  } else if (node.next_of_scope != kNoSlot) {
    first_of_scope_.at(node.scope) = node.next_of_scope;
  } else {
    first_of_scope_.erase(node.scope);
  }
  if (node.next_of_scope != kNoSlot) {
    nodes_[node.next_of_scope].previous_of_scope = node.previous_of_scope;
  }
}

bool PrefixIndex::may_go(const Node& node) const noexcept {
  return node.is_filled && node.pins == 0 &&
         (!policy_->takes_leaves_only() || node.first_child == kNoSlot);
}

void PrefixIndex::offer_if_possible(CacheSlot slot) {
  Node& node = nodes_[slot];
  const bool possible = may_go(node);
  if (possible == node.is_offered) {
    return;
  }
  node.is_offered = possible;
  if (possible) {
    policy_->offered(slot);
  } else {
    policy_->withdrawn(slot);
  }
}

void PrefixIndex::pin(PrefixNode node) {
  Node& pinned = at(node);
  cached_ -= pinned.is_filled && pinned.pins == 0 ? 1 : 0;
  ++pinned.pins;
  offer_if_possible(node.slot);
}

void PrefixIndex::unpin(PrefixNode node) {
  if (!knows(node)) {
    return;  // purged meanwhile
  }
  Node& pinned = at(node);
  KVL_CHECK_GT(pinned.pins, 0U);
  --pinned.pins;
  cached_ += pinned.is_filled && pinned.pins == 0 ? 1 : 0;
  offer_if_possible(node.slot);
  forget_if_useless(node.slot);
}

void PrefixIndex::fill(PrefixNode node, BlockId block) {
  Node& hollow = at(node);
  KVL_CHECK(!hollow.is_filled);
  hollow.is_filled = true;
  hollow.block = block;
  ++filled_;
  cached_ += hollow.pins == 0 ? 1 : 0;
  policy_->entered(node.slot, ++uses_);
  offer_if_possible(node.slot);
}

void PrefixIndex::use(PrefixNode node) {
  KVL_CHECK(at(node).is_filled);
  policy_->used(node.slot, ++uses_);
}

std::optional<BlockId> PrefixIndex::block_of(PrefixNode node) const {
  const Node& known = at(node);
  return known.is_filled ? std::optional(known.block) : std::nullopt;
}

std::optional<BlockId> PrefixIndex::evict() {
  const CacheSlot slot = policy_->victim();
  if (slot == kNoSlot) {
    return std::nullopt;
  }
  KVL_CHECK(nodes_[slot].is_offered);
  const BlockId block = empty(slot, Departure::kEvicted);
  forget_if_useless(slot);
  return block;
}

BlockId PrefixIndex::empty(CacheSlot slot, Departure how) {
  Node& node = nodes_[slot];
  if (node.is_offered) {
    node.is_offered = false;
    policy_->withdrawn(slot);
  }
  policy_->leaving(slot, how);
  node.is_filled = false;
  --filled_;
  cached_ -= node.pins == 0 ? 1 : 0;
  return node.block;
}

void PrefixIndex::forget_if_useless(CacheSlot slot) {
  while (slot != kNoSlot) {
    const Node& node = nodes_[slot];
    if (node.is_filled || node.pins > 0 || node.first_child != kNoSlot) {
      return;
    }
    const CacheSlot parent = node.parent;
    forget(slot);
    if (parent != kNoSlot) {
      offer_if_possible(parent);  // it may be a leaf now
    }
    slot = parent;
  }
}

void PrefixIndex::forget(CacheSlot slot) {
  unlink(slot);
  nodes_[slot].serial = 0;
  free_.push_back(slot);
  --nodes_in_use_;
}

void PrefixIndex::purge(ScopeId scope, std::vector<BlockId>& freed, std::vector<BlockId>& pinned) {
  for (auto found = first_of_scope_.find(scope); found != first_of_scope_.end();
       found = first_of_scope_.find(scope)) {
    purge_from(found->second, freed, pinned);
  }
}

void PrefixIndex::purge(PrefixNode top, std::vector<BlockId>& freed, std::vector<BlockId>& pinned) {
  KVL_CHECK(knows(top));
  purge_from(top.slot, freed, pinned);
}

// Children go before their parents, so that no link leads to a node that is gone; each node is come
// to from its parent once.
void PrefixIndex::purge_from(CacheSlot top, std::vector<BlockId>& freed,
                             std::vector<BlockId>& pinned) {
  const CacheSlot above = nodes_[top].parent;
  for (CacheSlot slot = top; slot != above;) {
    if (nodes_[slot].first_child != kNoSlot) {
      slot = nodes_[slot].first_child;
      continue;
    }
    const CacheSlot parent = nodes_[slot].parent;
    if (nodes_[slot].is_filled) {
      std::vector<BlockId>& blocks = nodes_[slot].pins > 0 ? pinned : freed;
      blocks.push_back(nodes_[slot].block);
      empty(slot, Departure::kPurged);
    }
    forget(slot);
    slot = parent;
  }
  if (above != kNoSlot) {
    offer_if_possible(above);
    forget_if_useless(above);
  }
}

std::optional<std::string> PrefixIndex::audit_node(CacheSlot slot) const {
  const Node& node = nodes_[slot];
  const std::string name = "node " + std::to_string(node.serial);
  const auto* own = tokens_.data() + slot * static_cast<std::size_t>(settings_.block_tokens);
  const bool is_first = node.parent == kNoSlot;
  if (!is_first && nodes_[node.parent].serial == 0) {
    return name + " hangs below one that is gone";
  }
  const PrefixNode parent = is_first ? root() : PrefixNode{nodes_[node.parent].serial, node.parent};
  const Hashes hashes = hash(parent, node.scope, {own, node.tokens});
  if (node.key != hashes.key || blocks_[slot].path != hashes.path) {
    return name + " is not what its place says";
  }
  if (search(parent, node.scope, {own, node.tokens}, node.key) != slot) {
    return name + " cannot be found, or is there twice";
  }
  if (!is_first && !may_follow(nodes_[node.parent].scope, node.scope)) {
    return name + " hangs below another scope";
  }
  if (!node.is_filled && node.pins == 0 && node.first_child == kNoSlot) {
    return name + " is kept for nothing";
  }
  return may_go(node) == node.is_offered ? std::nullopt
                                         : std::optional(name + " is offered wrongly");
}

std::optional<std::string> PrefixIndex::audit() const {
  std::int64_t in_use = 0;
  std::int64_t filled = 0;
  std::int64_t cached = 0;
  std::vector<bool> is_child(nodes_.size(), false);
  std::int64_t children = 0;
  const auto count_children = [&](CacheSlot first) {
    for (CacheSlot child = first; child != kNoSlot && !is_child[child];
         child = nodes_[child].next_sibling) {
      is_child[child] = true;
      ++children;
    }
  };
  count_children(first_of_root_);
  for (std::size_t slot = 0; slot < nodes_.size(); ++slot) {
    if (nodes_[slot].serial == 0) {
      continue;
    }
    ++in_use;
    filled += nodes_[slot].is_filled ? 1 : 0;
    cached += nodes_[slot].is_filled && nodes_[slot].pins == 0 ? 1 : 0;
    count_children(nodes_[slot].first_child);
    if (std::optional<std::string> wrong = audit_node(static_cast<CacheSlot>(slot))) {
      return wrong;
    }
  }
  std::int64_t scoped = 0;
  for (const auto& [scope, first] : first_of_scope_) {
    for (CacheSlot slot = first; slot != kNoSlot; slot = nodes_[slot].next_of_scope) {
      scoped += nodes_[slot].scope == scope ? 1 : 0;
    }
  }
  const auto free = static_cast<std::int64_t>(free_.size());
  if (in_use != nodes_in_use_ || filled != filled_ || cached != cached_ || children != in_use ||
      scoped != in_use || in_use + free != settings_.nodes) {
    return std::to_string(in_use) + " nodes, " + std::to_string(filled) + " filled, " +
           std::to_string(children) + " children, " + std::to_string(scoped) + " in scopes, " +
           std::to_string(free) + " free do not agree";
  }
  return std::nullopt;
}

}  // namespace kvledger
