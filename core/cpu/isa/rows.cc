// What a model does to one row of activations between its linear layers, and a plain read of
// memory to compare with.

#include "core/cpu/isa/table.h"
#include "core/cpu/isa/vec.h"

namespace kvledger::cpu::KVL_ISA {
namespace {

constexpr int kLanes = 16;

int lanes_left(int64_t length, int64_t i) {
  return length - i < kLanes ? static_cast<int>(length - i) : kLanes;
}

KVL_INLINE F32 load_some(const float* p, int count) {
  return count == kLanes ? load(p) : load_first(p, count);
}

KVL_INLINE void store_some(float* p, F32 a, int count) {
  if (count == kLanes) {
    store(p, a);
    return;
  }
  float lanes[kLanes];
  store(lanes, a);
  memcpy(p, lanes, sizeof(float) * static_cast<size_t>(count));
}

}  // namespace

// out = x * weight / sqrt(mean(x^2) + epsilon)   (Zhang and Sennrich 2019)
void rms_norm(const float* x, const float* weight, float epsilon, int64_t length, float* out) {
  F32 squares = zero();
  for (int64_t i = 0; i < length; i += kLanes) {
    const F32 value = load_some(x + i, lanes_left(length, i));
    squares = fma(value, value, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(length);
  const F32 scale = splat(1.0F / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < length; i += kLanes) {
    const int count = lanes_left(length, i);
    const F32 value = mul(load_some(x + i, count), scale);
    store_some(out + i, mul(value, load_some(weight + i, count)), count);
  }
}

void silu_multiply(const float* gate, const float* up, int64_t length, float* out) {
  for (int64_t i = 0; i < length; i += kLanes) {
    const int count = lanes_left(length, i);
    const F32 g = load_some(gate + i, count);
    const F32 denominator = add(splat(1.0F), exp(sub(zero(), g)));
    store_some(out + i, mul(div(g, denominator), load_some(up + i, count)), count);
  }
}

uint64_t read(const void* data, int64_t bytes) {
  // Four accumulators, so that the additions do not wait for each other.
  const char* p = static_cast<const char*>(data);
  uint64_t sums[32] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 32; ++j) {
      uint64_t word;
      memcpy(&word, p + i + 8 * j, sizeof(word));
      sums[j] += word;
    }
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) {
    sum += part;
  }
  return sum;
}

}  // namespace kvledger::cpu::KVL_ISA
