// When cached blocks are used again: learnt from those that were and those that were not, so that
// the block with the least to give can be dropped first.
//
// Time is the count of uses of blocks, not a clock. A block that was used `uses` times and not
// since `age` uses of others has a chance to be used at any later age: the hazard of its class (how
// often it was used) at that age. The value of keeping it is the Gittins index of that chance
// (Gittins and Jones 1974; for caches, the reasoning of hit density in Beckmann et al., LHD, NSDI
// 2018):
//
//   value(age) = the highest, over all times L, of
//                P(used again within L) / E[time until it is used or L has passed]
//
// which is what a block returns for each unit of time that it occupies memory, if it is dropped as
// soon as that stops paying. Where hazards only fall with age this is the hazard and the order that
// of LRU within a class; where conversations come back after a pause, a block gains value as the
// pause passes.
//
// Values are computed for ages 2^b - 1 and interpolated between them. A class and age that were
// hardly seen are believed to be like 1 / age, a little more for what was used more often. Older
// news counts less. Equal calls give equal answers; no call allocates. One thread at a time.

#pragma once

#include <array>
#include <cstdint>

namespace kvledger {

class ReuseModel {
 public:
  // Values are renewed after each `news` observations, at least 1.
  explicit ReuseModel(std::int64_t news);

  // Learns that a block used `uses` times before was used again at `age`, or was not within it.
  // What pass() was told of it before is `passed`.
  void observe(std::int64_t uses, std::uint64_t age, bool used_again,
               std::uint64_t passed = 0) noexcept;
  // Learns that a block used `uses` times was not used between two ages, and may be later.
  void pass(std::int64_t uses, std::uint64_t from, std::uint64_t to) noexcept;

  // Expected uses for each use of others that passes, of a block kept from now on.
  double value(std::int64_t uses, std::uint64_t age) const noexcept;

  // Classes by number of uses: 1, 2, 3 to 4, 5 to 8, more.
  static constexpr std::size_t kClasses = 5;
  static std::size_t class_of(std::int64_t uses) noexcept;

 private:
  // Ages from 2^b - 1 to 2^(b+1) - 2.
  static constexpr std::size_t kBands = 40;
  static std::size_t band_of(std::uint64_t age) noexcept;

  struct Class {
    std::array<double, kBands> used{};     // uses at ages of the band
    std::array<double, kBands> exposed{};  // time that blocks spent at such ages
    std::array<double, kBands> value{};
  };

  void renew(std::size_t index) noexcept;

  const std::int64_t news_;
  std::int64_t until_renewal_;
  std::array<Class, kClasses> classes_;
};

}  // namespace kvledger
