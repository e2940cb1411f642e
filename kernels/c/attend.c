/* Attention over pages where they are: the twin of `paged_attention` of the other kernels.

   A query row is a pair of a query and a query head. A task is a tile of query rows of one KV head,
   over a part of a sequence's tokens. It decodes blocks of tokens into floats and attends to them
   with a running maximum and sum. In tiles of few rows the lanes of a vector are tokens, and then
   head dims; in tiles of many rows they are rows.

   The bits of a query row depend only on the row and the tokens that it sees, not on other rows or
   the cut into tiles. Blocks and parts begin at fixed places of the text, parts are joined from the
   first to the last, and tokens that a row does not see add zeros. Tokens that no query of a tile
   sees are not read. Vectors are those of GCC and clang, in plain C. */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

enum { BLOCK = 16, MANY = 2 * LANES, FEW = 7, PART = 1024 };
enum { DENSE, FP8, INT8, INT4_TOKEN, INT4_CHANNEL }; /* formats of pages */

/* K or V of one layer. Strides are in elements of their own tensor. */
typedef struct {
    const void *data, *scales, *staging;
    int64_t data_page, data_head, data_slot;
    int64_t scales_page, scales_head;
    int64_t staging_page, staging_head, staging_slot;
    int64_t count; /* of coded pages; ids of staging pages follow theirs */
    int64_t dim;
    int32_t format, type;
} Pages;

typedef struct {
    Pages k, v;
    const void *q;         /* [T, H, D] of the same type as dense elements */
    void *out;             /* [T, H, D of V], contiguous */
    float *lse;            /* [T, H], or null */
    const float *sinks, *slopes; /* [H], or null */
    const float *bias;     /* [T, H, distances], or null */
    const int64_t *tree;   /* [T], or null */
    const int32_t *table;  /* [B, columns] */
    const int32_t *chosen; /* [B, G, read], columns that a row reads, ascending; or null */
    const int64_t *num_new, *kv_lens; /* [B] */
    int64_t q_token, q_head, columns, read;
    int64_t rows, heads, groups, page_size, window; /* a window of 0: none */
    int64_t bias_token, bias_head, distances;       /* strides of the bias, and how far it reaches */
    float scale, softcap;                           /* a softcap of 0: none */
    int32_t type, v_is_k, threads, causal; /* not causal: every query sees all of its row */
} Call;

typedef struct {
    int64_t row, group, first, count; /* query rows first .. first + count of a sequence */
    int64_t begin, end;               /* tokens, or slots of the pages chosen */
    int64_t part, parts;
    float *partial; /* its results, beside those of other parts; null if there is one part */
} Task;

/* ------------------------------------------------------------------ elements */

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* Makes a float from the bits of a narrower one: all are in place except the bias of exponents.

   No intermediate float is subnormal, because a process may treat subnormals as zeros. */
INLINE float widen(uint32_t rest, uint32_t sign, uint32_t bias, uint32_t least_special) {
    float subnormal = as_float(rest + ((bias + 1) << 23)) - as_float((bias + 1) << 23);
    uint32_t bits = rest < 0x00800000u ? as_bits(subnormal) : rest + (bias << 23);
    return as_float(bits | (rest >= least_special ? 0x7f800000u : 0) | sign);
}

INLINE float from_half(uint16_t x) {
    return widen((uint32_t)(x & 0x7fff) << 13, (uint32_t)(x & 0x8000) << 16, 112, 0x0f800000u);
}

INLINE float from_e4m3(uint32_t x) {
    return widen((x & 0x7f) << 20, (x & 0x80) << 24, 120, 0x07f00000u);
}

