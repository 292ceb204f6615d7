// The block that was used longest ago goes first. The reference that other policies are held
// against; a request's blocks are used the last one first, so its tail goes before its beginning.

#pragma once

#include "core/eviction_policy.h"

namespace kvledger {

class LruPolicy : public EvictionPolicy {
 public:
  explicit LruPolicy(CachedBlocks& blocks, bool leaves_only = false)
      : blocks_(blocks), order_(blocks, 1), leaves_only_(leaves_only) {}

  bool takes_leaves_only() const noexcept override { return leaves_only_; }
  void entered(CacheSlot slot, std::uint64_t now) override { blocks_[slot].used_at = now; }
  void used(CacheSlot slot, std::uint64_t now) override;
  void adopted(CacheSlot, std::uint64_t) override {}
  void offered(CacheSlot slot) override { order_.push_last(slot); }
  void withdrawn(CacheSlot slot) override { order_.remove(slot); }
  void leaving(CacheSlot, Departure) override {}
  CacheSlot victim() override { return order_.first(); }

 private:
  CachedBlocks& blocks_;
  CacheList order_;  // the oldest first
  const bool leaves_only_;
};

}  // namespace kvledger
