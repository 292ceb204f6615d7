#include "core/output_lengths.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr std::size_t kSingles = 8;  // lengths that are a class each
constexpr std::size_t kParts = 4;    // of a doubling

// Of those that reach a quarter of a doubling, who ends in it if half end in the whole: 1 - 2^-1/4.
constexpr float kGuess = 0.1591036F;

}  // namespace

OutputLengths::OutputLengths(const OutputLengths* everybody) : everybody_(everybody) {
  learn();
}

std::size_t OutputLengths::class_of(std::int64_t tokens) noexcept {
  if (tokens < static_cast<std::int64_t>(kSingles)) {
    return static_cast<std::size_t>(std::max<std::int64_t>(0, tokens));
  }
  const auto length = static_cast<std::uint64_t>(tokens);
  const auto octave = static_cast<std::size_t>(std::bit_width(length)) - 4;  // of 8 .. 15
  const std::size_t part = (length >> (octave + 1)) % kParts;
  return std::min(kClasses - 1, kSingles + octave * kParts + part);
}

std::int64_t OutputLengths::least_of(std::size_t length_class) noexcept {
  if (length_class < kSingles) {
    return static_cast<std::int64_t>(length_class);
  }
  const std::size_t octave = (length_class - kSingles) / kParts;
  const std::size_t part = (length_class - kSingles) % kParts;
  return static_cast<std::int64_t>((kParts + part) << (octave + 1));
}

void OutputLengths::note(std::int64_t tokens, Counts& counts) {
  KVL_CHECK_GE(tokens, 1);
  if (known_ >= kKept) {
    for (std::size_t i = 0; i < kClasses; ++i) {
      ended_[i] /= 2;
      cut_[i] /= 2;
    }
    known_ /= 2;
  }
  counts[class_of(tokens)] += 1;
  known_ += 1;
  ++notes_;
  is_stale_ = true;
  if (everybody_ == nullptr && (notes_ < kNews || notes_ % kNews == 0)) {
    learn();
  }
}

void OutputLengths::learn() const noexcept {
  is_stale_ = false;
  news_ = everybody_ == nullptr ? news_ + 1 : everybody_->news_;
  float longer = 0;
  for (std::size_t i = kClasses; i-- > 0;) {
    const float guess = least_of(i) < kGuessFrom ? 0.0F : kGuess;
    const float others = everybody_ == nullptr ? guess : everybody_->hazard_[i];
    const auto lean = static_cast<float>(kLean);
    hazard_[i] = (ended_[i] + lean * others) / (ended_[i] + longer + lean);
    longer += ended_[i] + cut_[i];
  }
  reaching_[0] = 1;
  for (std::size_t i = 1; i < kClasses; ++i) {
    reaching_[i] = reaching_[i - 1] * (1 - hazard_[i - 1]);
  }
}

double OutputLengths::reaching(std::int64_t tokens) const noexcept {
  if (everybody_ != nullptr && (is_stale_ || news_ != everybody_->news_)) {
    learn();
  }
  const std::size_t at = class_of(tokens);
  const double here = reaching_[at];
  const std::int64_t least = least_of(at);
  if (at + 1 == kClasses) {
    // Of those that get here half stay for each doubling, as of the guess.
    return here * static_cast<double>(least) / static_cast<double>(std::max(tokens, least));
  }
  const double part =
      static_cast<double>(tokens - least) / static_cast<double>(least_of(at + 1) - least);
  return here + (reaching_[at + 1] - here) * std::clamp(part, 0.0, 1.0);
}

}  // namespace kvledger
