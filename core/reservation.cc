#include "core/reservation.h"

#include <utility>

#include "core/block_pool.h"
#include "core/check.h"

namespace kvledger {
namespace {

constexpr BlockCount kNone{0};

}  // namespace

Reservation::Reservation(BlockPool& pool, RequestAccount account, BlockCount count) noexcept
    : pool_(&pool), account_(account), remaining_(count) {}

Reservation::Reservation(Reservation&& other) noexcept
    : pool_(other.pool_),
      account_(other.account_),
      remaining_(std::exchange(other.remaining_, kNone)) {}

Reservation& Reservation::operator=(Reservation&& other) {
  KVL_CHECK_EQ(remaining_, kNone);
  pool_ = other.pool_;
  account_ = other.account_;
  remaining_ = std::exchange(other.remaining_, kNone);
  return *this;
}

Reservation::~Reservation() noexcept(false) {
  KVL_CHECK_EQ(remaining_, kNone);
}

BlockId Reservation::acquire() {
  KVL_CHECK_GT(remaining_, kNone);
  remaining_ -= BlockCount{1};
  return pool_->acquire(account_);
}

void Reservation::forfeit() {
  forfeit(remaining_);
}

void Reservation::forfeit(BlockCount count) {
  KVL_CHECK_LE(count, remaining_);
  if (count > kNone) {
    remaining_ -= count;
    pool_->forfeit(account_, count);
  }
}

}  // namespace kvledger
