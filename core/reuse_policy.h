// The block that is worth least goes first, by what was learnt about uses (reuse_model.h). The
// default policy.
//
// Blocks are kept in classes by how often they were used, each about in the order of their last
// use. Where a class's blocks mostly come back after one pause, their value rises and then falls
// with age, so the least valuable one is the oldest or the newest: a victim is found by looking at
// both ends of each class. Evicted blocks are remembered, so that the model learns from what came
// back too late, and so that a block that returns counts as what it is. Only leaves go: what hangs
// below a block would be lost with it.

#pragma once

#include <array>

#include "core/eviction_memory.h"
#include "core/eviction_policy.h"
#include "core/reuse_model.h"

namespace kvledger {

class ReusePolicy : public EvictionPolicy {
 public:
  // `capacity` is the most blocks that are in at once.
  ReusePolicy(CachedBlocks& blocks, std::int64_t capacity);

  bool takes_leaves_only() const noexcept override { return true; }
  void entered(CacheSlot slot, std::uint64_t now) override;
  void used(CacheSlot slot, std::uint64_t now) override;
  void offered(CacheSlot slot) override;
  void withdrawn(CacheSlot slot) override;
  void leaving(CacheSlot slot, Departure how) override;
  CacheSlot victim() override;

 private:
  CacheList& list_of(CacheSlot slot) noexcept;
  double value_of(CacheSlot slot) const noexcept;

  CachedBlocks& blocks_;
  ReuseModel model_;
  EvictionMemory evicted_;
  std::array<CacheList, ReuseModel::kClasses> classes_;  // offered ones, the oldest first
  std::uint64_t now_ = 0;
};

}  // namespace kvledger
