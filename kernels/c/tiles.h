/* Two ways to compute a tile: few rows, with tokens or head dims in lanes; many, with rows there.

   Both compute the same bits. A product of a query and a token is one chain over head dims, the
   weights of a block are summed as a tree, and weighted values are one chain over tokens. */

enum { AHEAD = 2 * BLOCK }; /* blocks are prefetched so many tokens ahead */
enum { FARTHEST = 63 };     /* tokens so many places in front or more are not in a tree */

typedef struct {
    const char *rows[BLOCK];
    int64_t bytes; /* of each row */
} Soon;

/* Prefetches each row's line with its d-th float; a little at a time, between products. */
INLINE void ask(const Soon *soon, int64_t d) {
    if (4 * d < soon->bytes)
        for (int t = 0; t < BLOCK; t++) __builtin_prefetch(soon->rows[t] + 4 * d);
}

typedef struct {
    int64_t k_width, v_width; /* of decoded rows: head dims, rounded up to whole vectors */
    float *q, *k, *v, *turned, *numbers, *weights, *weighed, *most, *total;
    float *held, *held_most, *held_total; /* the same sums of the earlier parts */
    int32_t *first, *last; /* tokens that each row sees; if causal, the last is its own */
    float *slopes;         /* of each row */
    const float **bias;    /* of each row, by distance */
    int64_t *tree;         /* each row's bits; null without a tree */
    Soon k_soon, v_soon;
} Scratch;

/* Sizes of a thread's scratch, in floats; each begins at a whole vector. */
static int64_t scratch_floats(const Call *call) {
    int64_t k = (call->k.dim + LANES - 1) / LANES * LANES, v = (call->v.dim + LANES - 1) / LANES * LANES;
    return MANY * (k + 2 * v) + BLOCK * 2 * (k + v) + BLOCK * MANY + 11 * MANY;
}

static Scratch cut(const Call *call, float *memory) {
    Scratch s;
    s.k_width = (call->k.dim + LANES - 1) / LANES * LANES;
    s.v_width = (call->v.dim + LANES - 1) / LANES * LANES;
    s.q = memory;
    s.weighed = s.q + MANY * s.k_width;
    s.held = s.weighed + MANY * s.v_width;
    s.k = s.held + MANY * s.v_width;
    s.v = s.k + BLOCK * s.k_width;
    s.turned = s.v + BLOCK * s.v_width;
    s.numbers = s.turned + BLOCK * s.k_width;
    s.weights = s.numbers + BLOCK * s.v_width;
    s.most = s.weights + BLOCK * MANY;
    s.total = s.most + MANY;
    s.held_most = s.total + MANY;
    s.held_total = s.held_most + MANY;
    s.first = (int32_t *)(s.held_total + MANY);
    s.last = s.first + MANY;
    s.slopes = (float *)(s.last + MANY);
    s.bias = (const float **)(s.slopes + MANY);
    s.tree = call->tree ? (int64_t *)(s.bias + MANY) : NULL;
    return s;
}

INLINE void empty(float *most, float *total, float *weighed, int64_t width) {
    memset(weighed, 0, 4 * MANY * width);
    for (int64_t i = 0; i < MANY; i++) most[i] = -INFINITY, total[i] = 0;
}

/* Reads the queries, and which tokens each row sees. Lanes without a row see none. */
static void begin_tile(const Call *call, const Task *task, const int64_t *starts, Scratch *s, int in_lanes) {
    int64_t ratio = call->heads / call->groups, dim = call->k.dim;
    memset(s->q, 0, 4 * MANY * s->k_width);
    empty(s->most, s->total, s->weighed, s->v_width);
    for (int64_t i = 0; i < MANY; i++) {
        s->first[i] = 0, s->last[i] = -1;
        if (call->slopes || call->bias) s->slopes[i] = 0.0f, s->bias[i] = call->bias;
        if (s->tree) s->tree[i] = -1;
        if (i >= task->count) continue;
        int64_t row = task->first + i, at = last_of(call, task->row, row / ratio);
        s->last[i] = (int32_t)at;
        s->first[i] = (int32_t)(call->window && at >= call->window ? at - call->window + 1 : 0);
        int64_t token = starts[task->row] + row / ratio, head = task->group * ratio + row % ratio;
        int64_t from = token * call->q_token + head * call->q_head;
        if (call->slopes) s->slopes[i] = call->slopes[head];
        if (call->bias) s->bias[i] = call->bias + token * call->bias_token + head * call->bias_head;
        if (s->tree) s->tree[i] = call->tree[token];
        for (int64_t d = 0; d < dim; d++)
            s->q[in_lanes ? d * MANY + i : i * s->k_width + d] = element(call->q, from + d, call->type);
    }
}

