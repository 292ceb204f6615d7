// An eviction policy with some blocks, driven by hand.

#pragma once

#include "core/eviction_policy.h"

namespace kvledger::testing {

template <class Policy>
struct PolicyCache {
  explicit PolicyCache(std::size_t size)
      : blocks(size), policy(blocks, static_cast<std::int64_t>(size)) {}

  void enter(CacheSlot slot, std::uint64_t path) {
    blocks[slot].path = path;
    policy.entered(slot, ++now);
    policy.offered(slot);
  }
  // kNoSlot if there is no victim.
  CacheSlot evict() {
    const CacheSlot slot = policy.victim();
    if (slot != kNoSlot) {
      policy.withdrawn(slot);
      policy.leaving(slot, Departure::kEvicted);
    }
    return slot;
  }

  CachedBlocks blocks;
  Policy policy;
  std::uint64_t now = 0;
};

}  // namespace kvledger::testing
