// All blocks of one device: which are free, how often each is referenced, and the only code that
// posts in the ledger.
//
// A block is taken through a Reservation and given back by the account that holds it:
//
//   reserve(account, n)  -> Reservation      n blocks are promised, or nothing happens
//   reservation.acquire() -> BlockId         one promise becomes a block, referenced once
//   join(account, block) -> stamp            one more reference to a held or kept block
//   release(account, block, stamp)           one less; the last one frees the block
//   retire(account, block, stamp)            as release, but the last one leaves the block in
//                                            `releasing` until settle(): a step that was planned
//                                            with it may still read or write it. While a step is
//                                            open release does so too with what several may have:
//                                            who gives it back last need not be in the step for
//                                            another to be
//   keep(account, block, owner)              from now on the last reference leaves the block
//                                            `cached`: the prefix index has it
//   drop(block)                              ends that; a block without references is free then
//
// Stamps are the ledger's; who has got none has 0.
//
// Running out of blocks is expected and is a returned value. Everything is O(1) per block and
// allocates nothing after construction. One thread at a time.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/ledger.h"
#include "core/reservation.h"
#include "core/types.h"

namespace kvledger {

class BlockPool {
 public:
  // Posts in `ledger`, which outlives the pool and was opened with the same number of blocks.
  explicit BlockPool(Ledger& ledger);

  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  BlockCount total() const noexcept { return ledger_.total(); }
  // Blocks that may be reserved now, without taking any from the prefix index.
  BlockCount available() const noexcept { return ledger_.free(); }

  // Counts as time of the books while it lives (Ledger::timed).
  [[nodiscard]] CallTimer::Call timed() const noexcept { return ledger_.timed(); }

  // Promises `count` blocks to `account`, or nothing if fewer are available.
  std::optional<Reservation> reserve(RequestAccount account, BlockCount count);

  Nanoseconds join(RequestAccount account, BlockId block);
  void release(RequestAccount account, BlockId block, Nanoseconds stamp = 0);
  void retire(RequestAccount account, BlockId block, Nanoseconds stamp = 0);
  // A step begins that may touch any block in a table, and is over: every block in `releasing` is
  // free, or cached.
  void open_step() noexcept { step_is_open_ = true; }
  void settle();

  // `owner` is the request's tenant, or the shared scope to whose account the block goes.
  void keep(RequestAccount account, BlockId block, TenantId owner);
  void drop(BlockId block);
  bool is_kept(BlockId block) const { return checked_at(kept_, block.value()) != 0; }
  // A reference to a kept block of a shared scope that is the scope's own, and its end.
  void hold_for_scope(BlockId block);
  void end_hold_for_scope(BlockId block);

  std::uint32_t references(BlockId block) const;
  // Compares the free list and the reference counts with the ledger; O(blocks).
  std::optional<std::string> audit() const;

 private:
  friend class Reservation;

  BlockId acquire(RequestAccount account);
  void forfeit(RequestAccount account, BlockCount count);
  // Ends a reference; true if it was the last.
  bool end_reference(BlockId block);

  Ledger& ledger_;
  bool step_is_open_ = false;
  std::vector<BlockId> free_;  // the block freed last is taken first: it may still be in cache
  std::vector<BlockId> releasing_;
  std::vector<std::uint32_t> references_;  // by block
  std::vector<std::uint8_t> kept_;         // by block
};

}  // namespace kvledger
