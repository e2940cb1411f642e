/* Attention over pages where they are: the twin of `paged_attention` of the other kernels.

   A task is a tile of query rows of one KV head, rows being pairs of a query and one of the head's
   query heads, over a part of a sequence's tokens. Blocks of tokens are decoded into floats and
   attended with a running maximum and sum. Tiles of few rows have head dims in the lanes of a
   vector; tiles of many have rows there, so that nothing is summed across lanes.

   What a row computes depends on the row alone: tiles and parts are cut by its own numbers. Tokens
   that no query of a tile sees are not read. Vectors are those of GCC and clang, in plain C. */

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
    int64_t count; /* of coded pages: staging pages have the ids that follow */
    int64_t dim;
    int32_t format, type;
} Pages;

typedef struct {
    Pages k, v;
    const void *q;         /* [T, H, D] of the same type as dense elements */
    void *out;             /* [T, H, D of V], contiguous */
    float *lse;            /* [T, H], or null */
    const float *sinks;    /* [H], or null */
    const int32_t *table;  /* [B, columns] */
    const int32_t *chosen; /* [B, G, read], columns that a row reads, ascending; or null */
    const int64_t *num_new, *kv_lens; /* [B] */
    int64_t q_token, q_head, columns, read;
    int64_t rows, heads, groups, page_size, window; /* a window of 0: none */
    float scale, softcap;                           /* a softcap of 0: none */
    int32_t type, v_is_k, threads;
} Call;

typedef struct {
    int64_t row, group, first, count; /* query rows first .. first + count of a sequence */
    int64_t begin, end;               /* tokens, or slots of the pages chosen */
    int64_t part, parts;
    float *partial; /* [count, 2 + D of V], beside that of the other parts; null for an only part */
} Task;

/* ------------------------------------------------------------------ elements */

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* A float of the bits of a narrower one: they stand where its own do, but for the bias of exponents.

   No float on the way is subnormal, because a process may treat those as zeros. */
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

/* To the nearest half, to the even one of two. */
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

/* Each decodes `count` tokens of one page into rows of `width` floats. */
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

/* The column of a row's table in which the n-th page is that a task reads. */
INLINE int64_t column_of(const Call *call, const Task *task, int64_t n) {
    if (!call->chosen) return n;
    const int32_t *chosen = call->chosen + (task->row * call->groups + task->group) * call->read;
    return chosen[0] < 0 ? n : chosen[n]; /* below 0: a row that reads all */
}

/* Decodes tokens begin .. begin + count of a task, and says where in the text they are. */
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
INLINE vf choose(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }
INLINE vf larger(vf x, vf y) { return choose(x > y, x, y); }

