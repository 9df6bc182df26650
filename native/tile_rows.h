// Where the rows of a tile lie in the paged cache, and fetching them before they are read.
#pragma once
#include "softmax.h"

namespace MP_ISA {

alignas(64) static const char zero_row[1024] = {};

// Where the keys and values of a tile lie, for the first of some heads. Keys that do not exist repeat the last one, their
// scores are masked; values that do not exist are zeros (0 * NaN is NaN).
struct TileRows {
    const char* row[2 * TILE];  // keys, then values
    int count;
    bool bad_block;
};

// Fetches the next tile into L2 while this one is packed, one line at a time. In prefill, requests from inside the products
// come out slower than from the packing loops.
struct RowsAhead {
    const char *const *row, *const *end;  // keys, and then values, which lie behind them
    const char *at, *stop;
    int64_t step, bytes;
    RowsAhead(const TileRows* next, int64_t row_bytes)
        : row(next ? next->row : nullptr), end(next ? next->row + 2 * TILE : nullptr), bytes(round_up(row_bytes, 64)) { enter(); }
    void enter() {  // nothing left: goes on fetching the same line
        at = row == end ? zero_row : *row;
        step = row == end ? 0 : 64;
        stop = row == end ? nullptr : at + bytes;
    }
    void lines(int64_t n) {
        for (; n > 0; n--) {
            prefetch_l2(at);
            at += step;
            if (at == stop) row++, enter();
        }
    }
    void rest() {
        while (step) lines(1);
    }
};

}  // namespace MP_ISA
