// Sixteen lanes in several registers: two of AVX2, four of NEON or SSE2. See simd.h. Arithmetic is written once, on vectors
// that the compiler knows; what moves lanes or bits has its own form for AVX2 and plain loops for the others.
#pragma once
#include "scalar.h"

namespace MP_ISA {

#if defined(__AVX2__)
constexpr int PART_BYTES = 32;
constexpr int REGISTER_ROWS = 6, REGISTER_VECTORS = 1;  // 12 accumulators + operands in 16 registers
constexpr int FEW_ROWS = 4;                             // see few_rows.h
#elif defined(__aarch64__)
constexpr int PART_BYTES = 16;
constexpr int REGISTER_ROWS = 6, REGISTER_VECTORS = 1;  // 24 in 32
constexpr int FEW_ROWS = 0;
#else
constexpr int PART_BYTES = 16;
constexpr int REGISTER_ROWS = 2, REGISTER_VECTORS = 1;  // 8 in 16
constexpr int FEW_ROWS = 0;
#endif
constexpr int PARTS = 64 / PART_BYTES, PART_LANES = PART_BYTES / 4;
typedef float fpart __attribute__((vector_size(PART_BYTES)));
typedef uint32_t upart __attribute__((vector_size(PART_BYTES)));
typedef int32_t ipart __attribute__((vector_size(PART_BYTES)));
struct f32x16 {
    fpart p[PARTS];
};
struct u32x16 {
    upart p[PARTS];
};
struct FourWords {
    u32x16 word[4];
};
#define MP_EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

inline f32x16 operator+(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] += b.p[i]; return a; }
inline f32x16 operator-(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] -= b.p[i]; return a; }
inline f32x16 operator*(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] *= b.p[i]; return a; }
inline f32x16 operator/(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] /= b.p[i]; return a; }
inline f32x16 operator-(f32x16 a) { MP_EACH_PART a.p[i] = -a.p[i]; return a; }
inline u32x16 operator+(u32x16 a, u32x16 b) { MP_EACH_PART a.p[i] += b.p[i]; return a; }
inline u32x16 operator&(u32x16 a, u32x16 b) { MP_EACH_PART a.p[i] &= b.p[i]; return a; }
inline u32x16 operator<<(u32x16 a, int n) { MP_EACH_PART a.p[i] <<= n; return a; }
inline f32x16 splat(float x) { f32x16 r; MP_EACH_PART r.p[i] = x - fpart{}; return r; }
inline u32x16 splat_word(uint32_t x) { u32x16 r; MP_EACH_PART r.p[i] = x + upart{}; return r; }
// Part by part: a value that is copied whole goes through the stack.
inline f32x16 load(const float* p) { f32x16 r; MP_EACH_PART memcpy(&r.p[i], p + i * PART_LANES, PART_BYTES); return r; }
inline u32x16 load_words(const uint32_t* p) { u32x16 r; MP_EACH_PART memcpy(&r.p[i], p + i * PART_LANES, PART_BYTES); return r; }
inline void store(float* p, f32x16 x) { MP_EACH_PART memcpy(p + i * PART_LANES, &x.p[i], PART_BYTES); }
inline void store_words(uint32_t* p, u32x16 x) { MP_EACH_PART memcpy(p + i * PART_LANES, &x.p[i], PART_BYTES); }
inline f32x16 as_floats(u32x16 x) { f32x16 r; MP_EACH_PART r.p[i] = (fpart)x.p[i]; return r; }
inline u32x16 as_words(f32x16 x) { u32x16 r; MP_EACH_PART r.p[i] = (upart)x.p[i]; return r; }

