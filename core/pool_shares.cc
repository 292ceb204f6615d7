#include "core/pool_shares.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr BlockCount kNone{0};

}  // namespace

void PoolShares::set(const std::vector<PoolShare>& shares) {
  std::unordered_map<TenantId, PoolShare> named;
  std::vector<PoolShare> apart;
  std::vector<PoolShare> guaranteed;
  BlockCount sum;
  for (const PoolShare& share : shares) {
    KVL_CHECK_GE(share.guaranteed, kNone);
    KVL_CHECK_LE(share.guaranteed, share.max);
    KVL_CHECK(named.emplace(share.tenant, share).second);
    sum += share.guaranteed;
    if (share.guaranteed > kNone) {
      guaranteed.push_back(share);
    }
    if (stands_apart(share, ledger_.total())) {
      apart.push_back(share);
    }
  }
  KVL_CHECK_LE(sum, ledger_.total());
  named_.swap(named);
  apart_.swap(apart);
  guaranteed_.swap(guaranteed);
}

PoolShare PoolShares::of(TenantId tenant) const noexcept {
  const auto found = named_.find(tenant);
  return found == named_.end() ? PoolShare{tenant, kNone, ledger_.total(), ledger_.total(), false}
                               : found->second;
}

bool PoolShares::limits(TenantId tenant) const noexcept {
  const auto found = named_.find(tenant);
  return found != named_.end() &&
         std::min(found->second.live_max, found->second.max) < ledger_.total();
}

bool PoolShares::is_apart(TenantId tenant) const noexcept {
  const auto found = named_.find(tenant);
  return found != named_.end() && stands_apart(found->second, ledger_.total());
}

BlockCount PoolShares::unused(const PoolShare& share) const noexcept {
  return std::max(kNone, share.guaranteed - ledger_.live(share.tenant));
}

BlockCount PoolShares::kept_from(TenantId tenant) const noexcept {
  BlockCount kept;
  for (const PoolShare& share : guaranteed_) {
    kept += share.tenant == tenant ? kNone : unused(share);
  }
  return kept;
}

BlockCount PoolShares::left_to(TenantId tenant) const noexcept {
  const PoolShare share = of(tenant);
  return std::min(share.live_max, share.max) - ledger_.live(tenant);
}

BlockCount PoolShares::reach_of(TenantId tenant, BlockCount pool) const noexcept {
  const PoolShare share = of(tenant);
  return std::min({share.live_max, share.max, pool - (guaranteed() - share.guaranteed)});
}

BlockCount PoolShares::guaranteed() const noexcept {
  BlockCount sum;
  for (const PoolShare& share : guaranteed_) {
    sum += share.guaranteed;
  }
  return sum;
}

bool PoolShares::is_beyond_guarantee(TenantId tenant) const noexcept {
  return ledger_.live(tenant) > of(tenant).guaranteed;
}

BlockCount PoolShares::sealed_from(TenantId tenant) const noexcept {
  BlockCount sealed;
  for (const PoolShare& share : guaranteed_) {
    if (share.sealed && share.tenant != tenant) {
      const BlockCount cached = ledger_.statement(share.tenant).cached;
      sealed += std::max(kNone, unused(share) - cached);
    }
  }
  return sealed;
}

}  // namespace kvledger
