/* RMS norms of rows; each result depends on its row alone. `rms_norm.py` calls it.

   If the end of a row does not fill two vectors, it is padded with zeros. */

#include "vectors.h"
#include <math.h>

enum { WIDE = 2 * LANES, FEW = 1 << 15 }; /* with so few numbers no second thread is woken */

typedef struct {
    const char *x, *weight; /* [rows, width], [width] */
    char *out;              /* [rows, width] */
    int64_t rows, width;
    float eps;
    float added;    /* to each weight */
    int32_t rounds; /* whether a number is rounded to its type before it is weighted */
    int32_t type;
} Norms;

INLINE vf rounded(vf x, int type) { return type == F32 ? x : to_bfloats(x); }

/* Inverts `widen_two`, for numbers that are rounded to their type already. */
INLINE void narrow_two(char *into, int type, vf first, vf second) {
    if (type == F32) {
        *(vfu *)into = first;
        *(vfu *)(into + 4 * LANES) = second;
    } else
        *(viu *)into = (vi)second | ((vi)first >> 16 & 0xffff);
}

/* Widens `count` numbers, fewer than two vectors have, and fills up with zeros. */
INLINE void widen_end(const char *at, int type, int64_t count, vf *first, vf *second) {
    char padded[4 * WIDE] = {0};
    memcpy(padded, at, count * size_of(type));
    widen_two(padded, type, first, second);
}

INLINE void narrow_end(char *into, int type, int64_t count, vf first, vf second) {
    char padded[4 * WIDE];
    narrow_two(padded, type, first, second);
    memcpy(into, padded, count * size_of(type));
}

INLINE vf weighted(const Norms *by, int type, vf x, float scale, vf weight) {
    x *= scale;
    return rounded((by->rounds ? rounded(x, type) : x) * (weight + by->added), type);
}

INLINE void norm(const Norms *by, int type, int64_t row) {
    const int64_t width = by->width, size = size_of(type), whole = width / WIDE * WIDE;
    const char *x = by->x + row * width * size;
    char *out = by->out + row * width * size;
    vf a, b, c, d, sums = {0}, others = {0};
    for (int64_t i = 0; i < whole; i += WIDE) {
        widen_two(x + i * size, type, &a, &b);
        sums = fused(a, a, sums);
        others = fused(b, b, others);
    }
    widen_end(x + whole * size, type, width - whole, &a, &b);
    sums = fused(a, a, sums);
    others = fused(b, b, others);
    float lanes[LANES], total = 0.0f;
    *(vfu *)lanes = sums + others;
    for (int i = 0; i < LANES; i++) total += lanes[i];
    const float scale = 1.0f / sqrtf(total / (float)width + by->eps);
    for (int64_t i = 0; i < whole; i += WIDE) {
        widen_two(x + i * size, type, &a, &b);
        widen_two(by->weight + i * size, type, &c, &d);
        narrow_two(out + i * size, type, weighted(by, type, a, scale, c), weighted(by, type, b, scale, d));
    }
    widen_end(x + whole * size, type, width - whole, &a, &b);
    widen_end(by->weight + whole * size, type, width - whole, &c, &d);
    narrow_end(out + whole * size, type, width - whole, weighted(by, type, a, scale, c),
               weighted(by, type, b, scale, d));
}

void rms_norm(const Norms *by, int threads) {
    (void)threads;
#pragma omp parallel for num_threads(threads > 0 ? threads : 1) schedule(static) if (by->rows * by->width > FEW)
    for (int64_t row = 0; row < by->rows; row++)
        if (by->type == F32) norm(by, F32, row);
        else norm(by, BF16, row);
}
