// The index's owners and partitions: which blocks a policy chooses from, and which of them may go.

#include "core/prefix_index.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace kvledger {

PrefixIndex::Owner* PrefixIndex::find_owner(CacheOwner owner) noexcept {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? nullptr : &found->second;
}

const PrefixIndex::Owner* PrefixIndex::find_owner(CacheOwner owner) const noexcept {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? nullptr : &found->second;
}

void PrefixIndex::forget_owner_if_useless(Owner& owner) {
  if (owner.nodes == 0 && owner.own == nullptr) {
    owners_.erase(CacheOwner{owner.id});
  }
}

PrefixIndex::Scope& PrefixIndex::scope_for(ScopeId scope, CacheOwner owner) {
  if (const auto known = scopes_.find(scope); known != scopes_.end()) {
    KVL_CHECK_EQ(known->second.owner->id, owner);
    return known->second;
  }
  Owner& of = owners_.try_emplace(owner).first->second;
  of.id = owner;
  try {
    return scopes_.try_emplace(scope, Scope{kNoSlot, &of}).first->second;
  } catch (...) {
    forget_owner_if_useless(of);
    throw;
  }
}

std::optional<CacheOwner> PrefixIndex::owner_of(ScopeId scope) const noexcept {
  const auto known = scopes_.find(scope);
  return known == scopes_.end() ? std::nullopt : std::optional(known->second.owner->id);
}

bool PrefixIndex::has_partition(CacheOwner owner) const noexcept {
  const Owner* known = find_owner(owner);
  return known != nullptr && known->own != nullptr;
}

std::int64_t PrefixIndex::filled(CacheOwner owner) const noexcept {
  const Owner* known = find_owner(owner);
  return known == nullptr ? 0 : known->filled;
}

std::int64_t PrefixIndex::cached(CacheOwner owner) const noexcept {
  const Owner* known = find_owner(owner);
  return known == nullptr ? 0 : known->cached;
}

void PrefixIndex::link_to_owner(CacheSlot slot) {
  Node& node = nodes_[slot];
  node.next_of_owner = node.owner->first;
  if (node.next_of_owner != kNoSlot) {
    nodes_[node.next_of_owner].previous_of_owner = slot;
  }
  node.owner->first = slot;
  ++node.owner->nodes;
}

void PrefixIndex::unlink_from_owner(CacheSlot slot) {
  Node& node = nodes_[slot];
  (node.previous_of_owner == kNoSlot ? node.owner->first
                                     : nodes_[node.previous_of_owner].next_of_owner) =
      node.next_of_owner;
  if (node.next_of_owner != kNoSlot) {
    nodes_[node.next_of_owner].previous_of_owner = node.previous_of_owner;
  }
  --node.owner->nodes;
  forget_owner_if_useless(*std::exchange(node.owner, nullptr));
}

void PrefixIndex::change_pins(Node& node, std::uint32_t pins) {
  if (node.is_filled) {
    const std::int64_t by = std::int64_t{pins == 0} - std::int64_t{node.pins == 0};
    cached_ += by;
    node.owner->cached += by;
  }
  node.pins = pins;
}

void PrefixIndex::count_filled(Node& node, std::int64_t by) {
  filled_ += by;
  node.owner->filled += by;
  if (node.pins == 0) {
    cached_ += by;
    node.owner->cached += by;
  }
}

PrefixIndex::Partition& PrefixIndex::partition_of(const Node& node) noexcept {
  return node.owner->own != nullptr ? *node.owner->own : common_;
}

const PrefixIndex::Partition& PrefixIndex::partition_of(const Node& node) const noexcept {
  return node.owner->own != nullptr ? *node.owner->own : common_;
}

// A node's children of the same owner lie in its partition wherever that is; others only where both
// lie in the common one. Both are counted always, so that an owner moves without a look at others.
std::uint32_t* PrefixIndex::count_above(const Node& node) noexcept {
  if (node.parent == kNoSlot) {
    return nullptr;
  }
  Node& parent = nodes_[node.parent];
  if (parent.owner == node.owner) {
    return &parent.live_own;
  }
  return node.owner->own == nullptr ? &parent.live_common : nullptr;
}

std::uint32_t PrefixIndex::live_below(const Node& node) const noexcept {
  return node.live_own + (node.owner->own == nullptr ? node.live_common : 0);
}

bool PrefixIndex::should_live(const Node& node) const noexcept {
  return node.is_filled || node.pins > 0 || live_below(node) > 0;
}

bool PrefixIndex::may_go(const Node& node) const noexcept {
  return node.is_filled && node.pins == 0 &&
         (!partition_of(node).policy->takes_leaves_only() || live_below(node) == 0);
}

