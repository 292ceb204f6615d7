// F32 and U32 in two AVX2 registers; see vec.h. Needs avx2, fma, f16c.

#pragma once

#include <immintrin.h>

namespace kvledger::cpu::KVL_ISA {

// As in vec_avx512.h; of sixteen registers twelve hold six sums, three are for what is multiplied.
#if defined(KVL_FEW_INSTANCES)
constexpr int kRowsMax = 4;
#else
constexpr int kRowsMax = 6;
#endif
constexpr int kSumsMax = 6;
constexpr int kWeightVectors = 1;
constexpr bool kFewRegisters = true;

struct F32 {
  __m256 a, b;
};
struct U32 {
  __m256i a, b;
};

KVL_INLINE F32 zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
KVL_INLINE F32 splat(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
KVL_INLINE F32 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
// All bits set in the lanes below `count`, which may be negative or above 8.
KVL_INLINE __m256i mask_first(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
KVL_INLINE F32 load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, mask_first(count)),
          _mm256_maskload_ps(p + 8, mask_first(count - 8))};
}
KVL_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
KVL_INLINE F32 add(F32 x, F32 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
KVL_INLINE F32 sub(F32 x, F32 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
KVL_INLINE F32 mul(F32 x, F32 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
KVL_INLINE F32 div(F32 x, F32 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
KVL_INLINE F32 fma(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
KVL_INLINE F32 max(F32 x, F32 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
KVL_INLINE F32 min(F32 x, F32 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
KVL_INLINE F32 round(F32 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
KVL_INLINE __m256 scale_half(__m256 x, __m256 n) {
  // In two steps: 2^n itself may lie outside the range of floats.
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i first = _mm256_srai_epi32(whole, 1);
  const __m256i second = _mm256_sub_epi32(whole, first);
  const __m256i bias = _mm256_set1_epi32(127);
  const auto power = [bias](__m256i k) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, bias), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(x, power(first)), power(second));
}
KVL_INLINE F32 scale_by_power_of_two(F32 x, F32 n) {
  return {scale_half(x.a, n.a), scale_half(x.b, n.b)};
}
KVL_INLINE F32 select_first(int count, F32 x, F32 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(mask_first(count))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(mask_first(count - 8)))};
}
struct Lanes {
  __m256 a, b;
};
KVL_INLINE Lanes no_lanes() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
KVL_INLINE Lanes equal(F32 x, F32 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
KVL_INLINE Lanes unordered(F32 x, F32 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q)};
}
KVL_INLINE Lanes either(Lanes x, Lanes y) {
  return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)};
}
KVL_INLINE uint32_t bits(Lanes x) {
  return static_cast<uint32_t>(_mm256_movemask_ps(x.a)) |
         static_cast<uint32_t>(_mm256_movemask_ps(x.b)) << 8;
}
KVL_INLINE float reduce_max(F32 x) {
  const __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
KVL_INLINE float reduce_add(F32 x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}

KVL_INLINE U32 load(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
KVL_INLINE U32 load_first(const uint32_t* p, int count) {
  const int* q = reinterpret_cast<const int*>(p);
  return {_mm256_maskload_epi32(q, mask_first(count)),
          _mm256_maskload_epi32(q + 8, mask_first(count - 8))};
}
KVL_INLINE F32 bf16_low(U32 x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
KVL_INLINE F32 bf16_high(U32 x) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
KVL_INLINE __m128i load_halves(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
KVL_INLINE F32 load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p + 8)), 16))};
}
KVL_INLINE F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_halves(p)), _mm256_cvtph_ps(load_halves(p + 8))};
}
KVL_INLINE __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
KVL_INLINE void store_bf16(uint16_t* p, F32 x) {
  // The pack works within each half of the register; the permutation undoes it.
  const __m256i packed = _mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
template <int index>
KVL_INLINE F32 nibble(U32 x) {
  const __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 4 * index), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 4 * index), mask))};
}
template <int index>
KVL_INLINE F32 signed_byte(U32 x) {
  constexpr int kUp = 24 - 8 * index;
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.a, kUp), 24)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.b, kUp), 24))};
}

KVL_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace kvledger::cpu::KVL_ISA
