// Blocks that outlive their sequence because somebody may begin with the same tokens: joins the
// prefix index, which finds them, with the block pool, which has them.
//
//   match(waiting)     what a sequence could begin with now
//   adopt(admitted)    it begins with that: blocks are joined, nodes pinned
//   advance(running)   before a chunk: what others have computed meanwhile it need not
//   insert(computed)   after a step: full, computed blocks enter the index
//   reserve(...)       blocks for somebody, at the price of cached ones if there must be
//   leave(leaving)     nodes are unpinned; the blocks go back by themselves and stay cached
//   purge(scope)       nobody finds these any more, and who holds none frees them
//
// Only whole blocks are kept and found, and the last token of a prompt is always computed: its
// logits are wanted. Of the block in which a prompt leaves the index, the tokens that agree with a
// cached one are copied (copy-on-write).
//
// match() is O(blocks found + a block), adopt() and insert() O(blocks), the rest O(1) amortized.
// What allocates is purge(), and insert() for a new scope, which does without where memory ends.
// One thread at a time.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/block_pool.h"
#include "core/call_timer.h"
#include "core/ledger.h"
#include "core/pool_shares.h"
#include "core/prefix_index.h"
#include "core/sequence.h"
#include "core/types.h"

namespace kvledger {

struct PrefixCacheSettings {
  // False keeps and finds nothing.
  bool on = false;
  std::uint64_t seed = 0;
  // How much more a block costs to compute than the one before it, of what the first one costs
  // (reuse_policy.h); 0 takes all for the same.
  double cost_growth = 0.0;
  // Makes the eviction policies; without one they are the default ones (reuse_policy.h).
  PrefixIndex::MakePolicy make_policy;
  // Times the calls (PrefixCounts::nanoseconds); without one nothing is timed.
  CallTimer::Clock clock = nullptr;
};

// What a sequence could begin with.
struct PrefixMatch {
  std::int64_t blocks = 0;
  // Of them, those that nobody holds: taking them takes from what is available.
  std::int64_t cached = 0;
  // Tokens of the block behind them that `source` begins with too.
  std::int64_t tail = 0;
  PrefixNode source;
};

// How much was found and kept, all together.
struct PrefixCounts {
  // Sequences that were admitted with what the index had for them, much or nothing.
  std::uint64_t lookups = 0;
  std::uint64_t reused_tokens = 0;
  std::uint64_t inserted = 0;
  std::uint64_t evicted = 0;
  std::uint64_t mismatches = 0;
  // Blocks of another owner that the index named and the books refused: must stay 0.
  std::uint64_t foreign = 0;
  // Time in here and in what the scheduler does for it, where there is a clock.
  Nanoseconds nanoseconds = 0;
};

class PrefixCache {
 public:
  PrefixCache(const PrefixCacheSettings& settings, std::int64_t slots_per_block, Ledger& ledger,
              BlockPool& pool);

  // Makes room in a new sequence, so that its prompt can be matched without allocating.
  void begin(Sequence& sequence) const;

  PrefixMatch match(Sequence& waiting);
  // Pins and joins the block `index` of what a sequence was matched with last.
  BlockId adopt(Sequence& sequence, std::int64_t index);
  // Pins the next node of one sequence's path for another, which has joined its block.
  void follow(const Sequence& from, Sequence& to, Nanoseconds stamp);
  // Keeps the source of a tail, while a block is found to copy it to.
  void pin_source(const PrefixMatch& match);
  void unpin_source(const PrefixMatch& match);
  BlockId source_of(const PrefixMatch& match) const { return *index_->block_of(match.source); }
  void count_tail(Sequence& sequence, const PrefixMatch& match);
  // Counts a sequence that is about to be admitted for the first time: however often it was
  // matched while it waited, it looked once.
  void count_lookup(const Sequence& admitted) noexcept;
  // Whether somebody has computed the next block of a running sequence whose whole blocks are all
  // known meanwhile; adopt_next() takes it.
  bool has_next(const Sequence& running);
  BlockId adopt_next(Sequence& sequence);
  // Where the sequence's next block belongs in the index; nothing if it enters none.
  struct Place {
    PrefixNode parent;
    ScopeId scope;
    std::span<const Token> tokens;
  };
  std::optional<Place> next_place(const Sequence& sequence) const;

