// Adds up the time that calls take, with a clock that is handed in: the core reads none by itself.
//
// Of calls within calls only the outermost counts, and only it reads the clock. Without a clock
// nothing is counted. One thread at a time.

#pragma once

#include "core/types.h"

namespace kvledger {

class CallTimer {
 public:
  using Clock = Nanoseconds (*)() noexcept;

  explicit CallTimer(Clock clock) noexcept : clock_(clock) {}

  // Counts from when it is made until it ends.
  class Call {
   public:
    explicit Call(CallTimer& timer) noexcept : timer_(timer) {
      if (timer_.clock_ != nullptr && timer_.depth_++ == 0) {
        timer_.begun_ = timer_.clock_();
      }
    }
    ~Call() {
      if (timer_.clock_ != nullptr && --timer_.depth_ == 0) {
        timer_.nanoseconds_ += timer_.clock_() - timer_.begun_;
      }
    }

    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CallTimer& timer_;
  };

  [[nodiscard]] Call call() noexcept { return Call(*this); }
  // Of all calls that have ended.
  Nanoseconds nanoseconds() const noexcept { return nanoseconds_; }

 private:
  const Clock clock_;
  int depth_ = 0;
  Nanoseconds begun_ = 0;  // the outermost call
  Nanoseconds nanoseconds_ = 0;
};

}  // namespace kvledger
