// The books of the block pool: who holds how many blocks, and for how long.
//
// Double entry. Nothing edits a balance; every change of a block's owner is a posting from one
// account to another, so the balances always add up to the pool. Each account also carries the
// integral of its balance over time in block-nanoseconds, a 128-bit integer, so the time adds up
// exactly as well: the sum of all integrals is blocks x elapsed time.
//
//   free ──reserve──> reserved ──acquire──> held (by a tenant, within it by a request)
//    ^ ^                 │                    │   │
//    │ └────forfeit──────┘                    │   │ retire: a running step may still read it
//    ├───────────────release──────────────────┘   v
//    └───────────────settle─────────────────── releasing
//
// A request's account sees the same postings as its tenant's: what the requests of a tenant hold
// or held adds up to what the tenant holds or held. `cached` is part of the equation and stays 0
// until a prefix index keeps blocks that nobody holds.
//
// Only BlockPool posts. One thread at a time may use a ledger; nothing here allocates except
// open(), which may grow the table of request accounts.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

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
  BlockCount held_peak;
};

// What one tenant's account stands at.
struct TenantStatement {
  BlockCount held;
  BlockNanoseconds held_time = 0;
  // Part of `held_time` that stands in statements of requests already closed.
  BlockNanoseconds closed_time = 0;
};

class Ledger {
 public:
  // All `total` blocks start free at time `now`.
  Ledger(BlockCount total, Nanoseconds now);

  // Postings take place at the ledger's time. Time never runs back: an earlier `now` is the
  // latest one.
  void advance(Nanoseconds now) noexcept;
  Nanoseconds now() const noexcept { return now_; }

  RequestAccount open(TenantId tenant);
  // Closes an account that holds and reserves nothing any more.
  Statement close(RequestAccount account);

  // Moves `count` blocks of `account` between free and reserved.
  void reserve(RequestAccount account, BlockCount count);
  void forfeit(RequestAccount account, BlockCount count);
  // Moves one block; `block` must stand where the posting takes it from.
  void acquire(RequestAccount account, BlockId block);
  void release(RequestAccount account, BlockId block);
  void retire(RequestAccount account, BlockId block);
  void settle(BlockId block);

  BlockCount total() const noexcept { return total_; }
  Balances balances() const noexcept;
  BlockCount free() const noexcept { return state_[0].balance; }
  BlockCount held_by(RequestAccount account) const;
  BlockCount reserved_by(RequestAccount account) const;
  // Zeros for a tenant that never held anything.
  TenantStatement statement(TenantId tenant) const;
  std::vector<TenantId> tenants() const;
  BlockState state_of(BlockId block) const;
  // The account that holds the block; nothing if it is not held.
  std::optional<RequestAccount> holder_of(BlockId block) const;

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
    Account held;
    BlockNanoseconds closed_time = 0;
  };
  struct Request {
    TenantId tenant_id;
    Tenant* tenant = nullptr;  // stays where it is: map nodes do not move
    Account held;
    Account reserved;
    BlockCount held_peak;
    bool open = false;
  };
  struct Owner {
    BlockState state = BlockState::kFree;
    RequestAccount account;
  };

  Account& at(BlockState state) noexcept { return state_[static_cast<std::size_t>(state)]; }
  Request& request(RequestAccount account);
  const Request& request(RequestAccount account) const;
  Tenant& tenant(TenantId id);
  void move(BlockState from, BlockState to, BlockCount count);
  void hold(Request& request, BlockCount change);
  void take_from_holder(RequestAccount account, BlockId block, BlockState to);
  std::optional<std::string> audit_conservation() const;
  std::optional<std::string> audit_blocks() const;
  std::optional<std::string> audit_tenants() const;

  const BlockCount total_;
  const Nanoseconds opened_at_;
  Nanoseconds now_;
  std::array<Account, kBlockStates> state_;
  std::unordered_map<TenantId, Tenant> tenants_;
  std::vector<Request> requests_;
  std::vector<RequestAccount> closed_;  // accounts that may be opened again
  std::vector<Owner> owners_;           // by block
};

}  // namespace kvledger
