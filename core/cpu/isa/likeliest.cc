// The place of a row's largest float, with one look at the row's memory.

#include "core/cpu/isa/table.h"
#include "core/cpu/isa/vec.h"

namespace kvledger::cpu::KVL_ISA {
namespace {

constexpr int kLanes = 16;
// Floats of which only the largest is found at first, not its place. A second look at the one part
// that has it finds the place, while that part is still in the nearest cache.
constexpr int64_t kPart = 1024;
// Floats that are fetched ahead, also from the row that follows: the processor's own fetching ends
// at each page.
constexpr int64_t kAhead = 768;

KVL_INLINE F32 load_some(const float* p, int64_t count) {
  if (count >= kLanes) {
    return load(p);
  }
  const int some = static_cast<int>(count);
  return select_first(some, load_first(p, some), splat(-__builtin_inff()));
}

// The largest of a part; `strange` gets the lanes that hold NaN in any of its vectors.
KVL_INLINE float largest(const float* x, int64_t length, Lanes* strange) {
  // Four of each, so that no comparison waits for the one before.
  F32 a = splat(-__builtin_inff());
  F32 b = a;
  F32 c = a;
  F32 d = a;
  int64_t i = 0;
  for (; i + 4 * kLanes <= length; i += 4 * kLanes) {
    for (int64_t ahead = i + kAhead; ahead < i + kAhead + 4 * kLanes; ahead += kLanes) {
      prefetch(x + ahead);
    }
    const F32 p = load(x + i);
    const F32 q = load(x + i + kLanes);
    const F32 r = load(x + i + 2 * kLanes);
    const F32 s = load(x + i + 3 * kLanes);
    // max() forgets a NaN that comes before a number.
    *strange = either(*strange, either(unordered(p, q), unordered(r, s)));
    a = max(a, p);
    b = max(b, q);
    c = max(c, r);
    d = max(d, s);
  }
  for (; i < length; i += kLanes) {
    const F32 p = load_some(x + i, length - i);
    *strange = either(*strange, unordered(p, p));
    a = max(a, p);
  }
  return reduce_max(max(max(a, b), max(c, d)));
}

}  // namespace

int32_t likeliest(const float* x, int64_t length) {
  Lanes strange = no_lanes();
  float best = -__builtin_inff();
  int64_t best_part = 0;
  for (int64_t part = 0; part < length; part += kPart) {
    const int64_t left = length - part;
    const float found = largest(x + part, left < kPart ? left : kPart, &strange);
    if (found > best) {  // not equal: the first of equals is the one
      best = found;
      best_part = part;
    }
  }
  if (bits(strange) != 0 || __builtin_isfinite(best) == 0) {
    return -1;
  }
  const F32 wanted = splat(best);
  for (int64_t i = best_part; i < length; i += kLanes) {
    const uint32_t places = bits(equal(load_some(x + i, length - i), wanted));
    if (places != 0) {
      return static_cast<int32_t>(i + __builtin_ctz(places));
    }
  }
  return -1;
}

}  // namespace kvledger::cpu::KVL_ISA
