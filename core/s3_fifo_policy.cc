#include "core/s3_fifo_policy.h"

#include <algorithm>

namespace kvledger {

S3FifoPolicy::S3FifoPolicy(CachedBlocks& blocks, std::int64_t capacity)
    : blocks_(blocks),
      small_size_(std::max<std::int64_t>(1, capacity / 10)),
      small_(blocks, 1),
      main_(blocks, 2),
      evicted_(capacity),
      count_(blocks.size(), 0),
      offered_(blocks.size(), false) {}

void S3FifoPolicy::entered(CacheSlot slot, std::uint64_t now) {
  blocks_[slot].used_at = now;
  count_[slot] = 0;
  (evicted_.recall(blocks_[slot].path) ? main_ : small_).push_last(slot);
}

// What its other policy counted of its uses is not known here: it has a turn of the main queue.
void S3FifoPolicy::adopted(CacheSlot slot, std::uint64_t) {
  count_[slot] = 0;
  main_.push_last(slot);
}

void S3FifoPolicy::used(CacheSlot slot, std::uint64_t now) {
  blocks_[slot].used_at = now;
  count_[slot] = std::min<std::uint8_t>(kCountMax, count_[slot] + 1);
}

void S3FifoPolicy::leaving(CacheSlot slot, Departure how) {
  const bool was_small = small_.has(slot);
  (was_small ? small_ : main_).remove(slot);
  if (was_small && how == Departure::kEvicted) {
    evicted_.remember(EvictedBlock{.path = blocks_[slot].path});
  }
}

// Each turn lowers a counter, moves a block to the main queue or passes over a held one, so there
// are at most kCountMax + 2 for each block. Where held blocks keep a queue's turn, the other one
// gives.
CacheSlot S3FifoPolicy::victim() {
  for (std::int64_t turns = (kCountMax + 2) * (small_.size() + main_.size()); turns > 0; --turns) {
    const bool from_small = !small_.empty() && (small_.size() >= small_size_ || main_.empty());
    CacheList& queue = from_small ? small_ : main_;
    const CacheSlot slot = queue.first();
    if (offered_[slot] && count_[slot] <= (from_small ? 1 : 0)) {
      return slot;
    }
    queue.remove(slot);
    if (from_small && count_[slot] > 1) {
      count_[slot] = 0;
      main_.push_last(slot);
    } else {
      count_[slot] =
          static_cast<std::uint8_t>(from_small ? count_[slot] : std::max(0, count_[slot] - 1));
      queue.push_last(slot);
    }
  }
  for (const CacheList* queue : {&small_, &main_}) {
    for (CacheSlot slot = queue->first(); slot != kNoSlot; slot = blocks_[slot].next) {
      if (offered_[slot]) {
        return slot;
      }
    }
  }
  return kNoSlot;
}

}  // namespace kvledger
