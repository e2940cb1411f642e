/* Products of rows of floats with a matrix of 8 bits a weight; `eight_bits.py` packs it.

   A group is 32 inputs. Weights and rows are integers up to 127 within a group, times a scale of the
   group. A weight's code is its integer + 128, as `vpdpbusd` needs unsigned codes. The sum of a
   group begins at -128 times the sum of the row's integers, so this costs nothing. Sums of a group
   are exact, and groups are added in their order in every tile and thread. Each row is rounded by
   itself, once in a call.

   Without this instruction products of 16 bits are faster (docs/kernels.md): this file is empty. */

#include "vectors.h"
#include <math.h>

#ifdef __AVX512VNNI__

enum { TILE = 8 }; /* rows whose sums fit into registers: a vector for a group and one for all */
enum { GROUP = 32, AHEAD = 8192 }; /* weights are prefetched so many bytes ahead */
/* A group of a panel of LANES outputs: scales as halves, then [GROUP / 4][LANES][4] codes. */
enum { BLOCK = 2 * LANES + GROUP * LANES };

typedef struct {
    int8_t codes[GROUP];
    float scale;
    int32_t begin; /* -128 times the sum of the codes */
} Group;

typedef struct {
    const char *panels; /* [ceil(outputs / LANES), inputs / GROUP, BLOCK] */
    const float *x;     /* [rows, inputs] */
    const float *bias;  /* [outputs], or null */
    float *out;         /* [rows, outputs] */
    Group *groups;      /* [rows, inputs / GROUP], of the call */
    int64_t outputs, inputs, rows;
} Product;

/* ------------------------------------------------------------------ rows */

/* A group with NaN or infinity becomes NaN; a group of numbers below 2^-80 becomes 0. */
static void round_group(const float *x, Group *into) {
    typedef int8_t Codes __attribute__((vector_size(LANES)));
    vi most = {0}, sums = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        vi size = *(const viu *)(x + i) & 0x7fffffff, is_more = size > most;
        most = (is_more & size) | (~is_more & most); /* bits have the order of the floats */
    }
    int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
    float top, by = 0.0f;
    memcpy(&top, &bits, 4);
    if (bits >= 0x7f800000) {
        memset(into, 0, sizeof *into);
        into->scale = NAN;
        return;
    }
    if (top < 0x1p-80f) top = 0.0f;
    else by = 127.0f / top;
    for (int i = 0; i < GROUP; i += LANES) {
        vi whole = (vi)_mm512_cvtps_epi32((__m512)(*(const vfu *)(x + i) * by));
        Codes codes = __builtin_convertvector(whole, Codes);
        memcpy(into->codes + i, &codes, sizeof codes);
        sums += whole;
    }
    into->scale = top / 127.0f;
    into->begin = -128 * _mm512_reduce_add_epi32((__m512i)sums);
}

/* ------------------------------------------------------------------ products */

/* Multiplies `count` rows, a constant at each call, with a panel that has `width` outputs. */
INLINE void tile(const Product *by, const char *at, int64_t row, int count, int64_t output, int64_t width) {
    const int64_t groups = by->inputs / GROUP;
    const Group *x = by->groups + row * groups;
    vf sums[TILE];
    for (int r = 0; r < count; r++) sums[r] = (vf){0};
    for (int64_t g = 0; g < groups; g++, at += BLOCK) {
        vi each[TILE];
        for (int i = 0; i < BLOCK; i += 64) __builtin_prefetch(at + AHEAD + i);
        vf scales = of_halves(at);
        for (int r = 0; r < count; r++) each[r] = x[r * groups + g].begin - (vi){0};
        for (int k = 0; k < GROUP; k += 4) {
            vi four = *(const viu *)(at + (2 + k) * LANES);
            for (int r = 0; r < count; r++) {
                int32_t codes;
                memcpy(&codes, x[r * groups + g].codes + k, 4);
                each[r] = (vi)_mm512_dpbusd_epi32((__m512i)each[r], (__m512i)four, _mm512_set1_epi32(codes));
            }
        }
        for (int r = 0; r < count; r++)
            sums[r] += __builtin_convertvector(each[r], vf) * (scales * x[r * groups + g].scale);
    }
    for (int r = 0; r < count; r++) {
        float found[LANES];
        *(vfu *)found = sums[r];
        if (by->bias)
            for (int64_t i = 0; i < width; i++) found[i] += by->bias[output + i];
        memcpy(by->out + (row + r) * by->outputs + output, found, 4 * width);
    }
}

static void panel(const Product *by, int64_t index) {
    const char *at = by->panels + index * (by->inputs / GROUP) * BLOCK;
    int64_t output = index * LANES, width = by->outputs - output < LANES ? by->outputs - output : LANES;
    for (int64_t row = 0, count; row < by->rows; row += count) {
        int64_t left = by->rows - row;
        count = left >= TILE ? TILE : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        switch (count) { /* few sizes, because each is compiled separately */
            case TILE: tile(by, at, row, TILE, output, width); break;
            case 4: tile(by, at, row, 4, output, width); break;
            case 2: tile(by, at, row, 2, output, width); break;
            default: tile(by, at, row, 1, output, width);
        }
    }
}

int eight_bit_width(void) { return LANES; }
int eight_bit_group(void) { return sizeof(Group); }

void eight_bit_product(const Product *by, int threads) {
    const int64_t groups = by->rows * (by->inputs / GROUP), panels = (by->outputs + LANES - 1) / LANES;
    (void)threads;
#pragma omp parallel num_threads(threads > 0 ? threads : 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < groups; i++) round_group(by->x + i * GROUP, by->groups + i);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < panels; i++) panel(by, i);
    }
}

#endif
