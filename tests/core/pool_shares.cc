#include "core/pool_shares.h"

#include "core/block_pool.h"
#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr TenantId kAnna{1};
constexpr TenantId kBen{2};
constexpr TenantId kNobody{9};

PoolShare share(TenantId tenant, std::int64_t guaranteed, std::int64_t live_max, std::int64_t max,
                bool sealed = false) {
  return PoolShare{tenant, BlockCount{guaranteed}, BlockCount{live_max}, BlockCount{max}, sealed};
}

// A pool of 20 blocks of which Anna's requests hold `live`.
struct Pool {
  explicit Pool(std::int64_t live) : ledger(BlockCount{20}, 0), pool(ledger), shares(ledger) {
    const RequestAccount account = ledger.open(kAnna);
    std::optional<Reservation> reservation = pool.reserve(account, BlockCount{live});
    for (std::int64_t i = 0; i < live; ++i) {
      reservation->acquire();
    }
  }

  Ledger ledger;
  BlockPool pool;
  PoolShares shares;
};

}  // namespace

TEST_CASE("who is not named has neither a guarantee nor a limit") {
  // If this fails, a server without shares does not use its memory.
  Pool pool(5);
  CHECK(pool.shares.of(kAnna).guaranteed == BlockCount{0});
  CHECK(pool.shares.kept_from(kAnna) == BlockCount{0});
  CHECK(pool.shares.left_to(kAnna) == BlockCount{15});
  CHECK(pool.shares.reach_of(kAnna, BlockCount{20}) == BlockCount{20});
  CHECK(pool.shares.apart().empty());
  CHECK(pool.shares.is_beyond_guarantee(kAnna));
  CHECK_FALSE(pool.shares.is_beyond_guarantee(kBen));
}

TEST_CASE("what a tenant does not use of its guarantee is kept from others, not from itself") {
  // If this fails, somebody else's requests lie where a tenant was promised room.
  Pool pool(5);
  pool.shares.set({share(kAnna, 8, 20, 20), share(kBen, 6, 6, 6)});
  CHECK(pool.shares.kept_from(kAnna) == BlockCount{6});
  CHECK(pool.shares.kept_from(kBen) == BlockCount{3});
  CHECK(pool.shares.kept_from(kNobody) == BlockCount{9});
  CHECK_FALSE(pool.shares.is_beyond_guarantee(kAnna));
  CHECK(pool.shares.reach_of(kAnna, BlockCount{20}) == BlockCount{14});
  CHECK(pool.shares.reach_of(kBen, BlockCount{20}) == BlockCount{6});
  CHECK(pool.shares.reach_of(kNobody, BlockCount{20}) == BlockCount{6});
  CHECK(pool.shares.guaranteed() == BlockCount{14});
}

TEST_CASE("a tenant's own limits are on live blocks and on all") {
  // If this fails, a limit is not one.
  Pool pool(5);
  pool.shares.set({share(kAnna, 0, 7, 10)});
  CHECK(pool.shares.left_to(kAnna) == BlockCount{2});
  CHECK(pool.shares.apart().size() == 1);
  pool.shares.set({share(kAnna, 0, 7, 20)});
  CHECK(pool.shares.apart().empty());  // its cached blocks are like anybody's
  pool.shares.set({share(kAnna, 0, 3, 20)});
  CHECK(pool.shares.left_to(kAnna) == BlockCount{-2});  // lowered: it drains
}

TEST_CASE("a sealed tenant's unused guarantee is kept even from cached blocks") {
  // If this fails, a sealed tenant lends.
  Pool pool(5);
  pool.shares.set({share(kAnna, 8, 8, 8, true), share(kBen, 4, 20, 20)});
  CHECK(pool.shares.sealed_from(kBen) == BlockCount{3});
  CHECK(pool.shares.sealed_from(kAnna) == BlockCount{0});
}

TEST_CASE("shares that cannot all hold break at once") {
  // If this fails, two tenants are promised the same block.
  Pool pool(5);
  CHECK_BREAKS(pool.shares.set({share(kAnna, 15, 20, 20), share(kBen, 6, 20, 20)}));
  CHECK_BREAKS(pool.shares.set({share(kAnna, 5, 20, 4)}));
  CHECK_BREAKS(pool.shares.set({share(kAnna, 1, 20, 20), share(kAnna, 1, 20, 20)}));
  CHECK(pool.shares.guaranteed() == BlockCount{0});  // nothing has changed
}
