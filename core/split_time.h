// The time of one block that several hold at once, split evenly among them to the nanosecond.
//
// Each nanosecond is divided among those who hold the block then. Whoever joins is given a stamp;
// leaving with it says what the holder has to pay. What cannot be divided evenly is carried on and
// paid by the last to leave, so all payments together are exactly the time that passed.
//
// O(1), no memory beyond itself. One thread at a time.

#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/types.h"

namespace kvledger {

class SplitTime {
 public:
  // Nobody holds it.
  SplitTime() noexcept = default;
  // `holders` hold it from `now` on; their stamp is 0.
  SplitTime(std::uint32_t holders, Nanoseconds now) noexcept
      : holders_(holders), opened_at_(now), since_(now) {}

  // One more holder, and its stamp.
  Nanoseconds join(Nanoseconds now) {
    divide(now);
    ++holders_;
    return each_;
  }

  // One holder less: what it pays.
  Nanoseconds leave(Nanoseconds stamp, Nanoseconds now) {
    KVL_CHECK_GT(holders_, 0U);
    divide(now);
    --holders_;
    KVL_CHECK_GE(each_, stamp);
    Nanoseconds due = each_ - stamp;
    if (holders_ == 0) {
      due += carry_;
      carry_ = 0;
      KVL_CHECK_EQ(paid_ + due, now - opened_at_);
    }
    paid_ += due;
    return due;
  }

  std::uint32_t holders() const noexcept { return holders_; }
  // Of the time so far, what holders still have to pay.
  Nanoseconds unpaid(Nanoseconds now) const noexcept { return now - opened_at_ - paid_; }

 private:
  void divide(Nanoseconds now) {
    KVL_CHECK_GE(now, since_);
    if (holders_ == 0) {
      return;
    }
    const Nanoseconds elapsed = now - since_ + carry_;
    const Nanoseconds share = elapsed / holders_;
    each_ += share;
    carry_ = elapsed - share * holders_;
    since_ = now;
  }

  std::uint32_t holders_ = 0;
  Nanoseconds opened_at_ = 0;
  Nanoseconds since_ = 0;
  Nanoseconds each_ = 0;   // what a holder from the start would have to pay
  Nanoseconds carry_ = 0;  // divided among nobody yet
  Nanoseconds paid_ = 0;
};

}  // namespace kvledger
