#include "core/block_pool.h"

#include <set>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr TenantId kAnna{1};
constexpr TenantId kBen{2};

struct Pool {
  explicit Pool(std::int64_t blocks) : ledger(BlockCount{blocks}, 0), pool(ledger) {}

  // Takes one block for `account`.
  BlockId take(RequestAccount account) {
    std::optional<Reservation> one = pool.reserve(account, BlockCount{1});
    REQUIRE(one.has_value());
    return one->acquire();
  }
  std::int64_t balance(BlockState state) const { return ledger.balances()[state].value(); }
  void audit() const {
    CHECK(ledger.audit().value_or("") == "");
    CHECK(pool.audit().value_or("") == "");
  }

  Ledger ledger;
  BlockPool pool;
};

}  // namespace

TEST_CASE("every block is handed out once before any is handed out again") {
  // If this fails, two sequences write into the same memory.
  Pool pool(5);
  const RequestAccount account = pool.ledger.open(kAnna);
  std::set<BlockId> taken;
  for (int i = 0; i < 5; ++i) {
    const BlockId block = pool.take(account);
    CHECK(block.value() < 5);
    CHECK(pool.pool.references(block) == 1);
    CHECK(taken.insert(block).second);
    pool.audit();
  }
  CHECK(pool.pool.available() == BlockCount{0});
  CHECK(pool.pool.total() == BlockCount{5});
}

TEST_CASE("running out is an answer, and takes nothing") {
  // If this fails, a request that does not fit costs blocks, or ends the server.
  Pool pool(4);
  const RequestAccount anna = pool.ledger.open(kAnna);
  const RequestAccount ben = pool.ledger.open(kBen);
  std::optional<Reservation> three = pool.pool.reserve(anna, BlockCount{3});
  REQUIRE(three.has_value());
  for (int i = 0; i < 100; ++i) {
    CHECK_FALSE(pool.pool.reserve(ben, BlockCount{2}).has_value());
    CHECK(pool.pool.available() == BlockCount{1});
  }
  pool.audit();
  three->forfeit();
  CHECK(pool.pool.available() == BlockCount{4});
}

TEST_CASE("a promise counts as taken, by whoever else asks") {
  // If this fails, an admitted sequence finds no block where one was promised.
  Pool pool(4);
  const RequestAccount anna = pool.ledger.open(kAnna);
  const RequestAccount ben = pool.ledger.open(kBen);
  std::optional<Reservation> promise = pool.pool.reserve(anna, BlockCount{3});
  REQUIRE(promise.has_value());
  pool.take(ben);
  CHECK_FALSE(pool.pool.reserve(ben, BlockCount{1}).has_value());
  for (int i = 0; i < 3; ++i) {
    promise->acquire();
  }
  CHECK(pool.ledger.statement(kAnna).held == BlockCount{3});
  CHECK(pool.ledger.statement(kBen).held == BlockCount{1});
  pool.audit();
}

TEST_CASE("a block released is free at once and is the next one taken") {
  // If this fails, blocks are lost, or the warm one is left to grow cold.
  Pool pool(3);
  const RequestAccount account = pool.ledger.open(kAnna);
  const BlockId first = pool.take(account);
  const BlockId second = pool.take(account);
  pool.pool.release(account, first);
  CHECK(pool.pool.references(first) == 0);
  CHECK(pool.pool.available() == BlockCount{2});
  CHECK(pool.take(account) == first);
  pool.pool.release(account, second);
  CHECK(pool.take(account) == second);
  pool.audit();
}

TEST_CASE("a block retired is not free before it is settled") {
  // If this fails, a block that a running step still reads is given to somebody else.
  Pool pool(2);
  const RequestAccount account = pool.ledger.open(kAnna);
  const BlockId first = pool.take(account);
  const BlockId second = pool.take(account);
  pool.pool.retire(account, first);
  CHECK(pool.balance(BlockState::kReleasing) == 1);
  CHECK(pool.ledger.held_by(account) == BlockCount{1});
  CHECK_FALSE(pool.pool.reserve(account, BlockCount{1}).has_value());
  pool.audit();
  pool.pool.release(account, second);
  CHECK(pool.pool.available() == BlockCount{1});
  pool.pool.settle();
  CHECK(pool.pool.available() == BlockCount{2});
  CHECK(pool.balance(BlockState::kReleasing) == 0);
  pool.pool.settle();
  CHECK(pool.pool.available() == BlockCount{2});
  pool.audit();
}

TEST_CASE("a block that a running step reads is not free when somebody else gives it back last") {
  // If this fails, a block that a running step still reads is given to somebody else.
  Pool pool(2);
  const RequestAccount in_step = pool.ledger.open(kAnna);
  const RequestAccount other = pool.ledger.open(kAnna);
  const BlockId block = pool.take(in_step);
  pool.pool.keep(in_step, block, kAnna);
  const Nanoseconds stamp = pool.pool.join(other, block);
  pool.pool.drop(block);
  pool.pool.open_step();
  pool.pool.retire(in_step, block);
  pool.pool.release(other, block, stamp);
  CHECK(pool.ledger.state_of(block) == BlockState::kReleasing);
  pool.audit();
  pool.pool.settle();
  CHECK(pool.ledger.state_of(block) == BlockState::kFree);
  pool.audit();
}

