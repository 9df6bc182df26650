// The one matrix product behind linear layers and attention, and the tile layout it reads.
//
// A "word" is 32 bits: one float, or two neighbouring bf16. A tile holds columns side by side, word by word:
// tile[k][column], so that one vector load gives the k-th word of 16 columns. An output element is ONE register that
// runs over k upwards. Nothing here ever splits or reorders k: this is what makes results independent of the batch.
#pragma once
#include "packed.h"
#include "simd.h"

namespace MP_ISA {

template <class T>
constexpr int WORD = 4 / sizeof(T);  // elements per word

constexpr int MAX_ROWS = 12;    // rows that one call of `product` takes
constexpr int MAX_VECTORS = 8;  // vectors of 16 columns that it takes

// A product of two bf16 pairs is one instruction (dpbf16) where the machine has it. Elsewhere the left operand is kept in
// float32, the right one is widened as it is read, and a pair is two fused multiply-adds. The bits are the same:
// fma(even, fma(odd, acc)).
#if defined(__AVX512BF16__)
template <class T>
using Left = T;
#else
template <class T>
using Left = float;
#endif
template <class T>
constexpr int FACTORS = WORD<T> * sizeof(Left<T>) / 4;  // multiply-adds per word
template <class T>
constexpr int LEFT_BYTES = 4 * FACTORS<T>;  // of the left operand, per word of the right one

template <class T>
inline void copy_left(const T* from, int64_t n, Left<T>* to) {
    int64_t i = 0;
    if constexpr (sizeof(Left<T>) == sizeof(T)) memcpy(to, from, n * sizeof(T));
    else {
        for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
        for (; i < n; i++) to[i] = to_float(from[i]);
    }
}
// What factor f of 16 words multiplies.
template <class T>
inline u32x16 factor(u32x16 words, int f) {
    if constexpr (FACTORS<T> == 1) return words;
    else return f == 0 ? words << 16 : words & splat_word(0xffff0000u);
}
template <class T>
inline f32x16 multiply_add(f32x16 acc, uint32_t left, u32x16 right) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) return dot_pairs(acc, splat_word(left), right);
#endif
    return add_product(acc, splat(float_of(left)), as_floats(right));
}

// out[r][c] gets the chain x[r][0] * tile[0][c] + x[r][1] * tile[1][c] + ..., that
//   SET: starts from 0;
//   START: starts from out[r][c] * scale[r];
//   ADD: starts from 0 and is added, once finished, to out[r][c] * scale[r].
enum Into { SET, START, ADD };
struct Product {
    const char* x;         // row-major, LEFT_BYTES for each word of the tile
    int64_t x_stride;      // bytes
    const uint32_t* tile;
    int64_t tile_stride;   // words from k to k + 1
    int64_t pair_stride;   // words from two vectors of columns to the next two
    int64_t steps;         // words
    float* out;
    int64_t out_stride;    // floats
    Into into;
    const float* scale;
};

// Where vector v of a word begins.
inline int64_t vector_at(const Product& a, int v) { return v / 2 * a.pair_stride + v % 2 * LANES; }

// What to fetch into the cache meanwhile: `step` runs once per word of the sum and two vectors.
struct NothingAhead {
    void step() {}
};
struct TileAhead {  // `half` = 64: two lines, as fast as 32 columns are read; less for blocks of rows that share the work
    const char *line, *end, *next;  // goes on at `next` once it has reached `end`, if that is not null
    int64_t half;
    void step() {
        prefetch_l2(line), prefetch_l2(line + half), line += 2 * half;
        if (line == end) line = next;
    }
};
// The same for products that read a tile in several passes, or share the work: at most one line per word. Each is asked for
// twice, since Zen 3 drops requests when it is busy (2 to 12 % faster with up to 12 rows).
struct LineAhead {
    const char *line, *end, *next;
    int64_t bytes;
    void step() {
        prefetch_l1(line), prefetch_l2(line + 4096), line += bytes;
        if (line >= end) line = next;
    }
};

// How `product` goes about R rows and V vectors: in passes over the tile whose accumulators stay in registers.
constexpr int row_passes(int rows) { return (rows + REGISTER_ROWS - 1) / REGISTER_ROWS; }
constexpr int passes(int rows, int vectors) {
    const int r = (rows + row_passes(rows) - 1) / row_passes(rows);
    return row_passes(rows) * (r * vectors <= REGISTER_ROWS * REGISTER_VECTORS ? 1 : 2);
}

