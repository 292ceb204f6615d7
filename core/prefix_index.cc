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

}  // namespace

bool PrefixIndex::may_follow(ScopeId before, ScopeId scope) noexcept {
  return scope == before || (is_shared(before) && !is_shared(scope));
}

PrefixIndex::PrefixIndex(const PrefixIndexSettings& settings, const MakePolicy& make_policy)
    : settings_(settings), make_policy_(make_policy) {
  KVL_CHECK_GT(settings.nodes, 0);
  KVL_CHECK_LT(settings.nodes, std::int64_t{kNoSlot});
  KVL_CHECK_GT(settings.block_tokens, 0);
  KVL_CHECK_LE(settings.block_tokens, kBlockTokensMax);
  const auto count = static_cast<std::size_t>(settings.nodes);
  blocks_.resize(count);
  nodes_.resize(count);
  tokens_.resize(count * static_cast<std::size_t>(settings.block_tokens));
  buckets_.resize(std::bit_ceil(2 * count), kNoSlot);
  families_.resize(buckets_.size(), kNoSlot);
  free_.reserve(count);
  for (std::size_t slot = count; slot-- > 0;) {
    free_.push_back(static_cast<CacheSlot>(slot));
  }
  KVL_CHECK_GE(settings.capacity, 0);
  common_.policy =
      make_policy_(blocks_, settings.capacity > 0 ? settings.capacity : settings.nodes);
  KVL_CHECK(common_.policy != nullptr);
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
                                             std::span<const Token> tokens, CacheOwner owner) {
  KVL_CHECK(!tokens.empty());
  KVL_CHECK_LE(static_cast<std::int64_t>(tokens.size()), settings_.block_tokens);
  KVL_CHECK(may_place(parent, scope));
  const Hashes hashes = hash(parent, scope, tokens);
  if (const CacheSlot slot = search(parent, scope, tokens, hashes.key); slot != kNoSlot) {
    const PrefixNode found{nodes_[slot].serial, slot};
    KVL_CHECK_EQ(nodes_[slot].owner->id, owner);
    pin(found);
    return found;
  }
  if (free_.empty()) {
    return std::nullopt;
  }
  Scope& known = scope_for(scope, owner);  // where memory ends, nothing has changed yet
  const CacheSlot slot = free_.back();
  free_.pop_back();
  Node& node = nodes_[slot];
  node = Node{};
  node.serial = ++serials_;
  node.key = hashes.key;
  node.parent = parent.slot;
  node.owner = known.owner;
  node.scope = scope;
  node.tokens = static_cast<std::uint32_t>(tokens.size());
  node.pins = 1;
  blocks_[slot] = CachedBlock{};
  blocks_[slot].path = hashes.path;
  if (parent != root()) {
    blocks_[slot].position = blocks_[parent.slot].position + nodes_[parent.slot].tokens;
  }
  std::copy(tokens.begin(), tokens.end(),
            tokens_.begin() + slot * static_cast<std::ptrdiff_t>(settings_.block_tokens));
  link(slot);
  ++nodes_in_use_;
  return PrefixNode{node.serial, slot};
}

std::optional<PrefixIndex::Likeness> PrefixIndex::likest(PrefixNode parent, ScopeId scope,
                                                         std::span<const Token> tokens) const {
  KVL_CHECK(parent == root() || knows(parent));
  CacheSlot child = youngest_of(parent.slot, scope);
  Likeness best;
  for (int i = 0; i < kChildrenCompared && child != kNoSlot; ++i) {
    const Node& node = nodes_[child];
    if (node.is_filled) {
      const Token* own = tokens_.data() + child * static_cast<std::size_t>(settings_.block_tokens);
      const auto differ = std::mismatch(tokens.begin(), tokens.end(), own, own + node.tokens).first;
      const std::int64_t alike = differ - tokens.begin();
      if (alike > best.tokens) {
        best = Likeness{PrefixNode{node.serial, child}, alike};
      }
    }
    child = node.older_kin;
  }
  return best.tokens == 0 ? std::nullopt : std::optional(best);
}

std::size_t PrefixIndex::family_bucket(CacheSlot parent, ScopeId scope) const noexcept {
  const std::uint64_t both = std::uint64_t{parent} << 32 | scope.value();
  return mix(both ^ settings_.seed, kScopeFactor ^ settings_.seed) & (families_.size() - 1);
}

CacheSlot PrefixIndex::youngest_of(CacheSlot parent, ScopeId scope) const noexcept {
  CacheSlot youngest = families_[family_bucket(parent, scope)];
  while (youngest != kNoSlot &&
         (nodes_[youngest].parent != parent || nodes_[youngest].scope != scope)) {
    youngest = nodes_[youngest].next_family;
  }
  return youngest;
}