/* The sum of the lanes. */
INLINE float sum(vf x) {
    float parts[LANES];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

#define I(i, h, more) ((i) / (h) * 2 * (h) + (i) % (h) + (more)) /* of every two stretches of h lanes, one */
#define FOUR(i, h, more) I(i, h, more), I(i + 1, h, more), I(i + 2, h, more), I(i + 3, h, more)
#define EIGHT(i, h, more) FOUR(i, h, more), FOUR(i + 4, h, more)
#if LANES == 16
#define EACH(h, more) EIGHT(0, h, more), EIGHT(8, h, more)
#elif LANES == 8
#define EACH(h, more) EIGHT(0, h, more)
#else
#define EACH(h, more) FOUR(0, h, more)
#endif
#ifdef __clang__
#define PICK(x, y, h, more) __builtin_shufflevector(x, y, EACH(h, more))
#else
#define PICK(x, y, h, more) __builtin_shuffle(x, y, (vi){EACH(h, more)})
#endif
#define HALVE(h) \
    for (int i = 0; i < h; i++) x[i] = PICK(x[2 * i], x[2 * i + 1], h, 0) + PICK(x[2 * i], x[2 * i + 1], h, h);

/* The sums of as many vectors as there are lanes, each in its lane; overwrites them. */
INLINE vf sums_of(vf *x) {
#if LANES > 8
    HALVE(8)
#endif
#if LANES > 4
    HALVE(4)
#endif
    HALVE(2) HALVE(1)
    return x[0];
}

/* Whether it holds in a lane; no lane waits for another. */
INLINE int any(vi which) {
    uint64_t parts[LANES / 2], found = 0;
    memcpy(parts, &which, sizeof which);
    for (int i = 0; i < LANES / 2; i++) found |= parts[i];
    return found != 0;
}

/* e^x to 2e-7 of it; 0 below -87, where float32 has no normal numbers left. */
INLINE vf exponential(vf x) {
    vi small = x < all(-87.0f);
    x = choose(small, all(-87.0f), choose(x > all(88.0f), all(88.0f), x));
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded */
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return choose(small, all(0.0f), p * (vf)e);
}

INLINE vf tangent(vf x) { /* tanh; near 0 by a polynomial, where 1 - small would lose digits */
    vf z = x * x, p = all(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return choose((x < all(0.625f)) & (x > all(-0.625f)), p * z * x + x, far);
}

/* Products are scaled, not queries: these could become infinite, and their sums no numbers. */
INLINE vf scored(const Call *call, vf product) {
    vf score = product * call->scale;
    return call->softcap ? call->softcap * tangent(score / call->softcap) : score;
}

#include "tiles.h"

/* ------------------------------------------------------------------ parts and results */

/* Writes one query row's result, of the sum of its weights, their maximum and what they weigh. */
static void finish(const Call *call, const Task *task, const int64_t *starts, int64_t i, float most,
                   float total, const float *weighed, int64_t stride) {
    int64_t ratio = call->heads / call->groups, row = task->first + i, head = task->group * ratio + row % ratio;
    int sees = call->kv_lens[task->row] - call->num_new[task->row] + row / ratio >= 0; /* itself */
    float factor = 1.0f, lse;
    if (call->sinks) {
        float sink = call->sinks[head], level = most > sink ? most : sink;
        factor = total ? expf(most - level) : 0.0f;
        total = total * factor + expf(sink - level);
        most = level;
    }
    lse = total ? most + logf(total) : -INFINITY;
    if (sees) factor /= total; /* NaN where a weight is no number, or every score minus infinity */
    int64_t at = (starts[task->row] + row / ratio) * call->heads + head, dim = call->v.dim;
    if (call->lse) call->lse[at] = lse;
    for (int64_t i = 0; i < dim; i++) put(call->out, at * dim + i, call->type, weighed[i * stride] * factor);
}

static void end_task(const Call *call, const Task *task, const int64_t *starts, const float *most,
                     const float *total, const float *weighed, int64_t by_row, int64_t by_dim) {
    int64_t dim = call->v.dim;
    for (int64_t i = 0; i < task->count; i++) {
        if (task->partial) {
            float *into = task->partial + i * (2 + dim);
            into[0] = most[i], into[1] = total[i];
            for (int64_t d = 0; d < dim; d++) into[2 + d] = weighed[i * by_row + d * by_dim];
        } else {
            finish(call, task, starts, i, most[i], total[i], weighed + i * by_row, by_dim);
        }
    }
}

/* Merges what the parts of a tile have left into that of its first part, and finishes its rows. */
static void merge(const Call *call, const Task *task, const int64_t *starts) {
    int64_t dim = call->v.dim, parts = task->parts, apart = task->count * (2 + dim);
    for (int64_t i = 0; i < task->count; i++) {
        float *first = task->partial + i * (2 + dim), most = -INFINITY, total = 0;
        for (int64_t part = 0; part < parts; part++) most = fmaxf(most, first[part * apart]);
        for (int64_t part = 0; part < parts; part++) {
            float *each = first + part * apart, by = each[1] ? expf(each[0] - most) : 0.0f;
            total += each[1] * by;
            for (int64_t d = 0; d < dim; d++) first[2 + d] = each[2 + d] * by + (part ? first[2 + d] : 0.0f);
        }
        finish(call, task, starts, i, most, total, first + 2, 1);
    }
}

#include "tasks.h"
#include "write.h"
#include "select_pages.h"
