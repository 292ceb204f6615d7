// The books of the block pool: who holds how many blocks, and for how long.
//
// Double entry. Nothing edits a balance; every change of a block's owner is a posting from one
// account to another, so the balances always add up to the pool. Each account also carries the
// integral of its balance over time in block-nanoseconds, a 128-bit integer, so the time adds up
// exactly as well: the sum of all integrals is blocks x elapsed time.
//
//   free ──reserve──> reserved ──acquire──> held (by a tenant, within it by requests)
//    ^ ^                 │                  ^ │  │
//    │ └────forfeit──────┘             join │ │  │ retire: a running step may still read it
//    │                                      │ v  v
//    ├────────────evict───────────────── cached<─┼── cache: the prefix index keeps it
//    ├────────────release────────────────────────┘
//    └────────────settle──────────────── releasing
//
// A block is held in one of three ways:
//
//   by one request          it is that request's, and within its tenant's balance
//   by several of a tenant  its time is split among all that refer to it (split_time.h)
//   by a shared scope       it is the scope's own account's, whoever refers to it; what a request
//                           refers to is counted beside its own, at full weight, and does not add
//                           up to anything
//
// What the requests of a tenant hold or held adds up to what the tenant holds or held, exactly. A
// cached block is the tenant's or the scope's that held it last.
//
// Only BlockPool posts. One thread at a time may use a ledger; nothing here allocates except
// open(), which may grow the table of request accounts, and account(), for a new tenant or scope.
//
// With a clock it knows what all of it takes: postings, and what else calls timed().

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/call_timer.h"
#include "core/split_time.h"
#include "core/types.h"

namespace kvledger {

__extension__ typedef unsigned __int128 BlockNanoseconds;

// Block-nanoseconds as they travel: whole block-seconds and the rest.
struct BlockTime {
  std::uint64_t seconds = 0;
  std::uint32_t nanos = 0;
};

BlockTime to_block_time(BlockNanoseconds time) noexcept;

// Where a block can stand.
enum class BlockState : std::uint8_t {
  kFree = 0,
  kReserved = 1,
  kHeld = 2,
  kCached = 3,
  kReleasing = 4,
};

inline constexpr std::size_t kBlockStates = 5;

// Balances of the whole pool by state.
struct Balances {
  std::array<BlockCount, kBlockStates> blocks;

  BlockCount operator[](BlockState state) const noexcept {
    return blocks[static_cast<std::size_t>(state)];
  }
};

// What one request's account came to.
struct Statement {
  TenantId tenant;
  BlockNanoseconds held = 0;
  BlockNanoseconds reserved = 0;
  // Blocks of shared scopes that it referred to: theirs, not part of `held`.
  BlockNanoseconds of_scopes = 0;
  // What `held` would be more if it had shared no block with other requests of its tenant.
  BlockNanoseconds saved = 0;
  BlockCount held_peak;
};

// What one tenant's account stands at, or a shared scope's.
struct TenantStatement {
  BlockCount held;
  BlockCount reserved;
  BlockCount cached;
  BlockNanoseconds held_time = 0;
  BlockNanoseconds reserved_time = 0;
  BlockNanoseconds cached_time = 0;
  // Part of `held_time` that stands in statements of requests already closed.
  BlockNanoseconds closed_time = 0;
  // Requests that have an account.
  std::int64_t open_requests = 0;
};

class Ledger {
 public:
  // All `total` blocks start free at time `now`. `clock` is for timed() alone; postings take place
  // at the ledger's own time.
  Ledger(BlockCount total, Nanoseconds now, CallTimer::Clock clock = nullptr);

  // Counts as time of the books while it lives: postings do so, and so does other bookkeeping that
  // is made of them.
  [[nodiscard]] CallTimer::Call timed() const noexcept { return timer_.call(); }
  // All that was counted so far; 0 without a clock.
  Nanoseconds nanoseconds() const noexcept { return timer_.nanoseconds(); }

  // Postings take place at the ledger's time. Time never runs back: an earlier `now` is the
  // latest one.
  void advance(Nanoseconds now) noexcept;
  Nanoseconds now() const noexcept { return now_; }
  Nanoseconds opened_at() const noexcept { return opened_at_; }

  RequestAccount open(TenantId tenant);
  // Closes an account that holds and reserves nothing any more.
  Statement close(RequestAccount account);

