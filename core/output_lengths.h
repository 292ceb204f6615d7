// How long outputs get: learnt from those that are over, by length classes, so that a sequence that
// has made so many tokens can be given a chance to make so many more.
//
// An output that ended by itself says how long outputs are; one that was cut (by its limit, the
// context, its client) says only that it would have come that far, and counts so: it was there to
// end in every class below its own, and did not (Kaplan and Meier's estimate). Of each class the
// hazard is kept: what part of those that reach it end in it.
//
//   lengths   1 2 3 4 5 6 7 | 8 9 | 10 11 | 12 13 | 14 15 | 16 .. 19 | 20 .. 23 | ...   tokens
//   hazard    .....           h     h       h       h       h          h
//   reaching  the product of (1 - hazard) of all classes before
//
// A tenant's hazards lean on those of all tenants together with the weight of kLean outputs, and
// theirs on a guess: none end before kGuessFrom tokens, and of those that reach a length from there
// on half end before twice of it. So there is always an answer, and what a tenant's own outputs say
// soon prevails. Counts are halved when they reach kKept: who changes is learnt anew.
//
// What one tenant learns of others: by their lengths, as far as its own do not say anything, how
// full the pool may get before its request has to wait. That is an average over everybody, moves
// with each kNews outputs, and decides the same admissions as the lengths of what runs beside it,
// which it sees by the load. It is left open: without it every new tenant would be let in blindly.
//
// Answers follow from what was noted, not from time, chance or earlier questions, and nothing
// allocates. Noting and asking are O(1), but O(classes) for a tenant's first question after a note,
// and for one note in kNews of everybody's. One thread at a time.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvledger {

class OutputLengths {
 public:
  // Those of all tenants are without `everybody`; it outlives a tenant's.
  explicit OutputLengths(const OutputLengths* everybody = nullptr);

  // An output of `tokens` tokens, at least 1, ended by itself, or was cut.
  void note_end(std::int64_t tokens) { note(tokens, ended_); }
  void note_cut(std::int64_t tokens) { note(tokens, cut_); }

  // The part of outputs that come to `tokens` tokens, from 0 to 1; falls as they rise. Only what
  // one answer is of another means anything: reaching(a + b) / reaching(a) of those that have come
  // to a make b more.
  double reaching(std::int64_t tokens) const noexcept;

  // How many outputs the tenant's answer rests on, halved ones counted as a half.
  double known() const noexcept { return known_; }

  static constexpr double kLean = 4.0;
  static constexpr double kKept = 512.0;
  static constexpr std::int64_t kGuessFrom = 64;
  static constexpr std::uint64_t kNews = 16;

  // A class for each length below 8, then four for each doubling; lengths from 2^20 on are one.
  static constexpr std::size_t kClasses = 8 + 4 * 17 + 1;
  static std::size_t class_of(std::int64_t tokens) noexcept;
  // The least length in a class.
  static std::int64_t least_of(std::size_t length_class) noexcept;

 private:
  using Counts = std::array<float, kClasses>;

  void note(std::int64_t tokens, Counts& counts);
  void learn() const noexcept;

  const OutputLengths* const everybody_;
  Counts ended_{};
  Counts cut_{};
  double known_ = 0.0;
  std::uint64_t notes_ = 0;

  // What was made of the counts: everybody's with the notes, a tenant's when it is asked for.
  mutable bool is_stale_ = true;
  mutable std::uint64_t news_ = 0;  // how often, or of everybody's
  mutable Counts hazard_{};
  mutable Counts reaching_{};
};

}  // namespace kvledger
