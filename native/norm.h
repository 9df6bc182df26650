// RMSNorm in the order of operations of Hugging Face's module: normalise in float32, round, multiply by the weight, round.
#pragma once
#include "api.h"
#include "tile.h"

namespace MP_ISA {

// 1 / sqrt(mean of squares + eps), one 16-lane chain over the row.
template <class T>
inline float inverse_rms(const T* x, int64_t n, double eps) {
    f32x16 squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x16 v = load(x + i);
        squares = fma(v, v, squares);
    }
    if (i < n) {
        f32x16 v = load(x + i, n - i);
        squares = fma(v, v, squares);
    }
    return (float)(1.0 / sqrt((double)sum(squares) / (double)n + eps));
}

// Out: T, or float that keeps what T would.
template <class T, class Out>
inline void rms_norm_row(const T* x, int64_t n, const T* weight, double eps, Out* out) {
    const f32x16 inverse = splat(inverse_rms(x, n, eps));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_as<T>(out + i, rounded_to<T>(load(x + i) * inverse) * load(weight + i));
    if (i < n) store_as<T>(out + i, rounded_to<T>(load(x + i, n - i) * inverse) * load(weight + i, n - i), n - i);
}

template <class T>
int rms_norm(const mp_rms_norm* a) {
#pragma omp parallel for num_threads(a->threads) if (a->rows * a->size > 16384)
    for (int64_t r = 0; r < a->rows; r++) {
        FlushDenormals flush;
        rms_norm_row((const T*)a->x + r * a->x_stride, a->size, (const T*)a->weight, a->eps,
                     (T*)a->out + r * a->out_stride);
    }
    return MP_OK;
}

}  // namespace MP_ISA
