// Watches how much of the work is done twice, and says how careful admission has to be.
//
// Work is counted in tokens: all that were computed, and those of them that had been computed
// before a preemption. Both are kept for about the last kWindow tokens, so there is no clock. When
// more than a part of kTooMuch is recomputed the level rises, when it is less than kHealthy it
// falls; in between it stays, and after a move it stays for kPause tokens, in which the move can
// show. A level is worth so many deviations more of what a forecast may be off (memory_forecast.h).
//
// Equal counts give equal levels. O(1). One thread counts; any may read what it says.

#pragma once

#include <atomic>
#include <cstdint>

namespace kvledger {

class RecomputeGovernor {
 public:
  static constexpr std::int64_t kLevels = 4;
  // Deviations of level 0.
  static constexpr double kCalm = 1.0;
  static constexpr double kWindow = 65536.0;
  static constexpr double kTooMuch = 0.02;
  static constexpr double kHealthy = 0.005;
  static constexpr std::int64_t kPause = 8192;

  // A step computed so many tokens, some of them again.
  void count(std::int64_t computed, std::int64_t again);

  // From 0, where all is well, to kLevels - 1.
  std::int64_t level() const noexcept { return level_.load(std::memory_order_relaxed); }
  double deviations() const noexcept;
  // The part of recent work that was done again.
  double wasted() const noexcept { return wasted_.load(std::memory_order_relaxed); }
  std::int64_t raised() const noexcept { return raised_.load(std::memory_order_relaxed); }
  std::int64_t lowered() const noexcept { return lowered_.load(std::memory_order_relaxed); }

 private:
  double computed_ = 0.0;
  double again_ = 0.0;
  std::int64_t since_move_ = kPause;
  std::atomic<double> wasted_{0.0};
  std::atomic<std::int64_t> level_{0};
  std::atomic<std::int64_t> raised_{0};
  std::atomic<std::int64_t> lowered_{0};
};

}  // namespace kvledger
