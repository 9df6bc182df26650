// Online softmax over tiles of 64 keys: what a query row remembers of the keys so far, and how one more tile changes it.
//   - softmax runs in log2 units: m = max(m, highest * s), e = 2^(x s - m), one polynomial for e and for rescaling;
//   - x s is rounded as m was, so that the best key has exactly 2^0, however large the scores are;
//   - masked e are exactly 0, and the sum of e keeps 16 lanes until the split ends.
// Milakov and Gimelshein 2018.
#pragma once
#include "tile.h"

namespace MP_ISA {

constexpr int TILE = 64;
constexpr float EMPTY = -1e30f;  // m of a state that has seen no key

// The running state of some query rows: m [rows], l [rows][16], o [rows][columns].
struct State {
    float *m, *l, *o;
    State from(int64_t row, int64_t columns) const { return {m + row, l + row * LANES, o + row * columns}; }
    void clear(int64_t rows, int64_t columns) {
        for (int64_t r = 0; r < rows; r++) m[r] = EMPTY;
        memset(l, 0, rows * LANES * 4);
        memset(o, 0, rows * columns * 4);
    }
};

// One tile for up to 16 rows: scores [rows][64] -> weights p [rows][64], and c[r], the factor of what o has so far.
// visible[r] = keys of the tile that row r sees, at least 1.
template <class T>
inline void soften(const float* scores, int rows, const int* visible, float log2_scale, State s, Left<T>* p, float* c) {
    alignas(64) float m[LANES], top[LANES];
    for (int i = 0; i < LANES; i++) m[i] = top[i] = EMPTY;
    for (int r = 0; r < rows; r++) {
        const float* x = scores + r * TILE;
        f32x16 high;
        if (visible[r] >= TILE) {
            high = max(max(load(x), load(x + LANES)), max(load(x + 2 * LANES), load(x + 3 * LANES)));
        } else {
            high = splat(EMPTY);
            for (int i = 0; i < visible[r]; i += LANES) high = max(high, first_or(load(x + i), min_of(LANES, visible[r] - i), splat(EMPTY)));
        }
        top[r] = highest(high);
        m[r] = s.m[r];
    }
    const f32x16 before = load(m), now = max(before, load(top) * splat(log2_scale));
    store(c, exp2(before - now));
    store(m, now);

    for (int r = 0; r < rows; r++) {
        const float* x = scores + r * TILE;
        f32x16 e[TILE / LANES];
        for (int v = 0; v < TILE / LANES; v++) e[v] = exp2(load(x + LANES * v) * splat(log2_scale) - splat(m[r]));
        for (int v = 0; visible[r] < TILE && v < TILE / LANES; v++)
            e[v] = first_or(e[v], min_of(LANES, max_of(0, visible[r] - LANES * v)), splat(0.0f));
        for (int v = 0; v < TILE / LANES; v++) store_as<T>(p + r * TILE + LANES * v, e[v]);
        s.m[r] = m[r];
        store(s.l + r * LANES, fma(load(s.l + r * LANES), splat(c[r]), (e[0] + e[1]) + (e[2] + e[3])));
    }
}

}  // namespace MP_ISA
