#include "core/reuse_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"

namespace kvledger {
namespace {

// How many observed uses the belief about what was not seen is worth, and that belief: uses in the
// time that a block is old already, for classes 0, 1, ... times (class + 1) to this power.
constexpr double kBeliefUses = 10.0;
constexpr double kBelievedUses = 0.1;
constexpr double kBelievedPower = 0.25;
// What an observation counts after the next renewal.
constexpr double kDecay = 0.95;

constexpr double first_age(std::size_t band) {
  return static_cast<double>((std::uint64_t{1} << band) - 1);
}
constexpr double width(std::size_t band) {
  return static_cast<double>(std::uint64_t{1} << band);
}

}  // namespace

ReuseModel::ReuseModel(std::int64_t news) : news_(news), until_renewal_(news) {
  KVL_CHECK_GT(news, 0);
  for (std::size_t i = 0; i < kClasses; ++i) {
    renew(i);
  }
}

std::size_t ReuseModel::class_of(std::int64_t uses) noexcept {
  return uses <= 2 ? static_cast<std::size_t>(std::max<std::int64_t>(uses, 1) - 1)
                   : std::min<std::size_t>(kClasses - 1,
                                           std::bit_width(static_cast<std::uint64_t>(uses - 1)));
}

std::size_t ReuseModel::band_of(std::uint64_t age) noexcept {
  return std::min<std::size_t>(kBands, std::bit_width(age + 1)) - 1;
}

double ReuseModel::value(std::int64_t uses, std::uint64_t age) const noexcept {
  const std::array<double, kBands>& values = classes_[class_of(uses)].value;
  const std::size_t band = band_of(age);
  const double part = std::min(1.0, (static_cast<double>(age) - first_age(band)) / width(band));
  return values[band] + part * (values[std::min(band + 1, kBands - 1)] - values[band]);
}

void ReuseModel::pass(std::int64_t uses, std::uint64_t from, std::uint64_t to) noexcept {
  if (to <= from) {
    return;
  }
  std::array<double, kBands>& exposed = classes_[class_of(uses)].exposed;
  const std::size_t last = band_of(to);
  double at = static_cast<double>(from);
  for (std::size_t band = band_of(from); band < last; ++band) {
    exposed[band] += first_age(band + 1) - at;
    at = first_age(band + 1);
  }
  exposed[last] += static_cast<double>(to) - at;
}

void ReuseModel::observe(std::int64_t uses, std::uint64_t age, bool used_again,
                         std::uint64_t passed) noexcept {
  pass(uses, passed, age);
  classes_[class_of(uses)].used[band_of(age)] += used_again ? 1.0 : 0.0;
  if (--until_renewal_ > 0) {
    return;
  }
  until_renewal_ = news_;
  for (std::size_t i = 0; i < kClasses; ++i) {
    renew(i);
    for (std::size_t band = 0; band < kBands; ++band) {
      classes_[i].used[band] *= kDecay;
      classes_[i].exposed[band] *= kDecay;
    }
  }
}

// The hazard is taken as constant within a band, so a block that enters it leaves it unused with
// probability e^(-hazard * width).
void ReuseModel::renew(std::size_t index) noexcept {
  Class& of = classes_[index];
  const double more = std::pow(static_cast<double>(index + 1), kBelievedPower);
  std::array<double, kBands> hazard;
  std::array<double, kBands> leaving;  // of the blocks that enter a band, those used in it
  for (std::size_t band = 0; band < kBands; ++band) {
    const double middle = first_age(band) + width(band) / 2 + 1;
    const double believed = more * kBelievedUses / middle;
    hazard[band] = (of.used[band] + kBeliefUses) / (of.exposed[band] + kBeliefUses / believed);
    leaving[band] = -std::expm1(-hazard[band] * width(band));
  }
  for (std::size_t from = 0; from < kBands; ++from) {
    double unused = 1.0;
    double uses = 0.0;
    double time = 0.0;
    double best = 0.0;
    for (std::size_t band = from; band < kBands; ++band) {
      const double used = unused * leaving[band];
      uses += used;
      time += used / hazard[band];
      unused -= used;
      best = std::max(best, uses / time);
    }
    of.value[from] = best;
  }
}

}  // namespace kvledger