TEST_CASE("a block that a running step reads is not free when its scope is purged") {
  // If this fails, a public prefix that is withdrawn is overwritten under those who read it.
  constexpr TenantId kScope{0x80000000U};
  Pool pool(2);
  pool.ledger.account(kScope);
  const RequestAccount account = pool.ledger.open(kAnna);
  const BlockId block = pool.take(account);
  pool.pool.keep(account, block, kScope);
  pool.pool.hold_for_scope(block);
  pool.pool.open_step();
  pool.pool.retire(account, block);
  pool.pool.end_hold_for_scope(block);
  pool.pool.drop(block);
  CHECK(pool.ledger.state_of(block) == BlockState::kReleasing);
  pool.audit();
  pool.pool.settle();
  CHECK(pool.ledger.state_of(block) == BlockState::kFree);
  pool.audit();
}

TEST_CASE("a block with more references is given back by the last one") {
  // If this fails, a shared block vanishes under the sequence that still reads it.
  Pool pool(2);
  const RequestAccount account = pool.ledger.open(kAnna);
  const BlockId block = pool.take(account);
  pool.pool.join(account, block);
  CHECK(pool.pool.references(block) == 2);
  pool.pool.release(account, block);
  CHECK(pool.ledger.state_of(block) == BlockState::kHeld);
  pool.audit();
  pool.pool.join(account, block);
  pool.pool.retire(account, block);
  CHECK(pool.ledger.state_of(block) == BlockState::kHeld);
  pool.pool.retire(account, block);
  CHECK(pool.ledger.state_of(block) == BlockState::kReleasing);
  pool.pool.settle();
  pool.audit();
}

TEST_CASE("what nobody references can be neither shared nor given back") {
  // If this fails, one block is free twice and is handed to two sequences.
  Pool pool(2);
  const RequestAccount account = pool.ledger.open(kAnna);
  const BlockId block = pool.take(account);
  pool.pool.retire(account, block);
  CHECK_BREAKS(pool.pool.join(account, block));
  CHECK_BREAKS(pool.pool.release(account, block));
  CHECK_BREAKS(pool.pool.retire(account, block));
  pool.pool.settle();
  CHECK_BREAKS(pool.pool.release(account, block));
  CHECK_BREAKS(pool.pool.join(account, BlockId{2}));
  CHECK_BREAKS(pool.pool.references(BlockId{2}));
  CHECK_BREAKS(pool.pool.release(account, BlockId{2}));
  CHECK_BREAKS(pool.pool.reserve(account, BlockCount{-1}));
  pool.audit();
}

TEST_CASE("blocks are given back by the account that holds them") {
  // If this fails, one tenant's block is freed at the cost of another's books.
  Pool pool(2);
  const RequestAccount anna = pool.ledger.open(kAnna);
  const RequestAccount ben = pool.ledger.open(kBen);
  const BlockId block = pool.take(anna);
  CHECK_BREAKS(pool.pool.release(ben, block));
}

// The audit: two pools that post in one ledger contradict each other in every way that it knows.

TEST_CASE("the audit finds a block on the free list that somebody holds") {
  // If this fails, a block with two owners is found only in the text that comes out.
  Ledger ledger(BlockCount{2}, 0);
  BlockPool pool(ledger);
  BlockPool other(ledger);
  const RequestAccount account = ledger.open(kAnna);
  std::optional<Reservation> one = other.reserve(account, BlockCount{1});
  REQUIRE(one.has_value());
  CHECK(one->acquire() == BlockId{0});
  CHECK(other.audit().value_or("") == "");
  CHECK(pool.audit().value_or("") == "block 0 is listed as unused but is not");
}

TEST_CASE("the audit finds a block that is referenced and held by nobody") {
  // If this fails, the memory of a running sequence can be given away unnoticed.
  Ledger ledger(BlockCount{2}, 0);
  BlockPool pool(ledger);
  const RequestAccount account = ledger.open(kAnna);
  std::optional<Reservation> one = pool.reserve(account, BlockCount{1});
  REQUIRE(one.has_value());
  const BlockId block = one->acquire();
  ledger.release(account, block);  // behind the pool's back
  CHECK(ledger.audit().value_or("") == "");
  CHECK(pool.audit().value_or("") == "block 0 is referenced but held by nobody");
}

TEST_CASE("the audit finds a block that fell off every list") {
  // If this fails, the pool shrinks by a block each time it happens.
  Ledger ledger(BlockCount{2}, 0);
  BlockPool pool(ledger);
  const RequestAccount anna = ledger.open(kAnna);
  const RequestAccount ben = ledger.open(kBen);
  std::optional<Reservation> one = pool.reserve(anna, BlockCount{1});
  REQUIRE(one.has_value());
  const BlockId block = one->acquire();
  CHECK_BREAKS(pool.release(ben, block));  // dropped the reference, then broke
  CHECK(pool.audit().value_or("") == "block 0 is lost: neither listed nor referenced");
}
