// Linear layers on packed weights: y = act(norm(x) W^T + bias) + residual.
//
// Threads share out panels and never a sum. Everything after the product happens in float32 and is rounded once.
#pragma once
#include "norm.h"
#include "weights.h"

namespace MP_ISA {

// From float32 sums of one panel, [rows][stride], to results: bias, SiLU-mul, residual, one rounding.
template <class Out>
inline void finish(const mp_linear* a, const float* sums, int64_t stride, int64_t first_row, int64_t rows, int64_t panel) {
    const mp_weight& w = *a->weight;
    const float* bias = w.bias ? w.bias + panel * PANEL : nullptr;
    for (int64_t r = 0; r < rows; r++, sums += stride) {
        Out* out = (Out*)a->out + (first_row + r) * a->out_stride;
        const Out* residual = a->residual ? (const Out*)a->residual + (first_row + r) * a->residual_stride : nullptr;
        f32x16 y[2] = {load(sums), load(sums + LANES)};
        if (bias) y[0] = y[0] + load(bias), y[1] = y[1] + load(bias + LANES);
        if (w.gated) y[0] = silu(y[0]) * y[1];
        for (int v = 0; v < (w.gated ? 1 : 2); v++) {
            const int64_t column = panel * panel_outputs(w) + v * LANES;
            const int64_t n = min_of<int64_t>(LANES, outputs(w) - column);
            if (n == LANES) {
                store(out + column, residual ? y[v] + load(residual + column) : y[v]);
            } else if (n > 0) {
                store(out + column, residual ? y[v] + load(residual + column, n) : y[v], n);
            }
        }
    }
}

// Bytes between fetching a panel into L2 and reading it. Measured with 8 rows: on Zen 4 4 KiB is 15 % slower, 16 and 32 KiB
// are no better; on Zen 5 4 and 16 KiB are 5 % slower.
constexpr int64_t FETCH_DISTANCE = 8192;

template <class T>
int linear(const mp_linear* a) {
    if (a->rows == 0) return MP_OK;
    static thread_local Scratch scratch;
    const mp_weight& w = *a->weight;
    const int64_t words = words_of(w), panel_words = words * PANEL, panel_bytes = 4 * panel_words;
    const int64_t rows = a->rows, block = block_rows(rows), blocks = ceil_div(rows, block);

    // The rows that the products read: x itself if nothing is in the way, else a prepared copy. Rows a multiple of 4 KiB
    // apart would all fall into the same sets of the L1 cache, so copies lie 64 bytes further apart.
    int64_t x_stride = a->x_stride * (int64_t)sizeof(T);
    const char* x = (const char*)a->x;
    const bool copy = a->norm_weight || w.in_features % WORD<T> || sizeof(Left<T>) != sizeof(T) || (rows > 1 && x_stride % 4096 == 0);
    if (copy) {
        x_stride = round_up(LEFT_BYTES<T> * words, 64);
        if (x_stride % 4096 == 0) x_stride += 64;
        x = scratch.reserve(rows * x_stride);
        if (!x) return MP_OUT_OF_MEMORY;
    }

    // A task is some neighbouring panels for all rows: memory is read fastest in long runs. They are taken one by one, each
    // for all blocks of rows; or, where the rows do not fit into L2 (1 MiB on current servers), several at a time, so that
    // a block of rows is used again while it is in L1. Small tasks keep the threads level.
    const int64_t all_panels = panels(w);
    const bool many = rows * x_stride > 256 * 1024 && blocks > 1;
    // Two gated panels share the cache lines that they write: two threads would wait for each other.
    const int64_t even = w.gated ? 2 : 1, wanted = many ? max_of(even, 256 * 1024 / panel_bytes / even * even) : 8;
    const int64_t group = max_of<int64_t>(1, min_of(wanted, all_panels / (4 * a->threads)));
    const int64_t chunk = many ? group : 1;

    int64_t next = 0;

#pragma omp parallel num_threads(a->threads)
    {
        FlushDenormals flush;
        if (copy) {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                const T* from = (const T*)a->x + r * a->x_stride;
                Left<T>* to = (Left<T>*)(x + r * x_stride);
                if (a->norm_weight) rms_norm_row(from, w.in_features, (const T*)a->norm_weight, a->eps, to);
                else copy_left(from, w.in_features, to);
                for (int64_t k = w.in_features; k < words * WORD<T>; k++) to[k] = {};
            }
        }
        alignas(64) float sums[MAX_ROWS * PANEL];
        const auto panel = [&](int64_t p) { return (const char*)w.data + p * panel_bytes; };
        const auto results = [&](int64_t stride, int64_t first, int64_t n, int64_t p, const float* from) {
            if (a->out_type == MP_BF16) finish<bf16>(a, from, stride, first, n, p);
            else finish<float>(a, from, stride, first, n, p);
        };
        const auto take = [&] { return min_of(all_panels, group * __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)); };
        // What is read next is fetched into L2 meanwhile, across tasks: each thread knows its next one in advance.
        for (int64_t task = take(), following; task < all_panels; task = following) {
            following = take();
            const int64_t end = min_of(all_panels, task + group);
            int64_t from = task;
            // Four panels side by side are four streams for the hardware's prefetchers: with one row a third faster than one
            // stream where memory gives 80 GB/s (Zen 5), as fast where it gives 45. Fetching by hand brings nothing here. Where
            // registers hold two rows of one vector only, two rows go the other way (Zen 3: 15 % faster).
            for (; rows <= REGISTER_VECTORS && from + 4 <= end; from += 4) {
                NothingAhead nothing;
                product_chains<T, 8>((int)rows, {x, x_stride, (const uint32_t*)panel(from), PANEL, panel_words, words, sums, 4 * PANEL, SET, nullptr}, nothing);
                for (int i = 0; i < 4; i++) results(4 * PANEL, 0, rows, from + i, sums + i * PANEL);
            }
            for (; from < end; from += chunk) {
                const char* soon = panel(min_of(from + chunk < end ? from + chunk : following, all_panels - 1));
                for (int64_t b = 0; b < blocks; b++) {
                    const int64_t first = b * block, n = min_of(block, rows - first);
                    for (int64_t p = from; p < min_of(end, from + chunk); p++) {
                        const char* here = panel(p);
                        const Product product = {x + first * x_stride, x_stride, (const uint32_t*)here, PANEL, PANEL, words, sums, PANEL, SET, nullptr};
                        constexpr int64_t RUN = 32;  // 4 KiB of a panel: with 64, 2 to 8 % slower on Zen 3
                        const char* share = soon + (b * chunk + p - from) * panel_bytes / blocks;  // of several blocks
                        const int turns = (int)blocks * passes((int)n, 2);
                        if (REGISTER_VECTORS == 1 && turns > 1) {
                            LineAhead ahead = {here + 4 * PANEL * RUN, here + panel_bytes, soon, ceil_div(128, turns)};
                            if (blocks > 1) ahead.line = share, ahead.end = (const char*)UINTPTR_MAX;
                            product_chains<T, 2>((int)n, product, ahead, blocks > 1 ? words : RUN);
                        } else {
                            TileAhead ahead = {here + FETCH_DISTANCE, here + panel_bytes, soon, 64};
                            if (blocks > 1) ahead = {share, nullptr, nullptr, ceil_div(64, blocks)};
                            product_chains<T, 2>((int)n, product, ahead);
                        }
                        results(PANEL, first, n, p, sums);
                    }
                }
            }
        }
    }
    return MP_OK;
}

}  // namespace MP_ISA
