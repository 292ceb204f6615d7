// Finds blocks that already hold the keys and values of a prompt's beginning.
//
// A trie over blocks. A node stands for the tokens of one block behind those of its parent, in one
// scope. It is found by (parent, scope, exact tokens); tokens are compared every time, so no hash
// is trusted with more than speed. Scopes meet in one way only: below a node of a shared scope may
// hang nodes of others, each found by its own. Below a node of any other scope is only that scope,
// so a walk goes from shared to own once, and not back.
//
//   root ── A1 (shared) ── A2 (shared) ── B1 (tenant 7)       find(A2, tenant 7, tokens) -> B1
//                                     └── B1 (tenant 9)       the same tokens: another node
//
// A node is filled when a computed block stands for it. It is hollow before that, and after its
// block was evicted while others hang below it; a walk that wants blocks stops there. place() makes
// hollow nodes, fill() fills them. A node that is hollow, childless and unpinned is forgotten, and
// its id never comes back.
//
// The index owns no blocks and posts nothing: whoever fills a node hands a block in, and gets it
// back from evict() or purge(). Blocks that sequences hold are pinned and are not evicted. Which of
// the others goes is the policy's choice (eviction_policy.h).
//
// find() is O(tokens), everything else O(tokens or 1), evict() amortized over what was offered;
// purge() is O(nodes purged). What allocates is the first node of a scope, before anything is
// changed, and purge's answer. One thread at a time.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/cached_block.h"
#include "core/eviction_policy.h"
#include "core/types.h"

namespace kvledger {

struct PrefixIndexSettings {
  // Most nodes, filled and hollow.
  std::int64_t nodes = 0;
  // Most tokens of a block.
  std::int64_t block_tokens = 0;
  // Makes where nodes lie in tables unpredictable to who sends tokens.
  std::uint64_t seed = 0;
  // Bits of hashes that are used. Tests take bits away, to see that nothing rests on them.
  std::uint64_t hash_mask = ~std::uint64_t{0};
};

// A node, for ever: the serial number is never used again.
struct PrefixNode {
  std::uint64_t serial = 0;
  CacheSlot slot = kNoSlot;

  friend bool operator==(const PrefixNode&, const PrefixNode&) = default;
};

class PrefixIndex {
 public:
  using MakePolicy = std::function<std::unique_ptr<EvictionPolicy>(CachedBlocks&)>;

  PrefixIndex(const PrefixIndexSettings& settings, const MakePolicy& make_policy);

  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // Where every walk begins. It has no block, no scope and no tokens.
  static constexpr PrefixNode root() noexcept { return PrefixNode{}; }

  // The node for `tokens` in `scope` behind `parent`, hollow or filled.
  std::optional<PrefixNode> find(PrefixNode parent, ScopeId scope,
                                 std::span<const Token> tokens) const;
  // The same, made if there is none; pinned once more in either case. Nothing if there is no room
  // for another node. `parent` must be the root or pinned; only behind a shared scope may another
  // one begin, and none that is shared.
  std::optional<PrefixNode> place(PrefixNode parent, ScopeId scope, std::span<const Token> tokens);

  // Of a node's children in `scope`, the filled one that begins with the most of `tokens`, and how
  // many; nothing if none begins so. Only the youngest few children are looked at.
  struct Likeness {
    PrefixNode node;
    std::int64_t tokens = 0;
  };
  std::optional<Likeness> likest(PrefixNode parent, ScopeId scope,
                                 std::span<const Token> tokens) const;

  // Keeps a node, and its block if it has one, from being dropped.
  void pin(PrefixNode node);
  // Ends a pin; a node that nothing keeps any more is forgotten.
  void unpin(PrefixNode node);

  // Lets `block`, full and computed, stand for a hollow node.
  void fill(PrefixNode node, BlockId block);
  // Counts a use of a filled node.
  void use(PrefixNode node);
  // The block of a filled node.
  std::optional<BlockId> block_of(PrefixNode node) const;

  // Takes out the block that the policy would miss least; nothing if all are pinned.
  std::optional<BlockId> evict();

