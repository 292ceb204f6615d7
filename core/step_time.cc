#include "core/step_time.h"

#include <algorithm>
#include <numeric>

namespace kvledger {
namespace {

// What a sample still counts after the next one: about a hundred of them make the fit.
constexpr double kDecay = 0.99;
// Share of the newest sample in the scale. What takes longer is believed sooner than what takes
// less.
constexpr double kNewestSlower = 0.5;
constexpr double kNewestFaster = 0.1;
// Rounds over the weights with each sample; they begin where the last ones ended.
constexpr int kRounds = 8;
// Keeps the weight of keys near zero until so many have been read that they matter: while contexts
// are short, what looks like their price is the machine getting slower.
constexpr double kKeysRidge = 0.1;
// Keeps a weight where it is while its feature has not been seen.
constexpr double kLeastProduct = 1e-12;
// Samples after which an outlier can be told, and how far off it is.
constexpr std::int64_t kTrusted = 8;
constexpr double kOutlier = 3.0;

// Of a step that is worth it, its own time over the fixed part.
constexpr double kWorthwhile = 4.0;

// Features of about one: weights of similar size converge together.
constexpr double kTokens = 1.0 / 16;
constexpr double kKeys = 1.0 / 16384;
constexpr double kMilliseconds = 1e-6;

constexpr std::size_t kKeysFeature = 2;

// What cannot be told apart yet goes to the first feature: a step of decoding takes its time for
// whatever it has, and a prompt for its tokens, so that neither is expected to be cheaper than it
// is.
FittedTime::Features decode_features(std::int64_t tokens, std::int64_t keys) noexcept {
  return {1.0, static_cast<double>(tokens) * kTokens, static_cast<double>(keys) * kKeys};
}

FittedTime::Features prefill_features(std::int64_t tokens, std::int64_t keys) noexcept {
  return {static_cast<double>(tokens) * kTokens, 1.0, static_cast<double>(keys) * kKeys};
}

}  // namespace

void FittedTime::add(const Features& features, double value) noexcept {
  const double expected = predict(features);
  const double told = samples_ >= kTrusted && expected > 0.0  //
                          ? std::min(value, kOutlier * expected)
                          : value;
  ++samples_;
  // By its size, so that an error counts for its share: small steps matter as much as large ones.
  const double size = std::reduce(features.begin(), features.end());
  for (std::size_t i = 0; i < features.size(); ++i) {
    for (std::size_t j = 0; j < features.size(); ++j) {
      products_[i][j] = kDecay * products_[i][j] + features[i] / size * features[j] / size;
    }
    values_[i] = kDecay * values_[i] + features[i] / size * told / size;
  }
  fit();
  if (samples_ > kTrusted && fitted(features) > 0.0) {
    const double ratio = std::clamp(told / fitted(features), 1 / kOutlier, kOutlier);
    scale_ += (ratio > scale_ ? kNewestSlower : kNewestFaster) * (ratio - scale_);
  }
}

void FittedTime::fit() noexcept {
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (products_[i][i] < kLeastProduct) {
        continue;
      }
      double rest = values_[i];
      for (std::size_t j = 0; j < weights_.size(); ++j) {
        rest -= j == i ? 0.0 : products_[i][j] * weights_[j];
      }
      const double ridge = i == kKeysFeature ? kKeysRidge : 0.0;
      weights_[i] = std::max(0.0, rest / (products_[i][i] + ridge));
    }
  }
}

double FittedTime::fitted(const Features& features) const noexcept {
  double sum = 0.0;
  for (std::size_t i = 0; i < features.size(); ++i) {
    sum += weights_[i] * features[i];
  }
  return sum;
}

void StepTimeModel::observe(const StepWork& work, Nanoseconds elapsed) noexcept {
  const double total = static_cast<double>(std::max<Nanoseconds>(0, elapsed)) * kMilliseconds;
  const auto decode = decode_features(work.decode_tokens, work.decode_keys);
  if (work.prefill_tokens == 0) {
    if (work.decode_tokens > 0) {
      decode_.add(decode, total);
      since_decode_ = 0;
    }
    return;
  }
  since_decode_ += work.decode_tokens > 0 ? 1 : 0;
  largest_chunk_ = std::max(largest_chunk_, work.prefill_tokens);
  const double rest = std::max(0.0, total - decode_.predict(decode));
  prefill_.add(prefill_features(work.prefill_tokens, work.prefill_keys), rest);
}

Nanoseconds StepTimeModel::decode_time(std::int64_t tokens, std::int64_t keys) const noexcept {
  return static_cast<Nanoseconds>(decode_.predict(decode_features(tokens, keys)) / kMilliseconds);
}

std::int64_t StepTimeModel::worthwhile(std::int64_t most) const noexcept {
  const double none = prefill_.predict(prefill_features(0, 0));
  const double one = prefill_.predict(prefill_features(1, 0)) - none;
  if (none <= 0.0 || one <= 0.0) {
    return 0;
  }
  return static_cast<std::int64_t>(std::min(static_cast<double>(most), kWorthwhile * none / one));
}

std::int64_t StepTimeModel::prefill_like(std::int64_t tokens,
                                         std::int64_t computed) const noexcept {
  const double time = prefill_.predict(prefill_features(tokens, keys_of_chunk(0, tokens)));
  if (time <= 0.0) {
    return tokens;
  }
  std::int64_t fits = 0;
  std::int64_t too_many = tokens + 1;
  while (too_many - fits > 1) {
    const std::int64_t middle = fits + (too_many - fits) / 2;
    const double taken =
        prefill_.predict(prefill_features(middle, keys_of_chunk(computed, middle)));
    (taken <= time ? fits : too_many) = middle;
  }
  return fits;
}

double StepTimeModel::cost_of(std::int64_t tokens, std::int64_t computed) const noexcept {
  const std::int64_t keys = keys_of_chunk(computed, tokens);
  const bool is_known = prefill_.predict(prefill_features(1, 1)) > 0.0;
  if (tokens == 0 || is_known) {
    return tokens == 0 ? 0.0 : prefill_.predict(prefill_features(tokens, keys));
  }
  return static_cast<double>(tokens) * kTokens + static_cast<double>(keys) * kKeys;
}

Nanoseconds StepTimeModel::expected(const StepWork& work) const noexcept {
  double sum = 0.0;
  if (work.decode_tokens > 0) {
    const double decode = decode_.predict(decode_features(work.decode_tokens, work.decode_keys));
    if (decode <= 0.0) {
      return 0;
    }
    sum += decode;
  }
  if (work.prefill_tokens > 0) {
    const double prefill =
        prefill_.predict(prefill_features(work.prefill_tokens, work.prefill_keys));
    if (prefill <= 0.0) {
      return 0;
    }
    sum += prefill;
  }
  return static_cast<Nanoseconds>(sum / kMilliseconds);
}

std::int64_t StepTimeModel::prefill_within(Nanoseconds room, std::int64_t computed,
                                           std::int64_t most) const noexcept {
  const double limit = static_cast<double>(room) * kMilliseconds;
  std::int64_t fits = 0;
  std::int64_t too_many = std::min(most, 2 * largest_chunk_) + 1;
  while (too_many - fits > 1) {  // the time grows with the tokens
    const std::int64_t tokens = fits + (too_many - fits) / 2;
    const double time = prefill_.predict(prefill_features(tokens, keys_of_chunk(computed, tokens)));
    (time <= limit ? fits : too_many) = tokens;
  }
  return fits;
}

}  // namespace kvledger
