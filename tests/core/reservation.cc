#include "core/reservation.h"

#include <optional>
#include <type_traits>
#include <utility>

#include "core/block_pool.h"
#include "tests/check_throws.h"

using namespace kvledger;

namespace {

struct Books {
  explicit Books(std::int64_t blocks)
      : ledger(BlockCount{blocks}, 0), pool(ledger), account(ledger.open(TenantId{1})) {}

  Reservation reserve(std::int64_t blocks) {
    std::optional<Reservation> reservation = pool.reserve(account, BlockCount{blocks});
    REQUIRE(reservation.has_value());
    return std::move(*reservation);
  }
  std::int64_t free() const { return pool.available().value(); }
  std::int64_t reserved() const { return ledger.reserved_by(account).value(); }
  std::int64_t held() const { return ledger.held_by(account).value(); }

  Ledger ledger;
  BlockPool pool;
  RequestAccount account;
};

}  // namespace

TEST_CASE("a claim has one owner") {
  // If this fails, the same promise can be cashed twice.
  static_assert(!std::is_copy_constructible_v<Reservation>);
  static_assert(!std::is_copy_assignable_v<Reservation>);
  static_assert(std::is_move_constructible_v<Reservation>);
  CHECK(Reservation().remaining() == BlockCount{0});
}

TEST_CASE("a claim lives from reserve over acquire to forfeit") {
  // If this fails, blocks promised and blocks held do not add up.
  Books books(5);
  Reservation claim = books.reserve(3);
  CHECK(claim.remaining() == BlockCount{3});
  CHECK(books.free() == 2);
  CHECK(books.reserved() == 3);
  const BlockId block = claim.acquire();
  CHECK(books.ledger.holder_of(block) == books.account);
  CHECK(claim.remaining() == BlockCount{2});
  CHECK(books.reserved() == 2);
  CHECK(books.held() == 1);
  claim.forfeit();
  CHECK(claim.remaining() == BlockCount{0});
  CHECK(books.free() == 4);
  CHECK(books.reserved() == 0);
  CHECK(books.held() == 1);
  CHECK(books.ledger.audit().value_or("") == "");
}

TEST_CASE("a settled claim has nothing to give, and can be forfeited again") {
  // If this fails, a claim hands out more blocks than it was promised.
  Books books(2);
  Reservation claim = books.reserve(1);
  claim.acquire();
  CHECK_BREAKS(claim.acquire());
  claim.forfeit();
  claim.forfeit();
  CHECK(books.free() == 1);
  Reservation none;
  none.forfeit();
  CHECK_BREAKS(none.acquire());
  Reservation empty = books.reserve(0);
  CHECK(empty.remaining() == BlockCount{0});
  CHECK_BREAKS(empty.acquire());
}

TEST_CASE("a claim that was moved away claims nothing") {
  // If this fails, both ends of a move can be cashed.
  Books books(4);
  Reservation first = books.reserve(2);
  Reservation second = std::move(first);
  CHECK(first.remaining() == BlockCount{0});
  CHECK_BREAKS(first.acquire());
  CHECK(second.remaining() == BlockCount{2});
  Reservation third;
  third = std::move(second);
  CHECK(second.remaining() == BlockCount{0});
  second.forfeit();
  CHECK(books.reserved() == 2);
  third.acquire();
  third.forfeit();
  CHECK(books.free() == 3);
}

TEST_CASE("a claim cannot be overwritten while it claims something") {
  // If this fails, an assignment leaks the blocks of the claim it replaces.
  Books books(4);
  Reservation first = books.reserve(1);
  Reservation second = books.reserve(2);
  CHECK_BREAKS(first = std::move(second));
  CHECK(first.remaining() == BlockCount{1});
  CHECK(second.remaining() == BlockCount{2});
  first.forfeit();
  first = std::move(second);
  CHECK(first.remaining() == BlockCount{2});
  first.forfeit();
  CHECK(books.free() == 4);
}

TEST_CASE("destroying a claim that is not settled shows itself at once") {
  // If this fails, blocks leak in silence and the pool shrinks until nothing runs.
  Books books(4);
  CHECK_BREAKS([&] { const Reservation forgotten = books.reserve(2); }());
  CHECK(books.reserved() == 2);
}

TEST_CASE("a claim of the whole pool can be taken to the last block") {
  // If this fails, the last block of a pool cannot be used.
  Books books(64);
  Reservation all = books.reserve(64);
  CHECK(books.free() == 0);
  for (int i = 0; i < 64; ++i) {
    all.acquire();
  }
  CHECK(books.held() == 64);
  CHECK(books.pool.audit().value_or("") == "");
}
