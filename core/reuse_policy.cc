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
// Places of the memory that each use looks at: about two rounds while the cache is used once over.
constexpr int kLooks = 2 * kRememberedForEach;

}  // namespace

ReusePolicy::ReusePolicy(CachedBlocks& blocks, std::int64_t capacity, double growth)
    : blocks_(blocks),
      news_(std::max(kNewsLeast, capacity / 2)),
      model_(news_),
      evicted_(std::max(kRememberedLeast, kRememberedForEach * capacity)),
      order_(blocks, model_, growth),
      duel_(capacity, news_, model_, growth) {}

void ReusePolicy::entered(CacheSlot slot, std::uint64_t now) {
  CachedBlock& block = blocks_[slot];
  const std::optional<EvictedBlock> before = evicted_.recall(block.path);
  if (before) {
    model_.observe(before->uses, now - before->used_at, true, before->passed);
  }
  block.uses = 1 + (before ? before->uses : 0);
  block.used_at = now;
  now_ = now;
  duel_.use(block, now);
  look_at_evicted();
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
  duel_.use(block, now);
  look_at_evicted();
}

// What has not come back says as much as what has, and says it before it is forgotten.
void ReusePolicy::look_at_evicted() noexcept {
  for (int look = 0; look < kLooks; ++look) {
    if (EvictedBlock* evicted = evicted_.next_in_round()) {
      const std::uint64_t age = now_ - evicted->used_at;
      model_.pass(evicted->uses, evicted->passed, age);
      evicted->passed = age;
    }
  }
}

void ReusePolicy::leaving(CacheSlot slot, Departure how) {
  if (how != Departure::kEvicted) {
    return;
  }
  const CachedBlock& block = blocks_[slot];
  const std::uint64_t age = now_ - block.used_at;
  model_.pass(block.uses, 0, age);
  const auto forgotten =
      evicted_.remember(EvictedBlock{block.path, block.used_at, block.uses, age});
  if (forgotten) {
    model_.observe(forgotten->uses, now_ - forgotten->used_at, false, forgotten->passed);
  }
}

}  // namespace kvledger