INLINE uint16_t to_bfloat(float x) {
    uint32_t bits = as_bits(x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Rounds to the nearest half, ties to even. */
INLINE uint16_t to_half(float x) {
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) return (uint16_t)(sign | (as_bits(as_float(bits) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}

INLINE float element(const void *from, int64_t i, int type) {
    if (type == F32) return ((const float *)from)[i];
    uint16_t x = ((const uint16_t *)from)[i];
    return type == BF16 ? as_float((uint32_t)x << 16) : from_half(x);
}

INLINE void put(void *into, int64_t i, int type, float x) {
    if (type == F32) ((float *)into)[i] = x;
    else if (type == BF16) ((uint16_t *)into)[i] = to_bfloat(x);
    else ((uint16_t *)into)[i] = to_half(x);
}

/* ------------------------------------------------------------------ tokens of a page */

INLINE void row_of_bfloats(const uint16_t *restrict from, float *restrict out, int64_t dim) {
    for (int64_t i = 0; i < dim; i++) out[i] = as_float((uint32_t)from[i] << 16);
}

INLINE void row_of_halves(const uint16_t *restrict from, float *restrict out, int64_t dim) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= dim; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < dim; i++) out[i] = from_half(from[i]);
}

/* These functions decode `count` tokens of one page into rows of `width` floats. */
#define FOR_TOKENS for (int64_t t = 0; t < count; t++, out += width, from += step)

static void read_dense(const void *data, int64_t at, int64_t step, int64_t dim, int type,
                       int64_t count, float *out, int64_t width) {
    if (type == F32) {
        const float *from = (const float *)data + at;
        FOR_TOKENS memcpy(out, from, 4 * dim);
        return;
    }
    const uint16_t *from = (const uint16_t *)data + at;
    if (type == BF16) FOR_TOKENS row_of_bfloats(from, out, dim);
    else FOR_TOKENS row_of_halves(from, out, dim);
}

static void read_coded(const Pages *x, int64_t page, int64_t head, int64_t slot, int64_t count,
                       float *restrict out, int64_t width) {
    const int64_t step = x->data_slot, dim = x->dim;
    const uint16_t *from = (const uint16_t *)x->data + page * x->data_page + head * x->data_head + slot * step;
    const uint16_t *scales = (const uint16_t *)x->scales + page * x->scales_page + head * x->scales_head;
    if (x->format == FP8) {
        const float scale = ((const float *)x->scales)[head];
        FOR_TOKENS for (int64_t i = 0; i < dim / 2; i++) {
            out[i] = from_e4m3(from[i] & 255) * scale;
            out[i + dim / 2] = from_e4m3(from[i] >> 8) * scale;
        }
    } else if (x->format == INT8) {
        FOR_TOKENS {
            const float scale = from_half(scales[slot + t]);
            for (int64_t i = 0; i < dim / 2; i++) {
                out[i] = (float)((int32_t)(from[i] & 255) - 128) * scale;
                out[i + dim / 2] = (float)((int32_t)(from[i] >> 8) - 128) * scale;
            }
        }
    } else if (x->format == INT4_TOKEN) {
        FOR_TOKENS {
            const float by = from_half(scales[2 * (slot + t)]), least = from_half(scales[2 * (slot + t) + 1]);
            for (int64_t part = 0; part < 4; part++)
                for (int64_t i = 0; i < dim / 4; i++)
                    out[part * (dim / 4) + i] = (float)((from[i] >> (4 * part)) & 15) * by + least;
        }
    } else { /* a step and a minimum of each channel, once for all tokens */
        float by[dim], least[dim];
        for (int64_t i = 0; i < dim; i++) {
            by[i] = from_half(scales[2 * i]);
            least[i] = from_half(scales[2 * i + 1]);
        }
        FOR_TOKENS for (int64_t part = 0; part < 4; part++)
            for (int64_t i = 0, o = part * (dim / 4); i < dim / 4; i++, o++)
                out[o] = (float)((from[i] >> (4 * part)) & 15) * by[o] + least[o];
    }
}

static void read_page(const Pages *x, int64_t page, int64_t head, int64_t slot, int64_t count,
                      float *out, int64_t width) {
    if (page >= x->count && x->staging) {
        int64_t at = (page - x->count) * x->staging_page + head * x->staging_head + slot * x->staging_slot;
        read_dense(x->staging, at, x->staging_slot, x->dim, x->type, count, out, width);
    } else if (x->format == DENSE) {
        int64_t at = page * x->data_page + head * x->data_head + slot * x->data_slot;
        read_dense(x->data, at, x->data_slot, x->dim, x->type, count, out, width);
    } else
        read_coded(x, page, head, slot, count, out, width);
}

/* Returns the table column of the n-th page that a task reads. */
INLINE int64_t column_of(const Call *call, const Task *task, int64_t n) {
    if (!call->chosen) return n;
    const int32_t *chosen = call->chosen + (task->row * call->groups + task->group) * call->read;
    return chosen[0] < 0 ? n : chosen[n]; /* below 0: the row reads all */
}

/* Decodes tokens begin .. begin + count of a task, and writes their places in the text. */
static void read_block(const Call *call, const Pages *x, const Task *task, int64_t begin, int64_t count,
                       int64_t last, float *out, int64_t width, int32_t *places) {
    const int64_t size = call->page_size;
    const int32_t *table = call->table + task->row * call->columns;
    for (int64_t done = 0; done < count;) {
        int64_t slot = (begin + done) % size, column = column_of(call, task, (begin + done) / size);
        int64_t here = size - slot < count - done ? size - slot : count - done;
        int64_t first = column * size + slot, seen = last + 1 - first;
        seen = seen < 0 ? 0 : seen < here ? seen : here;
        if (seen) read_page(x, table[column], task->group, slot, seen, out + done * width, width);
        memset(out + (done + seen) * width, 0, 4 * (here - seen) * width);
        for (int64_t t = 0; t < here; t++) places[done + t] = t < seen ? (int32_t)(first + t) : -1;
        done += here;
    }
}

/* ------------------------------------------------------------------ numbers in lanes */

INLINE vf load(const float *x) { return *(const vfu *)x; }
INLINE void store(float *x, vf y) { *(vfu *)x = y; }
INLINE vf larger(vf x, vf y) { return choose(x > y, x, y); }

/* The sum of the lanes. */
INLINE float sum(vf x) {
    float parts[LANES];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

/* e^x with a relative error of 2e-7; 0 below -87, where float32 has no normal numbers. */
INLINE vf exponential(vf x) {
    vi small = x < all(-87.0f);
    x = choose(small, all(-87.0f), choose(x > all(88.0f), all(88.0f), x));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = fused(x, all(1.44269504f), all(magic)) - magic;
    vf r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), x));
    vf p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return choose(small, all(0.0f), p * (vf)e);
}

