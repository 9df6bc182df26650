// Causal attention over the paged cache, one code path for decode and prefill.
//
// What one query row computes depends on nothing but its position and the keys and values before it, as long as these and
// their neighbours in the same tile are finite:
//   - keys are taken in tiles of 64 and splits of 512 by ABSOLUTE position, whatever the block size or the chunk;
//   - a score is one chain over the head dimension, a row of P V one chain over the keys of a tile (see tile.h), which
//     continues the row so far in bf16; in float32 it is added to it, for half the error;
//   - softmax runs in log2 units: m = max(m, highest * s), e = 2^(x s - m), one polynomial for e and for rescaling;
//     masked e are exactly 0, a tile without visible keys leaves the row alone, the sum of e keeps 16 lanes per split;
//   - splits are merged left to right by one formula that starts from the empty state.
// How rows, heads, tiles and splits are shared out among threads is free, and results are bit-identical.
// Online softmax: Milakov and Gimelshein 2018; splits over keys: Flash-Decoding (Dao et al. 2023).
#pragma once
#include "api.h"
#include "few_rows.h"

namespace MP_ISA {

constexpr int SPLIT = 512, TILES_PER_SPLIT = SPLIT / TILE;
constexpr int MAX_HEAD_DIM = 256;
constexpr int PREFILL_ROWS = 384;  // query rows (tokens x heads of a group) that share one pass over the keys

// A unit of work: some queries of one sequence, some kv heads, some splits.
struct Unit {
    int32_t sequence, first_query, last_query;  // [first, last) within this step's queries of the sequence
    int32_t first_head, last_head, first_split, last_split;
    int64_t partial;  // index of its first partial state, or -1: has all splits and writes the result itself
};

template <class T>
struct Attention {
    const mp_attention* a;
    const mp_batch* batch;
    const mp_cache* cache;
    int64_t dim, columns, words, group;  // columns: head_dim rounded up to whole vectors; words: of a row of K
    float log2_scale;

    explicit Attention(const mp_attention* call) : a(call), batch(call->batch), cache(call->cache) {
        dim = cache->head_dim;
        columns = round_up(dim, LANES);
        words = dim / WORD<T>;
        group = a->query_heads / cache->kv_heads;
        log2_scale = (float)(a->scale * 1.4426950408889634);
    }

    int64_t queries(int64_t s) const { return batch->query_start_loc[s + 1] - batch->query_start_loc[s]; }
    int64_t history(int64_t s) const { return batch->seq_lens[s] - queries(s); }  // position of the first query
    int64_t partial_floats() const { return columns + 2; }                        // m, l, o

    void locate(const Unit& u, int64_t tile, int64_t head, TileRows* rows) const {
        const int64_t start = tile * TILE, bs = cache->block_size;
        const int32_t* table = batch->block_tables + u.sequence * batch->table_stride;
        rows->count = (int)min_of<int64_t>(TILE, batch->seq_lens[u.sequence] - start);
        rows->bad_block = false;
        int64_t index = start / bs, offset = start % bs;
        for (int i = 0; i < rows->count; index++, offset = 0) {
            int64_t block = index < batch->table_width ? table[index] : -1;
            const bool bad = block < 0 || block >= cache->blocks;
            rows->bad_block |= bad;
            if (bad) block = 0;
            const T* k = (const T*)cache->key + block * cache->key_strides[0] + head * cache->key_strides[1];
            const T* v = (const T*)cache->value + block * cache->value_strides[0] + head * cache->value_strides[1];
            const int n = (int)min_of<int64_t>(bs - offset, rows->count - i);
            for (int j = 0; j < n; j++) rows->row[i + j] = (const char*)(k + (offset + j) * cache->key_strides[2]);
            for (int j = 0; j < n; j++) rows->row[TILE + i + j] = (const char*)(v + (offset + j) * cache->value_strides[2]);
            i += n;
        }
        for (int i = rows->count; i < TILE; i++) rows->row[i] = rows->row[rows->count - 1], rows->row[TILE + i] = zero_row;
    }

    // V as a tile [words of 64 keys][columns]: bf16 rows of two neighbouring keys are interleaved.
    void pack_values(const char* const* rows, uint32_t* tile, RowsAhead& ahead) const {
        for (int k = 0; k < TILE; k += WORD<T>, tile += columns) {
            if constexpr (sizeof(T) == 4) memcpy(tile, rows[k], dim * 4);
            else interleave((const bf16*)rows[k], (const bf16*)rows[k + 1], dim, tile);
            ahead.lines(dim / 16);  // half of the lines over all keys
        }
    }

