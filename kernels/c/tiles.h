/* Two ways through a tile: few rows, with head dims in lanes, and many, with rows in lanes. */

enum { AHEAD = 2 * BLOCK }; /* tokens after which a block is due that is asked for */

typedef struct {
    const char *rows[BLOCK];
    int64_t bytes; /* of each row */
} Soon;

/* Asks for the line of each row in which its d-th float would be; a little at a time, between products. */
INLINE void ask(const Soon *soon, int64_t d) {
    if (4 * d < soon->bytes)
        for (int t = 0; t < BLOCK; t++) __builtin_prefetch(soon->rows[t] + 4 * d);
}

typedef struct {
    int64_t k_width, v_width; /* of decoded rows: head dims, up to whole vectors */
    float *q, *k, *v, *weights, *weighed, *most, *total;
    float *totals; /* of few rows, in as many parts as there are lanes */
    int32_t *first, *last; /* tokens that each row sees */
    Soon k_soon, v_soon;
} Scratch;

/* Sizes of a thread's scratch, in floats; each begins at a whole vector. */
static int64_t scratch_floats(const Call *call) {
    int64_t k = (call->k.dim + LANES - 1) / LANES * LANES, v = (call->v.dim + LANES - 1) / LANES * LANES;
    return MANY * (k + v) + BLOCK * (k + v) + BLOCK * MANY + 4 * MANY + FEW * LANES;
}

static Scratch cut(const Call *call, float *memory) {
    Scratch s;
    s.k_width = (call->k.dim + LANES - 1) / LANES * LANES;
    s.v_width = (call->v.dim + LANES - 1) / LANES * LANES;
    s.q = memory;
    s.weighed = s.q + MANY * s.k_width;
    s.k = s.weighed + MANY * s.v_width;
    s.v = s.k + BLOCK * s.k_width;
    s.weights = s.v + BLOCK * s.v_width;
    s.most = s.weights + BLOCK * MANY;
    s.total = s.most + MANY;
    s.totals = s.total + MANY;
    s.first = (int32_t *)(s.totals + FEW * LANES);
    s.last = s.first + MANY;
    return s;
}

/* Queries, and what each row sees. Lanes without a row see nothing. */
static void begin_tile(const Call *call, const Task *task, const int64_t *starts, Scratch *s, int in_lanes) {
    int64_t ratio = call->heads / call->groups, dim = call->k.dim;
    int64_t before = call->kv_lens[task->row] - call->num_new[task->row];
    memset(s->q, 0, 4 * MANY * s->k_width);
    memset(s->weighed, 0, 4 * MANY * s->v_width);
    memset(s->totals, 0, 4 * FEW * LANES);
    for (int64_t i = 0; i < MANY; i++) {
        s->most[i] = -INFINITY, s->total[i] = 0;
        s->first[i] = 0, s->last[i] = -1;
        if (i >= task->count) continue;
        int64_t row = task->first + i, at = before + row / ratio;
        s->last[i] = (int32_t)at;
        s->first[i] = (int32_t)(call->window && at >= call->window ? at - call->window + 1 : 0);
        int64_t from = (starts[task->row] + row / ratio) * call->q_token;
        from += (task->group * ratio + row % ratio) * call->q_head;
        for (int64_t d = 0; d < dim; d++)
            s->q[in_lanes ? d * MANY + i : i * s->k_width + d] = element(call->q, from + d, call->type);
    }
}

/* ------------------------------------------------------------------ few rows */

/* Adds values to what a tile of rows weighs, in two vectors of head dims where there are two. */
INLINE void weigh(const Soon *soon, int rows, float *weighed, int64_t width, const float *weights, const float *v,
                  int64_t v_stride) {
    for (int64_t d = 0; d < width; d += 2 * LANES) {
        const int64_t more = d + LANES < width ? LANES : 0; /* else the same vector twice */
        vf sums[2][4];
        if (soon) ask(soon, d);
        if (soon && more) ask(soon, d + LANES);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++) sums[i][r] = load(weighed + r * width + d + i * more);
        for (int t = 0; t < BLOCK; t++) {
            vf value[2];
            for (int i = 0; i < 2; i++) value[i] = load(v + t * v_stride + d + i * more);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++) sums[i][r] += weights[r * BLOCK + t] * value[i];
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++) store(weighed + r * width + d + i * more, sums[i][r]);
    }
}

