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
    std::vector<double> values() const {  // sanitized code is slow: the plain loops read these
        std::vector<double> v(size);
        for (int64_t i = 0; i < size; i++) v[i] = get(i);
        return v;
    }
    char* at(int64_t i) const { return data.get() + i * (type == MP_BF16 ? 2 : 4); }
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

static void same_bits(const char* what, const mp_kernels* k, const Array& a, int64_t first, const Array& b, int64_t count) {
    if (!memcmp(a.at(first), b.at(0), b.at(count) - b.at(0))) return;
    if (failures++ < 20) printf("%s %s type %d: other bits\n", k->name, what, (int)a.type);
}

static void linear(const mp_kernels* k, int64_t type, int64_t rows, int64_t in, int64_t out, bool gated, int64_t threads = 2) {
    const int64_t outputs = gated ? out / 2 : out, panels = gated ? (outputs + 15) / 16 : (outputs + 31) / 32;
    Array w = Array(type, out * in).random(), x = Array(type, rows * in).random(), norm = Array(type, in).random();
    Array residual = Array(type, rows * outputs).random(), y(type, rows * outputs), bias = Array(MP_F32, 32 * panels).random();
    mp_weight weight = {nullptr, rows % 2 ? (float*)bias.at(0) : nullptr, in, out, gated, type};
    const int64_t bytes = mp_packed_bytes(&weight);
    std::unique_ptr<char[]> packed(new char[bytes]);
    weight.data = packed.get();
    mp_pack pack = {&weight, w.at(0), in, threads};
    k->pack(&pack);
    mp_linear call = {&weight, x.at(0), in, rows, nullptr, 1e-6, residual.at(0), outputs, y.at(0), outputs, type, threads};
    k->linear(&call);
    const std::vector<double> xs = x.values(), ws = w.values();
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double s[2] = {0, 0};
            for (int half = 0; half <= gated; half++) {
                const double *a = &xs[r * in], *b = &ws[(o + half * outputs) * in];
                for (int64_t i = 0; i < in; i++) s[half] += a[i] * b[i];
                if (weight.bias) s[half] += bias.get(gated ? o / 16 * 32 + half * 16 + o % 16 : o);
            }
            // Without the residual: next to it, a large product would look small, and its error would not.
            near("linear", k, y.get(r * outputs + o) - residual.get(r * outputs + o), gated ? s[0] / (1 + exp(-s[0])) * s[1] : s[0], type);
        }
    // The last row alone.
    Array alone(type, outputs);
    mp_linear last = call;
    last.rows = 1, last.x = x.at((rows - 1) * in), last.residual = residual.at((rows - 1) * outputs), last.out = alone.at(0);
    k->linear(&last);
    same_bits("one row alone", k, y, (rows - 1) * outputs, alone, outputs);
    // With a norm: in one pass or in two.
    Array normed(type, rows * in), wide(MP_F32, rows * outputs);
    mp_rms_norm rms = {x.at(0), in, rows, in, norm.at(0), 1e-6, normed.at(0), in, type, threads};
    k->rms_norm(&rms);
    for (int64_t i = 0; i < in; i++) {
        double squares = 0;
        for (int64_t j = 0; j < in; j++) squares += xs[j] * xs[j];
        near("rms_norm", k, normed.get(i), xs[i] / sqrt(squares / (double)in + 1e-6) * norm.get(i), type);
    }
    call.residual = nullptr, call.out = wide.at(0), call.out_type = MP_F32;
    Array separate(MP_F32, rows * outputs);
    mp_linear second = call;
    second.x = normed.at(0), second.out = separate.at(0);
    call.norm_weight = norm.at(0);
    k->linear(&call);
    k->linear(&second);
    same_bits("norm inside", k, wide, 0, separate, rows * outputs);
    if (gated) return;
    std::vector<int64_t> tokens = {out - 1, 0};
    Array rows_out(type, 2 * in);
    mp_embed embed = {&weight, tokens.data(), 2, rows_out.at(0), in, threads};
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
    const std::vector<double> qs = query.values(), ks = key.values(), vs = value.values();
    for (int s = 0; s < sequences; s++)
        for (int q = 0; q < queries[s]; q++)
            for (int64_t h = 0; h < heads; h++) {
                const int64_t seen = lengths[s] ? lengths[s] - queries[s] + q + 1 : 0, at = ((starts[s] + q) * heads + h) * dim;
                std::vector<double> o(dim), e(seen);
                double total = 0;
                for (int64_t t = 0; t < seen; t++) {
                    const double *a = &ks[place(s, h / group, t)], *b = &vs[place(s, h / group, t)];
                    double dot = 0;
                    for (int64_t d = 0; d < dim; d++) dot += qs[at + d] * a[d];
                    total += e[t] = exp(dot * scale);
                    for (int64_t d = 0; d < dim; d++) o[d] += e[t] * b[d];
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
            for (bool gated : {false, true}) {
                for (int64_t rows = 1; rows <= 30; rows++)
                    for (int64_t in : {1, 7, 64, 131}) linear(k, type, rows, in, rows % 3 ? 66 : 32 + 2 * in % 64, gated);
                for (int64_t rows : {1, 2, 3}) linear(k, type, rows, 130, 1100, gated, 1);  // four panels side by side
                linear(k, type, 300, 450, 290, gated, 1);                                   // rows that do not fit into L2
            }
            linear(k, type, 3, 2048, 40, false);  // gated, errors of a sum this long times the other sum exceed what is allowed
            for (int64_t dim : {16, 24, 72, 128, 256}) {
                attention(k, type, 2, 2, dim, 16, {70, 0, 600, 1}, {1, 1, 1, 1});
                attention(k, type, 1, 3, dim, 5, {70, 130, 0}, {70, 9, 2});
                attention(k, type, 1, 1, dim, 256, {515}, {40});
            }
        }
        // Few rows without packing (few_rows.h): enough sequences that a unit has several heads, runs of 16, 32 and 64 keys,
        // odd counts of keys, blocks that a run straddles.
        const std::vector<int> lengths = {1, 15, 17, 33, 63, 64, 65, 127, 129, 3}, ones(lengths.size(), 1);
        for (int64_t group = 1; group <= 9; group++)
            for (int64_t dim : {64, 128, 192, 256}) {
                const int64_t i = group + dim / 64, heads = 1 + (group + 2 * dim / 64) % (group <= 5 ? 9 : 3);
                for (int64_t bs : {i % 2 ? 5 : 100, 16, i % 2 ? 64 : 33}) attention(k, MP_BF16, heads, group, dim, bs, lengths, ones);
            }
        attention(k, MP_BF16, 9, 2, 128, 16, {513, 1025, 31, 2, 77, 47}, {1, 1, 1, 1, 1, 5});
        attention(k, MP_BF16, 1, 1, 64, 32, {600, 420}, {385, 1});  // a last unit of one query, over two splits
        printf("%s: %s\n", name, failures ? "FAILED" : "ok");
    }
    return failures != 0;
}