  // Puts the blocks that a running sequence has computed since into the index. `block_at(i)` is
  // the i-th of its table.
  template <class BlockAt>
  void insert(Sequence& sequence, const BlockAt& block_at) {
    const auto timed = timer_.call();
    while (can_insert(sequence)) {
      insert_one(sequence, block_at(static_cast<std::int64_t>(sequence.path.size())));
    }
  }
  // Joins the block that stands in the index for a sequence's `own`, and gives that one back;
  // nothing if it is the same, or none stands there any more.
  std::optional<BlockId> exchange(Sequence& sequence, std::int64_t index, BlockId own);
  // Takes out what a request's samples put in or began with in its own scope, and all that hangs
  // below: it may be wrong.
  void discard(const Request& request);
  // Unpins what a sequence that gives its blocks back had pinned.
  void leave(Sequence& sequence);
  // Makes room, so that stay() allocates nothing for so many more blocks.
  void make_room_to_stay(std::int64_t blocks);
  // Lets the blocks of the prompt of a sequence that has ended stay, held by its shared scope.
  void stay(const Sequence& ended);
  // Blocks that stay.
  std::int64_t staying() const noexcept { return static_cast<std::int64_t>(staying_.size()); }

  // Blocks that requests of a tenant may still reserve; the same, whatever its own limit.
  BlockCount available(TenantId tenant) const noexcept;
  BlockCount unkept(TenantId tenant) const noexcept;
  // Blocks that a request holds and nobody else does.
  BlockCount held_alone(RequestAccount account) const { return ledger_.held_by(account); }
  std::optional<Reservation> reserve(RequestAccount account, TenantId tenant, BlockCount count);

  const PoolShares& shares() const noexcept { return shares_; }
  // Blocks that requests of a tenant hold or have reserved.
  BlockCount live(TenantId tenant) const noexcept { return ledger_.live(tenant); }
  // From now on these are the shares; cached blocks beyond them go with keep_within_shares().
  void set_shares(const std::vector<PoolShare>& shares);
  // Evicts what tenants have cached beyond their shares, and where sealed tenants' blocks belong.
  void keep_within_shares();

  // Lets a sequence neither find nor leave anything in `scope` any more; of a shared one it goes on
  // in its own.
  void end_scope(Sequence& sequence, ScopeId scope) const noexcept;
  // Takes everything out that is in `scope` or below it; how many blocks that were.
  std::int64_t purge(ScopeId scope);

  bool is_on() const noexcept { return index_.has_value(); }
  // Counts the caller's time as the cache's, until what it returns ends.
  [[nodiscard]] CallTimer::Call timed() const noexcept { return timer_.call(); }
  PrefixCounts counts() const noexcept;
  // Adds the references that scopes have themselves; by block.
  void count_references(std::vector<std::uint32_t>& references) const;
  std::optional<std::string> audit() const;

  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

 private:
  PrefixNode parent_of_next(const Sequence& sequence) const noexcept;
  ScopeId scope_of(const Sequence& sequence, std::int64_t index) const noexcept;
  void count(Sequence& sequence, std::int64_t index, std::int64_t tokens);
  std::span<const Token> tokens_of(const Sequence& sequence, std::int64_t index) const noexcept;
  TenantId owner_of(const Sequence& sequence, ScopeId scope) const noexcept;
  std::int64_t border_of(const Sequence& sequence) const noexcept;
  // Forgets what a waiting sequence was told that is no longer so.
  void revise(Sequence& waiting) const;
  bool extend(Sequence& waiting);
  bool can_insert(const Sequence& sequence) const noexcept;
  void insert_one(Sequence& sequence, BlockId block);
  bool is_beyond_a_sibling(const Sequence& sequence, std::int64_t index,
                           BlockId block) const noexcept;
  static void note_twice(Sequence& sequence, std::int64_t index) noexcept;
  std::optional<PrefixNode> find(const Sequence& sequence, std::int64_t index, ScopeId scope);
  std::optional<PrefixNode> place(const Sequence& sequence, std::int64_t index, ScopeId scope);
  std::int64_t take_out();
  // Cached blocks that can be evicted.
  BlockCount reclaimable() const noexcept;
  // Blocks that shared scopes may still come to hold: they stand in nobody's guarantee.
  BlockCount room_of_scopes() const noexcept;
  bool may_give(const Sequence& sequence) const noexcept;
  // Cached blocks of an owner that lie in its own guarantee: others cannot have them.
  BlockCount protected_of(const PoolShare& share) const noexcept;
  // Evicts one for somebody who needs room; false if there is none to evict.
  bool evict_for(TenantId tenant);
  bool evict_from(std::optional<CacheOwner> owner);

  const std::int64_t slots_per_block_;
  Ledger& ledger_;
  BlockPool& pool_;
  PoolShares shares_;
  std::optional<PrefixIndex> index_;
  // Whether a partition that is made now learns: what it learns with takes memory.
  bool partitions_learn_ = true;
  struct Staying {
    ScopeId scope;
    PrefixNode node;
    BlockId block;
  };
  std::vector<Staying> staying_;
  std::vector<BlockId> freed_;  // of a purge
  std::vector<BlockId> pinned_;
  PrefixCounts counts_;
  mutable CallTimer timer_;  // of const calls too
};

}  // namespace kvledger
