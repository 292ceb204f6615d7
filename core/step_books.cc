#include "core/step_books.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvledger {
namespace {

// 2^(1/4), 2^(2/4) and 2^(3/4) of 2^62.
constexpr std::array<std::uint64_t, 3> kQuarters = {
    5'484'249'825'272'419'511U, 6'521'908'912'666'391'106U, 7'755'900'482'342'532'474U};
constexpr int kFirstOctave = 16;
constexpr std::int64_t kPerOctave = 4;

// Only one thread writes, so there is nothing to lock.
void add(StepBooks::Counter& counter, std::int64_t more) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

void add(StepBooks::FitSums::Sum& sum, double more) noexcept {
  sum.store(sum.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

// Tokens and keys that make a step about twice as large as one without any.
constexpr double kTokensOfSize = 16.0;
constexpr double kKeysOfSize = 16384.0;
constexpr Nanoseconds kOutlier = 3;

void add_fit(StepBooks::FitSums& sums, std::int64_t tokens, std::int64_t keys, Nanoseconds taken,
             Nanoseconds expected) noexcept {
  const Nanoseconds told = expected > 0 ? std::min(taken, kOutlier * expected) : taken;
  const auto t = static_cast<double>(tokens);
  const auto k = static_cast<double>(keys);
  const double size = 1.0 + t / kTokensOfSize + k / kKeysOfSize;
  const std::array<double, 3> features = {1.0 / size, t / size, k / size};
  std::size_t place = 0;
  for (std::size_t i = 0; i < features.size(); ++i) {
    for (std::size_t j = i; j < features.size(); ++j) {
      add(sums.products[place++], features[i] * features[j]);
    }
    add(sums.values[i], features[i] * static_cast<double>(told) / size);
  }
}

void add_step(StepBooks::StepCounts& counts, Nanoseconds elapsed, std::int64_t tokens) noexcept {
  add(counts.steps, 1);
  add(counts.nanoseconds, elapsed);
  add(counts.tokens, tokens);
  add(counts.durations[StepBooks::bucket_of(elapsed)], 1);
}

}  // namespace

Nanoseconds StepBooks::bound_of(std::size_t bucket) noexcept {
  const auto quarters = static_cast<std::int64_t>(bucket) % kPerOctave;
  const int octave =
      kFirstOctave + static_cast<int>(static_cast<std::int64_t>(bucket) / kPerOctave);
  if (quarters == 0) {
    return Nanoseconds{1} << octave;
  }
  return static_cast<Nanoseconds>(kQuarters[static_cast<std::size_t>(quarters - 1)] >>
                                  (62 - octave));
}

std::size_t StepBooks::bucket_of(Nanoseconds duration) noexcept {
  if (duration <= bound_of(0)) {
    return 0;
  }
  const int octave = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(duration))) - 1;
  auto bucket = static_cast<std::size_t>((octave - kFirstOctave) * kPerOctave);
  while (bucket < kBuckets - 1 && duration > bound_of(bucket)) {
    ++bucket;
  }
  return std::min(bucket, kBuckets - 1);
}

std::size_t StepBooks::batch_of(std::int64_t sequences) noexcept {
  const auto more = static_cast<std::uint64_t>(std::max<std::int64_t>(1, sequences) - 1);
  return std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(more)), kBatches - 1);
}

Nanoseconds StepBooks::decode_part(const StepWork& work, Nanoseconds elapsed,
                                   Nanoseconds decode) noexcept {
  if (work.prefill_tokens == 0) {
    return elapsed;
  }
  return work.decode_tokens == 0 ? 0 : std::clamp<Nanoseconds>(decode, 0, elapsed);
}

void StepBooks::observe(const StepWork& work, std::int64_t decoding, std::int64_t prompts,
                        Nanoseconds elapsed, Nanoseconds decode, Nanoseconds expected) noexcept {
  const Nanoseconds part = decode_part(work, elapsed, decode);
  if (work.decode_tokens > 0) {
    PhaseCounts& phase = phases_[kDecode];
    add(phase.steps, 1);
    add(phase.nanoseconds, part);
    add(phase.tokens, work.decode_tokens);
    add(phase.keys, work.decode_keys);
    add(phase.sequences, decoding);
    if (work.prefill_tokens == 0) {
      add_step(batches_[batch_of(decoding)], elapsed, work.decode_tokens);
      add_fit(fits_[kDecode], work.decode_tokens, work.decode_keys, elapsed, expected);
    }
  }
  if (work.prefill_tokens > 0) {
    PhaseCounts& phase = phases_[kPrefill];
    add(phase.steps, 1);
    add(phase.nanoseconds, elapsed - part);
    add(phase.tokens, work.prefill_tokens);
    add(phase.keys, work.prefill_keys);
    add(phase.sequences, prompts);
    add_fit(fits_[kPrefill], work.prefill_tokens, work.prefill_keys, elapsed - part,
            std::max<Nanoseconds>(0, expected - part));
  }
  const Mixture mixture = work.prefill_tokens == 0  ? kDecodeOnly
                          : work.decode_tokens == 0 ? kPrefillOnly
                                                    : kBoth;
  add_step(mixtures_[mixture], elapsed, work.decode_tokens + work.prefill_tokens);
  if (expected > 0) {
    add(forecast_.steps, 1);
    add(forecast_.expected, expected);
    add(forecast_.taken, elapsed);
    add(forecast_.off, expected > elapsed ? expected - elapsed : elapsed - expected);
  }
}

void StepBooks::waited(Waited what, Nanoseconds elapsed) noexcept {
  add(waited_[what], elapsed);
}

void StepBooks::preempted(Preempted why) noexcept {
  add(preemptions_[why], 1);
}

}  // namespace kvledger
