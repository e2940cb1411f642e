/* Matrices in panels, and products of rows with them; `packed_product.py` calls both.

   A panel has as many outputs of the matrix as two vectors have lanes, input after input. A tile of
   rows keeps its sums in registers while it reads a panel: an input's weights are read and widened
   once for all rows of the tile, and nothing is summed across lanes. So every sum is one chain, in
   the order of the inputs, for any number of rows, tile and thread.

   A word of bfloat16 has two inputs of an output, as `vdpbf16ps` needs them: if the processor has
   it, it multiplies rows of bfloat16. Vectors are those of GCC and clang, in plain C. */

#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE 12 /* rows whose sums, two vectors each, fit into 32 registers */
#else
#define TILE 6
#endif

enum { WIDE = 2 * LANES, AHEAD = 8192 }; /* weights are prefetched so many bytes ahead */

typedef struct {
    const void *panels; /* [ceil(outputs / WIDE), inputs, WIDE], in bfloat16 [.., inputs / 2, WIDE, 2] */
    int64_t outputs, inputs;
    int32_t type;
} Matrix;

typedef struct {
    const void *x;     /* [rows, inputs] */
    const float *bias; /* [outputs], or null */
    void *out;         /* [rows, outputs] */
    int64_t rows;
    int32_t type; /* of x and out; bfloat16 only if `multiplies_pairs` */
} Rows;

INLINE int64_t panel_bytes(const Matrix *by) {
    return by->type == BF16 ? (by->inputs + 1) / 2 * 4 * WIDE : by->inputs * size_of(by->type) * WIDE;
}

/* ------------------------------------------------------------------ packing */

/* Reads LANES words, from `first` on, of each of LANES outputs, of which `outputs` exist.
   A vector of the result has one word of every output; missing words are 0. */
INLINE void words_of(const char *at, int64_t row_bytes, int64_t first, int64_t outputs, vf *words) {
    const int64_t left = row_bytes - 4 * first, bytes = left < 4 * LANES ? left : 4 * LANES;
    for (int i = 0; i < LANES; i++) {
        const char *from = at + i * row_bytes + 4 * first;
        __builtin_prefetch(from + WIDE * row_bytes); /* the next panel */
        words[i] = (vf){0};
        if (i < outputs && bytes == 4 * LANES) words[i] = *(const vfu *)from;
        else if (i < outputs) memcpy(words + i, from, bytes);
    }
    transpose(words);
}

/* Packs floats, or unchanged pairs of bfloat16. Returns whether the type does not hold a float. */
INLINE int pack_panel(const Matrix *into, const char *weights, int from, int64_t index) {
    const int64_t row_bytes = into->inputs * size_of(from), words = (row_bytes + 3) / 4, output = index * WIDE;
    char *out = (char *)into->panels + index * panel_bytes(into);
    vi lost = {0};
    for (int64_t first = 0; first < words; first += LANES) {
        vf x[2][LANES];
        int64_t count = words - first < LANES ? words - first : LANES;
        for (int half = 0; half < 2; half++) {
            const int64_t at = output + half * LANES;
            words_of(weights + at * row_bytes, row_bytes, first, into->outputs - at, x[half]);
        }
        for (int64_t k = 0; k < count; k++)
            for (int half = 0; half < 2; half++) {
                vi bits = (vi)x[half][k];
                if (from == BF16 || into->type == F32) *(viu *)out = bits, out += 4 * LANES;
                else if (into->type == F16) {
                    vhu halves = to_halves(x[half][k]);
                    *(vhu *)out = halves;
                    lost |= (vi)of_halves(out) ^ bits;
                    out += 2 * LANES;
                } else if (k % 2 == 0) {
                    vi next = (vi)x[half][k + 1]; /* 0 behind the last input */
                    *(viu *)out = (bits >> 16 & 0xffff) | (next & -0x10000);
                    lost |= (bits | next) & 0xffff;
                    out += 4 * LANES;
                }
            }
    }
    return any(lost != 0);
}

/* Packs a matrix of floats, or of bfloat16. Returns 0 if its type does not hold all weights, bit for bit. */
int pack(const Matrix *into, const void *weights, int from, int threads) {
    int64_t panels = (into->outputs + WIDE - 1) / WIDE;
    int lost = 0; /* set by one panel; the others then do nothing */
    (void)threads;
#pragma omp parallel for num_threads(threads > 0 ? threads : 1) schedule(static)
    for (int64_t i = 0; i < panels; i++) {
        int is_lost;
#pragma omp atomic read
        is_lost = lost;
        if (is_lost) continue;
        if (from == BF16) is_lost = pack_panel(into, weights, BF16, i);
        else is_lost = pack_panel(into, weights, F32, i);
        if (is_lost) {
#pragma omp atomic write
            lost = 1;
        }
    }
    return !lost;
}

/* ------------------------------------------------------------------ products */

/* Widens the weights of one input of the pair of inputs at `at`: the second one if `odd`. */
INLINE void weights_at(const char *at, int type, int odd, vf *first, vf *second) {
    if (type != BF16) {
        widen_two(at + odd * WIDE * size_of(type), type, first, second);
        return;
    }
    vi a = *(const viu *)at, b = *(const viu *)(at + 4 * LANES);
    *first = (vf)(odd ? a & -0x10000 : a << 16);
    *second = (vf)(odd ? b & -0x10000 : b << 16);
}

