// The block that is worth least goes first, by what was learnt about uses (reuse_model.h) and by
// what computing it again would cost. The default policy.
//
// Whether what was learnt is followed is decided by play (order_duel.h): until it has shown that it
// hits more, and wherever it does not, the block used longest ago goes first, as with LRU. Evicted
// blocks are remembered, so that the model learns from what came back too late and from what did
// not, and so that a block that returns counts as what it is. Only leaves go: what hangs below a
// block would be lost with it.

#pragma once

#include "core/eviction_memory.h"
#include "core/eviction_policy.h"
#include "core/order_duel.h"
#include "core/reuse_model.h"
#include "core/value_order.h"

namespace kvledger {

// How the cost of a token grows with the tokens before it: computing one costs 1 + growth x
// position times what the first one does. Attention's multiplications over those of the weights;
// `weights` is without embeddings, `query_width` heads x their dimension.
constexpr double cost_growth(std::int64_t layers, std::int64_t query_width, std::int64_t weights) {
  return 2.0 * static_cast<double>(layers) * static_cast<double>(query_width) /
         static_cast<double>(weights);
}
// That of SmolLM2-135M: the cost doubles at 3,070 tokens.
inline constexpr double kDefaultCostGrowth = cost_growth(30, 576, 106'000'000);

class ReusePolicy : public EvictionPolicy {
 public:
  // `capacity` is the most blocks that are in at once. With a growth of 0 all blocks cost the same.
  ReusePolicy(CachedBlocks& blocks, std::int64_t capacity, double growth = 0.0);

  bool takes_leaves_only() const noexcept override { return true; }
  void entered(CacheSlot slot, std::uint64_t now) override;
  void used(CacheSlot slot, std::uint64_t now) override;
  void adopted(CacheSlot, std::uint64_t now) override { now_ = now; }
  void offered(CacheSlot slot) override { order_.insert(slot); }
  void withdrawn(CacheSlot slot) override { order_.remove(slot); }
  void leaving(CacheSlot slot, Departure how) override;
  CacheSlot victim() override { return order_.victim(duel_.winner(), now_); }

  VictimRule rule() const noexcept { return duel_.winner(); }

 private:
  // Counts the time that some of the evicted blocks have not been used.
  void look_at_evicted() noexcept;

  CachedBlocks& blocks_;
  const std::int64_t news_;
  ReuseModel model_;
  EvictionMemory evicted_;
  ValueOrder order_;  // of those offered
  OrderDuel duel_;
  std::uint64_t now_ = 0;
};

}  // namespace kvledger
