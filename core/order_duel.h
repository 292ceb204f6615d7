// Whether what was learnt about uses is worth following: two small caches play a sample of the uses
// as two large ones would, one by values, one by age alone.
//
// A block is in the sample by its path, so every use of it is. A cache of 1/r of the size that is
// played 1/r of the blocks hits about as often as the large one (Waldspurger et al., SHARDS, FAST
// 2015). Only a use that one of the two has and the other has not says anything. Age alone rules
// until values have won by more than chance gives, and again once their lead is gone. Older news
// counts less. Everything is O(1) on average and allocates nothing after construction. One thread
// at a time.

#pragma once

#include <cstdint>
#include <vector>

#include "core/cached_block.h"
#include "core/reuse_model.h"
#include "core/value_order.h"

namespace kvledger {

// A cache of blocks known by their paths, without a tree and without contents.
class ShadowCache {
 public:
  // `blocks` fit in it, at least 1.
  ShadowCache(std::int64_t blocks, const ReuseModel& model, double cost_growth, VictimRule rule);

  // Whether the block was in; afterwards it is, as used for the `block.uses`-th time.
  bool use(const CachedBlock& block, std::uint64_t now);

 private:
  CacheSlot& bucket(std::uint64_t path) noexcept;
  CacheSlot search(std::uint64_t path) noexcept;
  CacheSlot make_room(std::uint64_t now);

  const VictimRule rule_;
  CachedBlocks blocks_;
  ValueOrder order_;
  std::vector<CacheSlot> same_bucket_;
  std::vector<CacheSlot> buckets_;  // a power of two of them
  std::size_t taken_ = 0;
};

class OrderDuel {
 public:
  // `capacity` is the large cache's; older news is told to fade after each `news` uses of it.
  OrderDuel(std::int64_t capacity, std::int64_t news, const ReuseModel& model, double cost_growth);

  // A block was used, now for the `block.uses`-th time.
  void use(const CachedBlock& block, std::uint64_t now);
  VictimRule winner() const noexcept { return winner_; }

 private:
  // Most blocks of a shadow.
  static constexpr std::int64_t kShadowBlocks = 16384;

  const std::uint64_t sampled_;  // one of so many paths, a power of two
  const std::int64_t news_;
  const double cost_growth_;
  ShadowCache by_value_;
  ShadowCache by_age_;
  std::int64_t until_fading_;
  double lead_ = 0.0;      // what values hit beyond age, in costs
  double variance_ = 0.0;  // of that if it were chance
  VictimRule winner_ = VictimRule::kOldest;
};

}  // namespace kvledger