    // One packed tile for up to 12 rows whose states start at `s`.
    void attend(const char* q, const uint32_t* keys, const uint32_t* values, int rows, const int* visible, State s) const {
        alignas(64) float scores[MAX_ROWS * TILE];
        alignas(64) Left<T> p[MAX_ROWS * TILE];
        alignas(64) float c[LANES];
        int most = 1;
        for (int r = 0; r < rows; r++) most = max_of(most, visible[r]);
        product_columns<T>(rows, round_up(most, LANES), {q, words * LEFT_BYTES<T>, keys, TILE, 2 * LANES, words, scores, TILE, SET, nullptr});
        soften<T>(scores, rows, visible, log2_scale, s, p, c);
        product_columns<T>(rows, columns, {(const char*)p, TILE * (int64_t)sizeof(Left<T>), values, columns, 2 * LANES, ceil_div(most, WORD<T>),
                                           s.o, columns, sizeof(T) == 4 ? ADD : START, c});
    }

    // Whether the rows of one query token go without packing: see few_rows.h.
    bool few(const Unit& u) const {
        return FEW_ROWS > 0 && sizeof(T) == 2 && u.last_query - u.first_query == 1 && group <= FEW_ROWS && dim % 64 == 0;
    }

    // total = total + (m, l, o): what the splits before have found, and one more split.
    void merge(float* total_m, float* total_l, float* total_o, float m, float l, const float* o) const {
        const float now = *total_m > m ? *total_m : m;
        alignas(64) float c[LANES];
        store(c, exp2(first_or(splat(*total_m - now), 1, splat(m - now))));
        *total_l = *total_l * c[0] + l * c[1];
        for (int64_t i = 0; i < columns; i += LANES)
            store(total_o + i, fma(load(o + i), splat(c[1]), load(total_o + i) * splat(c[0])));
        *total_m = now;
    }

    void write(float l, const float* o, T* out) const {  // + 0: a sum of masked products may be -0 or +0
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + i, load(o + i) / splat(l) + splat(0.0f), min_of<int64_t>(LANES, dim - i));
    }

    T* output(int64_t token, int64_t head) const { return (T*)a->out + token * a->out_stride + head * a->out_head_stride; }

    // Scratch of one thread, for at most `rows` rows over all heads of a unit.
    struct Buffers {
        uint32_t *keys, *values;
        char* q;
        float *m, *l, *o, *total_m, *total_l, *total_o, *scores, *scale;
        Left<bf16>* p;
    };
    size_t buffer_bytes(int64_t rows) const { return 4 * (TILE * words + TILE * columns + rows * (words * FACTORS<T> + 2 * columns + LANES + 4 + 2 * TILE) + 13 * 16); }
    Buffers buffers(char* memory, int64_t rows) const {
        Buffers b;
        auto take = [&](int64_t n) { char* p = memory; memory += round_up(4 * n, 64); return p; };
        b.keys = (uint32_t*)take(TILE * words);
        b.values = (uint32_t*)take(TILE * columns / WORD<T>);
        b.q = take(rows * words * FACTORS<T>);
        b.m = (float*)take(rows);
        b.l = (float*)take(rows * LANES);
        b.o = (float*)take(rows * columns);
        b.total_m = (float*)take(rows);
        b.total_l = (float*)take(rows);
        b.total_o = (float*)take(rows * columns);
        b.scores = (float*)take(rows * TILE);
        b.scale = (float*)take(round_up(rows, LANES));
        b.p = (Left<bf16>*)take(rows * TILE * sizeof(Left<bf16>) / 4);
        return b;
    }

    // Walks the (tile, head) pairs of one unit after the other: the order in which the cache is read. Few rows take all heads
    // of a unit in one step.
    struct Walk {
        const Unit* unit;
        int64_t tile, head, end;  // end: first tile that no query of the unit sees
        TileRows rows;
    };
    bool enter(Walk* w, const Unit* units, int64_t count, int64_t* next) const {
        const int64_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        w->unit = i < count ? units + i : nullptr;
        if (!w->unit) return false;
        w->tile = (int64_t)w->unit->first_split * TILES_PER_SPLIT;
        w->head = w->unit->first_head;
        const int64_t last_position = history(w->unit->sequence) + w->unit->last_query - 1;
        w->end = min_of<int64_t>(last_position / TILE + 1, (int64_t)w->unit->last_split * TILES_PER_SPLIT);
        locate(*w->unit, w->tile, w->head, &w->rows);
        return true;
    }
    bool advance(const Walk& from, Walk* to, const Unit* units, int64_t count, int64_t* next) const {
        to->unit = from.unit, to->tile = from.tile, to->head = from.head + 1, to->end = from.end;
        if (few(*from.unit) || to->head == to->unit->last_head) to->head = to->unit->first_head, to->tile++;
        if (to->tile == to->end) return enter(to, units, count, next);
        locate(*to->unit, to->tile, to->head, &to->rows);
        return true;
    }