inline fpart fma(fpart a, fpart b, fpart c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (fpart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;  // no fused instruction: correct, but not the bits of the other paths
#endif
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { MP_EACH_PART a.p[i] = fma(a.p[i], b.p[i], c.p[i]); return a; }
// The same for long sums: written so that the sum stays in its register. Left to itself, GCC 12 moves sums around and then
// has too few of the 16 registers (a third slower).
inline f32x16 add_product(f32x16 acc, f32x16 a, f32x16 b) {
#if defined(__FMA__)
    MP_EACH_PART asm("vfmadd231ps %2, %1, %0" : "+x"(acc.p[i]) : "x"(a.p[i]), "x"(b.p[i]));
    return acc;
#else
    return fma(a, b, acc);
#endif
}
inline fpart max(fpart a, fpart b) {  // b if either is NaN
#if defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
inline fpart min(fpart a, fpart b) {
#if defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}
inline f32x16 max(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] = max(a.p[i], b.p[i]); return a; }
inline f32x16 min(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] = min(a.p[i], b.p[i]); return a; }

inline upart bf16_bits(fpart x) {  // in the upper half: to nearest, ties to even; NaN stays NaN
    const upart u = (upart)x;
    return x != x ? u | 0x400000 : u + ((u >> 16) & 1) + 0x7fff;
}
inline f32x16 rounded_to_bf16(f32x16 x) { MP_EACH_PART x.p[i] = (fpart)(bf16_bits(x.p[i]) & 0xffff0000u); return x; }

inline f32x16 first_or(f32x16 x, int64_t n, f32x16 other) {
    alignas(64) static const int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    MP_EACH_PART {
        ipart index;
        memcpy(&index, lane + i * PART_LANES, PART_BYTES);
        x.p[i] = index < (int32_t)n + ipart{} ? x.p[i] : other.p[i];
    }
    return x;
}
inline f32x16 load(const float* p, int64_t n) { float t[LANES] = {}; memcpy(t, p, 4 * n); return load(t); }
inline void store(float* p, f32x16 x, int64_t n) { float t[LANES]; store(t, x); memcpy(p, t, 4 * n); }

#if defined(__AVX2__)
// -------------------------------------------------------------------------------------------------------------- AVX2
inline f32x16 load(const bf16* p) {
    f32x16 r;
    MP_EACH_PART r.p[i] = (fpart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8 * i))), 16);
    return r;
}
inline void store(bf16* p, f32x16 x) {
    // The packing instruction takes turns between halves of its operands; the permutation puts lanes in order again.
    const __m256i packed = _mm256_packus_epi32((__m256i)(bf16_bits(x.p[0]) >> 16), (__m256i)(bf16_bits(x.p[1]) >> 16));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline float highest(f32x16 x) {
    const __m256 eight = _mm256_max_ps(x.p[0], x.p[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Four words of each of 16 rows -> four vectors, lane i from row i.
inline FourWords transpose_16x4(const char* const* rows, int64_t offset) {
    FourWords t;
    MP_EACH_PART {
        __m256i r[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {  // lane group g of r[j] = row j + 4 g of the part
            const __m128i low = _mm_loadu_si128((const __m128i*)(rows[8 * i + j] + offset));
            r[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i*)(rows[8 * i + j + 4] + offset)), 1);
        }
        const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
        const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
        t.word[0].p[i] = (upart)_mm256_unpacklo_epi64(a, c), t.word[1].p[i] = (upart)_mm256_unpackhi_epi64(a, c);
        t.word[2].p[i] = (upart)_mm256_unpacklo_epi64(b, d), t.word[3].p[i] = (upart)_mm256_unpackhi_epi64(b, d);
    }
    return t;
}
inline u32x16 pairs_of(const bf16* a, const bf16* b) {  // lane i: the pair (a[i], b[i])
    const __m256i x = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)a), 0xd8);
    const __m256i y = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)b), 0xd8);
    return {{(upart)_mm256_unpacklo_epi16(x, y), (upart)_mm256_unpackhi_epi16(x, y)}};
}
#else
// ------------------------------------------------------------------------------------------------------ NEON and SSE2
inline f32x16 load(const bf16* p) {
    float t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = to_float(p[i]);
    return load(t);
}
inline void store(bf16* p, f32x16 x) {
    uint32_t t[LANES];
    store_words(t, as_words(rounded_to_bf16(x)));
    for (int i = 0; i < LANES; i++) p[i].bits = uint16_t(t[i] >> 16);
}
inline float highest(f32x16 x) {
    float t[LANES];
    store(t, x);
    for (int i = 1; i < LANES; i++) t[0] = t[0] > t[i] ? t[0] : t[i];
    return t[0];
}
inline FourWords transpose_16x4(const char* const* rows, int64_t offset) {
    uint32_t t[4][LANES];
    for (int i = 0; i < LANES; i++)
        for (int w = 0; w < 4; w++) t[w][i] = load_word(rows[i] + offset + 4 * w);
    return {{load_words(t[0]), load_words(t[1]), load_words(t[2]), load_words(t[3])}};
}
inline u32x16 pairs_of(const bf16* a, const bf16* b) {
    uint32_t t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = a[i].bits | uint32_t(b[i].bits) << 16;
    return load_words(t);
}
#endif
inline f32x16 load(const bf16* p, int64_t n) { bf16 t[LANES] = {}; memcpy(t, p, 2 * n); return load(t); }
inline void store(bf16* p, f32x16 x, int64_t n) { bf16 t[LANES]; store(t, x); memcpy(p, t, 2 * n); }

}  // namespace MP_ISA
