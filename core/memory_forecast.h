// How full the pool is going to be: the most blocks that running sequences will hold together,
// if outputs get as long as they use to (output_lengths.h).
//
// Time is counted in blocks that a sequence which goes on grows by, at points that lie a quarter or
// less apart. At each of them stands what its sequences are expected to hold, and how far that may
// be off: the sum of independent chances.
//
//   held                         x = still there with chance p, then it holds h: adds p h to the
//    ^        ..---..            mean, p (1 - p) h^2 to the variance
//    |   ...''        ''.
//    |  '   they grow    ''.  they end, and their blocks come back
//    +--------------------------> points
//
// The peak is the largest  mean + deviations x root of the variance.  A single guess for each
// sequence's end would do with less (sort them by it), but is wrong for nearly all of them: those
// alike would end together, and blocks come back in the forecast that do not in fact. The sums of
// chances need no sorting either: a sequence is added, or tried, in O(points).
//
// Nothing allocates. One thread at a time.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/output_lengths.h"

namespace kvledger {

// What is known of one sequence.
struct MemoryMember {
  // How long its tenant's outputs get; null for one that stands as it is: it neither grows nor
  // ends.
  const OutputLengths* lengths = nullptr;
  // Blocks that come back when it ends, reserved ones too.
  double held = 0.0;
  // Output tokens that it has, and may still make.
  std::int64_t made = 0;
  std::int64_t more_max = 0;
  // Blocks that it can still come to take; none if it has reserved all.
  std::int64_t growth_max = 0;
  // Sequences that grow like it, each on its own: samples that will begin with it.
  std::int64_t copies = 1;
  // Blocks that these copy when they begin.
  std::int64_t copied = 0;
};

class MemoryForecast {
 public:
  explicit MemoryForecast(std::int64_t slots_per_block);

  void clear() noexcept;
  void add(const MemoryMember& member) noexcept;
  // The most blocks expected, with so many deviations to spare; with `member` if it is added.
  double peak(double deviations) const noexcept;
  double peak_with(const MemoryMember& member, double deviations) const noexcept;

  // From one point to the next a sequence grows: by a block each up to 8, then by a quarter of a
  // doubling or less. What is behind the last is as if it were there.
  static constexpr std::size_t kPoints = 8 + 4 * 12;

 private:
  struct Point {
    double mean = 0.0;
    double variance = 0.0;
  };
  template <class At>
  void walk(const MemoryMember& member, const At& at) const noexcept;

  const std::int64_t slots_per_block_;
  std::array<Point, kPoints> points_{};
  std::size_t used_ = 1;  // behind these nobody is
};

}  // namespace kvledger