/* Adds the products of one input of `count` rows of floats. */
INLINE void add(const float *x, int64_t inputs, int count, const char *at, int type, int odd, vf *first, vf *second) {
    vf a, b;
    weights_at(at, type, odd, &a, &b);
    for (int r = 0; r < count; r++) {
        vf each = all(x[r * inputs]);
        first[r] = fused(each, a, first[r]);
        second[r] = fused(each, b, second[r]);
    }
}

/* Adds the products of a pair of inputs of `count` rows of bfloat16; `there` inputs exist. */
INLINE void add_pair(const uint16_t *x, int64_t inputs, int count, const char *at, int there, vf *first, vf *second) {
#ifdef __AVX512BF16__
    __m512bh a = (__m512bh)*(const viu *)at, b = (__m512bh)*(const viu *)(at + 4 * LANES);
    for (int r = 0; r < count; r++) {
        int32_t pair = 0;
        memcpy(&pair, x + r * inputs, 2 * there);
        __m512bh each = (__m512bh)_mm512_set1_epi32(pair);
        first[r] = (vf)_mm512_dpbf16_ps((__m512)first[r], each, a);
        second[r] = (vf)_mm512_dpbf16_ps((__m512)second[r], each, b);
    }
#endif
}

/* Multiplies `count` rows, a constant at each call, with a panel that has `width` outputs. */
INLINE void tile(const Matrix *by, const Rows *rows, int kind, const char *at, int type, int64_t row, int count,
                 int64_t output, int64_t width) {
    const int64_t inputs = by->inputs, step = 2 * size_of(type) * WIDE; /* a pair of inputs */
    const float *x = (const float *)rows->x + row * inputs;
    const uint16_t *pairs = (const uint16_t *)rows->x + row * inputs;
    vf first[TILE], second[TILE];
    int64_t k = 0;
    for (int r = 0; r < count; r++) first[r] = second[r] = (vf){0};
    for (; k + 1 < inputs; k += 2, at += step) {
        for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + AHEAD + i);
        if (kind == BF16) add_pair(pairs + k, inputs, count, at, 2, first, second);
        else
            for (int odd = 0; odd < 2; odd++) add(x + k + odd, inputs, count, at, type, odd, first, second);
    }
    if (k < inputs) {
        if (kind == BF16) add_pair(pairs + k, inputs, count, at, 1, first, second);
        else add(x + k, inputs, count, at, type, 0, first, second);
    }
    for (int r = 0; r < count; r++) {
        float sums[WIDE];
        int64_t place = (row + r) * by->outputs + output;
        *(vfu *)sums = first[r];
        *(vfu *)(sums + LANES) = second[r];
        if (rows->bias)
            for (int64_t i = 0; i < width; i++) sums[i] += rows->bias[output + i];
        if (kind == BF16)
            for (int i = 0; i < WIDE; i += LANES) {
                vhu half = __builtin_convertvector((vi)to_bfloats(*(vfu *)(sums + i)) >> 16, vh);
                memcpy((uint16_t *)sums + i, &half, sizeof half);
            }
        memcpy((char *)rows->out + place * size_of(kind), sums, size_of(kind) * width);
    }
}

/* Calls `tile` with a constant count; there are few sizes, because each is compiled separately. */
#define TILES(kind, type) \
    switch (count) { \
        case 12: tile(by, rows, kind, at, type, row, TILE > 6 ? 12 : 1, output, width); break; \
        case 8: tile(by, rows, kind, at, type, row, TILE > 6 ? 8 : 1, output, width); break; \
        case 6: tile(by, rows, kind, at, type, row, 6, output, width); break; \
        case 4: tile(by, rows, kind, at, type, row, 4, output, width); break; \
        case 2: tile(by, rows, kind, at, type, row, 2, output, width); break; \
        default: tile(by, rows, kind, at, type, row, 1, output, width); \
    }

static void panel(const Matrix *by, const Rows *rows, int64_t index) {
    const char *at = (const char *)by->panels + index * panel_bytes(by);
    int64_t output = index * WIDE, width = by->outputs - output < WIDE ? by->outputs - output : WIDE;
    for (int64_t row = 0, count; row < rows->rows; row += count) {
        int64_t left = rows->rows - row;
        count = left >= TILE ? TILE : left >= 8 && TILE > 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (rows->type == BF16) TILES(BF16, BF16)
        else if (by->type == F32) TILES(F32, F32)
        else if (by->type == BF16) TILES(F32, BF16)
        else TILES(F32, F16)
    }
}

int panel_width(void) { return WIDE; }

/* Whether the processor multiplies rows of bfloat16 with matrices of bfloat16. */
int multiplies_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

void packed_product(const Matrix *by, const Rows *rows, int threads) {
    int64_t panels = (by->outputs + WIDE - 1) / WIDE;
    (void)threads;
#pragma omp parallel for num_threads(threads > 0 ? threads : 1) schedule(static)
    for (int64_t i = 0; i < panels; i++) panel(by, rows, i);
}
