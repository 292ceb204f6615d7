// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): a small
// queue takes what is new, a main queue what was used again, and a list of those evicted from the
// small one lets what returns enter the main one. A reference beside the default policy.
//
// A queue's turn passes over held blocks, and they begin anew behind the others. Where a queue
// holds nothing else, that costs as many turns as it has blocks.

#pragma once

#include <vector>

#include "core/eviction_memory.h"
#include "core/eviction_policy.h"

namespace kvledger {

class S3FifoPolicy : public EvictionPolicy {
 public:
  // `capacity` is the most blocks that are in at once.
  S3FifoPolicy(CachedBlocks& blocks, std::int64_t capacity);

  bool takes_leaves_only() const noexcept override { return false; }
  void entered(CacheSlot slot, std::uint64_t now) override;
  void used(CacheSlot slot, std::uint64_t now) override;
  void adopted(CacheSlot slot, std::uint64_t now) override;
  void offered(CacheSlot slot) override { offered_[slot] = true; }
  void withdrawn(CacheSlot slot) override { offered_[slot] = false; }
  void leaving(CacheSlot slot, Departure how) override;
  CacheSlot victim() override;

 private:
  static constexpr std::uint8_t kCountMax = 3;

  CachedBlocks& blocks_;
  const std::int64_t small_size_;  // from which on the small queue gives
  CacheList small_;                // the oldest first
  CacheList main_;
  EvictionMemory evicted_;           // from the small queue
  std::vector<std::uint8_t> count_;  // uses since it came into its queue, at most kCountMax
  std::vector<bool> offered_;
};

}  // namespace kvledger
