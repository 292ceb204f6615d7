// How long steps take on this machine with this model, learnt from the steps themselves, so that a
// prompt's chunk can be chosen to fit into the time that running streams can spare.
//
//   decode part   = a + b * decode tokens + c * keys they read
//   prefill part  = f + p * prompt tokens + q * keys they read
//
// Both are fitted by least squares without negative weights, each from the steps that say something
// about it, older ones counting less. Two fits instead of one, because minutes of pure decoding
// must not wear out what is known about prompts. What each fit expects is scaled by what the last
// few steps took of it: a machine gets slower and faster within seconds, sooner than weights are
// told apart from steps that are much alike. A step that took three times as long as expected
// counts as three times as long: an interruption by the machine is no news about the model, and a
// real change shows itself in the next steps too.
//
// Only tokens, keys and times go in, no clock: equal calls give equal answers. One thread at a
// time; no call allocates.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace kvledger {

// What one step computes.
struct StepWork {
  std::int64_t decode_tokens = 0;
  std::int64_t decode_keys = 0;  // summed over its decode tokens
  std::int64_t prefill_tokens = 0;
  std::int64_t prefill_keys = 0;
};

// Keys that a chunk of `tokens` tokens reads behind `computed` others, the chunk's own included.
constexpr std::int64_t keys_of_chunk(std::int64_t computed, std::int64_t tokens) noexcept {
  return tokens * computed + tokens * (tokens + 1) / 2;
}

// Weighted least squares of three non-negative weights, newest samples first, scaled by what the
// newest of them were.
class FittedTime {
 public:
  using Features = std::array<double, 3>;

  void add(const Features& features, double value) noexcept;
  double predict(const Features& features) const noexcept { return scale_ * fitted(features); }

 private:
  double fitted(const Features& features) const noexcept;
  // Brings the weights nearer to what the sums say.
  void fit() noexcept;

  std::array<Features, 3> products_{};  // decayed sums of features times features
  Features values_{};                   // and of features times value
  Features weights_{};
  double scale_ = 1.0;
  std::int64_t samples_ = 0;
};

class StepTimeModel {
 public:
  // Learns that a step of `work` took `elapsed`.
  void observe(const StepWork& work, Nanoseconds elapsed) noexcept;

  // Whether a step of decoding alone should come next: none was seen for so long, or ever, that
  // what is known about decoding is no measure any more. Beside prompts it cannot be told apart.
  bool needs_decode() const noexcept { return since_decode_ >= kDecodeNews; }

  // Prompt tokens, up to `most`, with which a step's fixed cost is a fifth of its time; 0 where
  // nothing is known or nothing is fixed.
  std::int64_t worthwhile(std::int64_t most) const noexcept;
  // As many tokens behind `computed` others as take as long as `tokens` of a new prompt.
  std::int64_t prefill_like(std::int64_t tokens, std::int64_t computed) const noexcept;

  // Expected time of a step; 0 where nothing like it was observed.
  Nanoseconds expected(const StepWork& work) const noexcept;
  // What computing `tokens` tokens behind `computed` others costs: milliseconds, or, before prompts
  // were observed, tokens and a little for the keys that they read. Only what one answer is of
  // another of the same moment means anything.
  double cost_of(std::int64_t tokens, std::int64_t computed) const noexcept;
  // Expected time of the decode part alone; 0 before anything was observed.
  Nanoseconds decode_time(std::int64_t tokens, std::int64_t keys) const noexcept;

  // Most prompt tokens, up to `most`, that add at most `room` to a step if they follow `computed`
  // others. Never much more than a chunk that was observed already: what lies beyond is a guess.
  std::int64_t prefill_within(Nanoseconds room, std::int64_t computed,
                              std::int64_t most) const noexcept;

 private:
  static constexpr std::int64_t kFirstChunk = 32;
  // Steps of both kinds at once after which one without prompts is worth it.
  static constexpr std::int64_t kDecodeNews = 64;

  FittedTime decode_;
  FittedTime prefill_;
  std::int64_t largest_chunk_ = kFirstChunk / 2;
  std::int64_t since_decode_ = kDecodeNews;
};

}  // namespace kvledger
