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
#if defined(__AVX512F__)
#include "simd_avx512.h"
#else
#include "simd_parts.h"
#endif

namespace MP_ISA {

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
inline f32x16 rounded_to<bf16>(f32x16 x) { return rounded_to_bf16(x); }

// x rounded to T, stored as such or as the float of the same value.
template <class T, class Out>
inline void store_as(Out* p, f32x16 x) {
    if constexpr (sizeof(Out) == sizeof(T)) store(p, x);
    else store(p, rounded_to<T>(x));
}
template <class T, class Out>
inline void store_as(Out* p, f32x16 x, int64_t n) {
    if constexpr (sizeof(Out) == sizeof(T)) store(p, x, n);
    else store(p, rounded_to<T>(x), n);
}

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
