// The two products of decode attention in bf16, for the one to four query rows of a kv head: straight from the rows of
// the cache, without a packed tile in between. Each chain is the one that `product` runs on the tile, bit for bit.
// More rows share one packed tile. Not used where the accumulators would not stay in registers.
#pragma once
#include "tile.h"

namespace MP_ISA {

constexpr int FEW_ROWS = REGISTER_ROWS > 4 ? 4 : 0;

template <int N>
struct Constant {
    static constexpr int value = N;
};

// scores[r][i] = q[r] . keys[i] for the first `count` keys, rounded up to whole vectors. q [R][words], scores [R][stride].
template <int R, class Ahead>
inline void few_dots(const char* q, const char* const* keys, int64_t words, int count, float* scores, int stride, Ahead& ahead) {
    for (int i = 0; i < count; i += LANES) {
        f32x16 acc[R];
        for (int r = 0; r < R; r++) acc[r] = splat(0.0f);
        for (int64_t k = 0; k < words; k += 4) {
            alignas(64) uint32_t t[4 * LANES];
            transpose_16x4(keys + i, 4 * k, t, LANES);
#pragma GCC unroll 4
            for (int w = 0; w < 4; w++) {
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    acc[r] = multiply_add<bf16>(acc[r], load_word(q + 4 * (r * words + k + w)), load_words(t + w * LANES));
                ahead.lines(1);
            }
        }
        for (int r = 0; r < R; r++) store(scores + r * stride + i, acc[r]);
    }
}

// o[r] = o[r] * scale[r] + p[r] V over the first `count` keys, rounded up to pairs. p [R][stride], o [R][columns].
template <int R, class Ahead>
inline void few_sums(const bf16* p, int stride, const char* const* values, int count, const float* scale, float* o,
                     int64_t columns, Ahead& ahead) {
    constexpr int V = 4;
    for (int64_t c = 0; c < columns; c += V * LANES) {
        f32x16 acc[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] = load(o + r * columns + c + v * LANES) * splat(scale[r]);
        for (int k = 0; k < count; k += 2) {
            const bf16 *a = (const bf16*)values[k] + c, *b = (const bf16*)values[k + 1] + c;
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const u32x16 w = pairs_of(a + v * LANES, b + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) acc[r][v] = multiply_add<bf16>(acc[r][v], load_word(p + r * stride + k), w);
                ahead.lines(1);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(o + r * columns + c + v * LANES, acc[r][v]);
    }
}

// Calls f with `rows` as a constant, 1 to 4.
template <class F>
inline void with_few(int rows, F f) {
    if (rows == 1) f(Constant<1>());
    else if (rows == 2) f(Constant<2>());
    else if (rows == 3) f(Constant<3>());
    else f(Constant<4>());
}

}  // namespace MP_ISA
