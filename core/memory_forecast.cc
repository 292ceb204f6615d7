#include "core/memory_forecast.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace kvledger {
namespace {

// Chances below this are left out.
constexpr double kNever = 0.002;

// Blocks grown at the beginning of an interval.
constexpr std::int64_t growth_at(std::size_t point) noexcept {
  if (point < 8) {
    return static_cast<std::int64_t>(point);
  }
  return static_cast<std::int64_t>(4 + point % 4) << (point / 4 - 1);
}

static_assert(growth_at(7) == 7 && growth_at(8) == 8 && growth_at(9) == 10 && growth_at(12) == 16);

}  // namespace

MemoryForecast::MemoryForecast(std::int64_t slots_per_block) : slots_per_block_(slots_per_block) {
  KVL_CHECK_GT(slots_per_block, 0);
}

void MemoryForecast::clear() noexcept {
  std::fill_n(points_.begin(), used_, Point{});
  used_ = 1;
}

// Calls `at` for each point, with the mean and the variance that the member adds there. An interval
// counts those that are there at its beginning with what they have grown to at its end.
template <class At>
void MemoryForecast::walk(const MemoryMember& member, const At& at) const noexcept {
  if (member.lengths == nullptr) {
    for (std::size_t point = 0; point < kPoints; ++point) {
      at(point, member.held, 0.0);
    }
    return;
  }
  const double all = member.lengths->reaching(member.made + 1);
  const auto copies = static_cast<double>(member.copies);
  for (std::size_t point = 0; point < kPoints; ++point) {
    const std::int64_t tokens = growth_at(point) * slots_per_block_;
    if (tokens >= member.more_max) {
      return;
    }
    const double there =
        point == 0 ? 1.0 : member.lengths->reaching(member.made + 1 + tokens) / all;
    if (there < kNever) {
      return;
    }
    const auto grown = static_cast<double>(std::min(growth_at(point + 1), member.growth_max));
    const double one = (member.held + static_cast<double>(member.copied)) / copies + grown;
    at(point, there * copies * one, there * (1 - there) * copies * one * one);
  }
}

void MemoryForecast::add(const MemoryMember& member) noexcept {
  walk(member, [this](std::size_t point, double mean, double variance) {
    points_[point].mean += mean;
    points_[point].variance += variance;
    used_ = std::max(used_, point + 1);
  });
}

double MemoryForecast::peak(double deviations) const noexcept {
  double peak = 0.0;
  for (std::size_t i = 0; i < used_; ++i) {
    peak = std::max(peak, points_[i].mean + deviations * std::sqrt(points_[i].variance));
  }
  return peak;
}

double MemoryForecast::peak_with(const MemoryMember& member, double deviations) const noexcept {
  double peak = 0.0;
  std::size_t next = 0;
  walk(member, [&](std::size_t point, double mean, double variance) {
    const Point& others = points_[point];
    peak = std::max(peak, others.mean + mean + deviations * std::sqrt(others.variance + variance));
    next = point + 1;
  });
  for (std::size_t i = next; i < used_; ++i) {
    peak = std::max(peak, points_[i].mean + deviations * std::sqrt(points_[i].variance));
  }
  return peak;
}

}  // namespace kvledger