CacheSlot& PrefixIndex::family_link(CacheSlot youngest) noexcept {
  const Node& node = nodes_[youngest];
  CacheSlot* link = &families_[family_bucket(node.parent, node.scope)];
  while (*link != youngest) {
    link = &nodes_[*link].next_family;
  }
  return *link;
}

void PrefixIndex::link_to_kin(CacheSlot slot) noexcept {
  Node& node = nodes_[slot];
  const CacheSlot older = youngest_of(node.parent, node.scope);
  if (older == kNoSlot) {
    CacheSlot& first = families_[family_bucket(node.parent, node.scope)];
    node.next_family = first;
    first = slot;
    return;
  }
  CacheSlot& link = family_link(older);
  node.older_kin = older;
  node.next_family = nodes_[older].next_family;
  nodes_[older].younger_kin = slot;
  link = slot;
}

void PrefixIndex::unlink_from_kin(CacheSlot slot) noexcept {
  const Node& node = nodes_[slot];
  if (node.older_kin != kNoSlot) {
    nodes_[node.older_kin].younger_kin = node.younger_kin;
  }
  if (node.younger_kin != kNoSlot) {
    nodes_[node.younger_kin].older_kin = node.older_kin;
  } else if (node.older_kin != kNoSlot) {
    nodes_[node.older_kin].next_family = node.next_family;
    family_link(slot) = node.older_kin;
  } else {
    family_link(slot) = node.next_family;
  }
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
  link_to_kin(slot);

  CacheSlot& of_scope = scopes_.at(node.scope).first;
  node.next_of_scope = of_scope;
  if (of_scope != kNoSlot) {
    nodes_[of_scope].previous_of_scope = slot;
  }
  of_scope = slot;
  link_to_owner(slot);
  refresh(slot);  // the parent may be no leaf now
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
  unlink_from_kin(slot);

  if (node.previous_of_scope != kNoSlot) {
    nodes_[node.previous_of_scope].next_of_scope = node.next_of_scope;
  } else if (node.next_of_scope != kNoSlot) {
    scopes_.at(node.scope).first = node.next_of_scope;
  } else {
    scopes_.erase(node.scope);
  }
  if (node.next_of_scope != kNoSlot) {
    nodes_[node.next_of_scope].previous_of_scope = node.previous_of_scope;
  }
  unlink_from_owner(slot);
}

void PrefixIndex::pin(PrefixNode node) {
  change_pins(at(node), at(node).pins + 1);
  refresh(node.slot);
}

void PrefixIndex::unpin(PrefixNode node) {
  if (!knows(node)) {
    return;  // purged meanwhile
  }
  Node& pinned = at(node);
  KVL_CHECK_GT(pinned.pins, 0U);
  change_pins(pinned, pinned.pins - 1);
  refresh(node.slot);
  forget_if_useless(node.slot);
}

void PrefixIndex::fill(PrefixNode node, BlockId block) {
  Node& hollow = at(node);
  KVL_CHECK(!hollow.is_filled);
  hollow.is_filled = true;
  hollow.block = block;
  count_filled(hollow, 1);
  Partition& partition = partition_of(hollow);
  partition.policy->entered(node.slot, ++partition.uses);
  refresh(node.slot);
}

void PrefixIndex::use(PrefixNode node) {
  KVL_CHECK(at(node).is_filled);
  Partition& partition = partition_of(at(node));
  partition.policy->used(node.slot, ++partition.uses);
}

std::optional<BlockId> PrefixIndex::block_of(PrefixNode node) const {
  const Node& known = at(node);
  return known.is_filled ? std::optional(known.block) : std::nullopt;
}

BlockId PrefixIndex::empty(CacheSlot slot, Departure how) {
  Node& node = nodes_[slot];
  leave_policy(slot, how);
  node.is_filled = false;
  count_filled(node, -1);
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
    slot = parent;
  }
}

void PrefixIndex::forget(CacheSlot slot) {
  stop_living(slot);
  unlink(slot);
  nodes_[slot].serial = 0;
  free_.push_back(slot);
  --nodes_in_use_;
}

void PrefixIndex::purge(ScopeId scope, std::vector<BlockId>& freed, std::vector<BlockId>& pinned) {
  for (auto found = scopes_.find(scope); found != scopes_.end(); found = scopes_.find(scope)) {
    purge_from(found->second.first, freed, pinned);
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
    refresh(above);
    forget_if_useless(above);
  }
}

}  // namespace kvledger
