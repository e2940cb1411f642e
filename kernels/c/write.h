/* Writes coded pages, with the same bits as the torch kernels' `page_coding.py`.

   Tokens are written to slots one by one, a whole page from tokens or from a staging page. */

typedef struct {
    Pages pages;
    const void *x;       /* elements of the dense type; a token's head is contiguous */
    const int64_t *from; /* [count] places in x, in steps of `unit`; null for 0, 1, 2 and so on */
    const int64_t *to;   /* [count] slots, or ids of pages if they are written whole */
    int64_t unit, token, head;
    int64_t count, groups, page_size;
    int32_t whole, threads;
} Write;

/* Converts a float to an integer, so that integers have the order of the floats. */
INLINE int32_t ordered(float x) { int32_t bits = (int32_t)as_bits(x); return bits ^ (bits >> 31 & 0x7fffffff); }
INLINE float unordered(int32_t key) { return as_float((uint32_t)(key ^ (key >> 31 & 0x7fffffff))); }

enum { INFINITE = 0x7f800000 };

/* Clamps to two bounds; NaN becomes the lower one. */
INLINE float within(float x, float least, float most) {
    x = x > least ? x : least;
    return x < most ? x : most;
}

/* Rounds to the nearest code, ties to even; 0 for NaN. */
INLINE uint16_t code_of(float x, float least, float most, float bias) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float code = (within(x, least, most) + magic) - magic + bias;
    return (uint16_t)(int32_t)(x == x ? code : 0.0f);
}