INLINE vf tangent(vf x) { /* tanh; a polynomial near 0, where the other formula loses digits */
    vf z = x * x, p = all(-5.70498872745e-3f);
    p = fused(p, z, all(2.06390887954e-2f));
    p = fused(p, z, all(-5.37397155531e-2f));
    p = fused(p, z, all(1.33314422036e-1f));
    p = fused(p, z, all(-3.33332819422e-1f));
    vf far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return choose((x < all(0.625f)) & (x > all(-0.625f)), fused(p * z, x, x), far);
}

/* Products are scaled, not queries: a scaled query could become infinite, and its sums NaN. */
INLINE vf scored(const Call *call, vf product) {
    vf score = product * call->scale;
    return call->softcap ? call->softcap * tangent(score / call->softcap) : score;
}

/* The last token that a query of a row sees. */
INLINE int64_t last_of(const Call *call, int64_t row, int64_t query) {
    return call->kv_lens[row] - (call->causal ? call->num_new[row] - query : 1);
}

#include "tiles.h"

/* ------------------------------------------------------------------ parts and results */

/* Writes one query row's result from its maximum score, sum of weights and weighted values. */
static void finish(const Call *call, const Task *task, const int64_t *starts, int64_t i, float most,
                   float total, const float *weighed, int64_t stride) {
    int64_t ratio = call->heads / call->groups, row = task->first + i, head = task->group * ratio + row % ratio;
    int sees = last_of(call, task->row, row / ratio) >= 0; /* at least itself */
    float factor = 1.0f, lse;
    if (call->sinks) {
        float sink = call->sinks[head], level = most > sink ? most : sink;
        factor = total ? expf(most - level) : 0.0f;
        /* inf - inf is NaN: an infinite sink takes all, one of -inf without tokens adds 0. */
        total = total * factor + (sink == INFINITY ? 1.0f : total || sink != -INFINITY ? expf(sink - level) : 0.0f);
        most = level;
    }
    lse = total ? most + logf(total) : -INFINITY;
    if (sees) factor /= total; /* NaN if a weight is NaN, or every score minus infinity */
    int64_t at = (starts[task->row] + row / ratio) * call->heads + head, dim = call->v.dim;
    if (call->lse) call->lse[at] = lse;
    for (int64_t i = 0; i < dim; i++) put(call->out, at * dim + i, call->type, weighed[i * stride] * factor);
}