  // Moves `count` blocks of `account` between free and reserved.
  void reserve(RequestAccount account, BlockCount count);
  void forfeit(RequestAccount account, BlockCount count);
  // Moves one block; `block` must stand where the posting takes it from.
  void acquire(RequestAccount account, BlockId block);
  // Lets `account` refer to a block that is cached, or that it, its tenant or a shared scope
  // holds and that `references` refer to; its stamp, for leaving.
  Nanoseconds join(RequestAccount account, BlockId block, std::uint32_t references);
  // Ends one of several references to a held block.
  void leave(RequestAccount account, BlockId block, Nanoseconds stamp);
  // End the only reference to one.
  void release(RequestAccount account, BlockId block, Nanoseconds stamp = 0);
  void retire(RequestAccount account, BlockId block, Nanoseconds stamp = 0);
  void cache(RequestAccount account, BlockId block, Nanoseconds stamp = 0);
  // Frees a block in `releasing`, or leaves it with its holder's account as cached.
  void settle(BlockId block, bool cached = false);
  // Frees a cached one.
  void evict(BlockId block);
  // Books a block that a request alone holds, with `references`, to a shared scope's account.
  void give(RequestAccount account, BlockId block, TenantId scope, std::uint32_t references);
  // Lets a shared scope itself hold one of its cached blocks, and ends that: it is cached again, or
  // `releasing` while a running step may read it.
  void hold_for_scope(BlockId block);
  void end_hold_for_scope(BlockId block, bool releasing = false);

  // Makes a tenant's or a shared scope's account, if there is none.
  void account(TenantId id);
  // Blocks that a tenant holds or has reserved.
  BlockCount live(TenantId id) const noexcept;

  BlockCount total() const noexcept { return total_; }
  Balances balances() const noexcept;
  // The integral of a balance of the whole pool, until now.
  BlockNanoseconds time_in(BlockState state) const noexcept;
  BlockCount free() const noexcept { return state_[0].balance; }
  BlockCount held_by(RequestAccount account) const;
  BlockCount reserved_by(RequestAccount account) const;
  // Zeros for a tenant that never held anything.
  TenantStatement statement(TenantId tenant) const;
  std::vector<TenantId> tenants() const;
  BlockState state_of(BlockId block) const;
  // The account that alone holds the block; nothing if none does.
  std::optional<RequestAccount> holder_of(BlockId block) const;
  // The tenant or shared scope that a held, cached or releasing block is booked to.
  std::optional<TenantId> owner_of(BlockId block) const;

  // Recomputes every balance and integral from the blocks and the open accounts, and says what
  // disagrees; nothing if the books are right. O(blocks + accounts).
  std::optional<std::string> audit() const;

 private:
  struct Account {
    BlockCount balance;
    BlockNanoseconds integral = 0;
    Nanoseconds since = 0;

    void post(BlockCount change, Nanoseconds now);
    BlockNanoseconds integral_at(Nanoseconds now) const noexcept;
  };
  struct Tenant {
    TenantId id;
    Account held;
    Account reserved;
    Account cached;
    BlockNanoseconds closed_time = 0;
    std::int64_t open_requests = 0;
  };
  struct Request {
    TenantId tenant_id;
    Tenant* tenant = nullptr;  // stays where it is: map nodes do not move
    Account held;              // alone
    Account reserved;
    Account of_scopes;
    Account split;                    // references to blocks that others of its tenant hold too
    BlockNanoseconds split_time = 0;  // that it has paid for
    BlockCount held_peak;
    bool open = false;
  };
  enum class Holding : std::uint8_t { kAlone, kSplit, kScope };
  struct Owner {
    BlockState state = BlockState::kFree;
    Holding holding = Holding::kAlone;
    RequestAccount account;    // while it is held alone
    Tenant* tenant = nullptr;  // or scope; while it is not free
    SplitTime split;
  };

  Account& at(BlockState state) noexcept { return state_[static_cast<std::size_t>(state)]; }
  Request& request(RequestAccount account);
  const Request& request(RequestAccount account) const;
  Tenant& tenant(TenantId id);
  void move(BlockState from, BlockState to, BlockCount count);
  void hold(Request& request, BlockCount change);
  Owner& held(BlockId block);
  void end_reference(RequestAccount account, Owner& owner, Nanoseconds stamp);
  void take_from_holder(RequestAccount account, BlockId block, Nanoseconds stamp, BlockState to);
  void put(Owner& owner, BlockState to);
  std::optional<std::string> audit_conservation() const;
  std::optional<std::string> audit_blocks() const;
  std::optional<std::string> audit_tenants() const;
  std::optional<std::string> audit_tenants_time() const;

  const BlockCount total_;
  const Nanoseconds opened_at_;
  Nanoseconds now_;
  std::array<Account, kBlockStates> state_;
  std::unordered_map<TenantId, Tenant> tenants_;
  std::vector<Request> requests_;
  std::vector<RequestAccount> closed_;  // accounts that may be opened again
  std::vector<Owner> owners_;           // by block
  mutable CallTimer timer_;             // of const calls too
};

}  // namespace kvledger