INLINE uint16_t to_e4m3(float x) {
    uint32_t bits = as_bits(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff, code;
    uint32_t small = as_bits(as_float(size) + 16384.0f) - as_bits(16384.0f); /* in steps of 2^-9 */
    size = size < as_bits(448.0f) ? size : as_bits(448.0f);
    code = (size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20;
    code = size < as_bits(0.015625f) ? small : code;
    return (uint16_t)(sign | (x != x ? 0x7f : code));
}

/* Returns the divisor of elements for a scale; infinity for 0, so that codes become 0. */
INLINE float divisor(uint16_t scale) {
    float x = from_half(scale);
    return x ? x : INFINITY;
}

/* Writes step and minimum of elements between two ordered keys, as halves. */
INLINE void step_and_minimum(int32_t least, int32_t most, uint16_t *scales) {
    int number = most <= INFINITE && least >= ordered(-INFINITY);
    float low = within(unordered(least), -65504.0f, 65504.0f);
    scales[1] = number ? to_half(low) : 0x7e00;
    scales[0] = number ? to_half(within((unordered(most) - from_half(scales[1])) / 15.0f, 0.0f, 65504.0f)) : 0x7e00;
}

static void pack(const uint16_t *restrict codes, uint16_t *restrict words, int64_t dim, int bits) {
    const int64_t width = dim * bits / 16;
    for (int64_t i = 0; i < width; i++) words[i] = codes[i];
    for (int64_t part = 1; part < 16 / bits; part++)
        for (int64_t i = 0; i < width; i++) words[i] |= (uint16_t)(codes[part * width + i] << (part * bits));
}

static void write_token(const Pages *p, int64_t page, int64_t head, int64_t slot, const void *x, int64_t at) {
    const int64_t dim = p->dim, size = p->type == F32 ? 4 : 2;
    const char *from = (const char *)x + at * size;
    if (p->staging && page >= p->count) {
        at = (page - p->count) * p->staging_page + head * p->staging_head + slot * p->staging_slot;
        memcpy((char *)p->staging + at * size, from, size * dim);
        return;
    }
    at = page * p->data_page + head * p->data_head + slot * p->data_slot;
    if (p->format == DENSE) {
        memcpy((char *)p->data + at * size, from, size * dim);
        return;
    }
    float values[dim];
    uint16_t codes[dim], *words = (uint16_t *)p->data + at;
    uint16_t *scales = (uint16_t *)p->scales + page * p->scales_page + head * p->scales_head;
    read_dense(from, 0, 0, dim, p->type, 1, values, dim);
    if (p->format == FP8) {
        const float by = ((const float *)p->scales)[head];
        for (int64_t i = 0; i < dim; i++) codes[i] = to_e4m3(values[i] / by);
        pack(codes, words, dim, 8);
    } else if (p->format == INT8) {
        int32_t most = 0;
        for (int64_t i = 0; i < dim; i++) {
            int32_t key = (int32_t)(as_bits(values[i]) & 0x7fffffff);
            most = key > most ? key : most;
        }
        float largest = within(as_float((uint32_t)most) / 127.0f, 0.0f, 65504.0f);
        scales[slot] = most > INFINITE ? 0x7e00 : to_half(largest);
        const float by = divisor(scales[slot]);
        for (int64_t i = 0; i < dim; i++) codes[i] = code_of(values[i] / by, -127.0f, 127.0f, 128.0f);
        pack(codes, words, dim, 8);
    } else {
        int32_t least = INT32_MAX, most = INT32_MIN;
        for (int64_t i = 0; i < dim; i++) {
            int32_t key = ordered(values[i]);
            least = key < least ? key : least;
            most = key > most ? key : most;
        }
        step_and_minimum(least, most, scales + 2 * slot);
        const float by = divisor(scales[2 * slot]), low = from_half(scales[2 * slot + 1]);
        for (int64_t i = 0; i < dim; i++) codes[i] = code_of((values[i] - low) / by, 0.0f, 15.0f, 0.0f);
        pack(codes, words, dim, 4);
    }
}

/* Writes a page whose channels have scales. */
static void write_channels(const Write *w, int64_t page, int64_t head, int64_t at) {
    const Pages *p = &w->pages;
    const int64_t dim = p->dim, size = w->page_size;
    float values[dim], by[dim], low[dim];
    int32_t least[dim], most[dim];
    uint16_t codes[dim], *scales = (uint16_t *)p->scales + page * p->scales_page + head * p->scales_head;
    for (int64_t i = 0; i < dim; i++) least[i] = INT32_MAX, most[i] = INT32_MIN;
    for (int64_t t = 0; t < size; t++) {
        read_dense(w->x, at + t * w->token, 0, dim, p->type, 1, values, dim);
        for (int64_t i = 0; i < dim; i++) {
            int32_t key = ordered(values[i]);
            least[i] = key < least[i] ? key : least[i];
            most[i] = key > most[i] ? key : most[i];
        }
    }
    for (int64_t i = 0; i < dim; i++) {
        step_and_minimum(least[i], most[i], scales + 2 * i);
        by[i] = divisor(scales[2 * i]), low[i] = from_half(scales[2 * i + 1]);
    }
    for (int64_t t = 0; t < size; t++) {
        read_dense(w->x, at + t * w->token, 0, dim, p->type, 1, values, dim);
        for (int64_t i = 0; i < dim; i++) codes[i] = code_of((values[i] - low[i]) / by[i], 0.0f, 15.0f, 0.0f);
        uint16_t *words = (uint16_t *)p->data + page * p->data_page + head * p->data_head + t * p->data_slot;
        pack(codes, words, dim, 4);
    }
}

/* Writes K, V, or both. */
void write_pages(const Write *writes, int64_t count) {
    for (const Write *w = writes; w < writes + count; w++) {
#pragma omp parallel for num_threads(w->threads) if (w->count * w->groups > 256)
        for (int64_t i = 0; i < w->count * w->groups; i++) {
            const int64_t n = i / w->groups, head = i % w->groups, size = w->page_size;
            const int64_t at = (w->from ? w->from[n] : n) * w->unit + head * w->head;
            if (!w->whole) write_token(&w->pages, w->to[n] / size, head, w->to[n] % size, w->x, at);
            else if (w->pages.format == INT4_CHANNEL) write_channels(w, w->to[n], head, at);
            else
                for (int64_t t = 0; t < size; t++)
                    write_token(&w->pages, w->to[n], head, t, w->x, at + t * w->token);
        }
    }
}

/* Writes K and V of a layer's new tokens, then attends. */
int write_and_attend(const Write *writes, int64_t count, const Call *call) {
    write_pages(writes, count);
    return paged_attention(call);
}