/* Joins two parts, in lanes of rows or head dims; scales the part with the lower maximum down. */
INLINE vf joined(vf one, vf other, vf most, vf other_most) {
    vi rises = other_most > most;
    vf least = choose(rises, most, other_most), level = choose(rises, other_most, most);
    vf by = exponential(least - choose(level == all(-INFINITY), all(0.0f), level));
    return choose(rises, fused(one, by, other), fused(other, by, one));
}

/* Joins a part of some rows with the held sums of earlier parts. */
static void join(const Scratch *s, int64_t count, int in_lanes) {
    const int64_t lanes = in_lanes ? LANES : 1;
    for (int64_t i = 0; i < count; i += lanes) {
        vf most = in_lanes ? load(s->held_most + i) : all(s->held_most[i]);
        vf other = in_lanes ? load(s->most + i) : all(s->most[i]);
        float *held = s->held + (in_lanes ? i : i * s->v_width);
        const float *weighed = s->weighed + (held - s->held);
        for (int64_t d = 0, at = 0; d < s->v_width; d += LANES / lanes, at += in_lanes ? MANY : LANES)
            store(held + at, joined(load(held + at), load(weighed + at), most, other));
        vf total = in_lanes ? load(s->held_total + i) : all(s->held_total[i]);
        total = joined(total, in_lanes ? load(s->total + i) : all(s->total[i]), most, other);
        most = larger(other, most);
        memcpy(s->held_total + i, &total, 4 * lanes);
        memcpy(s->held_most + i, &most, 4 * lanes);
    }
}

/* Writes a tile's results, or a part's for `merge`: weighted values, maxima and sums of rows. */
static void end_task(const Call *call, const Task *task, const int64_t *starts, const Scratch *s,
                     const float *most, const float *total, const float *weighed, int in_lanes) {
    int64_t by_row = in_lanes ? 1 : s->v_width, by_dim = in_lanes ? MANY : 1, width = s->v_width;
    for (int64_t i = 0; i < task->count; i++) {
        const float *row = weighed + i * by_row;
        if (!task->partial) finish(call, task, starts, i, most[i], total[i], row, by_dim);
        else for (int64_t d = 0; d < width; d++) task->partial[i * width + d] = row[d * by_dim];
    }
    if (!task->partial) return;
    memcpy(task->partial + task->count * width, most, 4 * task->count);
    memcpy(task->partial + task->count * (width + 1), total, 4 * task->count);
}

/* Joins the results of a tile's parts, in place of the first part's, and finishes its rows. */
static void merge(const Call *call, const Task *task, const int64_t *starts, Scratch s) {
    int64_t count = task->count, width = s.v_width;
    s.held = task->partial, s.held_most = s.held + count * width, s.held_total = s.held_most + count;
    for (int64_t part = 1; part < task->parts; part++) {
        s.weighed = s.held + part * count * (width + 2);
        s.most = s.weighed + count * width, s.total = s.most + count;
        join(&s, count, 0);
    }
    for (int64_t i = 0; i < count; i++)
        finish(call, task, starts, i, s.held_most[i], s.held_total[i], s.held + i * width, 1);
}

#include "tasks.h"
#include "write.h"
#include "log_sums.h"
#include "select_pages.h"
