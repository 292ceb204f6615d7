// The naive definitions that every kernel is compared with. They accumulate in double, so that a
// difference is the kernel's rounding and not theirs.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/kv_format.h"

namespace kvledger::testing {

// Numbers that differ between libraries' distributions must not decide whether a test passes.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  // From 0 to `count` - 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  // From -1 to 1.
  float uniform() { return static_cast<float>(static_cast<double>(next() >> 11) * 0x1p-52 - 1.0); }

 private:
  std::uint64_t state_;
};

inline std::vector<float> random_floats(Random& random, std::int64_t count, float scale) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    value = scale * random.uniform();
  }
  return values;
}

// Nearest bf16, ties to even, as a float.
inline float rounded_to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fffU + (bits >> 16 & 1U);
  bits &= 0xffff0000U;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

inline float stored_as(KvFormat format, float value) {
  return format == KvFormat::kBf16 ? rounded_to_bf16(value) : value;
}

// softmax(scale q . K^T) V for one query over `keys` keys, each [head_dim].
inline std::vector<double> attention(const float* query, const std::vector<const float*>& keys,
                                     const std::vector<const float*>& values, int head_dim,
                                     float scale) {
  std::vector<double> scores(keys.size());
  double highest = -INFINITY;
  for (std::size_t k = 0; k < keys.size(); ++k) {
    double score = 0;
    for (int d = 0; d < head_dim; ++d) {
      score += static_cast<double>(query[d]) * keys[k][d];
    }
    scores[k] = score * scale;
    highest = std::max(highest, scores[k]);
  }
  double sum = 0;
  std::vector<double> out(static_cast<std::size_t>(head_dim), 0.0);
  for (std::size_t k = 0; k < keys.size(); ++k) {
    const double weight = std::exp(scores[k] - highest);
    sum += weight;
    for (int d = 0; d < head_dim; ++d) {
      out[static_cast<std::size_t>(d)] += weight * values[k][d];
    }
  }
  for (double& value : out) {
    value /= sum;
  }
  return out;
}

}  // namespace kvledger::testing
