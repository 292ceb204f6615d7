#include "tests/simulation/index_model.h"

#include <algorithm>
#include <utility>

#include "tests/simulation/random.h"

namespace kvledger::simulation {
namespace {

constexpr std::size_t kNodesForEachBlock = 2;
constexpr std::size_t kChildrenCompared = 16;

bool shared(std::uint32_t scope) {
  return is_shared(ScopeId{scope});
}

}  // namespace

IndexModel::IndexModel(BooksModel& books, std::int64_t block_tokens, bool by_age)
    : books_(books), block_tokens_(block_tokens), by_age_(by_age) {}

IndexModel::Node* IndexModel::find(const Place& place) {
  const auto found = nodes_.find(place);
  return found == nodes_.end() ? nullptr : &found->second;
}

IndexModel::Node* IndexModel::find(const Place& place, std::uint64_t id) {
  Node* const found = find(place);
  return found != nullptr && found->id == id ? found : nullptr;
}

IndexModel::Node* IndexModel::place(const Place& place, std::uint32_t owner) {
  Place before = place;
  before.scopes.pop_back();
  before.tokens.resize(before.tokens.size() - static_cast<std::size_t>(block_tokens_));
  Node* const parent = before.scopes.empty() ? nullptr : find(before);
  if (!before.scopes.empty()) {
    const bool follows = before.scopes.back() == place.scopes.back() ||
                         (shared(before.scopes.back()) && !shared(place.scopes.back()));
    if (parent == nullptr || parent->pins == 0 || !follows) {
      return nullptr;
    }
  }
  Node* node = find(place);
  if (node == nullptr) {
    if (nodes_.size() == kNodesForEachBlock * books_.blocks.size()) {
      return nullptr;
    }
    const auto made = nodes_.emplace(place, Node{}).first;
    node = &made->second;
    node->id = ++ids_;
    node->place = &made->first;
    node->parent = parent;
    node->owner = owner;
  }
  pin(*node);
  return node;
}

void IndexModel::pin(Node& node) {
  ++node.pins;
  refresh();
}

void IndexModel::unpin(Node& node) {
  expect(node.pins > 0, "model: a pin too few");
  --node.pins;
  refresh();
  forget_useless(&node);
}

void IndexModel::fill(Node& node, std::uint32_t block) {
  node.block = block;
  use(node);
  refresh();
}

std::pair<IndexModel::Node*, std::int64_t> IndexModel::likest(const Node* parent,
                                                              std::uint32_t scope,
                                                              const std::vector<Token>& tokens) {
  std::vector<Node*> children = children_of(parent);
  std::erase_if(children, [scope](const Node* child) { return child->scope() != scope; });
  children.resize(std::min(children.size(), kChildrenCompared));
  std::pair<Node*, std::int64_t> best{nullptr, 0};
  for (Node* const child : children) {
    if (!child->block) {
      continue;
    }
    const std::vector<Token> own(child->place->tokens.end() - block_tokens_,
                                 child->place->tokens.end());
    std::int64_t alike = 0;
    while (alike < static_cast<std::int64_t>(std::min(own.size(), tokens.size())) &&
           own[static_cast<std::size_t>(alike)] == tokens[static_cast<std::size_t>(alike)]) {
      ++alike;
    }
    if (alike > best.second) {
      best = {child, alike};
    }
  }
  return best;
}

// The youngest first.
std::vector<IndexModel::Node*> IndexModel::children_of(const Node* parent) {
  std::vector<Node*> children;
  for (auto& [place, node] : nodes_) {
    if (node.parent == parent) {
      children.push_back(&node);
    }
  }
  std::ranges::sort(children, std::greater{}, &Node::id);
  return children;
}

IndexModel::Owner IndexModel::partition_of(const Node& node) const {
  return apart_.contains(node.owner) ? Owner(node.owner) : Owner();
}

// Nobody has it, and in its partition nobody has anything below it, nor is anything cached there.
bool IndexModel::may_go(const Node& node) const {
  if (!node.block || node.pins > 0) {
    return false;
  }
  return std::ranges::none_of(nodes_, [&](const auto& entry) {
    const Node& other = entry.second;
    if (other.place->scopes.size() <= node.place->scopes.size() ||
        (!other.block && other.pins == 0) || partition_of(other) != partition_of(node)) {
      return false;
    }
    const Node* above = &other;
    while (above != nullptr && above != &node) {
      above = above->parent;
    }
    return above == &node;
  });
}

void IndexModel::settle_in(Node& node, std::uint64_t since) {
  const bool now = may_go(node);
  if (now == node.may_go) {
    return;
  }
  node.may_go = now;
  node.since = since;
  std::list<Node*>& list = lists_[partition_of(node)];
  if (now) {
    list.push_back(&node);
  } else {
    list.remove(&node);
  }
}

void IndexModel::refresh() {
  int offered = 0;
  for (auto& [place, node] : nodes_) {
    const bool before = node.may_go;
    settle_in(node);
    offered += node.may_go && !before ? 1 : 0;
  }
  expect(offered <= 1, "model: two blocks may go by one event, in no order");
}

void IndexModel::forget_useless(Node* node) {
  while (node != nullptr && !node->block && node->pins == 0 && children_of(node).empty()) {
    Node* const parent = node->parent;
    const Place place = *node->place;
    nodes_.erase(place);
    node = parent;
  }
}

std::int64_t IndexModel::purge(std::uint32_t scope) {
  std::vector<std::uint32_t> freed;
  std::vector<std::uint32_t> pinned;
  std::int64_t count = 0;
  for (;;) {
    Node* youngest = nullptr;
    for (auto& [place, node] : nodes_) {
      if (node.scope() == scope && (youngest == nullptr || node.id > youngest->id)) {
        youngest = &node;
      }
    }
    if (youngest == nullptr) {
      break;
    }
    count += purge_from(*youngest, freed, pinned);
  }
  drop(freed, pinned);
  return count;
}

std::int64_t IndexModel::purge(Node& top) {
  std::vector<std::uint32_t> freed;
  std::vector<std::uint32_t> pinned;
  const std::int64_t count = purge_from(top, freed, pinned);
  drop(freed, pinned);
  return count;
}

std::int64_t IndexModel::purge_from(Node& top, std::vector<std::uint32_t>& freed,
                                    std::vector<std::uint32_t>& pinned) {
  Node* const parent = top.parent;
  const std::int64_t count = purge_below(top, freed, pinned);
  refresh();
  forget_useless(parent);
  return count;
}

// The youngest child first, and a node after all that hang below it.
std::int64_t IndexModel::purge_below(Node& top, std::vector<std::uint32_t>& freed,
                                     std::vector<std::uint32_t>& pinned) {
  std::int64_t count = 0;
  for (Node* const child : children_of(&top)) {
    count += purge_below(*child, freed, pinned);
  }
  if (top.block) {
    (top.pins > 0 ? pinned : freed).push_back(*top.block);
    ++count;
  }
  if (top.may_go) {
    lists_[partition_of(top)].remove(&top);
  }
  const Place place = *top.place;
  nodes_.erase(place);
  return count;
}

void IndexModel::drop(const std::vector<std::uint32_t>& freed,
                      const std::vector<std::uint32_t>& pinned) {
  for (const auto* blocks : {&freed, &pinned}) {
    for (const std::uint32_t block : *blocks) {
      books_.drop(block);
    }
  }
}

PoolShare IndexModel::share_of(std::uint32_t tenant) const {
  for (const PoolShare& share : shares_) {
    if (share.tenant.value() == tenant) {
      return share;
    }
  }
  const BlockCount all{static_cast<std::int64_t>(books_.blocks.size())};
  return PoolShare{TenantId{tenant}, BlockCount{0}, all, all, false};
}

std::int64_t IndexModel::unused(const PoolShare& share) const {
  return std::max<std::int64_t>(0, share.guaranteed.value() - books_.live(share.tenant.value()));
}

// What others have guaranteed and do not use.
std::int64_t IndexModel::kept_from(Owner tenant) const {
  std::int64_t sum = 0;
  for (const PoolShare& share : shares_) {
    sum += share.tenant.value() == tenant ? 0 : unused(share);
  }
  return sum;
}

std::int64_t IndexModel::available(std::uint32_t tenant) const {
  const PoolShare share = share_of(tenant);
  return std::min(books_.free() + reclaimable() - kept_from(tenant),
                  std::min(share.live_max, share.max).value() - books_.live(tenant));
}

std::int64_t IndexModel::room_of_scopes() const {
  return books_.free() + reclaimable() - kept_from({});
}

// What a tenant gives away makes its unused guarantee larger by one, unless it is beyond that.
bool IndexModel::may_give(std::uint32_t tenant) const {
  const bool beyond = books_.live(tenant) > share_of(tenant).guaranteed.value();
  return room_of_scopes() >= (beyond ? 0 : 1);
}

// Whoever newly stands apart, or does no more, moves.
void IndexModel::set_shares(const std::vector<PoolShare>& shares) {
  const std::vector<PoolShare> before = std::exchange(shares_, shares);
  const auto is_apart = [this](std::uint32_t tenant) {
    const PoolShare share = share_of(tenant);
    return share.guaranteed > BlockCount{0} ||
           share.max < BlockCount{static_cast<std::int64_t>(books_.blocks.size())};
  };
  for (const PoolShare& share : before) {
    const std::uint32_t owner = share.tenant.value();
    if (apart_.contains(owner) && !is_apart(owner)) {
      move(owner);
    }
  }
  for (const PoolShare& share : shares) {
    const std::uint32_t owner = share.tenant.value();
    if (!apart_.contains(owner) && is_apart(owner)) {
      move(owner);
    }
  }
}

// An owner's blocks join the other list in the order of their last uses. Others' that only those
// had kept may go from now on, all at once.
void IndexModel::move(std::uint32_t owner) {
  std::vector<Node*> moved;
  for (auto& [place, node] : nodes_) {
    if (node.owner == owner) {
      moved.push_back(&node);
      if (std::exchange(node.may_go, false)) {
        lists_[partition_of(node)].remove(&node);
      }
    }
  }
  if (apart_.erase(owner) == 0) {
    apart_.insert(owner);
  }
  ++moves_;
  for (auto& [place, node] : nodes_) {
    if (node.owner != owner) {
      settle_in(node, moves_);
    }
  }
  std::ranges::sort(moved, {}, &Node::used);
  for (Node* const node : moved) {
    settle_in(*node);
  }
  refresh();
}

std::int64_t IndexModel::cached(std::uint32_t owner) const {
  return std::ranges::count_if(nodes_, [&](const auto& entry) {
    return entry.second.owner == owner && entry.second.block && entry.second.pins == 0;
  });
}

std::int64_t IndexModel::reclaimable() const {
  const std::int64_t unpinned = std::ranges::count_if(
      nodes_, [](const auto& entry) { return entry.second.block && entry.second.pins == 0; });
  return std::min(unpinned, books_.count(BlockState::kCached));
}

void IndexModel::make_room(std::uint32_t tenant, std::int64_t count) {
  while (books_.free() < count) {
    expect(evict_for(tenant), "model: nothing can be evicted for who may have it");
  }
}

// Out of the partition that has most beyond what is guaranteed to its owner; the common one first.
bool IndexModel::evict_for(Owner tenant) {
  std::int64_t common = 0;
  for (const auto& [place, node] : nodes_) {
    common += node.block && node.pins == 0 && !partition_of(node) ? 1 : 0;
  }
  Owner partition;
  std::int64_t most = common;
  for (const PoolShare& share : shares_) {
    const std::uint32_t owner = share.tenant.value();
    if (!apart_.contains(owner)) {
      continue;
    }
    const std::int64_t all = cached(owner);
    const std::int64_t beyond = owner == tenant ? all : all - std::min(all, unused(share));
    if (beyond > most) {
      most = beyond;
      partition = owner;
    }
  }
  return evict_from(partition);
}

// What is still held is only forgotten, and makes no room.
bool IndexModel::evict_from(Owner partition) {
  std::list<Node*>& list = lists_[partition];
  while (!list.empty()) {
    expect(!told.empty(), "a block should have been evicted");
    const std::uint32_t block = told.front();
    told.pop_front();
    const auto goes = std::ranges::find_if(list, [&](Node* node) { return node->block == block; });
    expect(goes != list.end(), "a block was evicted that was in use, no leaf, or of another share");
    const bool is_oldest = std::all_of(list.begin(), goes, [&](const Node* older) {
      return older->since != 0 && older->since == (*goes)->since;
    });
    expect(!by_age_ || is_oldest, "a block was evicted before one that is older");
    const bool is_cached = books_.blocks[block].state == BlockState::kCached;
    take_out(**goes);
    if (is_cached) {
      ++evicted;
      return true;
    }
  }
  return false;
}

void IndexModel::take_out(Node& node) {
  lists_[partition_of(node)].remove(&node);
  node.may_go = false;
  books_.drop(*std::exchange(node.block, std::nullopt));
  refresh();
  forget_useless(&node);
}

void IndexModel::keep_within_shares() {
  for (const PoolShare& share : shares_) {
    const std::uint32_t owner = share.tenant.value();
    while (apart_.contains(owner) && cached(owner) > 0 &&
           books_.live(owner) + cached(owner) > share.max.value()) {
      expect(evict_from(owner), "model: nothing can be evicted of what is beyond a share");
    }
  }
  const auto sealed = [this] {
    std::int64_t sum = 0;
    for (const PoolShare& share : shares_) {
      const std::int64_t own = books_.count(BlockState::kCached, share.tenant.value());
      sum += share.sealed ? std::max<std::int64_t>(0, unused(share) - own) : 0;
    }
    return sum;
  };
  for (const PoolShare& share : shares_) {
    while (share.sealed && books_.free() < sealed() && evict_for({})) {
    }
  }
}

}  // namespace kvledger::simulation
