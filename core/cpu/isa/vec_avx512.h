// F32 and U32 in one AVX-512 register; see vec.h. Needs avx512f, avx512bw, avx512dq, avx512vl.

#pragma once

#include <immintrin.h>

namespace kvledger::cpu::KVL_ISA {

// Rows whose partial results a kernel keeps in registers at once (each number of them up to it is
// an instance of the kernels' templates), how many F32 hold such results, and vectors of weights.
#if defined(KVL_FEW_INSTANCES)
constexpr int kRowsMax = 4;
#else
constexpr int kRowsMax = 12;
#endif
constexpr int kSumsMax = 24;
constexpr int kWeightVectors = 2;
constexpr bool kFewRegisters = false;

struct F32 {
  __m512 v;
};
struct U32 {
  __m512i v;
};

KVL_INLINE F32 zero() {
  return {_mm512_setzero_ps()};
}
KVL_INLINE F32 splat(float x) {
  return {_mm512_set1_ps(x)};
}
KVL_INLINE F32 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
// The first `count` lanes, 1 to 16, from memory; the others are 0 and are not read.
KVL_INLINE F32 load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1U), p)};
}
KVL_INLINE void store(float* p, F32 a) {
  _mm512_storeu_ps(p, a.v);
}
KVL_INLINE F32 add(F32 a, F32 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
KVL_INLINE F32 sub(F32 a, F32 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
KVL_INLINE F32 mul(F32 a, F32 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
KVL_INLINE F32 div(F32 a, F32 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
KVL_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
KVL_INLINE F32 max(F32 a, F32 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
KVL_INLINE F32 min(F32 a, F32 b) {
  return {_mm512_min_ps(a.v, b.v)};
}
KVL_INLINE F32 round(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for whole n.
KVL_INLINE F32 scale_by_power_of_two(F32 a, F32 n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// Lanes below `count` from a, the others from b.
KVL_INLINE F32 select_first(int count, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1U << count) - 1U), b.v, a.v)};
}
// Which lanes a comparison holds in.
using Lanes = __mmask16;
KVL_INLINE Lanes no_lanes() {
  return 0;
}
KVL_INLINE Lanes equal(F32 a, F32 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ);
}
// Where a or b is NaN.
KVL_INLINE Lanes unordered(F32 a, F32 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q);
}
KVL_INLINE Lanes either(Lanes a, Lanes b) {
  return static_cast<Lanes>(a | b);
}
// One bit for each lane, the first lane's lowest.
KVL_INLINE uint32_t bits(Lanes a) {
  return a;
}
KVL_INLINE float reduce_max(F32 a) {
  return _mm512_reduce_max_ps(a.v);
}
KVL_INLINE float reduce_add(F32 a) {
  return _mm512_reduce_add_ps(a.v);
}

KVL_INLINE U32 load(const uint32_t* p) {
  return {_mm512_loadu_si512(p)};
}
KVL_INLINE U32 load_first(const uint32_t* p, int count) {
  return {_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << count) - 1U), p)};
}
// bf16 in the low and in the high half of every dword.
KVL_INLINE F32 bf16_low(U32 a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))};
}
KVL_INLINE F32 bf16_high(U32 a) {
  return {
      _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
}
// Sixteen consecutive bf16 or f16.
KVL_INLINE F32 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
KVL_INLINE F32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Rounds to the nearest bf16, ties to even; NaN stays NaN.
KVL_INLINE void store_bf16(uint16_t* p, F32 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
// The 4-bit number at bit 4 * index of every dword, as a float.
template <int index>
KVL_INLINE F32 nibble(U32 a) {
  // The permutation reads only the low four bits of each lane.
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(a.v, 4 * index), numbers)};
}
// The signed byte at bit 8 * index of every dword, as a float.
template <int index>
KVL_INLINE F32 signed_byte(U32 a) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * index), 24))};
}

KVL_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace kvledger::cpu::KVL_ISA
