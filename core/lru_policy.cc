#include "core/lru_policy.h"

namespace kvledger {

void LruPolicy::used(CacheSlot slot, std::uint64_t now) {
  blocks_[slot].used_at = now;
  if (order_.has(slot)) {
    order_.remove(slot);
    order_.push_last(slot);
  }
}

}  // namespace kvledger
