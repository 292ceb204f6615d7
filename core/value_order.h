// Cached blocks that may go, in an order in which the next victim is found by a few looks.
//
// Blocks are kept in lists by how often they were used and by how much their computing costs, each
// list about in the order of last uses. The oldest block of all is the first of a list. The least
// valuable one is the first or the last of one: where a class's blocks mostly come back after one
// pause, their value rises towards it and falls after it. Everything is O(1) and allocates nothing.
// One thread at a time.

#pragma once

#include <array>
#include <cstdint>

#include "core/cached_block.h"
#include "core/reuse_model.h"

namespace kvledger {

// Which block goes first.
enum class VictimRule : std::uint8_t { kOldest, kLeastValuable };

class ValueOrder {
 public:
  // A block's value is the model's times 1 + cost_growth x its position.
  ValueOrder(CachedBlocks& blocks, const ReuseModel& model, double cost_growth);

  void insert(CacheSlot slot);
  void remove(CacheSlot slot);
  // kNoSlot where there is none.
  CacheSlot victim(VictimRule rule, std::uint64_t now) const noexcept;

  // What computing a block again costs, as a multiple of the first one's.
  double cost_of(CacheSlot slot) const noexcept {
    return 1.0 + cost_growth_ * blocks_[slot].position;
  }

 private:
  // Costs up to 2, 4, 8 and more.
  static constexpr std::size_t kCosts = 4;

  CacheList& list_of(CacheSlot slot) noexcept;
  double value_of(CacheSlot slot, std::uint64_t now) const noexcept;
  CacheSlot oldest() const noexcept;
  CacheSlot least_valuable(std::uint64_t now) const noexcept;

  CachedBlocks& blocks_;
  const ReuseModel& model_;
  const double cost_growth_;
  std::vector<CacheList> lists_;  // [class][cost], the oldest first
};

}  // namespace kvledger
