#include "core/reuse_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"

namespace kvledger {
namespace {

// How many observed uses the belief about what was not seen is worth, and that belief: uses in the
// time that a block is old already.
constexpr double kBeliefUses = 10.0;
constexpr double kBelievedUses = 0.1;
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

void ReuseModel::observe(std::int64_t uses, std::uint64_t age, bool used_again) noexcept {
  Class& seen = classes_[class_of(uses)];
  const std::size_t last = band_of(age);
  for (std::size_t band = 0; band < last; ++band) {
    seen.exposed[band] += width(band);
  }
  seen.exposed[last] += static_cast<double>(age) - first_age(last);
  seen.used[last] += used_again ? 1.0 : 0.0;
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
  std::array<double, kBands> hazard;
  for (std::size_t band = 0; band < kBands; ++band) {
    const double middle = first_age(band) + width(band) / 2 + 1;
    const double believed = kBelievedUses * static_cast<double>(index + 1) / middle;
    hazard[band] = (of.used[band] + kBeliefUses) / (of.exposed[band] + kBeliefUses / believed);
  }
  for (std::size_t from = 0; from < kBands; ++from) {
    double unused = 1.0;
    double uses = 0.0;
    double time = 0.0;
    double best = 0.0;
    for (std::size_t band = from; band < kBands; ++band) {
      const double used = unused * -std::expm1(-hazard[band] * width(band));
      uses += used;
      time += used / hazard[band];
      unused -= used;
      best = std::max(best, uses / time);
    }
    of.value[from] = best;
  }
}

}  // namespace kvledger