    // One step of the walk, and whatever starts or ends with it.
    void visit(const Walk& w, const Walk* following, const Buffers& b, float* partials) const {
        const Unit& u = *w.unit;
        const int64_t tokens = u.last_query - u.first_query, per_head = tokens * group;
        const int64_t rows = few(u) ? (u.last_head - u.first_head) * group : per_head;  // of this step
        const int64_t base = (w.head - u.first_head) * per_head;                        // where they begin in the buffers
        const int64_t first_position = history(u.sequence) + u.first_query;
        const int64_t first_token = batch->query_start_loc[u.sequence] + u.first_query;
        State state = State{b.m, b.l, b.o}.from(base, columns);
        char* q = b.q + base * words * LEFT_BYTES<T>;
        const auto token_of = [&](int64_t r) { return first_token + r % per_head / group; };
        const auto head_of = [&](int64_t r) { return (w.head + r / per_head) * group + r % group; };

        if (w.tile == (int64_t)u.first_split * TILES_PER_SPLIT) {  // first tile of the unit
            for (int64_t r = 0; r < rows; r++) {
                const T* from = (const T*)a->query + token_of(r) * a->query_stride + head_of(r) * a->query_head_stride;
                copy_left(from, dim, (Left<T>*)(q + r * words * LEFT_BYTES<T>));
                b.total_m[base + r] = EMPTY;
                b.total_l[base + r] = 0;
            }
            memset(b.total_o + base * columns, 0, rows * columns * 4);
        }
        if (w.tile % TILES_PER_SPLIT == 0) state.clear(rows, columns);

        if (FEW_ROWS > 0 && few(u)) {
            const int64_t bytes = sizeof(T), bs = cache->block_size;
            few_tile({&w.rows, following ? &following->rows : nullptr, u.last_head - u.first_head, cache->key_strides[1] * bytes,
                      cache->value_strides[1] * bytes, dim, bs >= 64 ? 64 : bs >= 32 ? 32 : 16, log2_scale, q, state, b.scores, b.p, b.scale}, group);
        } else {
            RowsAhead ahead(following ? &following->rows : nullptr, dim * (int64_t)sizeof(T));
            for (int k = 0; k < TILE; k += LANES)
                transpose_rows(w.rows.row + k, words, b.keys + k, TILE, [&] { ahead.lines(4); });
            pack_values(w.rows.row + TILE, b.values, ahead);
            ahead.rest();
            // Rows are in order of position, so those that see nothing of this tile come first.
            const int64_t start = w.tile * TILE, blind = max_of<int64_t>(0, start - first_position) * group;
            const int64_t block = rows > blind ? block_rows(rows - blind) : 1;
            for (int64_t r = blind; r < rows; r += block) {
                const int n = (int)min_of(block, rows - r);
                int visible[MAX_ROWS];
                for (int i = 0; i < n; i++) visible[i] = (int)min_of<int64_t>(TILE, first_position + (r + i) / group + 1 - start);
                attend(q + r * words * LEFT_BYTES<T>, b.keys, b.values, n, visible, state.from(r, columns));
            }
        }

        const bool unit_ends = w.tile + 1 == w.end;
        if (!unit_ends && (w.tile + 1) % TILES_PER_SPLIT != 0) return;
        for (int64_t r = 0; r < rows; r++) {
            const float l = sum(load(state.l + r * LANES));
            const float* o = state.o + r * columns;
            if (u.partial >= 0) {  // a decode unit of one split: [query head][split]
                float* to = partials + (u.partial + head_of(r) * ceil_div(batch->seq_lens[u.sequence], SPLIT)) * partial_floats();
                to[0] = state.m[r];
                to[1] = l;
                memcpy(to + 2, o, columns * 4);
                continue;
            }
            float* total_o = b.total_o + (base + r) * columns;
            merge(b.total_m + base + r, b.total_l + base + r, total_o, state.m[r], l, o);
            if (unit_ends) write(b.total_l[base + r], total_o, output(token_of(r), head_of(r)));
        }
    }

    int check() const {  // of all rows before anything is written
        if (batch->sequences > 0 && batch->query_start_loc[0] != 0) return MP_BAD_LENGTH;
        for (int64_t s = 0; s < batch->sequences; s++) {
            const int64_t length = batch->seq_lens[s];
            if (queries(s) < 0 || length < 0 || (length > 0 && history(s) < 0)) return MP_BAD_LENGTH;
            if (ceil_div(length, cache->block_size) > batch->table_width) return MP_BAD_BLOCK;
        }
        return MP_OK;
    }

