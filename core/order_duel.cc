#include "core/order_duel.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvledger {
namespace {

// What a difference counts after the next `news` uses.
constexpr double kFading = 0.95;
// By how many standard deviations of single blocks values must lead. The blocks of a prompt hit and
// miss together, in runs of ten and more, so these are about two of what chance does to prompts.
constexpr double kLead = 6.0;

std::uint64_t one_of(std::int64_t capacity, std::int64_t blocks) {
  return std::bit_ceil(static_cast<std::uint64_t>((capacity + blocks - 1) / blocks));
}

}  // namespace

ShadowCache::ShadowCache(std::int64_t blocks, const ReuseModel& model, double cost_growth,
                         VictimRule rule)
    : rule_(rule),
      blocks_(static_cast<std::size_t>(std::max<std::int64_t>(1, blocks))),
      order_(blocks_, model, cost_growth),
      same_bucket_(blocks_.size(), kNoSlot),
      buckets_(std::bit_ceil(2 * blocks_.size()), kNoSlot) {}

// A sample's paths differ in their low bits: what chooses it are the highest ones.
CacheSlot& ShadowCache::bucket(std::uint64_t path) noexcept {
  return buckets_[path & (buckets_.size() - 1)];
}

CacheSlot ShadowCache::search(std::uint64_t path) noexcept {
  CacheSlot slot = bucket(path);
  while (slot != kNoSlot && blocks_[slot].path != path) {
    slot = same_bucket_[slot];
  }
  return slot;
}

CacheSlot ShadowCache::make_room(std::uint64_t now) {
  if (taken_ < blocks_.size()) {
    return static_cast<CacheSlot>(taken_++);
  }
  const CacheSlot slot = order_.victim(rule_, now);
  order_.remove(slot);
  CacheSlot* link = &bucket(blocks_[slot].path);
  while (*link != slot) {
    link = &same_bucket_[*link];
  }
  *link = same_bucket_[slot];
  return slot;
}

bool ShadowCache::use(const CachedBlock& block, std::uint64_t now) {
  CacheSlot slot = search(block.path);
  const bool was_in = slot != kNoSlot;
  if (was_in) {
    order_.remove(slot);
  } else {
    slot = make_room(now);
    blocks_[slot] = CachedBlock{};
    blocks_[slot].path = block.path;
    blocks_[slot].position = block.position;
    CacheSlot& first = bucket(block.path);
    same_bucket_[slot] = first;
    first = slot;
  }
  blocks_[slot].uses = block.uses;
  blocks_[slot].used_at = now;
  order_.insert(slot);
  return was_in;
}

OrderDuel::OrderDuel(std::int64_t capacity, std::int64_t news, const ReuseModel& model,
                     double cost_growth)
    : sampled_(one_of(capacity, kShadowBlocks)),
      news_(news),
      cost_growth_(cost_growth),
      by_value_(capacity / static_cast<std::int64_t>(sampled_), model, cost_growth,
                VictimRule::kLeastValuable),
      by_age_(capacity / static_cast<std::int64_t>(sampled_), model, cost_growth,
              VictimRule::kOldest),
      until_fading_(news) {}

void OrderDuel::use(const CachedBlock& block, std::uint64_t now) {
  if (--until_fading_ <= 0) {
    until_fading_ = news_;
    lead_ *= kFading;
    variance_ *= kFading * kFading;
  }
  if ((block.path >> 32 & (sampled_ - 1)) != 0) {
    return;
  }
  const int difference = int{by_value_.use(block, now)} - int{by_age_.use(block, now)};
  if (difference == 0) {
    return;
  }
  const double cost = 1.0 + cost_growth_ * block.position;
  lead_ += difference * cost;
  variance_ += cost * cost;
  if (lead_ <= 0.0) {
    winner_ = VictimRule::kOldest;
  } else if (lead_ > kLead * std::sqrt(variance_)) {
    winner_ = VictimRule::kLeastValuable;
  }
}

}  // namespace kvledger
