// The C interface. Python fills these structs (minipaged/ops/cpu/arguments.py packs the same fields in the same order);
// every field is 8 bytes wide so that the layout is the same on both sides. Strides are in elements unless named bytes.
#pragma once
#include <stdint.h>

enum { MP_F32 = 0, MP_BF16 = 1 };
enum { MP_OK = 0, MP_OUT_OF_MEMORY = 1, MP_BAD_BLOCK = 2, MP_BAD_POSITION = 3, MP_BAD_TOKEN = 4, MP_BAD_LENGTH = 5 };

struct mp_weight {  // a packed [out_features, in_features]; gated: gate rows, then as many up rows
    void* data;
    const float* bias;  // in packed column order, or null
    int64_t in_features, out_features, gated, type;
};

struct mp_pack {
    const mp_weight* weight;
    const void* source;  // row-major, same type
    int64_t row_stride, threads;
};

struct mp_embed {
    const mp_weight* weight;
    const int64_t* tokens;
    int64_t count;
    void* out;
    int64_t out_stride, threads;
};

struct mp_linear {
    const mp_weight* weight;
    const void* x;
    int64_t x_stride, rows;
    const void* norm_weight;  // null: no RMSNorm before
    double eps;
    const void* residual;  // type of out, or null
    int64_t residual_stride;
    void* out;
    int64_t out_stride, out_type, threads;
};

struct mp_rms_norm {
    const void* x;
    int64_t x_stride, rows, size;
    const void* weight;
    double eps;
    void* out;
    int64_t out_stride, type, threads;
};

struct mp_cache {  // one layer: key and value [blocks, kv_heads, block_size, head_dim], head_dim contiguous
    void *key, *value;
    int64_t key_strides[3], value_strides[3];  // block, head, slot
    int64_t blocks, kv_heads, block_size, head_dim, type;
};

struct mp_rope_write {
    const void* qkv;
    int64_t qkv_stride, tokens, query_heads;
    const void *q_weight, *k_weight;
    double q_eps, k_eps;
    const float *cos, *sin;  // [max_position, head_dim / 2]
    int64_t max_position;
    const int64_t *positions, *slots;
    const mp_cache* cache;
    void* query;  // [tokens, query_heads, head_dim]
    int64_t query_stride, threads;
};

struct mp_batch {
    const int32_t* block_tables;
    int64_t table_stride, table_width;
    const int32_t *seq_lens, *query_start_loc;
    int64_t sequences;
};

struct mp_attention {
    const mp_batch* batch;
    const mp_cache* cache;
    const void* query;
    int64_t query_stride, query_head_stride, query_heads;
    void* out;
    int64_t out_stride, out_head_stride;
    double scale;
    int64_t threads;
};

struct mp_probe {
    const void* data;
    int64_t amount;  // bytes to read, or steps to compute: each 12 rows x 32 columns x one word
    int64_t type, threads;
    float* result;  // so that nothing is optimised away
};

struct mp_kernels {  // what one instruction set offers; all return MP_OK or an error
    const char* name;
    int (*pack)(const mp_pack*);
    int (*embed)(const mp_embed*);
    int (*linear)(const mp_linear*);
    int (*rms_norm)(const mp_rms_norm*);
    int (*rope_write)(const mp_rope_write*);
    int (*attention)(const mp_attention*);
    int (*read_probe)(const mp_probe*);
    int (*peak_probe)(const mp_probe*);
    int (*nothing)(const void*);  // what a call costs by itself
};
