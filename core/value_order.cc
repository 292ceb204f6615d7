#include "core/value_order.h"

#include <algorithm>
#include <bit>

namespace kvledger {

ValueOrder::ValueOrder(CachedBlocks& blocks, const ReuseModel& model, double cost_growth)
    : blocks_(blocks), model_(model), cost_growth_(cost_growth) {
  KVL_CHECK_GE(cost_growth, 0.0);
  const std::size_t count = ReuseModel::kClasses * (cost_growth > 0.0 ? kCosts : 1);
  lists_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    lists_.emplace_back(blocks, static_cast<std::uint8_t>(i + 1));
  }
}

CacheList& ValueOrder::list_of(CacheSlot slot) noexcept {
  const std::size_t of_uses = ReuseModel::class_of(blocks_[slot].uses);
  if (lists_.size() == ReuseModel::kClasses) {
    return lists_[of_uses];
  }
  const double cost = std::min(cost_of(slot), double{1 << kCosts});
  const auto of_cost =
      std::min<std::size_t>(std::bit_width(static_cast<std::uint64_t>(cost)), kCosts) - 1;
  return lists_[of_uses * kCosts + of_cost];
}

double ValueOrder::value_of(CacheSlot slot, std::uint64_t now) const noexcept {
  const CachedBlock& block = blocks_[slot];
  return model_.value(block.uses, now - block.used_at) * cost_of(slot);
}

// A block that becomes a leaf late may be older than those offered meanwhile. Only the ends of the
// order are looked at: it goes to the old one if it is older than all, else to the new one.
void ValueOrder::insert(CacheSlot slot) {
  CacheList& list = list_of(slot);
  if (!list.empty() && blocks_[slot].used_at <= blocks_[list.first()].used_at) {
    list.push_first(slot);
  } else {
    list.push_last(slot);
  }
}

void ValueOrder::remove(CacheSlot slot) {
  list_of(slot).remove(slot);
}

CacheSlot ValueOrder::victim(VictimRule rule, std::uint64_t now) const noexcept {
  return rule == VictimRule::kOldest ? oldest() : least_valuable(now);
}

CacheSlot ValueOrder::oldest() const noexcept {
  CacheSlot oldest = kNoSlot;
  for (const CacheList& list : lists_) {
    const CacheSlot slot = list.first();
    if (slot != kNoSlot && (oldest == kNoSlot || blocks_[slot].used_at < blocks_[oldest].used_at)) {
      oldest = slot;
    }
  }
  return oldest;
}

CacheSlot ValueOrder::least_valuable(std::uint64_t now) const noexcept {
  CacheSlot least = kNoSlot;
  double least_value = 0.0;
  for (const CacheList& list : lists_) {
    for (const CacheSlot slot : {list.first(), list.last()}) {
      if (slot == kNoSlot) {
        continue;
      }
      const double value = value_of(slot, now);
      if (least == kNoSlot || value < least_value) {
        least = slot;
        least_value = value;
      }
    }
  }
  return least;
}

}  // namespace kvledger
