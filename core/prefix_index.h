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
// back from evict() or purge(). Blocks that sequences hold are pinned and are not evicted; whoever
// pins a node pins those above it. Which of the others goes is the policy's choice
// (eviction_policy.h).
//
// Every scope belongs to an owner. All owners lie in one common partition with one policy, except
// those that have been given a partition of their own, with a policy and a clock of its own: what
// goes there depends on that owner's blocks alone. Where a policy takes leaves only, it is the
// leaves of its partition: what others keep below a block does not keep it (its node stays,
// hollow), so that all that nobody pins can be evicted from its partition, whatever lies in others.
//
// find() is O(tokens), everything else O(tokens or 1), amortized where whoever pins a node pins
// those above it; purge() is O(nodes purged); partition() and merge() are O(n log n) of the owner's
// nodes. What allocates is the first node of a scope or an owner, before anything is changed,
// purge's answer, partition() and merge(). One thread at a time.

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
  // Most blocks that are filled at once; 0 says as many as nodes. Policies size what they learn by
  // it.
  std::int64_t capacity = 0;
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
  // Makes a policy for at most so many filled blocks.
  using MakePolicy =
      std::function<std::unique_ptr<EvictionPolicy>(CachedBlocks&, std::int64_t capacity)>;

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
  // one begin, and none that is shared. As long as a scope has nodes its owner is the same.
  std::optional<PrefixNode> place(PrefixNode parent, ScopeId scope, std::span<const Token> tokens,
                                  CacheOwner owner = CacheOwner{0});

  // Of a node's children in `scope`, the filled one that begins with the most of `tokens`, and how
  // many; nothing if none begins so. Only the youngest few of that scope are looked at: what other
  // scopes have there changes nothing.
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

  // Takes out the block of the common partition that the policy would miss least; nothing if all
  // are pinned.
  std::optional<BlockId> evict();
  // The same of the partition in which an owner's blocks lie: its own, else the common one.
  std::optional<BlockId> evict(CacheOwner owner);

  // Gives an owner a partition of its own, for at most `capacity` filled blocks, at least 1. Its
  // blocks keep their order among themselves; what the common policy learnt stays there.
  void partition(CacheOwner owner, std::int64_t capacity);
  // Puts an owner's blocks back into the common partition, and drops its own.
  void merge(CacheOwner owner);
  bool has_partition(CacheOwner owner) const noexcept;

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
  // To whom a scope that has nodes belongs.
  std::optional<CacheOwner> owner_of(ScopeId scope) const noexcept;
  std::int64_t block_tokens() const noexcept { return settings_.block_tokens; }
  std::int64_t nodes() const noexcept { return nodes_in_use_; }
  // Filled nodes, of all and of one owner.
  std::int64_t filled() const noexcept { return filled_; }
  std::int64_t filled(CacheOwner owner) const noexcept;
  // Those of them that nobody has pinned: evict() can give them all.
  std::int64_t cached() const noexcept { return cached_; }
  std::int64_t cached(CacheOwner owner) const noexcept;
  // Nodes found by their table but refused for their tokens, parent or scope.
  std::uint64_t mismatches() const noexcept { return mismatches_; }

  // Recounts everything from the nodes, and says what disagrees. O(nodes).
  std::optional<std::string> audit() const;

 private:
  // Where clocks begin. A block may come from another partition with an age that is more than all
  // uses here so far: it was used before the first of them.
  static constexpr std::uint64_t kFirstUse = std::uint64_t{1} << 62;
  // Blocks that one policy chooses from, and its clock: the uses of them so far.
  struct Partition {
    std::unique_ptr<EvictionPolicy> policy;
    std::uint64_t uses = kFirstUse;
  };
  struct Owner {
    CacheOwner id;
    std::int64_t nodes = 0;
    std::int64_t filled = 0;
    std::int64_t cached = 0;
    CacheSlot first = kNoSlot;
    std::unique_ptr<Partition> own;  // nullptr while it lies in the common partition
  };
  struct Scope {
    CacheSlot first = kNoSlot;
    Owner* owner = nullptr;
  };
  // A node is live where its partition has something at it or below it: it is filled or pinned, or
  // has a live child in the same partition.
  struct Node {
    std::uint64_t serial = 0;  // 0 while it is free
    std::uint64_t key = 0;     // hash of parent, scope and tokens
    CacheSlot parent = kNoSlot;
    CacheSlot same_bucket = kNoSlot;
    CacheSlot first_child = kNoSlot;
    CacheSlot previous_sibling = kNoSlot;
    CacheSlot next_sibling = kNoSlot;
    // Its kin: the children of its parent in its scope, from the youngest on.
    CacheSlot younger_kin = kNoSlot;
    CacheSlot older_kin = kNoSlot;
    CacheSlot next_family = kNoSlot;  // of the youngest of a family: another in the same bucket
    CacheSlot previous_of_scope = kNoSlot;
    CacheSlot next_of_scope = kNoSlot;
    CacheSlot previous_of_owner = kNoSlot;
    CacheSlot next_of_owner = kNoSlot;
    Owner* owner = nullptr;
    std::uint32_t live_own = 0;     // live children of the same owner
    std::uint32_t live_common = 0;  // live children of others in the common partition
    ScopeId scope;
    std::uint32_t tokens = 0;
    std::uint32_t pins = 0;
    BlockId block;
    bool is_filled = false;
    bool is_offered = false;
    bool is_live = false;  // as it is counted above
  };
  // Hashes of a child's place in the table, and of its path from the root.
  struct Hashes {
    std::uint64_t key;
    std::uint64_t path;
  };

  static bool may_follow(ScopeId before, ScopeId scope) noexcept;
  Node& at(PrefixNode node);
  const Node& at(PrefixNode node) const;
  Hashes hash(PrefixNode parent, ScopeId scope, std::span<const Token> tokens) const noexcept;
  CacheSlot search(PrefixNode parent, ScopeId scope, std::span<const Token> tokens,
                   std::uint64_t key) const noexcept;
  CacheSlot& bucket(std::uint64_t key) noexcept;
  std::size_t family_bucket(CacheSlot parent, ScopeId scope) const noexcept;
  // The youngest child of a parent in a scope.
  CacheSlot youngest_of(CacheSlot parent, ScopeId scope) const noexcept;
  // Where in its bucket the youngest of a family is named.
  CacheSlot& family_link(CacheSlot youngest) noexcept;
  void link_to_kin(CacheSlot slot) noexcept;
  void unlink_from_kin(CacheSlot slot) noexcept;
  // The scope and owner of a new node, made if there are none.
  Scope& scope_for(ScopeId scope, CacheOwner owner);
  Owner* find_owner(CacheOwner owner) noexcept;
  const Owner* find_owner(CacheOwner owner) const noexcept;
  void forget_owner_if_useless(Owner& owner);
  void link(CacheSlot slot);
  void unlink(CacheSlot slot);
  void link_to_owner(CacheSlot slot);
  void unlink_from_owner(CacheSlot slot);
  Partition& partition_of(const Node& node) noexcept;
  const Partition& partition_of(const Node& node) const noexcept;
  // The count above a node that it is in while it is live; nullptr where there is none.
  std::uint32_t* count_above(const Node& node) noexcept;
  // Live children in the same partition.
  std::uint32_t live_below(const Node& node) const noexcept;
  bool should_live(const Node& node) const noexcept;
  // Whether a block could be evicted now.
  bool may_go(const Node& node) const noexcept;
  // Tells the policy if the node became a possible victim, or is none any more.
  void offer_if_possible(CacheSlot slot);
  // The same, and for those above as far as something changed for them.
  void refresh(CacheSlot slot);
  void stop_living(CacheSlot slot);
  void change_pins(Node& node, std::uint32_t pins);
  void count_filled(Node& node, std::int64_t by);
  void leave_policy(CacheSlot slot, Departure how);
  std::optional<BlockId> evict_from(Partition& partition);
  // Puts an owner's blocks under another policy: its own if `own` is one, else the common one.
  void move(Owner& owner, std::unique_ptr<Partition> own);
  // Forgets the node and hollow ancestors that only it kept.
  void forget_if_useless(CacheSlot slot);
  void forget(CacheSlot slot);
  BlockId empty(CacheSlot slot, Departure how);
  // Forgets a node and all below it.
  void purge_from(CacheSlot top, std::vector<BlockId>& freed, std::vector<BlockId>& pinned);
  std::optional<std::string> audit_node(CacheSlot slot) const;
  bool is_among_kin(CacheSlot slot) const;
  std::optional<std::string> audit_owners() const;
  std::optional<std::string> audit_life(CacheSlot slot) const;

  const PrefixIndexSettings settings_;
  const MakePolicy make_policy_;
  CachedBlocks blocks_;  // by slot, as the policy sees them
  std::vector<Node> nodes_;
  std::vector<Token> tokens_;  // [slot][block_tokens]
  std::vector<CacheSlot> buckets_;
  std::vector<CacheSlot> families_;  // the youngest of each family, by parent and scope
  std::vector<CacheSlot> free_;
  CacheSlot first_of_root_ = kNoSlot;
  std::unordered_map<ScopeId, Scope> scopes_;
  std::unordered_map<CacheOwner, Owner> owners_;  // with nodes, or a partition
  Partition common_;
  std::uint64_t serials_ = 0;
  std::int64_t nodes_in_use_ = 0;
  std::int64_t filled_ = 0;
  std::int64_t cached_ = 0;
  mutable std::uint64_t mismatches_ = 0;
};

}  // namespace kvledger