  // Takes out every node of a scope, and all that hangs below them. Blocks that nobody has pinned
  // are appended to `freed`, the others to `pinned`: they belong to those who pinned them alone.
  // From then on nobody knows such a node: who has pinned one asks knows() before anything but
  // unpin(), which takes it.
  void purge(ScopeId scope, std::vector<BlockId>& freed, std::vector<BlockId>& pinned);
  // The same for one node and all that hangs below it.
  void purge(PrefixNode top, std::vector<BlockId>& freed, std::vector<BlockId>& pinned);

  bool knows(PrefixNode node) const noexcept;
  std::int64_t pins(PrefixNode node) const { return at(node).pins; }
  // Whether place() may be asked for a child of a node in a scope.
  bool may_place(PrefixNode parent, ScopeId scope) const noexcept;
  std::int64_t block_tokens() const noexcept { return settings_.block_tokens; }
  std::int64_t nodes() const noexcept { return nodes_in_use_; }
  std::int64_t filled() const noexcept { return filled_; }
  // Filled ones that nobody has pinned.
  std::int64_t cached() const noexcept { return cached_; }
  // Nodes found by their table but refused for their tokens, parent or scope.
  std::uint64_t mismatches() const noexcept { return mismatches_; }

  // Recounts everything from the nodes, and says what disagrees. O(nodes).
  std::optional<std::string> audit() const;

 private:
  struct Node {
    std::uint64_t serial = 0;  // 0 while it is free
    std::uint64_t key = 0;     // hash of parent, scope and tokens
    CacheSlot parent = kNoSlot;
    CacheSlot same_bucket = kNoSlot;
    CacheSlot first_child = kNoSlot;
    CacheSlot previous_sibling = kNoSlot;
    CacheSlot next_sibling = kNoSlot;
    CacheSlot previous_of_scope = kNoSlot;
    CacheSlot next_of_scope = kNoSlot;
    ScopeId scope;
    std::uint32_t tokens = 0;
    std::uint32_t pins = 0;
    BlockId block;
    bool is_filled = false;
    bool is_offered = false;
  };
  // Hashes of a child's place in the table, and of its path from the root.
  struct Hashes {
    std::uint64_t key;
    std::uint64_t path;
  };

  Node& at(PrefixNode node);
  const Node& at(PrefixNode node) const;
  Hashes hash(PrefixNode parent, ScopeId scope, std::span<const Token> tokens) const noexcept;
  CacheSlot search(PrefixNode parent, ScopeId scope, std::span<const Token> tokens,
                   std::uint64_t key) const noexcept;
  CacheSlot& bucket(std::uint64_t key) noexcept;
  void link(CacheSlot slot);
  void unlink(CacheSlot slot);
  // Whether a block could be evicted now.
  bool may_go(const Node& node) const noexcept;
  // Tells the policy if the node became a possible victim, or is none any more.
  void offer_if_possible(CacheSlot slot);
  // Forgets the node and hollow ancestors that only it kept.
  void forget_if_useless(CacheSlot slot);
  void forget(CacheSlot slot);
  BlockId empty(CacheSlot slot, Departure how);
  // Forgets a node and all below it.
  void purge_from(CacheSlot top, std::vector<BlockId>& freed, std::vector<BlockId>& pinned);
  std::optional<std::string> audit_node(CacheSlot slot) const;

  const PrefixIndexSettings settings_;
  CachedBlocks blocks_;  // by slot, as the policy sees them
  std::vector<Node> nodes_;
  std::vector<Token> tokens_;  // [slot][block_tokens]
  std::vector<CacheSlot> buckets_;
  std::vector<CacheSlot> free_;
  CacheSlot first_of_root_ = kNoSlot;
  std::unordered_map<ScopeId, CacheSlot> first_of_scope_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::uint64_t serials_ = 0;
  std::uint64_t uses_ = 0;
  std::int64_t nodes_in_use_ = 0;
  std::int64_t filled_ = 0;
  std::int64_t cached_ = 0;
  mutable std::uint64_t mismatches_ = 0;
};

}  // namespace kvledger
