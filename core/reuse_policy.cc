#include "core/reuse_policy.h"

#include <algorithm>

namespace kvledger {
namespace {

// How many evicted blocks are remembered: for a small cache, those that come back are long gone.
constexpr std::int64_t kRememberedForEach = 4;
constexpr std::int64_t kRememberedLeast = 16384;
// Uses and losses after which the model's values are renewed, at the least; else half a cache of
// them.
constexpr std::int64_t kNewsLeast = 512;

}  // namespace

ReusePolicy::ReusePolicy(CachedBlocks& blocks, std::int64_t capacity)
    : blocks_(blocks),
      model_(std::max(kNewsLeast, capacity / 2)),
      evicted_(std::max(kRememberedLeast, kRememberedForEach * capacity)),
      classes_{CacheList(blocks, 1), CacheList(blocks, 2), CacheList(blocks, 3),
               CacheList(blocks, 4), CacheList(blocks, 5)} {}

CacheList& ReusePolicy::list_of(CacheSlot slot) noexcept {
  return classes_[ReuseModel::class_of(blocks_[slot].uses)];
}

double ReusePolicy::value_of(CacheSlot slot) const noexcept {
  const CachedBlock& block = blocks_[slot];
  return model_.value(block.uses, now_ - block.used_at);
}

void ReusePolicy::entered(CacheSlot slot, std::uint64_t now) {
  CachedBlock& block = blocks_[slot];
  const std::optional<EvictedBlock> before = evicted_.recall(block.path);
  if (before) {
    model_.observe(before->uses, now - before->used_at, true);
  }
  block.uses = 1 + (before ? before->uses : 0);
  block.used_at = now;
  now_ = now;
}

void ReusePolicy::used(CacheSlot slot, std::uint64_t now) {
  CachedBlock& block = blocks_[slot];
  const bool is_offered = block.list != 0;
  if (is_offered) {
    withdrawn(slot);
  }
  model_.observe(block.uses, now - block.used_at, true);
  ++block.uses;
  block.used_at = now;
  now_ = now;
  if (is_offered) {
    offered(slot);
  }
}

// A block that becomes a leaf late may be older than those offered meanwhile. Only the ends of the
// order are looked at: it goes to the old one if it is older than all, else to the new one.
void ReusePolicy::offered(CacheSlot slot) {
  CacheList& list = list_of(slot);
  if (!list.empty() && blocks_[slot].used_at <= blocks_[list.first()].used_at) {
    list.push_first(slot);
  } else {
    list.push_last(slot);
  }
}

void ReusePolicy::withdrawn(CacheSlot slot) {
  list_of(slot).remove(slot);
}

void ReusePolicy::leaving(CacheSlot slot, Departure how) {
  if (how == Departure::kPurged) {
    return;
  }
  const CachedBlock& block = blocks_[slot];
  const auto forgotten = evicted_.remember(EvictedBlock{block.path, block.used_at, block.uses});
  if (forgotten) {
    model_.observe(forgotten->uses, now_ - forgotten->used_at, false);
  }
}

CacheSlot ReusePolicy::victim() {
  CacheSlot least = kNoSlot;
  double least_value = 0.0;
  for (const CacheList& list : classes_) {
    for (const CacheSlot slot : {list.first(), list.last()}) {
      if (slot == kNoSlot) {
        continue;
      }
      const double value = value_of(slot);
      if (least == kNoSlot || value < least_value) {
        least = slot;
        least_value = value;
      }
    }
  }
  return least;
}

}  // namespace kvledger
