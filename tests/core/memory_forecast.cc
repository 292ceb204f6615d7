#include "core/memory_forecast.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr std::int64_t kSlots = 16;

MemoryMember member(const OutputLengths& lengths, double held, std::int64_t made,
                    std::int64_t more_max) {
  MemoryMember result;
  result.lengths = &lengths;
  result.held = held;
  result.made = made;
  result.more_max = more_max;
  result.growth_max = more_max / kSlots + 1;
  return result;
}

// The same at every single token, and without deviations.
double naive_peak(const std::vector<MemoryMember>& members) {
  double peak = 0.0;
  for (std::int64_t token = 0; token < 20'000; ++token) {
    double blocks = 0.0;
    for (const MemoryMember& one : members) {
      if (token < one.more_max) {
        const std::int64_t grown = std::min(token / kSlots + 1, one.growth_max);
        blocks += one.lengths->reaching(one.made + 1 + token) /
                  one.lengths->reaching(one.made + 1) * (one.held + static_cast<double>(grown));
      }
    }
    peak = std::max(peak, blocks);
  }
  return peak;
}

}  // namespace

TEST_CASE("one that ends at its limit needs all that it grows to by then") {
  // If this fails, the pool is full before those end that were counted on to give room.
  OutputLengths lengths;
  for (int i = 0; i < 500; ++i) {
    lengths.note_cut(100'000);  // nobody ends before the limit
  }
  MemoryForecast forecast(kSlots);
  forecast.add(member(lengths, 5, 0, 10 * kSlots));
  CHECK(forecast.peak(0.0) == doctest::Approx(15.0).epsilon(0.02));
  forecast.add(member(lengths, 100, 0, kSlots));  // gone after one block
  CHECK(forecast.peak(0.0) == doctest::Approx(107.0).epsilon(0.02));
}

TEST_CASE("the peak is that of every single token, and never less") {
  // If this fails, the forecast says that memory lasts where it does not, or wastes it.
  OutputLengths lengths;
  for (int i = 0; i < 300; ++i) {
    lengths.note_end(20 + i);
  }
  std::vector<MemoryMember> members;
  MemoryForecast forecast(kSlots);
  std::uint64_t state = 7;
  for (int i = 0; i < 40; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto drawn = static_cast<std::int64_t>(state >> 40);
    members.push_back(
        member(lengths, static_cast<double>(1 + drawn % 60), drawn % 250, 1 + drawn / 60 % 1000));
    const double with = forecast.peak_with(members.back(), 1.5);
    forecast.add(members.back());
    CHECK(forecast.peak(1.5) == doctest::Approx(with));
    const double naive = naive_peak(members);
    CAPTURE(i);
    CHECK(forecast.peak(0.0) >= naive * 0.999);
    CHECK(forecast.peak(0.0) <= naive * 1.12);
  }
}

TEST_CASE("deviations are those of independent chances") {
  // If this fails, to be careful means too much with many sequences, or nothing with few.
  OutputLengths lengths;
  for (int i = 0; i < 10'000; ++i) {
    lengths.note_end(i % 2 == 0 ? 1 : 10'000);  // half end at once
  }
  MemoryForecast forecast(1);
  MemoryMember one;
  one.lengths = &lengths;
  one.held = 9;
  one.more_max = 5000;
  one.growth_max = 1;
  for (int i = 0; i < 100; ++i) {
    forecast.add(one);
  }
  MemoryForecast later(1);
  one.made = 1;  // it has shown that it is no short one
  for (int i = 0; i < 100; ++i) {
    later.add(one);
  }
  // All are there at the first token: 1,000. Half are at the second: 500, give or take 50.
  CHECK(forecast.peak(0.0) == doctest::Approx(1000.0));
  CHECK(forecast.peak(14.0) > 1100.0);
  CHECK(forecast.peak(10.0) == doctest::Approx(1000.0).epsilon(0.03));
  CHECK(later.peak(1.0) == doctest::Approx(1000.0).epsilon(0.05));
}

TEST_CASE("one that stands neither grows nor ends; samples grow each on its own") {
  // If this fails, paused readers' blocks are counted on, or sixteen samples count as one.
  OutputLengths lengths;
  MemoryForecast forecast(kSlots);
  MemoryMember standing;
  standing.held = 30;
  forecast.add(standing);
  CHECK(forecast.peak(3.0) == doctest::Approx(30.0));
  MemoryMember samples = member(lengths, 10, 0, 4 * kSlots);
  samples.copies = 4;
  CHECK(forecast.peak_with(samples, 0.0) >= 30 + 10 + 4 * 3.9);
  CHECK(forecast.peak_with(samples, 0.0) <= 30 + 10 + 4 * 4.1);
  samples.copied = 3;
  CHECK(forecast.peak_with(samples, 0.0) >= 30 + 10 + 3 + 4 * 3.9);
  CHECK(forecast.peak(0.0) == doctest::Approx(30.0));  // it was only tried
  forecast.clear();
  CHECK(forecast.peak(3.0) == 0.0);
}

TEST_CASE("what is reserved to the end grows no more") {
  // If this fails, who may not be preempted any more is counted twice.
  OutputLengths lengths;
  MemoryForecast forecast(kSlots);
  MemoryMember reserved = member(lengths, 50, 0, 100 * kSlots);
  reserved.growth_max = 0;
  forecast.add(reserved);
  CHECK(forecast.peak(0.0) == doctest::Approx(50.0));
}

TEST_CASE("a forecast needs a size of blocks") {
  // If this fails, it divides by nothing.
  CHECK_BREAKS(MemoryForecast(0));
}
