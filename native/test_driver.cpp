// Runs every kernel of every instruction set on buffers of exactly the right size, and checks the results against plain
// loops in double precision. Meant for the sanitizers (cmake -DMP_SANITIZE=ON): a read or write past an end stops it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <utility>
#include <vector>

#include "api.h"

extern "C" const mp_kernels* mp_find(const char* name);
extern "C" const char* mp_isa(int i, int* supported);
extern "C" int64_t mp_packed_bytes(const mp_weight* w);

static uint64_t state = 1;
static double uniform() {  // -1 .. 1
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)state / 9.3e18;
}

// Elements of one of the two types, in memory that ends where they end.
struct Array {
    int64_t type, size;
    std::unique_ptr<char[]> data;
    Array(int64_t t, int64_t n) : type(t), size(n), data(new char[n * (t == MP_BF16 ? 2 : 4)]) {}
    void set(int64_t i, double x) {
        float f = (float)x;
        uint32_t u;
        memcpy(&u, &f, 4);
        u += type == MP_BF16 ? 0x7fff + ((u >> 16) & 1) : 0;
        uint16_t half = (uint16_t)(u >> 16);
        if (type == MP_BF16) memcpy(data.get() + 2 * i, &half, 2);
        else memcpy(data.get() + 4 * i, &f, 4);
    }
    double get(int64_t i) const {
        uint32_t u = 0;
        if (type == MP_BF16) {
            uint16_t half;
            memcpy(&half, data.get() + 2 * i, 2);
            u = (uint32_t)half << 16;
        } else {
            memcpy(&u, data.get() + 4 * i, 4);
        }
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    Array random() {
        for (int64_t i = 0; i < size; i++) set(i, uniform());
        return std::move(*this);
    }
    Array fill(double x) {
        for (int64_t i = 0; i < size; i++) set(i, x);
        return std::move(*this);
    }
};

static int failures = 0;
static void near(const char* what, const mp_kernels* k, double got, double expected, int64_t type) {
    const double allowed = (type == MP_BF16 ? 0.02 : 2e-5) * (1 + fabs(expected));
    if (fabs(got - expected) <= allowed) return;  // also false for NaN
    if (failures++ < 20) printf("%s %s type %d: %g, expected %g\n", k->name, what, (int)type, got, expected);
}

static void linear(const mp_kernels* k, int64_t type, int64_t rows, int64_t in, int64_t out, bool gated) {
    const int64_t outputs = gated ? out / 2 : out;
    Array w = Array(type, out * in).random(), x = Array(type, rows * in).random(), norm = Array(type, in).random();
    Array residual = Array(type, rows * outputs).random(), y(type, rows * outputs);
    mp_weight weight = {nullptr, nullptr, in, out, gated, type};
    const int64_t bytes = mp_packed_bytes(&weight);
    std::unique_ptr<char[]> packed(new char[bytes]);
    weight.data = packed.get();
    mp_pack pack = {&weight, w.data.get(), in, 2};
    k->pack(&pack);
    mp_linear call = {&weight, x.data.get(), in, rows, nullptr, 0, residual.data.get(), outputs, y.data.get(), outputs, type, 2};
    k->linear(&call);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double s[2] = {0, 0};
            for (int half = 0; half <= gated; half++)
                for (int64_t i = 0; i < in; i++) s[half] += x.get(r * in + i) * w.get((o + half * outputs) * in + i);
            near("linear", k, y.get(r * outputs + o),
                 residual.get(r * outputs + o) + (gated ? s[0] / (1 + exp(-s[0])) * s[1] : s[0]), type);
        }
    call.norm_weight = norm.data.get();
    call.eps = 1e-6;
    k->linear(&call);  // for the sanitizers; the values are checked from Python
    mp_rms_norm rms = {x.data.get(), in, rows, in, norm.data.get(), 1e-6, x.data.get(), in, type, 2};
    k->rms_norm(&rms);
    if (gated) return;
    std::vector<int64_t> tokens = {out - 1, 0};
    Array rows_out(type, 2 * in);
    mp_embed embed = {&weight, tokens.data(), 2, rows_out.data.get(), in, 2};
    k->embed(&embed);
    for (int64_t i = 0; i < in; i++) near("embed", k, rows_out.get(i), w.get((out - 1) * in + i), type);
}

