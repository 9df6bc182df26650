// Decode attention in bf16 for one query token with 1 to 8 query heads per kv head: straight from the rows of the cache,
// without a packed tile in between. Each chain is the one that `product` runs on the tile, bit for bit. More rows share one
// packed tile. Not used where the accumulators would not stay in registers.
//
// A tile of 64 keys is taken for all kv heads of a unit at once, keys and then values, in the order in which memory has them:
// blocks of the cache are [heads][slots][head_dim], so that the same slots of all heads form one run of 32 KiB (8 heads of
// 128, 16 slots), which the hardware's prefetchers follow.
#pragma once
#include "softmax.h"
#include "tile_rows.h"

namespace MP_ISA {

constexpr int DOTS = REGISTER_VECTORS;          // vectors of 16 keys side by side
constexpr int FETCH_PIECES = REGISTER_VECTORS;  // measured: 2 on Zen 5, 1 on Zen 3

struct FewTile {
    const TileRows *rows, *next;  // next: the tile after this one, or null
    int64_t heads, key_head_bytes, value_head_bytes, dim;
    int run;  // keys of one head that lie together: 16, 32 or 64
    float log2_scale;
    const char* q;  // [heads * R][dim]
    State state;    // of heads * R rows
    float* scores;  // [heads * R][64]
    Left<bf16>* p;  // [heads * R][64]
    float* scale;   // [heads * R], rounded up to 16
};

// Fetches lines in the order in which the tile reads them, some pieces (a run of one head) ahead of it and on into the next
// tile; one line at a time, since requests faster than memory answers wait for each other. Into L1: on Zen 5 3 to 10 %
// faster than into L2. Reading shuffled runs of 32 KiB is bound to about 70 % of what memory gives in order, of 4 KiB to 50 %.
struct FewFetch {
    struct Lines {
        const char *at, *stop;
    };
    const FewTile& t;
    int64_t pieces, index = FETCH_PIECES;  // of the keys, and as many of the values
    const char *const *row = nullptr, *const *end = nullptr;
    int64_t offset;
    Lines lines;

    explicit FewFetch(const FewTile& tile) : t(tile), pieces(ceil_div(tile.rows->count, tile.run) * tile.heads) { enter(), lines = next(); }
    void enter() {  // the piece `index`
        const bool here = index < 2 * pieces, value = here && index >= pieces;
        const int64_t i = here ? (value ? index - pieces : index) : index - 2 * pieces;
        const TileRows* rows = here ? t.rows : t.next;
        const int64_t first = i / t.heads * t.run;
        if (!rows || index >= 2 * pieces + FETCH_PIECES || first >= rows->count) {  // nothing left
            row = end = nullptr;
            return;
        }
        row = rows->row + (value ? TILE : 0) + first;
        end = row + min_of<int64_t>(t.run, rows->count - first);
        offset = i % t.heads * (value ? t.value_head_bytes : t.key_head_bytes);
    }
    // Rows that lie one behind the other. Where nothing is left, the same lines again and again.
    __attribute__((noinline)) Lines next() {
        if (row == end && row) index++, enter();
        if (!row) return {zero_row, zero_row + sizeof zero_row};
        const char *at = *row + offset, *stop = at + 2 * t.dim;
        for (row++; row != end && *row + offset == stop; row++) stop += 2 * t.dim;
        return {at, stop};
    }
    void line(Lines& l) {  // a copy of `lines`, which can live in registers
        prefetch_l1(l.at);
        if (REGISTER_VECTORS == 1) prefetch_l2(l.at + 4096);  // Zen 3 drops requests when it is busy: each line gets two
        l.at += 64;
        if (l.at == l.stop) l = next();
    }
    void rest() {
        while (row) line(lines);
    }
};

// Scores of 16 keys of one head with R query rows.
struct FewDots {
    const char* const* keys;
    int64_t offset;  // bytes from the rows of the first head
    const char* q;   // [R][words]
    float* scores;   // [R][64]
};

// V of them side by side: on AVX-512, R chains alone would wait for their own results.
template <int R, int V>
inline void few_dots(const FewDots* d, int64_t words, FewFetch& fetch) {
    f32x16 acc[V][R];
    for (int v = 0; v < V; v++)
        for (int r = 0; r < R; r++) acc[v][r] = splat(0.0f);
    FewFetch::Lines lines = fetch.lines;
    for (int64_t k = 0; k < words; k += 4) {
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            const FourWords t = transpose_16x4(d[v].keys, d[v].offset + 4 * k);
#pragma GCC unroll 8
            for (int w = 0; w < 4; w++) {
#pragma GCC unroll 2
                for (int f = FACTORS<bf16> - 1; f >= 0; f--) {
                    const u32x16 right = factor<bf16>(t.word[w], f);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++)
                        acc[v][r] = multiply_add<bf16>(acc[v][r], load_word(d[v].q + LEFT_BYTES<bf16> * (r * words + k + w) + 4 * f), right);
                }
                fetch.line(lines);
            }
        }
    }
    fetch.lines = lines;
    for (int v = 0; v < V; v++)
        for (int r = 0; r < R; r++) store(d[v].scores + r * TILE, acc[v][r]);
}

