// What eviction policies know of the blocks in a prefix index, and the lists they keep them in.
//
// The index writes where a block stands (path and position), its policy all else; when a block goes
// to another policy of the same kind the index translates its time. A block is in at most one list,
// and moving it costs O(1) and allocates nothing. One thread at a time.

#pragma once

#include <cstdint>
#include <vector>

#include "core/check.h"

namespace kvledger {

// Where a block stands in the index, from 0; used again when the block has left.
using CacheSlot = std::uint32_t;
inline constexpr CacheSlot kNoSlot = ~CacheSlot{0};

struct CachedBlock {
  // The same for the same tokens in the same scope behind the same others, also when they return
  // after an eviction; a hash, so now and then for others too.
  std::uint64_t path = 0;
  // Tokens before it.
  std::uint32_t position = 0;

  // When it was used last, and how often as far as the policy remembers.
  std::uint64_t used_at = 0;
  std::int64_t uses = 0;
  CacheSlot previous = kNoSlot;
  CacheSlot next = kNoSlot;
  std::uint8_t list = 0;
};

using CachedBlocks = std::vector<CachedBlock>;

// Blocks in an order. `number` is what `CachedBlock::list` of its members says, 0 being no list.
class CacheList {
 public:
  CacheList(CachedBlocks& blocks, std::uint8_t number) : blocks_(blocks), number_(number) {
    KVL_CHECK_NE(number, 0);
  }

  bool empty() const noexcept { return first_ == kNoSlot; }
  std::int64_t size() const noexcept { return size_; }
  // kNoSlot where there is none.
  CacheSlot first() const noexcept { return first_; }
  CacheSlot last() const noexcept { return last_; }
  bool has(CacheSlot slot) const noexcept { return blocks_[slot].list == number_; }

  void push_first(CacheSlot slot) { insert(kNoSlot, slot, first_); }
  void push_last(CacheSlot slot) { insert(last_, slot, kNoSlot); }

  void remove(CacheSlot slot) {
    CachedBlock& block = checked_at(blocks_, slot);
    KVL_CHECK_EQ(block.list, number_);
    (block.previous == kNoSlot ? first_ : blocks_[block.previous].next) = block.next;
    (block.next == kNoSlot ? last_ : blocks_[block.next].previous) = block.previous;
    block.list = 0;
    --size_;
  }

 private:
  void insert(CacheSlot before, CacheSlot slot, CacheSlot after) {
    CachedBlock& block = checked_at(blocks_, slot);
    KVL_CHECK_EQ(block.list, 0);
    block.previous = before;
    block.next = after;
    block.list = number_;
    (before == kNoSlot ? first_ : blocks_[before].next) = slot;
    (after == kNoSlot ? last_ : blocks_[after].previous) = slot;
    ++size_;
  }

  CachedBlocks& blocks_;
  const std::uint8_t number_;
  CacheSlot first_ = kNoSlot;
  CacheSlot last_ = kNoSlot;
  std::int64_t size_ = 0;
};

}  // namespace kvledger
