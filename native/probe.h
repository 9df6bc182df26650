// The two limits that every figure is compared with: how fast memory is read, and how fast products are computed.
#pragma once
#include <omp.h>

#include "api.h"
#include "tile.h"

namespace MP_ISA {

// Reads `bytes` (a multiple of 8 KiB) once with several streams per thread.
int read_probe(const mp_probe* a) {
    constexpr int STREAMS = 4;
    const uint32_t* data = (const uint32_t*)a->data;
    float total = 0;
#pragma omp parallel num_threads(a->threads) reduction(+ : total)
    {
        const int64_t threads = omp_get_num_threads(), per = a->amount / 4 / threads / STREAMS / LANES * LANES;
        const uint32_t* from = data + per * STREAMS * omp_get_thread_num();
        u32x16 s[STREAMS] = {};
        for (int64_t i = 0; i < per; i += LANES)
            for (int k = 0; k < STREAMS; k++) s[k] = s[k] + load_words(from + k * per + i);
        total += sum(as_floats((s[0] + s[1]) + (s[2] + s[3])));
    }
    *(volatile float*)a->result = total;
    return MP_OK;
}

// `amount` steps of the largest product kernel per thread, on data in L1.
template <class T>
int peak_probe(const mp_probe* a) {
#pragma omp parallel num_threads(a->threads)
    {
        FlushDenormals flush;
        alignas(64) uint32_t x[MAX_ROWS * 64 * FACTORS<T>] = {}, tile[64 * PANEL] = {};
        alignas(64) float out[MAX_ROWS * PANEL];
        int rows = MAX_ROWS;
        asm volatile("" : "+r"(rows));  // unknown to the compiler: it would drop sums that nobody reads
        NothingAhead nothing;
        for (int64_t i = 0; i < a->amount; i += 64)
            product_rows<T, 2>(rows, {(const char*)x, 64 * LEFT_BYTES<T>, tile, PANEL, PANEL, 64, out, PANEL, SET, nullptr}, nothing);
        if (omp_get_thread_num() == 0) *(volatile float*)a->result = out[0];
    }
    return MP_OK;
}

}  // namespace MP_ISA
