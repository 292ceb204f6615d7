// F32 and U32 for machines without AVX2; see vec.h.

#pragma once

namespace kvledger::cpu::KVL_ISA {

constexpr int kRowsMax = 4;
constexpr int kSumsMax = 8;
constexpr int kWeightVectors = 1;
constexpr bool kFewRegisters = false;

// Vector types of the compiler (GCC and Clang), wider than any register of the target: the compiler
// splits them.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

struct F32 {
  Floats v;
};
struct U32 {
  Words v;
};

KVL_INLINE Floats as_floats(Words bits) {
  return reinterpret_cast<Floats>(bits);
}
KVL_INLINE Words as_words(Floats x) {
  return reinterpret_cast<Words>(x);
}
KVL_INLINE Ints lanes() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

KVL_INLINE F32 zero() {
  return {Floats{}};
}
KVL_INLINE F32 splat(float x) {
  return {Floats{} + x};
}
KVL_INLINE F32 load(const float* p) {
  F32 a;
  memcpy(&a.v, p, sizeof(a.v));
  return a;
}
KVL_INLINE F32 load_first(const float* p, int count) {
  F32 a = zero();
  for (int i = 0; i < count; ++i) {
    a.v[i] = p[i];
  }
  return a;
}
KVL_INLINE void store(float* p, F32 a) {
  memcpy(p, &a.v, sizeof(a.v));
}
KVL_INLINE F32 add(F32 a, F32 b) {
  return {a.v + b.v};
}
KVL_INLINE F32 sub(F32 a, F32 b) {
  return {a.v - b.v};
}
KVL_INLINE F32 mul(F32 a, F32 b) {
  return {a.v * b.v};
}
KVL_INLINE F32 div(F32 a, F32 b) {
  return {a.v / b.v};
}
KVL_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {a.v * b.v + c.v};
}
KVL_INLINE F32 max(F32 a, F32 b) {
  return {a.v > b.v ? a.v : b.v};
}
KVL_INLINE F32 min(F32 a, F32 b) {
  return {a.v < b.v ? a.v : b.v};
}
KVL_INLINE F32 round(F32 a) {
  // Adding and taking away 1.5 x 2^23 leaves no place for a fraction; for |a| below 2^22.
  const Floats shifted = a.v + 12582912.0F;
  return {shifted - 12582912.0F};
}
KVL_INLINE F32 scale_by_power_of_two(F32 a, F32 n) {
  // In two steps: 2^n itself may lie outside the range of floats.
  const Ints whole = __builtin_convertvector(n.v, Ints);
  const Ints first = whole >> 1;
  const Ints second = whole - first;
  return {a.v * reinterpret_cast<Floats>((first + 127) << 23) *
          reinterpret_cast<Floats>((second + 127) << 23)};
}
KVL_INLINE F32 select_first(int count, F32 a, F32 b) {
  return {lanes() < count ? a.v : b.v};
}
struct Lanes {
  Ints v;
};
KVL_INLINE Lanes no_lanes() {
  return {Ints{}};
}
KVL_INLINE Lanes equal(F32 a, F32 b) {
  return {a.v == b.v};
}
KVL_INLINE Lanes unordered(F32 a, F32 b) {
  return {(a.v != a.v) | (b.v != b.v)};
}
KVL_INLINE Lanes either(Lanes a, Lanes b) {
  return {a.v | b.v};
}
KVL_INLINE uint32_t bits(Lanes a) {
  uint32_t found = 0;
  for (int i = 0; i < 16; ++i) {
    found |= static_cast<uint32_t>(a.v[i] & 1) << i;
  }
  return found;
}
KVL_INLINE float reduce_max(F32 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    }
  }
  return a.v[0];
}
KVL_INLINE float reduce_add(F32 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      a.v[i] += a.v[i + width];
    }
  }
  return a.v[0];
}

KVL_INLINE U32 load(const uint32_t* p) {
  U32 a;
  memcpy(&a.v, p, sizeof(a.v));
  return a;
}
KVL_INLINE U32 load_first(const uint32_t* p, int count) {
  U32 a = {Words{}};
  for (int i = 0; i < count; ++i) {
    a.v[i] = p[i];
  }
  return a;
}
KVL_INLINE F32 bf16_low(U32 a) {
  return {as_floats(a.v << 16)};
}
KVL_INLINE F32 bf16_high(U32 a) {
  return {as_floats(a.v & 0xffff0000U)};
}
KVL_INLINE F32 load_bf16(const uint16_t* p) {
  Words bits;
  for (int i = 0; i < 16; ++i) {
    bits[i] = p[i];
  }
  return {as_floats(bits << 16)};
}
KVL_INLINE F32 load_f16(const uint16_t* p) {
  Words half;
  for (int i = 0; i < 16; ++i) {
    half[i] = p[i];
  }
  const Words sign = (half & 0x8000U) << 16;
  const Words exponent = half >> 10 & 0x1fU;
  const Words fraction = half & 0x3ffU;
  const Words normal = (exponent + 112) << 23 | fraction << 13;
  const Words not_finite = (Words{} + 0x7f800000U) | fraction << 13;
  // Subnormal: fraction x 2^-24, exact in f32.
  const Words subnormal = as_words(__builtin_convertvector(fraction, Floats) * 0x1p-24F);
  const Words magnitude = exponent == 0U ? subnormal : (exponent == 0x1fU ? not_finite : normal);
  return {as_floats(sign | magnitude)};
}
KVL_INLINE void store_bf16(uint16_t* p, F32 a) {
  const Words bits = as_words(a.v);
  const Words rounded = bits + 0x7fffU + (bits >> 16 & 1U);
  const Words kept = a.v != a.v ? bits | 0x00400000U : rounded;
  for (int i = 0; i < 16; ++i) {
    p[i] = static_cast<uint16_t>(kept[i] >> 16);
  }
}
template <int index>
KVL_INLINE F32 nibble(U32 a) {
  return {__builtin_convertvector(a.v >> (4 * index) & 15U, Floats)};
}
template <int index>
KVL_INLINE F32 signed_byte(U32 a) {
  const Ints shifted = reinterpret_cast<Ints>(a.v << (24 - 8 * index));
  return {__builtin_convertvector(shifted >> 24, Floats)};
}

KVL_INLINE void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}

}  // namespace kvledger::cpu::KVL_ISA
