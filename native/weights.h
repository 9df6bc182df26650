// Packed weights (packed.h): each panel is a tile as tile.h multiplies it.
#pragma once
#include "tile.h"

namespace MP_ISA {

// The row of the weight that is column c of panel p, or -1 for padding.
inline int64_t source_row(const mp_weight& w, int64_t p, int64_t c) {
    const int64_t half = PANEL / 2, row = p * panel_outputs(w) + (w.gated ? c % half : c);
    return row >= outputs(w) ? -1 : w.gated && c >= half ? outputs(w) + row : row;
}

template <class T>
int pack(const mp_pack* a) {
    const mp_weight& w = *a->weight;
    const int64_t words = words_of(w), whole = w.in_features / WORD<T>;
    char* zeros = (char*)calloc(w.in_features, sizeof(T));
    if (!zeros) return MP_OUT_OF_MEMORY;
#pragma omp parallel for num_threads(a->threads) schedule(static)
    for (int64_t p = 0; p < panels(w); p++) {
        uint32_t* tile = (uint32_t*)w.data + p * words * PANEL;
        const char* rows[PANEL];
        for (int64_t c = 0; c < PANEL; c++) {
            const int64_t row = source_row(w, p, c);
            rows[c] = row < 0 ? zeros : (const char*)((const T*)a->source + row * a->row_stride);
        }
        for (int v = 0; v < PANEL; v += LANES) transpose_rows(rows + v, whole, tile + v, PANEL, [] {});
        if (whole < words)  // an odd bf16 row: the last pair is (x, 0)
            for (int c = 0; c < PANEL; c++) tile[whole * PANEL + c] = ((const bf16*)rows[c])[w.in_features - 1].bits;
    }
    free(zeros);
    return MP_OK;
}

// Rows of an ungated weight, read back out of the panels: one table serves as embedding and as output head.
template <class T>
int embed(const mp_embed* a) {
    const mp_weight& w = *a->weight;
    const int64_t words = words_of(w), whole = w.in_features / WORD<T>;
    for (int64_t i = 0; i < a->count; i++)
        if (a->tokens[i] < 0 || a->tokens[i] >= w.out_features) return MP_BAD_TOKEN;
#pragma omp parallel for num_threads(a->threads) if (a->count >= 4)
    for (int64_t i = 0; i < a->count; i++) {
        const uint32_t* column = (const uint32_t*)w.data + a->tokens[i] / PANEL * words * PANEL + a->tokens[i] % PANEL;
        char* out = (char*)((T*)a->out + i * a->out_stride);
        for (int64_t k = 0; k < whole; k++) memcpy(out + 4 * k, column + k * PANEL, 4);
        if (whole < words) memcpy(out + 4 * whole, column + whole * PANEL, sizeof(T));
    }
    return MP_OK;
}

}  // namespace MP_ISA