static void few_rows(const Call *call, const Scratch *s, int64_t rows, const int32_t *places, const float *k,
                     int64_t k_stride, const float *v, int64_t v_stride) {
    enum { VECTORS = BLOCK / LANES };
    for (int64_t r = 0; r < rows; r++) {
        const float *q = s->q + r * s->k_width;
        vf sums[BLOCK];
        for (int t = 0; t < BLOCK; t++) sums[t] = all(0.0f);
        for (int64_t d = 0; d < s->k_width; d += LANES) {
            vf query = load(q + d);
            if (!r) ask(&s->k_soon, d);
            for (int t = 0; t < BLOCK; t++) sums[t] += query * load(k + t * k_stride + d);
        }
        for (int i = 0; i < VECTORS; i++) store(s->weights + r * BLOCK + i * LANES, sums_of(sums + i * LANES));
    }
    for (int64_t r = 0; r < rows; r++) {
        float *weights = s->weights + r * BLOCK;
        vf score[VECTORS], most = all(s->most[r]), total = all(0.0f);
        for (int i = 0; i < VECTORS; i++) {
            vi place;
            memcpy(&place, places + i * LANES, sizeof place);
            vi seen = (place >= s->first[r]) & (place <= s->last[r]);
            score[i] = choose(seen, scored(call, load(weights + i * LANES)), all(-INFINITY));
            most = larger(score[i], most);
        }
        float *totals = s->totals + r * LANES;
        if (any(most > all(s->most[r]))) {
            float highest = most[0];
            for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
            float by = s->most[r] == -INFINITY ? 0.0f : expf(s->most[r] - highest);
            float *weighed = s->weighed + r * s->v_width;
            for (int64_t d = 0; d < s->v_width; d += LANES) store(weighed + d, load(weighed + d) * by);
            store(totals, load(totals) * by);
            s->most[r] = highest;
        }
        float level = s->most[r] == -INFINITY ? 0.0f : s->most[r]; /* a score that is no number gets on */
        for (int i = 0; i < VECTORS; i++) {
            vf weight = exponential(score[i] - level); /* of minus infinity: 0 */
            store(weights + i * LANES, weight);
            total += weight;
        }
        store(totals, load(totals) + total);
    }
    for (int64_t r = 0; r < rows; r += 4) {
        float *weighed = s->weighed + r * s->v_width;
        const float *weights = s->weights + r * BLOCK;
        const Soon *soon = r ? NULL : &s->v_soon;
        switch (rows - r) {
        case 1: weigh(soon, 1, weighed, s->v_width, weights, v, v_stride); break;
        case 2: weigh(soon, 2, weighed, s->v_width, weights, v, v_stride); break;
        case 3: weigh(soon, 3, weighed, s->v_width, weights, v, v_stride); break;
        default: weigh(soon, 4, weighed, s->v_width, weights, v, v_stride);
        }
    }
}

/* ------------------------------------------------------------------ many rows */

enum { ABREAST = 8 }; /* tokens, or head dims, that are summed side by side */

INLINE void many_rows(const Call *call, const Scratch *s, int vectors, const int32_t *places, const float *v,
                      int64_t v_stride) {
    vf scores[BLOCK][2];
    for (int t = 0; t < BLOCK; t += ABREAST) {
        vf sums[ABREAST][2];
        for (int j = 0; j < ABREAST; j++)
            for (int w = 0; w < vectors; w++) sums[j][w] = all(0.0f);
        for (int64_t d = 0; d < call->k.dim; d++) {
            vf query[2];
            for (int w = 0; w < vectors; w++) query[w] = load(s->q + d * MANY + w * LANES);
            for (int j = 0; j < ABREAST; j++)
                for (int w = 0; w < vectors; w++) sums[j][w] += query[w] * s->k[(t + j) * s->k_width + d];
        }
        for (int j = 0; j < ABREAST; j++)
            for (int w = 0; w < vectors; w++) scores[t + j][w] = sums[j][w];
    }
    for (int w = 0; w < vectors; w++) {
        vf before = load(s->most + w * LANES), most = before, total = all(0.0f);
        vi first, last;
        memcpy(&first, s->first + w * LANES, sizeof first);
        memcpy(&last, s->last + w * LANES, sizeof last);
        for (int t = 0; t < BLOCK; t++) {
            vi seen = (places[t] >= first) & (places[t] <= last);
            scores[t][w] = choose(seen, scored(call, scores[t][w]), all(-INFINITY));
            most = larger(scores[t][w], most);
        }
        vf level = choose(most == all(-INFINITY), all(0.0f), most);
        for (int t = 0; t < BLOCK; t++) {
            vf weight = exponential(scores[t][w] - level); /* of minus infinity: 0 */
            store(s->weights + t * MANY + w * LANES, weight);
            total += weight;
        }
        vf by = exponential(before - level);
        store(s->most + w * LANES, most);
        store(s->total + w * LANES, load(s->total + w * LANES) * by + total);
        if (any(most > before))
            for (int64_t d = 0; d < s->v_width; d++) {
                float *weighed = s->weighed + d * MANY + w * LANES;
                store(weighed, load(weighed) * by);
            }
    }
    enum { DIMS = ABREAST < LANES ? ABREAST : LANES };
    for (int64_t d = 0; d < s->v_width; d += DIMS) {
        vf sums[DIMS][2];
        for (int j = 0; j < DIMS; j++)
            for (int w = 0; w < vectors; w++) sums[j][w] = load(s->weighed + (d + j) * MANY + w * LANES);
        for (int t = 0; t < BLOCK; t++) {
            vf weight[2];
            for (int w = 0; w < vectors; w++) weight[w] = load(s->weights + t * MANY + w * LANES);
            for (int j = 0; j < DIMS; j++)
                for (int w = 0; w < vectors; w++) sums[j][w] += weight[w] * v[t * v_stride + d + j];
        }
        for (int j = 0; j < DIMS; j++)
            for (int w = 0; w < vectors; w++) store(s->weighed + (d + j) * MANY + w * LANES, sums[j][w]);
    }
}