void PrefixIndex::offer_if_possible(CacheSlot slot) {
  Node& node = nodes_[slot];
  const bool possible = may_go(node);
  if (possible == node.is_offered) {
    return;
  }
  node.is_offered = possible;
  if (possible) {
    partition_of(node).policy->offered(slot);
  } else {
    partition_of(node).policy->withdrawn(slot);
  }
}

// Going up ends at the first node that lives on its own, so below pinned ones at once. A hollow one
// that nobody has pinned begins to live or ends only with the last that lived below it.
void PrefixIndex::refresh(CacheSlot slot) {
  while (slot != kNoSlot) {
    Node& node = nodes_[slot];
    offer_if_possible(slot);
    const bool lives = should_live(node);
    if (lives == node.is_live) {
      return;
    }
    std::uint32_t* const above = count_above(node);
    node.is_live = lives;
    if (above == nullptr) {
      return;
    }
    lives ? ++*above : --*above;
    slot = node.parent;
  }
}

void PrefixIndex::stop_living(CacheSlot slot) {
  Node& node = nodes_[slot];
  if (!node.is_live) {
    return;
  }
  node.is_live = false;
  if (std::uint32_t* const above = count_above(node)) {
    --*above;
  }
}

void PrefixIndex::leave_policy(CacheSlot slot, Departure how) {
  Node& node = nodes_[slot];
  EvictionPolicy& policy = *partition_of(node).policy;
  if (std::exchange(node.is_offered, false)) {
    policy.withdrawn(slot);
  }
  policy.leaving(slot, how);
}

std::optional<BlockId> PrefixIndex::evict() {
  return evict_from(common_);
}

std::optional<BlockId> PrefixIndex::evict(CacheOwner owner) {
  Owner* const known = find_owner(owner);
  return evict_from(known != nullptr && known->own != nullptr ? *known->own : common_);
}

std::optional<BlockId> PrefixIndex::evict_from(Partition& partition) {
  const CacheSlot slot = partition.policy->victim();
  if (slot == kNoSlot) {
    return std::nullopt;
  }
  KVL_CHECK(nodes_[slot].is_offered);
  KVL_CHECK(&partition_of(nodes_[slot]) == &partition);
  const BlockId block = empty(slot, Departure::kEvicted);
  refresh(slot);
  forget_if_useless(slot);
  return block;
}

void PrefixIndex::partition(CacheOwner owner, std::int64_t capacity) {
  KVL_CHECK(!has_partition(owner));
  KVL_CHECK_GT(capacity, 0);
  auto own = std::make_unique<Partition>();
  own->policy = make_policy_(blocks_, capacity);
  KVL_CHECK(own->policy != nullptr);
  own->uses = common_.uses;
  Owner& known = owners_.try_emplace(owner).first->second;
  known.id = owner;
  move(known, std::move(own));
}

void PrefixIndex::merge(CacheOwner owner) {
  KVL_CHECK(has_partition(owner));
  Owner& known = *find_owner(owner);
  move(known, nullptr);
  forget_owner_if_useless(known);
}

// Takes the owner's nodes out of all that depends on partitions, and puts them in again.
void PrefixIndex::move(Owner& owner, std::unique_ptr<Partition> own) {
  std::vector<CacheSlot> filled;
  filled.reserve(static_cast<std::size_t>(owner.filled));
  for (CacheSlot slot = owner.first; slot != kNoSlot; slot = nodes_[slot].next_of_owner) {
    stop_living(slot);
    if (nodes_[slot].is_filled) {
      leave_policy(slot, Departure::kMoved);
      filled.push_back(slot);
    }
  }
  std::sort(filled.begin(), filled.end(),
            [&](CacheSlot a, CacheSlot b) { return blocks_[a].used_at < blocks_[b].used_at; });
  const std::uint64_t left_at = owner.own != nullptr ? owner.own->uses : common_.uses;
  std::swap(owner.own, own);  // the old one goes when its blocks are somewhere else
  Partition& to = owner.own != nullptr ? *owner.own : common_;
  for (const CacheSlot slot : filled) {
    const std::uint64_t age = left_at - blocks_[slot].used_at;
    blocks_[slot].used_at = to.uses - age;
    to.policy->adopted(slot, to.uses);
  }
  for (CacheSlot slot = owner.first; slot != kNoSlot; slot = nodes_[slot].next_of_owner) {
    refresh(slot);
    const CacheSlot parent = nodes_[slot].parent;
    if (parent != kNoSlot && nodes_[parent].owner != &owner) {
      refresh(parent);
    }
  }
  for (const CacheSlot slot : filled) {  // until here they were offered as they came
    if (nodes_[slot].is_offered) {
      to.policy->withdrawn(slot);
      to.policy->offered(slot);
    }
  }
}

}  // namespace kvledger
