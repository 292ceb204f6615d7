// Sixteen floats in whatever registers the instruction set has: one zmm, two ymm, or an array that
// the compiler vectorizes as it can.
//
// The kernels are written once against these types and compiled once for each instruction set,
// inside namespace KVL_ISA. To keep code for one instruction set out of programs running on
// another, everything here has internal linkage and nothing includes the standard library's
// templates: an inline function that two translation units share could be linked from the wrong
// one.
//
//   F32      16 floats          U32      16 dwords, for packed weights and bf16 pairs
//   Lanes    which of the 16, as a comparison finds them
//
// Lanes are ordered as in memory. `reduce_*` combine lanes in a fixed order. fma(a, b, c) is
// a * b + c rounded once, except in the portable build on machines without it.

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(KVL_ISA_AVX512)
#define KVL_ISA avx512
#elif defined(KVL_ISA_AVX2)
#define KVL_ISA avx2
#else
#define KVL_ISA portable
#endif

#define KVL_INLINE static inline __attribute__((always_inline))

#if defined(KVL_ISA_AVX512)
#include "core/cpu/isa/vec_avx512.h"
#elif defined(KVL_ISA_AVX2)
#include "core/cpu/isa/vec_avx2.h"
#else
#include "core/cpu/isa/vec_portable.h"
#endif

namespace kvledger::cpu::KVL_ISA {

// Numbers<0, 1, ..., n - 1> as a type, to instantiate a template for each; std::index_sequence
// without the standard library.
template <int... kNumbers>
struct Numbers {};
template <int kCount, int... kNumbers>
struct Count : Count<kCount - 1, kCount - 1, kNumbers...> {};
template <int... kNumbers>
struct Count<0, kNumbers...> {
  using Type = Numbers<kNumbers...>;
};

// The same pointer, but where registers are few the compiler does not know that it is the same: it
// loads again what the pointer leads to, and keeps in registers what is added to.
template <class T>
KVL_INLINE const T* again(const T* p) {
  if (kFewRegisters) {
    __asm__("" : "+r"(p));
  }
  return p;
}

// e^x for every lane, within 2 units in the last place; x below -87.3 gives a value below 1.3e-38,
// above 88.3 one above 2e38. Range reduction by ln 2 in two parts and a polynomial of degree 6
// (the Taylor coefficients: on [-ln2/2, ln2/2] their error is below 2^-26).
KVL_INLINE F32 exp(F32 x) {
  x = min(max(x, splat(-87.33654F)), splat(88.37626F));
  const F32 n = round(mul(x, splat(1.44269504F)));
  F32 r = fma(n, splat(-0.693359375F), x);
  r = fma(n, splat(2.12194440e-4F), r);
  F32 p = splat(1.0F / 720.0F);
  p = fma(p, r, splat(1.0F / 120.0F));
  p = fma(p, r, splat(1.0F / 24.0F));
  p = fma(p, r, splat(1.0F / 6.0F));
  p = fma(p, r, splat(0.5F));
  p = fma(p, mul(r, r), r);
  p = add(p, splat(1.0F));
  return scale_by_power_of_two(p, n);
}

}  // namespace kvledger::cpu::KVL_ISA
