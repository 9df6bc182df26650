// Sixteen lanes in one register of AVX-512. See simd.h.
#pragma once
#include "scalar.h"

namespace MP_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
struct FourWords {
    u32x16 word[4];
};
constexpr int REGISTER_ROWS = 12, REGISTER_VECTORS = 2;  // 24 accumulators + operands in 32 registers
constexpr int FEW_ROWS = 8;                              // see few_rows.h

inline f32x16 splat(float x) { return _mm512_set1_ps(x); }
inline u32x16 splat_word(uint32_t x) { return (u32x16)_mm512_set1_epi32((int)x); }
inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline u32x16 load_words(const uint32_t* p) { return (u32x16)_mm512_loadu_si512(p); }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x); }
inline void store_words(uint32_t* p, u32x16 x) { _mm512_storeu_si512(p, (__m512i)x); }
inline f32x16 as_floats(u32x16 x) { return (f32x16)x; }
inline u32x16 as_words(f32x16 x) { return (u32x16)x; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32x16 add_product(f32x16 acc, f32x16 a, f32x16 b) { return fma(a, b, acc); }
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }  // b if either is NaN
inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }

inline __mmask16 first(int64_t n) { return (__mmask16)((1u << n) - 1); }
inline f32x16 first_or(f32x16 x, int64_t n, f32x16 other) { return _mm512_mask_mov_ps(other, first(n), x); }
inline f32x16 load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, f32x16 x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

inline f32x16 widen(__m256i x) { return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
inline f32x16 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline f32x16 load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }

inline __m256i narrow(f32x16 x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i u = (__m512i)x;
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}
inline f32x16 rounded_to_bf16(f32x16 x) { return widen(narrow(x)); }
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store(bf16* p, f32x16 x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

inline float highest(f32x16 x) { return _mm512_reduce_max_ps(x); }

#if defined(__AVX512BF16__)
// acc + the sum of the two products of each bf16 pair: fma(even, fma(odd, acc)), denormals flushed.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) { return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b); }
#endif

// Four words of each of 16 rows -> four vectors, lane i from row i.
inline FourWords transpose_16x4(const char* const* rows, int64_t offset) {
    __m512i r[4];
    for (int i = 0; i < 4; i++) {  // lane group g of r[i] = row i + 4 g
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(rows[i] + offset)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, _mm_loadu_si128((const __m128i*)(rows[i + 4] + offset)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, _mm_loadu_si128((const __m128i*)(rows[i + 8] + offset)));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, _mm_loadu_si128((const __m128i*)(rows[i + 12] + offset)));
    }
    __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    // Lane 4 g + i of each now holds row i + 4 g: already in row order.
    return {{(u32x16)_mm512_unpacklo_epi64(a, c), (u32x16)_mm512_unpackhi_epi64(a, c), (u32x16)_mm512_unpacklo_epi64(b, d),
             (u32x16)_mm512_unpackhi_epi64(b, d)}};
}

inline u32x16 pairs_of(const bf16* a, const bf16* b) {  // lane i: the pair (a[i], b[i])
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return (u32x16)_mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

}  // namespace MP_ISA
