// Sixteen float lanes, whatever the machine has underneath.
//
// Every kernel is written once, on f32x16 and u32x16. AVX-512 holds one in a register; AVX2, NEON and SSE2 hold it as
// two or four parts. The lanes are the same everywhere, so sums over lanes are too, and results agree bit for bit
// between all instruction sets that have a fused multiply-add.
//
// This file is compiled once per instruction set with different flags. Everything lives in namespace MP_ISA and no
// inline function of the standard library is used: the linker would merge such copies and could keep one that this CPU
// cannot run.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace MP_ISA {

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

template <class A>
inline A min_of(A a, A b) { return a < b ? a : b; }
template <class A>
inline A max_of(A a, A b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
inline uint32_t load_word(const void* p) { uint32_t u; memcpy(&u, p, 4); return u; }
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// dpbf16 flushes denormals whatever the mode; with this the plain multiply-add of the other paths does so as well.
struct FlushDenormals {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(saved | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        asm volatile("msr fpcr, %0" ::"r"(saved | (1u << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

#if defined(__AVX512F__)
// ---------------------------------------------------------------------------------------------------- one register
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
struct FourWords {
    u32x16 word[4];
};
constexpr int REGISTER_ROWS = 12, REGISTER_VECTORS = 2;  // 24 accumulators + operands in 32 registers

inline f32x16 splat(float x) { return _mm512_set1_ps(x); }
inline u32x16 splat_word(uint32_t x) { return (u32x16)_mm512_set1_epi32((int)x); }
inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline u32x16 load_words(const uint32_t* p) { return (u32x16)_mm512_loadu_si512(p); }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x); }
inline void store_words(uint32_t* p, u32x16 x) { _mm512_storeu_si512(p, (__m512i)x); }
inline f32x16 as_floats(u32x16 x) { return (f32x16)x; }
inline u32x16 as_words(f32x16 x) { return (u32x16)x; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
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
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline void store(bf16* p, f32x16 x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

inline float highest(f32x16 x) { return _mm512_reduce_max_ps(x); }

// acc + sum of the two products of each bf16 pair: fma(even, fma(odd, acc)), denormals flushed.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
    const u32x16 high = splat_word(0xffff0000u);
    acc = fma(as_floats(a & high), as_floats(b & high), acc);
    return fma(as_floats(a << 16), as_floats(b << 16), acc);
#endif
}

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

#else
// ------------------------------------------------------------------------------- several smaller registers per value
#if defined(__AVX2__)
constexpr int PART_BYTES = 32;
#else
constexpr int PART_BYTES = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES;
constexpr int REGISTER_ROWS = 4, REGISTER_VECTORS = 1;
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
inline u32x16 operator<<(u32x16 a, int n) { MP_EACH_PART a.p[i] <<= n; return a; }
inline f32x16 splat(float x) { f32x16 r; MP_EACH_PART r.p[i] = x - fpart{}; return r; }
inline u32x16 splat_word(uint32_t x) { u32x16 r; MP_EACH_PART r.p[i] = x + upart{}; return r; }
inline f32x16 load(const float* p) { f32x16 r; memcpy(&r, p, 64); return r; }
inline u32x16 load_words(const uint32_t* p) { u32x16 r; memcpy(&r, p, 64); return r; }
inline void store(float* p, f32x16 x) { memcpy(p, &x, 64); }
inline void store_words(uint32_t* p, u32x16 x) { memcpy(p, &x, 64); }
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
inline f32x16 max(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i]; return a; }
inline f32x16 min(f32x16 a, f32x16 b) { MP_EACH_PART a.p[i] = a.p[i] < b.p[i] ? a.p[i] : b.p[i]; return a; }

inline f32x16 first_or(f32x16 x, int64_t n, f32x16 other) {
    float a[LANES], b[LANES];
    store(a, x);
    store(b, other);
    for (int i = 0; i < LANES; i++) a[i] = i < n ? a[i] : b[i];
    return load(a);
}
inline f32x16 load(const float* p, int64_t n) { float t[LANES] = {}; memcpy(t, p, 4 * n); return load(t); }
inline void store(float* p, f32x16 x, int64_t n) { float t[LANES]; store(t, x); memcpy(p, t, 4 * n); }
inline f32x16 load(const bf16* p) {
    float t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = to_float(p[i]);
    return load(t);
}
inline f32x16 load(const bf16* p, int64_t n) { bf16 t[LANES] = {}; memcpy(t, p, 2 * n); return load(t); }
inline void store(bf16* p, f32x16 x) {
    uint32_t t[LANES];
    store_words(t, as_words(x));
    for (int i = 0; i < LANES; i++) {
        bool nan = (t[i] & 0x7fffffffu) > 0x7f800000u;
        p[i].bits = uint16_t((nan ? t[i] | 0x400000u : t[i] + 0x7fffu + ((t[i] >> 16) & 1)) >> 16);
    }
}
inline void store(bf16* p, f32x16 x, int64_t n) { bf16 t[LANES]; store(t, x); memcpy(p, t, 2 * n); }
inline float highest(f32x16 x) {
    float t[LANES];
    store(t, x);
    for (int i = 1; i < LANES; i++) t[0] = t[0] > t[i] ? t[0] : t[i];
    return t[0];
}
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
    MP_EACH_PART {
        const upart high = 0xffff0000u + upart{};
        acc.p[i] = fma((fpart)(a.p[i] & high), (fpart)(b.p[i] & high), acc.p[i]);
        acc.p[i] = fma((fpart)(a.p[i] << 16), (fpart)(b.p[i] << 16), acc.p[i]);
    }
    return acc;
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

// ------------------------------------------------------------------------------------------ the same on every machine

inline void interleave(const bf16* a, const bf16* b, int64_t n, uint32_t* out) {  // out[i] = the pair (a[i], b[i])
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_words(out + i, pairs_of(a + i, b + i));
    for (; i < n; i++) out[i] = a[i].bits | uint32_t(b[i].bits) << 16;
}

// Sum of the lanes by a fixed tree: (i) + (i + 8), then + 4, + 2, + 1.
inline float sum(f32x16 x) {
    float t[LANES];
    store(t, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

template <class T>
inline f32x16 rounded_to(f32x16 x);  // as if stored as T and loaded again
template <>
inline f32x16 rounded_to<float>(f32x16 x) { return x; }
template <>
inline f32x16 rounded_to<bf16>(f32x16 x) { bf16 t[LANES]; store(t, x); return load(t); }

// 2^n for whole-numbered n in [-127, 127]; -127 gives 0.
inline f32x16 two_to_whole(f32x16 n_plus_magic) { return as_floats((as_words(n_plus_magic) + splat_word(127)) << 23); }

// 2^x for x up to 127, relative error below 2e-7, and exactly 1 at 0: "rescale by 2^0" and "skip" then give the same bits.
// What is below 2^-126 becomes 0, given FlushDenormals.
inline f32x16 exp2(f32x16 x) {
#if defined(__AVX512F__)
    const f32x16 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - whole;
#else
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
    x = min(splat(127.0f), max(splat(-127.0f), x));
    const f32x16 rounded = x + magic, f = x - (rounded - magic);
#endif
    f32x16 y = splat(0.00015353361959569156f);
    y = fma(y, f, splat(0.0013398875016719103f));
    y = fma(y, f, splat(0.00961843691766262f));
    y = fma(y, f, splat(0.055503323674201965f));
    y = fma(y, f, splat(0.24022647738456726f));
    y = fma(y, f, splat(0.6931471824645996f));
    y = fma(y, f, splat(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(y, whole);
#else
    return y * two_to_whole(rounded);
#endif
}

// e^x with the reduction in two steps, for large arguments.
inline f32x16 exp(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);
    x = min(splat(88.0f), max(splat(-88.0f), x));
    f32x16 rounded = fma(x, splat(1.4426950408889634f), magic), n = rounded - magic;
    f32x16 f = fma(n, splat(-0.693359375f), x);
    f = fma(n, splat(2.12194440e-4f), f);
    f32x16 y = splat(0.001381461275741458f);
    y = fma(y, f, splat(0.008368710055947304f));
    y = fma(y, f, splat(0.04166838899254799f));
    y = fma(y, f, splat(0.1666652113199234f));
    y = fma(y, f, splat(0.4999999403953552f));
    y = fma(y, f, splat(1.0f));
    return fma(y, f, splat(1.0f)) * two_to_whole(rounded);
}

inline f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exp(-x)); }

}  // namespace MP_ISA