    int run() const {
        static thread_local Scratch unit_memory, partial_memory, thread_memory;
        const int64_t sequences = batch->sequences, heads = cache->kv_heads, threads = a->threads;
        const int64_t tile_tokens = max_of<int64_t>(1, PREFILL_ROWS / group);

        // How finely decode is cut: whole heads together read whole blocks; fewer per unit when there is little work.
        int64_t decode_splits = 0, prefill_units = 0, partial_rows = 0;
        if (const int problem = check()) return problem;
        for (int64_t s = 0; s < sequences; s++) {
            if (batch->seq_lens[s] == 0) {  // a row without tokens gives zeros
                for (int64_t t = 0; t < queries(s); t++)
                    for (int64_t h = 0; h < a->query_heads; h++)
                        memset(output(batch->query_start_loc[s] + t, h), 0, dim * sizeof(T));
                continue;
            }
            if (queries(s) == 1) decode_splits += ceil_div(batch->seq_lens[s], SPLIT);
            else prefill_units += ceil_div(queries(s), tile_tokens) * heads;
        }
        const int64_t unit_heads = min_of(heads, max_of<int64_t>(1, heads * decode_splits / (4 * threads)));
        const int64_t head_groups = ceil_div(heads, unit_heads);
        Unit* units = (Unit*)unit_memory.reserve((decode_splits * head_groups + prefill_units + 1) * sizeof(Unit));
        if (!units) return MP_OUT_OF_MEMORY;

        // Long units first, so that no thread is left alone with one at the end: prefill from the last queries back.
        int64_t count = 0, most_rows = unit_heads * group;
        for (int64_t s = 0; s < sequences; s++) {
            if (queries(s) == 1 || batch->seq_lens[s] == 0) continue;
            const int32_t n = (int32_t)queries(s), splits = (int32_t)ceil_div(batch->seq_lens[s], SPLIT);
            for (int64_t t = ceil_div(n, tile_tokens) - 1; t >= 0; t--)
                for (int32_t h = 0; h < heads; h++) {
                    const int32_t first = (int32_t)(t * tile_tokens), last = (int32_t)min_of<int64_t>(n, first + tile_tokens);
                    units[count++] = {(int32_t)s, first, last, h, h + 1, 0, splits, -1};
                    most_rows = max_of(most_rows, (last - first) * group);
                }
        }
        for (int64_t s = 0; s < sequences; s++) {
            if (queries(s) != 1 || batch->seq_lens[s] == 0) continue;
            const int32_t splits = (int32_t)ceil_div(batch->seq_lens[s], SPLIT);
            for (int32_t i = 0; i < splits; i++)
                for (int64_t h = 0; h < heads; h += unit_heads)
                    units[count++] = {(int32_t)s, 0, 1, (int32_t)h, (int32_t)min_of(heads, h + unit_heads), i, i + 1,
                                      splits == 1 ? -1 : partial_rows + i};
            if (splits > 1) partial_rows += splits * a->query_heads;
        }
        float* partials = (float*)partial_memory.reserve((partial_rows * partial_floats() + 1) * 4);
        const size_t per_thread = round_up(buffer_bytes(most_rows) + 1024, 4096) + 64;
        char* memory = thread_memory.reserve(per_thread * threads);
        if (!partials || !memory) return MP_OUT_OF_MEMORY;

        int64_t next = 0;
        int bad = 0, arrived = 0;
#pragma omp parallel num_threads(threads)
        {
            FlushDenormals flush;
            const Buffers b = buffers(memory + per_thread * __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED), most_rows);
            Walk walks[2];
            int now = 0;
            bool more = enter(&walks[0], units, count, &next);
            while (more) {
                more = advance(walks[now], &walks[1 - now], units, count, &next);
                if (walks[now].rows.bad_block) __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
                visit(walks[now], more ? &walks[1 - now] : nullptr, b, partials);
                now = 1 - now;
            }
#pragma omp barrier
            int64_t seen = 0;  // partial states of the sequences before s
            for (int64_t s = 0; s < sequences; s++) {
                const int64_t token = batch->query_start_loc[s], splits = ceil_div(batch->seq_lens[s], SPLIT);
                if (queries(s) != 1 || splits < 2) continue;
#pragma omp for nowait
                for (int64_t h = 0; h < a->query_heads; h++) {
                    alignas(64) float o[MAX_HEAD_DIM] = {};
                    float m = EMPTY, l = 0;
                    const float* from = partials + (seen + h * splits) * partial_floats();
                    for (int64_t i = 0; i < splits; i++, from += partial_floats()) merge(&m, &l, o, from[0], from[1], from + 2);
                    write(l, o, output(token, h));
                }
                seen += splits * a->query_heads;
            }
        }
        return bad ? MP_BAD_BLOCK : MP_OK;
    }
};

template <class T>
int attention(const mp_attention* a) {
    return Attention<T>(a).run();
}

}  // namespace MP_ISA
