// All blocks of one device: which are free, how often each is referenced, and the only code that
// posts in the ledger.
//
// A block is taken through a Reservation and given back by the account that holds it:
//
//   reserve(account, n)  -> Reservation      n blocks are promised, or nothing happens
//   reservation.acquire() -> BlockId         one promise becomes a block, referenced once
//   retain(block)                            one more reference to a held block
//   release(account, block)                  one less; the last one frees the block
//   retire(account, block)                   as release, but the last one leaves the block in
//                                            `releasing` until settle(): a step that was planned
//                                            with it may still read or write it
//
// Running out of blocks is expected and is a returned value. Everything is O(1) per block and
// allocates nothing after construction. One thread at a time.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
  // Blocks that may be reserved now.
  BlockCount available() const noexcept { return ledger_.free(); }

  // Promises `count` blocks to `account`, or nothing if fewer are available.
  std::optional<Reservation> reserve(RequestAccount account, BlockCount count);

  void retain(BlockId block);
  void release(RequestAccount account, BlockId block);
  void retire(RequestAccount account, BlockId block);
  // Frees every block in `releasing`.
  void settle();

  std::uint32_t references(BlockId block) const;
  // Compares the free list and the reference counts with the ledger; O(blocks).
  std::optional<std::string> audit() const;

 private:
  friend class Reservation;

  BlockId acquire(RequestAccount account);
  void forfeit(RequestAccount account, BlockCount count);
  // Drops a reference; true if it was the last.
  bool drop(BlockId block);

  Ledger& ledger_;
  std::vector<BlockId> free_;  // the block freed last is taken first: it may still be in cache
  std::vector<BlockId> releasing_;
  std::vector<std::uint32_t> references_;  // by block
};

}  // namespace kvledger
