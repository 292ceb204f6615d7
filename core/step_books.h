// What all steps so far did and how long they took, by phase, mixture and batch size: counted once
// a step, so that metrics and diagnosis need not look at any.
//
// Prefill is bound by arithmetic and decoding by memory, so they are told apart even where a step
// does both: such a step's time is divided into what its decoding was expected to take alone
// (step_time.h) and the rest.
//
//   phases     steps that had it, nanoseconds, tokens, keys read by them, sequences; the
//              nanoseconds of both phases add up to those of all steps
//   mixtures   steps of decoding alone, of prompts alone, of both: nanoseconds, durations
//   batches    steps of decoding alone, by how many sequences do: nanoseconds, tokens, durations;
//              what a step with prompts took says nothing of its batch
//   forecast   what steps were expected to take, what they took, and how far off it was
//   fits       sums from which the time of a phase's steps is fitted over any interval
//   waited     time of steps in which somebody waited, by what for
//   preempted  sequences that lost their blocks, by the reason
//
// One thread observes; any thread may read meanwhile, and finds each count as it was at some recent
// time.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/step_time.h"
#include "core/types.h"

namespace kvledger {

class StepBooks {
 public:
  using Counter = std::atomic<std::int64_t>;

  enum Phase : std::size_t { kDecode, kPrefill, kPhases };
  // Another needed a block and came before; nobody came behind it when it needed one; it was paused
  // when another needed one.
  enum Preempted : std::size_t { kForAnother, kForItself, kPaused, kReasons };
  // What a waiting sequence would need: one of the places for running ones, blocks (now, or in time
  // for what is expected to grow), room in its own tenant's share, a turn for its prompt.
  enum Waited : std::size_t { kForPlace, kForMemory, kForShare, kForTurn, kWaits };
  enum Mixture : std::size_t { kDecodeOnly, kPrefillOnly, kBoth, kMixtures };

  // A duration falls into the first bucket whose bound is not less: bounds grow by a quarter of an
  // octave from 2^16 ns (66 us) to 2^36 ns (69 s); the last bucket has no bound.
  static constexpr std::size_t kBuckets = 82;
  static std::size_t bucket_of(Nanoseconds duration) noexcept;
  static Nanoseconds bound_of(std::size_t bucket) noexcept;
  using Durations = std::array<Counter, kBuckets>;

  // Batches of 1, 2, 3 to 4, 5 to 8, ... sequences, and in the last class of more.
  static constexpr std::size_t kBatches = 13;
  static std::size_t batch_of(std::int64_t sequences) noexcept;

  struct PhaseCounts {
    Counter steps{0};
    Counter nanoseconds{0};
    Counter tokens{0};
    Counter keys{0};
    Counter sequences{0};
  };
  struct StepCounts {
    Counter steps{0};
    Counter nanoseconds{0};
    Counter tokens{0};
    Durations durations{};
  };
  struct ForecastCounts {
    Counter steps{0};
    Counter expected{0};
    Counter taken{0};
    Counter off{0};  // how much more or less each took, added up
  };

  // The normal equations of  nanoseconds = a + b * tokens + c * keys,  of a phase's steps: of
  // decoding those without prompts, of prompts what their steps took beyond their decoding. A
  // step's features and time are divided by its size, so that an error counts for its share; one
  // that took three times as long as expected counts as three times as long, as in step_time.h.
  // They only grow: what lies between two looks is an interval's.
  struct FitSums {
    using Sum = std::atomic<double>;
    std::array<Sum, 6> products{};  // 1 x 1, 1 x tokens, 1 x keys, tokens^2, tokens x keys, keys^2
    std::array<Sum, 3> values{};    // times 1, tokens, keys
  };

  // A step of `work` took `elapsed`, of which its decoding was expected to take `decode` alone and
  // all of it `expected`; 0 if nothing was known. `decoding` and `prompts` are its sequences.
  void observe(const StepWork& work, std::int64_t decoding, std::int64_t prompts,
               Nanoseconds elapsed, Nanoseconds decode, Nanoseconds expected) noexcept;
  void preempted(Preempted why) noexcept;
  // Somebody waited for this in a step that took `elapsed`.
  void waited(Waited what, Nanoseconds elapsed) noexcept;

  const PhaseCounts& phase(Phase phase) const noexcept { return phases_[phase]; }
  const StepCounts& mixture(Mixture mixture) const noexcept { return mixtures_[mixture]; }
  const StepCounts& batch(std::size_t batch) const noexcept { return batches_[batch]; }
  const ForecastCounts& forecast() const noexcept { return forecast_; }
  const FitSums& fit(Phase phase) const noexcept { return fits_[phase]; }
  std::int64_t preemptions(Preempted why) const noexcept { return preemptions_[why]; }
  std::int64_t waited(Waited what) const noexcept { return waited_[what]; }

  // The part of a step's time that is its decoding's.
  static Nanoseconds decode_part(const StepWork& work, Nanoseconds elapsed,
                                 Nanoseconds decode) noexcept;

 private:
  std::array<PhaseCounts, kPhases> phases_;
  std::array<StepCounts, kMixtures> mixtures_;
  std::array<StepCounts, kBatches> batches_;
  ForecastCounts forecast_;
  std::array<FitSums, kPhases> fits_;
  std::array<Counter, kReasons> preemptions_{};
  std::array<Counter, kWaits> waited_{};
};

}  // namespace kvledger