static void attention(const mp_kernels* k, int64_t type, int64_t kv_heads, int64_t group, int64_t dim, int64_t bs,
                      const std::vector<int>& lengths, const std::vector<int>& queries) {
    const int64_t heads = kv_heads * group, sequences = (int64_t)lengths.size();
    int64_t blocks = 0, width = 1, tokens = 0;
    std::vector<int32_t> starts = {0};
    for (int s = 0; s < sequences; s++) {
        const int64_t need = (lengths[s] + bs - 1) / bs;
        blocks += need;
        width = need > width ? need : width;
        starts.push_back((int32_t)(tokens += queries[s]));
    }
    Array key = Array(type, blocks * kv_heads * bs * dim).fill(NAN), value = Array(type, key.size).fill(NAN);
    Array query = Array(type, tokens * heads * dim).random(), out(type, query.size);
    std::vector<int32_t> table(sequences * width, 1 << 30), lens(lengths.begin(), lengths.end());
    int64_t taken = 0;
    auto place = [&](int64_t s, int64_t h, int64_t t) {
        return ((table[s * width + t / bs] * kv_heads + h) * bs + t % bs) * dim;
    };
    for (int s = 0; s < sequences; s++) {
        for (int64_t i = 0; i * bs < lengths[s]; i++) table[s * width + i] = (int32_t)(blocks - 1 - taken++);
        for (int64_t t = 0; t < lengths[s]; t++)
            for (int64_t h = 0; h < kv_heads; h++)
                for (int64_t d = 0; d < dim; d++) {
                    key.set(place(s, h, t) + d, uniform());
                    value.set(place(s, h, t) + d, uniform());
                }
    }
    const int64_t strides[3] = {kv_heads * bs * dim, bs * dim, dim};
    mp_cache cache = {key.data.get(), value.data.get(), {strides[0], strides[1], strides[2]},
                      {strides[0], strides[1], strides[2]}, blocks, kv_heads, bs, dim, type};
    mp_batch batch = {table.data(), width, width, lens.data(), starts.data(), sequences};
    const double scale = 1 / sqrt((double)dim);
    mp_attention call = {&batch, &cache, query.data.get(), heads * dim, dim, heads, out.data.get(), heads * dim, dim, scale, 2};
    if (int code = k->attention(&call)) printf("attention returned %d\n", code), failures++;
    for (int s = 0; s < sequences; s++)
        for (int q = 0; q < queries[s]; q++)
            for (int64_t h = 0; h < heads; h++) {
                const int64_t seen = lengths[s] ? lengths[s] - queries[s] + q + 1 : 0, at = ((starts[s] + q) * heads + h) * dim;
                std::vector<double> o(dim), e(seen);
                double total = 0;
                for (int64_t t = 0; t < seen; t++) {
                    double dot = 0;
                    for (int64_t d = 0; d < dim; d++) dot += query.get(at + d) * key.get(place(s, h / group, t) + d);
                    total += e[t] = exp(dot * scale);
                    for (int64_t d = 0; d < dim; d++) o[d] += e[t] * value.get(place(s, h / group, t) + d);
                }
                for (int64_t d = 0; d < dim; d++) near("attention", k, out.get(at + d), seen ? o[d] / total : 0, type);
            }
    // One token per sequence through the fused pass, on the same cache.
    Array qkv = Array(type, sequences * (heads + 2 * kv_heads) * dim).random(), weight = Array(type, dim).random();
    Array cos = Array(MP_F32, dim / 2).fill(1), sin = Array(MP_F32, dim / 2).fill(0), rotated(type, sequences * heads * dim);
    std::vector<int64_t> positions(sequences, 0), slots(sequences, -1);
    slots[0] = blocks * bs - 1;
    mp_rope_write rope = {qkv.data.get(), (heads + 2 * kv_heads) * dim, sequences, heads, weight.data.get(), weight.data.get(),
                          1e-6, 1e-6, (float*)cos.data.get(), (float*)sin.data.get(), 1, positions.data(), slots.data(),
                          &cache, rotated.data.get(), heads * dim, 2};
    if (blocks) k->rope_write(&rope);
    for (int64_t d = 0; blocks && d < dim; d++)
        near("value written", k, value.get(((blocks - 1) * kv_heads * bs + bs - 1) * dim + d), qkv.get((heads + kv_heads) * dim + d), type);
}

int main() {
    int supported;
    for (int i = 0; const char* name = mp_isa(i, &supported); i++) {
        if (!supported) continue;
        const mp_kernels* k = mp_find(name);
        for (int64_t type : {MP_F32, MP_BF16}) {
            for (int64_t rows : {1, 2, 5, 12, 13, 25})
                for (int64_t in : {1, 7, 64, 130})
                    for (int64_t out : {2, 32, 66}) linear(k, type, rows, in, out, false), linear(k, type, rows, in, out, true);
            linear(k, type, 3, 2048, 40, false);
            for (int64_t dim : {16, 24, 72, 128, 256}) {
                attention(k, type, 2, 2, dim, 16, {70, 0, 600, 1}, {1, 1, 1, 1});
                attention(k, type, 1, 3, dim, 5, {70, 130, 0}, {70, 9, 2});
                attention(k, type, 1, 1, dim, 256, {515}, {40});
            }
        }
        // Few rows without packing (few_rows.h): enough sequences that a unit has several heads, runs of 16, 32 and 64 keys,
        // odd counts of keys, blocks that a run straddles.
        for (int64_t group = 1; group <= 9; group++)
            for (int64_t bs : {5, 16, 33, 64, 100}) {
                const int64_t dim = 64 * (1 + (group + bs) % 4), heads = 1 + (group * 3 + bs) % 5;
                const std::vector<int> lengths = {1, 15, 17, 33, 63, 64, 65, 127, 129, 3}, ones(lengths.size(), 1);
                attention(k, MP_BF16, heads, group, dim, bs, lengths, ones);
            }
        attention(k, MP_BF16, 9, 2, 128, 16, {513, 1025, 31, 2, 77, 47}, {1, 1, 1, 1, 1, 5});
        printf("%s: %s\n", name, failures ? "FAILED" : "ok");
    }
    return failures != 0;
}
