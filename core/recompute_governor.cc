#include "core/recompute_governor.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr std::array<double, RecomputeGovernor::kLevels> kDeviations = {1.0, 1.5, 2.25, 3.5};

}  // namespace

double RecomputeGovernor::deviations() const noexcept {
  return kDeviations[static_cast<std::size_t>(level())];
}

void RecomputeGovernor::count(std::int64_t computed, std::int64_t again) {
  KVL_CHECK_GE(again, 0);
  KVL_CHECK_LE(again, computed);
  const double kept = std::exp2(-static_cast<double>(computed) / kWindow);
  computed_ = computed_ * kept + static_cast<double>(computed);
  again_ = again_ * kept + static_cast<double>(again);
  wasted_.store(computed_ > 0 ? again_ / computed_ : 0.0, std::memory_order_relaxed);
  since_move_ += computed;
  if (since_move_ < kPause) {
    return;
  }
  if (wasted() > kTooMuch && level() + 1 < kLevels && again > 0) {
    level_.store(level() + 1, std::memory_order_relaxed);
    raised_.store(raised() + 1, std::memory_order_relaxed);
    since_move_ = 0;
  } else if (wasted() < kHealthy && level() > 0) {
    level_.store(level() - 1, std::memory_order_relaxed);
    lowered_.store(lowered() + 1, std::memory_order_relaxed);
    since_move_ = 0;
  }
}

}  // namespace kvledger
