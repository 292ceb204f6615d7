// The prefix index and what goes from it, as simple as they can be: every node by the tokens from
// the root and the scope of each block, the order of eviction as lists, every count made anew.
//
// Where the order of evictions is that of ages, the model says which block goes. Where it is not it
// is told, and says whether that one might.

#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/pool_shares.h"
#include "core/types.h"
#include "tests/simulation/books_model.h"

namespace kvledger::simulation {

class IndexModel {
 public:
  // A block's tokens behind all those before it, and in whose scope each of these blocks is.
  struct Place {
    std::vector<std::uint32_t> scopes;
    std::vector<Token> tokens;
    auto operator<=>(const Place&) const = default;
  };
  struct Node {
    std::uint64_t id = 0;  // in the order in which they came, never used again
    const Place* place = nullptr;
    Node* parent = nullptr;
    std::uint32_t owner = 0;
    std::optional<std::uint32_t> block;
    std::int64_t pins = 0;
    std::uint64_t used = 0;  // when, in uses of all
    bool may_go = false;
    std::uint64_t since = 0;  // not 0: with others of this number, in no order

    std::uint32_t scope() const { return place->scopes.back(); }
  };

  // `by_age`: whoever was let go first goes first.
  IndexModel(BooksModel& books, std::int64_t block_tokens, bool by_age);

  // The node at a place, if it is still the one that was meant.
  Node* find(const Place& place);
  Node* find(const Place& place, std::uint64_t id);
  // Pinned once more; nullptr if there is no way, or no room.
  Node* place(const Place& place, std::uint32_t owner);
  void pin(Node& node);
  void unpin(Node& node);
  void fill(Node& node, std::uint32_t block);
  void use(Node& node) { node.used = ++uses_; }
  // The filled child in `scope` that begins with the most of `tokens`, of the youngest 16 of that
  // scope; and how many.
  std::pair<Node*, std::int64_t> likest(const Node* parent, std::uint32_t scope,
                                        const std::vector<Token>& tokens);

  // Takes out a scope and all below it, and drops its blocks; how many.
  std::int64_t purge(std::uint32_t scope);
  std::int64_t purge(Node& top);

  void set_shares(const std::vector<PoolShare>& shares);
  void keep_within_shares();
  // Evicts until `count` blocks are free, for a tenant that may have them.
  void make_room(std::uint32_t tenant, std::int64_t count);
  std::int64_t available(std::uint32_t tenant) const;
  std::int64_t room_of_scopes() const;
  bool may_give(std::uint32_t tenant) const;

  // Blocks that the index said it evicted, in order.
  std::deque<std::uint32_t> told;
  std::int64_t evicted = 0;

  std::size_t nodes() const { return nodes_.size(); }

 private:
  using Owner = std::optional<std::uint32_t>;  // nothing: all that have no partition

  PoolShare share_of(std::uint32_t tenant) const;
  std::int64_t unused(const PoolShare& share) const;
  std::int64_t kept_from(Owner tenant) const;
  std::int64_t cached(std::uint32_t owner) const;
  // Blocks that could be evicted. One that somebody is about to take over is cached, but pinned;
  // one that a sample has which has not said yet that it computed it is not pinned, but held.
  std::int64_t reclaimable() const;
  Owner partition_of(const Node& node) const;
  bool may_go(const Node& node) const;
  // Finds out anew which blocks may go; new ones are the youngest of their lists.
  void refresh();
  void settle_in(Node& node, std::uint64_t since = 0);
  std::vector<Node*> children_of(const Node* parent);
  void forget_useless(Node* node);
  std::int64_t purge_from(Node& top, std::vector<std::uint32_t>& freed,
                          std::vector<std::uint32_t>& pinned);
  std::int64_t purge_below(Node& top, std::vector<std::uint32_t>& freed,
                           std::vector<std::uint32_t>& pinned);
  void drop(const std::vector<std::uint32_t>& freed, const std::vector<std::uint32_t>& pinned);
  void move(std::uint32_t owner);
  bool evict_for(Owner tenant);
  bool evict_from(Owner partition);
  void take_out(Node& node);

  BooksModel& books_;
  const std::int64_t block_tokens_;
  const bool by_age_;
  std::map<Place, Node> nodes_;
  std::map<Owner, std::list<Node*>> lists_;  // of those that may go, the next first
  std::vector<PoolShare> shares_;
  std::set<std::uint32_t> apart_;
  std::uint64_t ids_ = 0;
  std::uint64_t uses_ = 0;
  std::uint64_t moves_ = 0;
};

}  // namespace kvledger::simulation
