// The ledger's state at one moment, written out: what an operator and a tenant are shown.
//
// Plain records of fixed layout, so the bindings hand them to numpy as they are. What stands in
// them is of one moment, so it adds up: over all states, and over all accounts.
//
//   states     one row for each BlockState: blocks now, and block-time since the pool was taken.
//              The blocks add up to the pool, the block-time to blocks x elapsed time, exactly.
//   accounts   one row for each tenant and shared scope that ever had one: what it holds, has
//              reserved and cached. These add up to the pool's.
//   empty      slots of held blocks in which no token stands: internal fragmentation
//
// O(accounts + open sequences), not of the hot path. One thread at a time.

#pragma once

#include <cstdint>
#include <vector>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/ledger.h"
#include "core/sequence.h"
#include "core/types.h"

namespace kvledger {

struct StateRow {
  std::int64_t blocks = 0;
  std::uint64_t seconds = 0;  // whole block-seconds
  std::uint32_t nanos = 0;    // the rest
  std::uint32_t unused = 0;   // records have no gaps
};

struct AccountRow {
  // A tenant's number, or a shared scope's.
  std::uint32_t account = 0;
  std::uint32_t unused = 0;
  std::int64_t open_requests = 0;
  std::int64_t held = 0;
  std::int64_t reserved = 0;
  std::int64_t cached = 0;
  std::uint64_t held_seconds = 0;
  std::uint64_t reserved_seconds = 0;
  std::uint64_t cached_seconds = 0;
  // Part of the held block-time that requests have receipts for.
  std::uint64_t closed_seconds = 0;
  std::uint32_t held_nanos = 0;
  std::uint32_t reserved_nanos = 0;
  std::uint32_t cached_nanos = 0;
  std::uint32_t closed_nanos = 0;
};

struct Books {
  Nanoseconds elapsed = 0;  // since the pool was taken
  std::vector<StateRow> states;
  std::vector<AccountRow> accounts;  // by number
  std::int64_t empty_slots = 0;
};

// All but `empty_slots`, as of the ledger's time.
Books books_of(const Ledger& ledger);

// Slots without a token in the blocks of a running sequence that no sample before it counts too.
// A block that several samples of its request have holds what the furthest of them has computed.
std::int64_t empty_slots(const Sequence& running, std::int32_t slots_per_block,
                         const BlockTables& tables, const BlockPool& pool);

}  // namespace kvledger
