/* The logarithm of the sum of the exponentials of each row, in float32.

   Lanes are summed in stretches, and these in double. A row's result depends on that row alone. */

enum { STRETCH = 64 * LANES };

static float log_sum(const float *x, int64_t n) {
    vf most = all(-INFINITY);
    double total = 0;
    int64_t i = 0, whole = n / LANES * LANES;
    for (; i < whole; i += LANES) most = larger(load(x + i), most);
    float highest = -INFINITY;
    for (int k = 0; k < LANES; k++) highest = most[k] > highest ? most[k] : highest;
    for (; i < n; i++) highest = x[i] > highest ? x[i] : highest;
    if (highest == INFINITY) return INFINITY;
    vf level = all(highest == -INFINITY ? 0.0f : highest);
    for (int64_t begin = 0; begin < whole; begin += STRETCH) {
        vf part = all(0.0f);
        int64_t end = begin + STRETCH < whole ? begin + STRETCH : whole;
        for (i = begin; i < end; i += LANES) part += exponential(load(x + i) - level);
        total += sum(part);
    }
    for (i = whole; i < n; i++) total += exponential(all(x[i]) - level)[0];
    return (float)(level[0] + log(total));
}

void log_sums(const float *x, int64_t rows, int64_t n, float *out, int threads) {
    (void)threads;
#pragma omp parallel for num_threads(threads > 0 ? threads : 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) out[row] = log_sum(x + row * n, n);
}
