// What each tenant may take of the pool, and what others have to leave to it.
//
//   guaranteed  blocks that requests of others never hold: only cached blocks lie in what a tenant
//               does not use of them, and those go when it asks
//   live_max    the most blocks that its own requests hold or have reserved
//   max         the same with its cached blocks
//   sealed      not even others' cached blocks lie in its guarantee, and its own nowhere else
//
// Who is not named has no guarantee and no limit. Nothing here depends on what is cached. O(tenants
// with a guarantee), of which there are few; set() alone allocates. One thread at a time.

#pragma once

#include <unordered_map>
#include <vector>

#include "core/ledger.h"
#include "core/types.h"

namespace kvledger {

struct PoolShare {
  TenantId tenant;
  BlockCount guaranteed;
  BlockCount live_max;
  BlockCount max;
  bool sealed = false;
};

class PoolShares {
 public:
  explicit PoolShares(const Ledger& ledger) : ledger_(ledger) {}

  // From now on these are the shares. Guarantees add up to no more than the pool.
  void set(const std::vector<PoolShare>& shares);

  // The share of a tenant, or of a shared scope.
  PoolShare of(TenantId tenant) const noexcept;
  // Whether a tenant has a limit of its own.
  bool limits(TenantId tenant) const noexcept;
  // Those whose cached blocks are told apart from others': they have a guarantee, or a limit.
  const std::vector<PoolShare>& apart() const noexcept { return apart_; }
  bool is_apart(TenantId tenant) const noexcept;

  // Blocks that must stay free of live ones of `tenant`, because others have them guaranteed and
  // do not use them now.
  BlockCount kept_from(TenantId tenant) const noexcept;
  // Blocks that a tenant may still take before it reaches its own limit.
  BlockCount left_to(TenantId tenant) const noexcept;
  // The most that a tenant can ever hold of `pool` blocks.
  BlockCount reach_of(TenantId tenant, BlockCount pool) const noexcept;
  // All guarantees together.
  BlockCount guaranteed() const noexcept;
  // Whether requests of a tenant hold more than others have to leave to it.
  bool is_beyond_guarantee(TenantId tenant) const noexcept;
  // Blocks that sealed tenants other than `tenant` keep free of what others cache.
  BlockCount sealed_from(TenantId tenant) const noexcept;

 private:
  BlockCount unused(const PoolShare& share) const noexcept;
  static bool stands_apart(const PoolShare& share, BlockCount total) noexcept {
    return share.guaranteed > BlockCount{0} || share.max < total;
  }

  const Ledger& ledger_;
  std::unordered_map<TenantId, PoolShare> named_;
  std::vector<PoolShare> apart_;       // of those named
  std::vector<PoolShare> guaranteed_;  // of those
};

}  // namespace kvledger