template <class T, int R, int V, class Ahead>
void product(const Product& a, Ahead& ahead) {
    if constexpr (R > REGISTER_ROWS) {
        constexpr int FIRST = (R + row_passes(R) - 1) / row_passes(R);
        product<T, FIRST, V>(a, ahead);
        Product b = a;
        b.x += FIRST * a.x_stride;
        b.out += FIRST * a.out_stride;
        if (a.into != SET) b.scale += FIRST;
        product<T, R - FIRST, V>(b, ahead);
    } else if constexpr (R * V > REGISTER_ROWS * REGISTER_VECTORS) {
        product<T, R, V / 2>(a, ahead);
        Product b = a;
        b.tile += vector_at(a, V / 2);
        b.out += V / 2 * LANES;
        product<T, R, V / 2>(b, ahead);
    } else {
        f32x16 acc[R][V];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                acc[r][v] = a.into == START ? load(a.out + r * a.out_stride + LANES * v) * splat(a.scale[r]) : splat(0.0f);
        const char* x[(R + 2) / 3];  // one pointer for three rows: few enough for the general registers
#pragma GCC unroll 4
        for (int i = 0; i < (R + 2) / 3; i++) x[i] = a.x + 3 * i * a.x_stride;
        const uint32_t* tile = a.tile;
        Ahead fetch = ahead;  // a copy can live in registers
        const int64_t x_stride = a.x_stride, tile_stride = a.tile_stride, pair_stride = a.pair_stride;
        for (int64_t k = a.steps; k > 0; k--) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v += 2) fetch.step();
#pragma GCC unroll 2
            for (int f = FACTORS<T> - 1; f >= 0; f--) {
                u32x16 w[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) w[v] = factor<T>(load_words(tile + v / 2 * pair_stride + v % 2 * LANES), f);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const uint32_t left = load_word(x[r / 3] + r % 3 * x_stride + 4 * f);
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) acc[r][v] = multiply_add<T>(acc[r][v], left, w[v]);
                }
            }
            tile += tile_stride;
#pragma GCC unroll 4
            for (int i = 0; i < (R + 2) / 3; i++) x[i] += LEFT_BYTES<T>;
        }
        ahead = fetch;
        if (a.into == ADD)
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) acc[r][v] = fma(load(a.out + r * a.out_stride + LANES * v), splat(a.scale[r]), acc[r][v]);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) store(a.out + r * a.out_stride + LANES * v, acc[r][v]);
    }
}

template <class T, int V, class Ahead>
inline void product_rows(int rows, const Product& a, Ahead& ahead) {
    typedef void (*Function)(const Product&, Ahead&);
    static const Function table[MAX_ROWS] = {product<T, 1, V, Ahead>,  product<T, 2, V, Ahead>,  product<T, 3, V, Ahead>,
                                             product<T, 4, V, Ahead>,  product<T, 5, V, Ahead>,  product<T, 6, V, Ahead>,
                                             product<T, 7, V, Ahead>,  product<T, 8, V, Ahead>,  product<T, 9, V, Ahead>,
                                             product<T, 10, V, Ahead>, product<T, 11, V, Ahead>, product<T, 12, V, Ahead>};
    table[rows - 1](a, ahead);
}

// Words of one chain. In bf16 there is no limit: rounding the operands hides the rounding of the sum. In float32, chains
// of fixed length are summed, which keeps the error at that of a blocked BLAS. Where they end depends on nothing.
template <class T>
constexpr int64_t CHAIN = sizeof(T) == 4 ? 32 : int64_t(1) << 40;

alignas(64) static const float ONES[MAX_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// `run`: words after which a bf16 chain stops, to go on where it was: what is read in several passes then stays in L1.
template <class T, int V, class Ahead>
inline void product_chains(int rows, Product a, Ahead& ahead, int64_t run = CHAIN<T>) {
    const int64_t steps = a.steps;
    run = min_of(run, CHAIN<T>);
    for (int64_t k = 0; k < steps; k += run) {
        a.steps = min_of(run, steps - k);
        product_rows<T, V>(rows, a, ahead);
        if (steps - k <= run) break;
        a.x += LEFT_BYTES<T> * run;
        a.tile += a.tile_stride * run;
        a.into = sizeof(T) == 4 ? ADD : START, a.scale = ONES;
    }
}

// Any number of columns that is a multiple of 16. Few rows take more columns at a time, to have chains enough in flight.
template <class T>
inline void product_columns(int rows, int64_t columns, Product a) {
    NothingAhead nothing;
    while (columns > 0) {
        const int v = columns >= 64 && rows <= 6 ? 4 : columns >= 32 ? 2 : 1;
        if (v == 4) product_chains<T, 4>(rows, a, nothing);
        else if (v == 2) product_chains<T, 2>(rows, a, nothing);
        else product_chains<T, 1>(rows, a, nothing);
        a.tile += v * LANES;
        a.out += v * LANES;
        columns -= v * LANES;
    }
}

// n rows fall into blocks of at most MAX_ROWS and nearly equal size; a short last block would waste registers.
inline int64_t block_rows(int64_t n) { return ceil_div(n, ceil_div(n, MAX_ROWS)); }

// The first `words` words of 16 rows -> tile[word][row]. `between` runs after every four words (to prefetch).
template <class Between>
inline void transpose_rows(const char* const* rows, int64_t words, uint32_t* tile, int64_t stride, Between between) {
    int64_t k = 0;
    for (; k + 4 <= words; k += 4) {
        const FourWords t = transpose_16x4(rows, 4 * k);
        for (int w = 0; w < 4; w++) store_words(tile + (k + w) * stride, t.word[w]);
        between();
    }
    for (; k < words; k++)
        for (int i = 0; i < LANES; i++) tile[k * stride + i] = load_word(rows[i] + 4 * k);
}

// Memory of one thread, reused from call to call. Only the owner grows it, before a parallel region starts.
struct Scratch {
    char* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    char* reserve(size_t bytes) {
        if (bytes > size) {
            free(data);
            size = bytes + bytes / 4;
            data = (char*)aligned_alloc(4096, round_up((int64_t)size, 4096));
            if (!data) size = 0;
        }
        return data;
    }
};

}  // namespace MP_ISA