// o[r] = o[r] * scale[r] + p[r] V for some keys of one head, the first of which is even. p [R][64], o [R][columns].
template <int R, int V>
inline void few_sums(const Left<bf16>* p, const char* const* values, int64_t offset, int count, const float* scale, float* o,
                     int64_t columns, FewFetch& fetch) {
    for (int64_t c = 0; c < columns; c += V * LANES) {
        f32x16 acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                acc[r][v] = load(o + r * columns + c + v * LANES);
                if (scale) acc[r][v] = acc[r][v] * splat(scale[r]);
            }
        FewFetch::Lines lines = fetch.lines;
        for (int k = 0; k < count; k += 2) {
            const bf16* a = (const bf16*)(values[k] + offset) + c;
            const bf16* b = (const bf16*)(k + 1 < count ? values[k + 1] + offset : zero_row) + c;
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                const u32x16 w = pairs_of(a + v * LANES, b + v * LANES);
#pragma GCC unroll 2
                for (int f = FACTORS<bf16> - 1; f >= 0; f--) {
                    const u32x16 right = factor<bf16>(w, f);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) acc[r][v] = multiply_add<bf16>(acc[r][v], load_word(p + r * TILE + k + f), right);
                }
                fetch.line(lines);
            }
        }
        fetch.lines = lines;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(o + r * columns + c + v * LANES, acc[r][v]);
    }
}

// The whole tile: the query sees all of its keys.
template <int R>
void few_tile(const FewTile& t) {
    const int64_t words = t.dim / 2, count = t.rows->count;
    FewFetch fetch(t);
    FewDots dots[DOTS];
    int waiting = 0;
    for (int64_t first = 0; first < count; first += t.run)
        for (int64_t h = 0; h < t.heads; h++)
            for (int64_t i = first; i < min_of(count, first + t.run); i += LANES) {
                dots[waiting++] = {t.rows->row + i, h * t.key_head_bytes, t.q + h * R * words * LEFT_BYTES<bf16>, t.scores + h * R * TILE + i};
                if (waiting == DOTS) few_dots<R, DOTS>(dots, words, fetch), waiting = 0;
            }
    if (waiting) few_dots<R, 1>(dots, words, fetch);

    int visible[LANES];
    for (int i = 0; i < LANES; i++) visible[i] = (int)count;
    for (int64_t r = 0; r < t.heads * R; r += LANES)
        soften<bf16>(t.scores + r * TILE, (int)min_of<int64_t>(LANES, t.heads * R - r), visible, t.log2_scale,
                     t.state.from(r, t.dim), t.p + r * TILE, t.scale + r);

    for (int64_t first = 0; first < count; first += t.run)
        for (int64_t h = 0; h < t.heads; h++) {
            const int n = (int)min_of<int64_t>(t.run, count - first);
            // As many as accumulators allow (a power of two); all of a row of 128 at once reads it in order.
            constexpr int MOST = REGISTER_ROWS * REGISTER_VECTORS / R, V = MOST >= 4 ? 4 : MOST >= 2 ? 2 : 1;
            const auto sums = t.dim % 128 == 0 && MOST >= 8 ? few_sums<R, MOST >= 8 ? 8 : V> : few_sums<R, V>;
            sums(t.p + h * R * TILE + first, t.rows->row + TILE + first, h * t.value_head_bytes, n,
                 first == 0 ? t.scale + h * R : nullptr, t.state.o + h * R * t.dim, t.dim, fetch);
        }
    fetch.rest();
}

// R as a constant, 1 to 8.
inline void few_tile(const FewTile& t, int64_t rows) {
    typedef void (*Function)(const FewTile&);
    static const Function table[] = {few_tile<1>, few_tile<2>, few_tile<3>, few_tile<4>,
                                     few_tile<5>, few_tile<6>, few_tile<7>, few_tile<8>};
    if (rows >= 1 && rows <= FEW_ROWS) table[rows - 1](t);
}

}  // namespace MP_ISA
