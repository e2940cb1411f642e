/* Products of rows of floats with a matrix that was packed before; `packed_product.py` packs it.

   A panel is as many outputs of the matrix as two vectors have lanes, input after input. A tile of
   rows keeps its sums in registers while a panel goes by: an input's weights are read and widened
   once for all rows of the tile, and nothing is summed across lanes. So every sum is one chain, in
   the order of the inputs, however many rows there are, whatever the tile and the thread.

   Vectors are those of GCC and clang, in plain C. */

#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE 12 /* rows whose sums, two vectors each, fit into 32 registers */
#else
#define TILE 6
#endif

enum { WIDE = 2 * LANES, AHEAD = 8192 }; /* bytes of weights that are asked for before they are due */

typedef struct {
    const void *panels; /* [ceil(outputs / WIDE), inputs, WIDE] */
    int64_t outputs, inputs;
    int32_t type;
} Matrix;

typedef struct {
    const float *x;    /* [rows, inputs] */
    const float *bias; /* [outputs], or null */
    float *out;        /* [rows, outputs] */
    int64_t rows;
} Rows;

/* `count` rows, a constant of each place that calls it, by a panel of which `width` outputs are there. */
INLINE void tile(const Matrix *by, const Rows *rows, const char *at, int type, int64_t row, int count,
                 int64_t output, int64_t width) {
    const int64_t inputs = by->inputs, step = (type == F32 ? 4 : 2) * WIDE;
    const float *x = rows->x + row * inputs;
    vf first[TILE], second[TILE];
    for (int r = 0; r < count; r++) first[r] = second[r] = (vf){0};
    for (int64_t k = 0; k < inputs; k++, at += step) {
        vf a, b;
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + AHEAD + i);
        widen_two(at, type, &a, &b);
        for (int r = 0; r < count; r++) {
            vf each = all(x[r * inputs + k]);
            first[r] = fused(each, a, first[r]);
            second[r] = fused(each, b, second[r]);
        }
    }
    for (int r = 0; r < count; r++) {
        float sums[WIDE], *out = rows->out + (row + r) * by->outputs + output;
        *(vfu *)sums = first[r];
        *(vfu *)(sums + LANES) = second[r];
        if (rows->bias)
            for (int64_t i = 0; i < width; i++) sums[i] += rows->bias[output + i];
        memcpy(out, sums, 4 * width);
    }
}

/* The most rows that a tile may have, of few sizes, because each is compiled on its own. */
#define TILES(type) \
    switch (count) { \
        case 12: tile(by, rows, at, type, row, TILE > 6 ? 12 : 1, output, width); break; \
        case 8: tile(by, rows, at, type, row, TILE > 6 ? 8 : 1, output, width); break; \
        case 6: tile(by, rows, at, type, row, 6, output, width); break; \
        case 4: tile(by, rows, at, type, row, 4, output, width); break; \
        case 2: tile(by, rows, at, type, row, 2, output, width); break; \
        default: tile(by, rows, at, type, row, 1, output, width); \
    }

static void panel(const Matrix *by, const Rows *rows, int64_t index) {
    const char *at = (const char *)by->panels + index * by->inputs * WIDE * (by->type == F32 ? 4 : 2);
    int64_t output = index * WIDE, width = by->outputs - output < WIDE ? by->outputs - output : WIDE;
    for (int64_t row = 0, count; row < rows->rows; row += count) {
        int64_t left = rows->rows - row;
        count = left >= TILE ? TILE : left >= 8 && TILE > 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (by->type == F32) TILES(F32)
        else if (by->type == BF16) TILES(BF16)
        else TILES(F16)
    }
}

int panel_width(void) { return WIDE; }

void packed_product(const Matrix *by, const Rows *rows, int threads) {
    int64_t panels = (by->outputs + WIDE - 1) / WIDE;
    (void)threads;
#pragma omp parallel for num_threads(threads > 0 ? threads : 1) schedule(static)
    for (int64_t i = 0; i < panels; i++) panel(by, rows, i);
}
