// Between the qkv projection and attention, one pass over each token: RMSNorm of every query and key head, rotation
// (pairs (i, i + D/2), NeoX style), query to its buffer, key and value to their slot of the paged cache.
#pragma once
#include "norm.h"

namespace MP_ISA {

template <class T>
inline void norm_and_rotate(const T* x, int64_t dim, const T* weight, double eps, const float* cos, const float* sin, T* out) {
    const f32x16 inverse = splat(inverse_rms(x, dim, eps));
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = min_of<int64_t>(LANES, half - i);
        f32x16 a = rounded_to<T>(rounded_to<T>(load(x + i, n) * inverse) * load(weight + i, n));
        f32x16 b = rounded_to<T>(rounded_to<T>(load(x + half + i, n) * inverse) * load(weight + half + i, n));
        f32x16 c = load(cos + i, n), s = load(sin + i, n);
        store(out + i, fma(a, c, -(b * s)), n);
        store(out + half + i, fma(b, c, a * s), n);
    }
}

template <class T>
int rope_write(const mp_rope_write* a) {
    const mp_cache& cache = *a->cache;
    const int64_t dim = cache.head_dim, slots = cache.blocks * cache.block_size;
    for (int64_t t = 0; t < a->tokens; t++)
        if (a->positions[t] < 0 || a->positions[t] >= a->max_position) return MP_BAD_POSITION;
#pragma omp parallel for num_threads(a->threads) if (a->tokens >= 4)
    for (int64_t t = 0; t < a->tokens; t++) {
        FlushDenormals flush;
        const T* q = (const T*)a->qkv + t * a->qkv_stride;
        const T* k = q + a->query_heads * dim;
        const T* v = k + cache.kv_heads * dim;
        const float* cos = a->cos + a->positions[t] * (dim / 2);
        const float* sin = a->sin + a->positions[t] * (dim / 2);
        T* query = (T*)a->query + t * a->query_stride;
        for (int64_t h = 0; h < a->query_heads; h++)
            norm_and_rotate(q + h * dim, dim, (const T*)a->q_weight, a->q_eps, cos, sin, query + h * dim);
        const int64_t slot = a->slots[t];
        if (slot < 0 || slot >= slots) continue;
        const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
        const int64_t *ks = cache.key_strides, *vs = cache.value_strides;
        for (int64_t h = 0; h < cache.kv_heads; h++) {
            norm_and_rotate(k + h * dim, dim, (const T*)a->k_weight, a->k_eps, cos, sin,
                            (T*)cache.key + block * ks[0] + h * ks[1] + offset * ks[2]);
            memcpy((T*)cache.value + block * vs[0] + h * vs[1] + offset * vs[2], v + h * dim, dim * sizeof(T));
        }
    }
    return MP_OK;
}

}  // namespace MP_ISA