/* Adds the terms by distance to scores, of the query of a row or, if `abreast`, of LANES rows. */
INLINE vf biased(const Call *call, const Scratch *s, vf score, vi distance, int64_t row, int abreast) {
    if (call->slopes) {
        vf slope = abreast ? load(s->slopes + row) : all(s->slopes[row]);
        score = fused(-slope, __builtin_convertvector(distance, vf), score);
    }
    if (call->bias) {
        float more[LANES];
        for (int i = 0; i < LANES; i++) {
            int near = distance[i] >= 0 && distance[i] < call->distances;
            more[i] = near ? s->bias[row + (abreast ? i : 0)][distance[i]] : 0.0f;
        }
        score += load(more);
    }
    return score;
}

/* ------------------------------------------------------------------ values that are no numbers */

INLINE int is_number(float x) { return x - x == 0; }
INLINE int sees(const Scratch *s, int64_t row, int32_t place) { return place >= s->first[row] && place <= s->last[row]; }

/* Whether a row's tree, if there is one, lets it see a token that it would see without a tree. */
INLINE int shown(const Scratch *s, int64_t row, int32_t place) {
    int32_t back = s->last[row] - place;
    return !s->tree || back < 0 || back >= FARTHEST || (s->tree[row] >> back & 1);
}

/* Returns a block's values, with zeros for NaN and infinity if rows see different tokens: a weight
   of 0 does not hide these, because 0 times infinity is NaN. Else returns the values in place. */
static const float *numbers_of(const Scratch *s, int64_t rows, const int32_t *places, const float *v, int64_t stride) {
    int apart = s->tree != NULL; /* with a tree, rows see different tokens */
    vi none = {0};
    for (int t = 0; t < BLOCK; t++) apart |= places[t] >= 0 && !(sees(s, 0, places[t]) && sees(s, rows - 1, places[t]));
    for (int t = 0; apart && t < BLOCK; t++)
        for (int64_t d = 0; d < s->v_width; d += LANES) none |= ((vi)load(v + t * stride + d) & 0x7fffffff) >= 0x7f800000;
    if (!any(none)) return v;
    for (int t = 0; t < BLOCK; t++)
        for (int64_t d = 0; d < s->v_width; d++)
            s->numbers[t * s->v_width + d] = is_number(v[t * stride + d]) ? v[t * stride + d] : 0.0f;
    return s->numbers;
}

/* Adds the NaN and infinity that `numbers_of` replaced to the rows that see them. */
static void add_others(const Scratch *s, int64_t rows, const int32_t *places, const float *v, int64_t stride,
                       int in_lanes) {
    for (int t = 0; t < BLOCK; t++)
        for (int64_t d = 0; d < s->v_width; d++)
            for (int64_t r = 0; r < rows && !is_number(v[t * stride + d]); r++)
                if (sees(s, r, places[t]) && shown(s, r, places[t]))
                    s->weighed[in_lanes ? d * MANY + r : r * s->v_width + d] +=
                        s->weights[in_lanes ? t * MANY + r : r * BLOCK + t] * v[t * stride + d];
}

/* ------------------------------------------------------------------ few rows */

/* Adds weighted values to a tile's rows, two vectors of head dims at a time if there are two. */
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
                for (int i = 0; i < 2; i++)
                    sums[i][r] = fused(all(weights[r * BLOCK + t]), value[i], sums[i][r]);
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++) store(weighed + r * width + d + i * more, sums[i][r]);
    }
}

/* Transposes a block of K: tokens in lanes, head dim after head dim. */
static void turn(const Soon *soon, const float *k, int64_t stride, int64_t width, float *out) {
    for (int t = 0; t < BLOCK; t += LANES)
        for (int64_t d = 0; d < width; d += LANES) {
            vf x[LANES];
            if (!t) ask(soon, d);
            for (int i = 0; i < LANES; i++) x[i] = load(k + (t + i) * stride + d);
            transpose(x);
            for (int i = 0; i < LANES; i++) store(out + (d + i) * BLOCK + t, x[i]);
        }
}

/* Computes products of a few queries with each token of a block. */
INLINE void multiply(int rows, const float *q, int64_t width, const float *turned, int64_t dim, float *out) {
    for (int t = 0; t < BLOCK; t += LANES) {
        vf sums[4];
        for (int r = 0; r < rows; r++) sums[r] = all(0.0f);
        for (int64_t d = 0; d < dim; d++) {
            vf k = load(turned + d * BLOCK + t);
            for (int r = 0; r < rows; r++) sums[r] = fused(all(q[r * width + d]), k, sums[r]);
        }
        for (int r = 0; r < rows; r++) store(out + r * BLOCK + t, sums[r]);
    }
}

