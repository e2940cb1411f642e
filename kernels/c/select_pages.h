/* Chooses pages by the range of their keys: the twin of the torch kernels' `select_pages.py`.

   A page's bound for a query is one product with the steps and minima of its channels, which are
   interleaved in memory: 15 max(q, 0) times the step, q times the minimum. */

enum { NEWEST = 2, COLUMNS = 128 }; /* pages that are always read; columns that a task scores */

typedef struct {
    const void *q;          /* [n, H, D] */
    const uint16_t *bounds; /* [N, G, D, 2], halves */
    const int32_t *table;   /* [n, columns] */
    const int64_t *lens;    /* [n] */
    float *scores;          /* [n, G, columns], contiguous */
    int64_t q_row, q_head, bounds_page, bounds_head, table_row;
    int64_t rows, heads, groups, dim, count, columns, page_size; /* `count` pages have bounds */
    int32_t type, threads;
} Bounds;

/* Returns the bounds of a column's page. Staging pages have none, and are always read. */
INLINE const uint16_t *bounds_of(const Bounds *b, int64_t row, int64_t column) {
    const int64_t page = b->table[row * b->table_row + column];
    return b->bounds + (page < 0 || page >= b->count ? 0 : page) * b->bounds_page;
}

/* Sums the lanes of each of LANES vectors; the i-th sum is in lane i. Overwrites the vectors. */
INLINE vf sums_of(vf *x) {
    for (int left = LANES / 2; left; left /= 2)
        for (int i = 0; i < left; i++) x[i] = PICK(x[2 * i], x[2 * i + 1], 0) + PICK(x[2 * i], x[2 * i + 1], 1);
    return x[0];
}

/* The score of a column with an unknown bound: above all bounds, and higher in earlier columns. */
INLINE float unknown(int64_t column) { return as_float(0x7f7fffff - (uint32_t)column); }

/* Scores columns begin .. end of a row; all of them are before the row's end. */
static void score_part(const Bounds *b, int64_t row, int64_t begin, int64_t end) {
    const int64_t ratio = b->heads / b->groups, dim = b->dim, width = (2 * dim + LANES - 1) / LANES * LANES;
    float weights[b->heads * width], spans[LANES * width];
    memset(weights, 0, sizeof weights), memset(spans, 0, sizeof spans);
    for (int64_t h = 0; h < b->heads; h++)
        for (int64_t d = 0; d < dim; d++) {
            float q = element(b->q, row * b->q_row + h * b->q_head + d, b->type);
            weights[h * width + 2 * d] = q > 0 ? 15 * q : 0;
            weights[h * width + 2 * d + 1] = q;
        }
    for (int64_t c = begin; c < end; c += LANES) {
        const int64_t many = end - c < LANES ? end - c : LANES;
        for (int64_t group = 0; group < b->groups; group++) {
            const int64_t head = group * b->bounds_head;
            for (int64_t j = 0; j < many; j++) {
                row_of_halves(bounds_of(b, row, c + j) + head, spans + j * width, 2 * dim);
                if (c + LANES + j < end) /* prefetch the next bounds, whose pages lie anywhere */
                    for (int64_t d = 0; d < 2 * dim; d += 32)
                        __builtin_prefetch(bounds_of(b, row, c + LANES + j) + head + d);
            }
            vf best = all(-INFINITY), none = all(0.0f);
            for (int64_t r = 0; r < ratio; r++) {
                vf sums[LANES];
                for (int j = 0; j < LANES; j++) sums[j] = all(0.0f);
                for (int64_t d = 0; d < width; d += LANES) {
                    vf weight = load(weights + (group * ratio + r) * width + d);
                    for (int j = 0; j < LANES; j++) sums[j] = fused(weight, load(spans + j * width + d), sums[j]);
                }
                vf score = sums_of(sums);
                best = larger(score, best);
                none = fused(score, all(0.0f), none); /* NaN for infinity, too */
            }
            best = choose(none == none, best, all(NAN));
            for (int64_t j = 0; j < many; j++)
                b->scores[(row * b->groups + group) * b->columns + c + j] = best[j] == best[j] ? best[j] : unknown(c + j);
        }
    }
}

void score_columns(const Bounds *b) {
    const int64_t parts = (b->columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(b->threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < b->rows * parts; i++) {
        const int64_t row = i / parts, last = (b->lens[row] - 1) / b->page_size, begin = i % parts * COLUMNS;
        const int64_t end = begin + COLUMNS < b->columns ? begin + COLUMNS : b->columns;
        score_part(b, row, begin, end <= last ? end : last + 1);
        for (int64_t group = 0; group < b->groups; group++) {
            float *into = b->scores + (row * b->groups + group) * b->columns;
            for (int64_t c = begin; c < end; c++)
                if (c > last) into[c] = -INFINITY;
                else if (!c || c > last - NEWEST) into[c] = INFINITY;
        }
    }
}

/* Returns an integer in the order of the scores, none of which is NaN. */
INLINE int32_t rank_of(float score) { return ordered(score + 0.0f); }

INLINE int64_t ranked_from(const float *scores, int64_t columns, int32_t least) {
    int32_t found = 0;
    for (int64_t c = 0; c < columns; c++) found += rank_of(scores[c]) >= least;
    return found;
}

/* Chooses each list's `count` columns of highest scores, ascending; of equal ones the first. */
void choose_columns(const float *scores, int32_t *chosen, int64_t lists, int64_t columns, int64_t count,
                    int32_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < lists; i++) {
        const float *mine = scores + i * columns;
        int32_t *into = chosen + i * count, least = INT32_MIN; /* the lowest rank, bit by bit */
        for (int bit = 31; bit >= 0; bit--) {
            int32_t higher = (int32_t)((uint32_t)least + (1u << bit));
            if (ranked_from(mine, columns, higher) >= count) least = higher;
        }
        int64_t equal = count - (least < INT32_MAX ? ranked_from(mine, columns, least + 1) : 0);
        for (int64_t c = 0; c < columns; c++) {
            int32_t rank = rank_of(mine[c]);
            if (rank > least || (rank == least && equal-- > 0)) *into++ = (int32_t)c;
        }
    }
}
