// The index's audit: everything recounted from the nodes.

#include "core/prefix_index.h"

namespace kvledger {

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
  const std::uint32_t before =
      is_first ? 0 : blocks_[node.parent].position + nodes_[node.parent].tokens;
  if (blocks_[slot].position != before) {
    return name + " is not as deep as it says";
  }
  if (!is_among_kin(slot)) {
    return name + " is not where its kin are";
  }
  if (may_go(node) != node.is_offered) {
    return name + " is offered wrongly";
  }
  return audit_life(slot);
}

bool PrefixIndex::is_among_kin(CacheSlot slot) const {
  const Node& node = nodes_[slot];
  const auto is_kin = [&](CacheSlot other) {
    return nodes_[other].serial != 0 && nodes_[other].parent == node.parent &&
           nodes_[other].scope == node.scope;
  };
  if (node.younger_kin == kNoSlot) {
    return youngest_of(node.parent, node.scope) == slot;
  }
  return is_kin(node.younger_kin) && nodes_[node.younger_kin].older_kin == slot &&
         (node.older_kin == kNoSlot ||
          (is_kin(node.older_kin) && nodes_[node.older_kin].younger_kin == slot));
}

std::optional<std::string> PrefixIndex::audit_life(CacheSlot slot) const {
  const Node& node = nodes_[slot];
  std::uint32_t own = 0;
  std::uint32_t common = 0;
  for (CacheSlot at = node.first_child; at != kNoSlot; at = nodes_[at].next_sibling) {
    const Node& child = nodes_[at];
    own += child.is_live && child.owner == node.owner ? 1 : 0;
    common += child.is_live && child.owner != node.owner && child.owner->own == nullptr ? 1 : 0;
  }
  if (own == node.live_own && common == node.live_common && node.is_live == should_live(node)) {
    return std::nullopt;
  }
  return "node " + std::to_string(node.serial) + " counts " + std::to_string(node.live_own) +
         " and " + std::to_string(node.live_common) + " live children of " + std::to_string(own) +
         " and " + std::to_string(common);
}

std::optional<std::string> PrefixIndex::audit_owners() const {
  std::int64_t nodes = 0;
  std::int64_t filled = 0;
  std::int64_t cached = 0;
  for (const auto& [id, owner] : owners_) {
    std::int64_t own_nodes = 0;
    std::int64_t own_filled = 0;
    std::int64_t own_cached = 0;
    for (CacheSlot slot = owner.first; slot != kNoSlot; slot = nodes_[slot].next_of_owner) {
      const Node& node = nodes_[slot];
      own_nodes += node.owner == &owner ? 1 : 0;
      own_filled += node.is_filled ? 1 : 0;
      own_cached += node.is_filled && node.pins == 0 ? 1 : 0;
    }
    if (id != owner.id || own_nodes != owner.nodes || own_filled != owner.filled ||
        own_cached != owner.cached || (own_nodes == 0 && owner.own == nullptr)) {
      return "owner " + std::to_string(id.value()) + " counts wrongly, or is kept for nothing";
    }
    nodes += own_nodes;
    filled += own_filled;
    cached += own_cached;
  }
  if (nodes != nodes_in_use_ || filled != filled_ || cached != cached_) {
    return std::to_string(nodes) + " nodes, " + std::to_string(filled) + " filled and " +
           std::to_string(cached) + " cached of all owners do not agree";
  }
  return std::nullopt;
}

std::optional<std::string> PrefixIndex::audit() const {
  std::int64_t in_use = 0;
  std::int64_t filled = 0;
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
    count_children(nodes_[slot].first_child);
    if (std::optional<std::string> wrong = audit_node(static_cast<CacheSlot>(slot))) {
      return wrong;
    }
  }
  std::int64_t scoped = 0;
  for (const auto& [id, scope] : scopes_) {
    for (CacheSlot slot = scope.first; slot != kNoSlot; slot = nodes_[slot].next_of_scope) {
      scoped += nodes_[slot].scope == id && nodes_[slot].owner == scope.owner ? 1 : 0;
    }
  }
  const auto free = static_cast<std::int64_t>(free_.size());
  if (in_use != nodes_in_use_ || filled != filled_ || children != in_use || scoped != in_use ||
      in_use + free != settings_.nodes) {
    return std::to_string(in_use) + " nodes, " + std::to_string(filled) + " filled, " +
           std::to_string(children) + " children, " + std::to_string(scoped) + " in scopes, " +
           std::to_string(free) + " free do not agree";
  }
  return audit_owners();
}

}  // namespace kvledger