/* Replaces a row's products by its weights. */
static void weights_of(const Call *call, const Scratch *s, int64_t r, const int32_t *places) {
    enum { VECTORS = BLOCK / LANES };
    const int by_distance = call->slopes || call->bias;
    float *weights = s->weights + r * BLOCK, before = s->most[r], highest = before;
    vf score[VECTORS], most = all(before);
    vi seen[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
        vi place;
        memcpy(&place, places + i * LANES, sizeof place);
        seen[i] = (place >= s->first[r]) & (place <= s->last[r]);
        if (s->tree && any((s->last[r] - place) < FARTHEST))
            for (int t = 0; t < LANES; t++) seen[i][t] &= -shown(s, r, places[i * LANES + t]);
        score[i] = scored(call, load(weights + i * LANES));
        if (by_distance) score[i] = biased(call, s, score[i], s->last[r] - place, r, 0);
        score[i] = choose(seen[i], score[i], all(-INFINITY));
        most = larger(score[i], most);
    }
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    vf level = all(highest == -INFINITY ? 0.0f : highest); /* NaN scores stay NaN */
    for (int i = 0; i < VECTORS; i++) {
        score[i] = choose(seen[i], exponential(score[i] - level), all(0.0f));
        store(weights + i * LANES, score[i]);
    }
    for (int half = VECTORS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) score[i] += score[i + half];
    vf by = exponential(all(before) - level), total = fused(all(s->total[r]), by, all(sum(score[0])));
    s->total[r] = total[0];
    if (!(highest > before)) return;
    float *weighed = s->weighed + r * s->v_width;
    for (int64_t d = 0; d < s->v_width; d += LANES) store(weighed + d, load(weighed + d) * by);
    s->most[r] = highest;
}

static void few_rows(const Call *call, const Scratch *s, int64_t rows, const int32_t *places, const float *k,
                     int64_t k_stride, const float *v, int64_t v_stride) {
    turn(&s->k_soon, k, k_stride, s->k_width, s->turned);
    for (int64_t r = 0; r < rows; r += 4) {
        const float *q = s->q + r * s->k_width;
        float *out = s->weights + r * BLOCK;
        switch (rows - r) {
        case 1: multiply(1, q, s->k_width, s->turned, call->k.dim, out); break;
        case 2: multiply(2, q, s->k_width, s->turned, call->k.dim, out); break;
        case 3: multiply(3, q, s->k_width, s->turned, call->k.dim, out); break;
        default: multiply(4, q, s->k_width, s->turned, call->k.dim, out);
        }
    }
    for (int64_t r = 0; r < rows; r++) weights_of(call, s, r, places);
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
    const int by_distance = call->slopes || call->bias;
    for (int t = 0; t < BLOCK; t += ABREAST) {
        vf sums[ABREAST][2];
        for (int j = 0; j < ABREAST; j++)
            for (int w = 0; w < vectors; w++) sums[j][w] = all(0.0f);
        for (int64_t d = 0; d < call->k.dim; d++) {
            vf query[2];
            for (int w = 0; w < vectors; w++) query[w] = load(s->q + d * MANY + w * LANES);
            for (int j = 0; j < ABREAST; j++)
                for (int w = 0; w < vectors; w++)
                    sums[j][w] = fused(query[w], all(s->k[(t + j) * s->k_width + d]), sums[j][w]);
        }
        for (int j = 0; j < ABREAST; j++)
            for (int w = 0; w < vectors; w++) scores[t + j][w] = sums[j][w];
    }
    for (int w = 0; w < vectors; w++) {
        vf before = load(s->most + w * LANES), most = before;
        vi first, last;
        memcpy(&first, s->first + w * LANES, sizeof first);
        memcpy(&last, s->last + w * LANES, sizeof last);
        for (int t = 0; t < BLOCK; t++) {
            vi seen = (places[t] >= first) & (places[t] <= last);
            scores[t][w] = scored(call, scores[t][w]);
            if (by_distance) scores[t][w] = biased(call, s, scores[t][w], last - places[t], w * LANES, 1);
            scores[t][w] = choose(seen, scores[t][w], all(-INFINITY));
            most = larger(scores[t][w], most);
        }
        if (__builtin_expect(s->tree != NULL, 0)) {
            most = before;
            for (int t = 0; t < BLOCK; t++) {
                if (any(last - places[t] < FARTHEST)) {
                    vi seen;
                    for (int i = 0; i < LANES; i++) seen[i] = -shown(s, w * LANES + i, places[t]);
                    scores[t][w] = choose(seen, scores[t][w], all(-INFINITY));
                }
                most = larger(scores[t][w], most);
            }
        }
        vf level = choose(most == all(-INFINITY), all(0.0f), most);
        for (int t = 0; t < BLOCK; t++) {
            scores[t][w] = exponential(scores[t][w] - level); /* 0 for minus infinity */
            store(s->weights + t * MANY + w * LANES, scores[t][w]);
        }
        for (int half = BLOCK / 2; half; half /= 2)
            for (int t = 0; t < half; t++) scores[t][w] += scores[t + half][w];
        vf by = exponential(before - level);
        store(s->most + w * LANES, most);
        store(s->total + w * LANES, fused(load(s->total + w * LANES), by, scores[0][w]));
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
                for (int w = 0; w < vectors; w++)
                    sums[j][w] = fused(weight[w], all(v[t * v_stride + d + j]), sums[j][w]);
        }
        for (int j = 0; j < DIMS; j++)
            for (int w = 0; w < vectors; w++) store(s->weighed + (d + j) * MANY + w * LANES, sums[j][w]);
    }
}
