/* The tasks of a call, and the threads that carry them out. */

/* Returns a block of floats in place, or NULL: it must have whole vectors, be in one page, and have
   no token that a query does not see. `first` becomes its place in the text. */
static const float *in_place(const Call *call, const Pages *x, const Task *task, int64_t t, int64_t last,
                             int64_t *first) {
    const int64_t size = call->page_size, slot = t % size, column = column_of(call, task, t / size);
    if (x->format != DENSE || x->type != F32 || x->dim % LANES) return NULL;
    if (slot + BLOCK > size || t < task->begin || t + BLOCK > task->end) return NULL;
    *first = column * size + slot;
    if (*first + BLOCK > last + 1) return NULL;
    const int64_t page = call->table[task->row * call->columns + column];
    if (page >= x->count) return NULL; /* a staging page */
    return (const float *)x->data + page * x->data_page + task->group * x->data_head + slot * x->data_slot;
}

/* Finds the rows of a block that will be needed, so that they can be prefetched.

   Rows of a head are apart, and pages anywhere, so no processor prefetches them by itself. */
static void foresee(const Call *call, const Pages *x, const Task *task, int64_t t, Soon *soon) {
    const int64_t size = call->page_size, end = t + BLOCK < task->end ? t + BLOCK : task->end;
    const int64_t bits = x->format >= INT4_TOKEN ? 4 : x->format ? 8 : x->type ? 16 : 32, unit = bits == 32 ? 4 : 2;
    soon->bytes = t < end ? x->dim * bits / 8 : 0;
    for (int64_t i = 0; t < end;) {
        const int64_t slot = t % size, column = column_of(call, task, t / size);
        const int64_t page = call->table[task->row * call->columns + column];
        const int64_t at = page * x->data_page + task->group * x->data_head + slot * x->data_slot;
        const char *from = (const char *)x->data + unit * at;
        for (int64_t s = slot; s < size && t < end; s++, t++, from += unit * x->data_slot) soon->rows[i++] = from;
    }
}

/* Attends for one task. */
static void run(const Call *call, const Task *task, const int64_t *starts, float *memory) {
    Scratch s = cut(call, memory);
    int few = task->count <= FEW, holds = 0;
    int32_t places[BLOCK];
    begin_tile(call, task, starts, &s, !few);
    int64_t last = s.last[task->count - 1];
    int alike = s.first[0] == s.first[task->count - 1] && s.last[0] == last; /* as in one query */
    for (int i = 0; i < BLOCK; i++) s.k_soon.rows[i] = s.v_soon.rows[i] = (const char *)call;
    memset(s.k, 0, 4 * BLOCK * (s.k_width + s.v_width)); /* also the places that no token fills */
    for (int64_t t = task->begin / BLOCK * BLOCK; t < task->end; t += BLOCK) {
        if (t % PART == 0 && t > task->begin) {
            if (!holds) empty(s.held_most, s.held_total, s.held, s.v_width);
            join(&s, task->count, !few), holds = 1;
            empty(s.most, s.total, s.weighed, s.v_width);
        }
        int64_t first;
        if (few) {
            foresee(call, &call->k, task, t + AHEAD, &s.k_soon);
            foresee(call, &call->v, task, t + AHEAD, &s.v_soon);
        }
        const float *k = few ? in_place(call, &call->k, task, t, last, &first) : NULL;
        const float *v = k ? in_place(call, &call->v, task, t, last, &first) : NULL;
        int64_t k_stride = call->k.data_slot, v_stride = call->v.data_slot;
        if (v) for (int i = 0; i < BLOCK; i++) places[i] = (int32_t)(first + i);
        else {
            int64_t before = t < task->begin ? task->begin - t : 0;
            int64_t count = (task->end - t < BLOCK ? task->end - t : BLOCK) - before;
            if (count < BLOCK) {
                memset(s.k, 0, 4 * BLOCK * (s.k_width + s.v_width));
                for (int i = 0; i < BLOCK; i++) places[i] = -1;
            }
            k = s.k, k_stride = s.k_width;
            v = call->v_is_k ? s.k : s.v, v_stride = call->v_is_k ? s.k_width : s.v_width;
            read_block(call, &call->k, task, t + before, count, last, s.k + before * k_stride, k_stride, places + before);
            if (!call->v_is_k)
                read_block(call, &call->v, task, t + before, count, last, s.v + before * v_stride, v_stride, places + before);
        }
        const float *numbers = alike ? v : numbers_of(&s, task->count, places, v, v_stride);
        const int64_t stride = numbers == v ? v_stride : s.v_width;
        if (few) few_rows(call, &s, task->count, places, k, k_stride, numbers, stride);
        else if (task->count <= LANES) many_rows(call, &s, 1, places, numbers, stride);
        else many_rows(call, &s, 2, places, numbers, stride);
        if (numbers != v) add_others(&s, task->count, places, v, v_stride, !few);
    }
    if (holds) join(&s, task->count, !few);
    end_task(call, task, starts, &s, holds ? s.held_most : s.most, holds ? s.held_total : s.total,
             holds ? s.held : s.weighed, !few);
}

/* Makes all tasks, or counts them if `tasks` is null. `longer` has room for `rows`.

   Within a part sequences follow each other, so that sequences with the same first pages find these
   in the processor's cache; so do heads of a part, whose rows share lines of memory. The results of
   a tile's parts are side by side, for `merge`. */
static int64_t plan(const Call *call, Task *tasks, float *partials, int64_t *floats, int64_t *longer) {
    const int64_t ratio = call->heads / call->groups, each = 2 + (call->v.dim + LANES - 1) / LANES * LANES;
    int64_t made = 0, most = 1, many = 0;
    for (int64_t part = 0; part < most; part++) {
        const int64_t rows = part ? many : call->rows;
        int64_t used = 0;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t row = part ? longer[i] : i, count = call->num_new[row] * ratio;
            const int64_t size = count > FEW ? MANY : FEW, tiles = (count + size - 1) / size;
            for (int64_t group = 0; group < call->groups; group++) {
                const int32_t *chosen = call->chosen;
                if (chosen) chosen += (row * call->groups + group) * call->read;
                for (int64_t tile = 0; tile < tiles; tile++) {
                    Task task = {row, group, tile * size, count - tile * size, 0, 0, part, 1, NULL};
                    if (task.count > size) task.count = size;
                    int64_t from = last_of(call, row, task.first / ratio);
                    int64_t to = last_of(call, row, (task.first + task.count - 1) / ratio);
                    task.begin = call->window && from >= call->window ? from - call->window + 1 : 0;
                    task.end = to + 1;
                    if (chosen && chosen[0] >= 0) task.begin = 0, task.end = call->read * call->page_size;
                    int64_t first = task.begin / PART, parts = (task.end - 1) / PART + 1 - first;
                    if (tiles == 1 && parts > 1) { /* else there are enough tasks */
                        task.parts = parts;
                        if (part) task.begin = (first + part) * PART;
                        if (task.end > (first + part + 1) * PART) task.end = (first + part + 1) * PART;
                        if (tasks) task.partial = partials + used + part * task.count * each;
                        used += task.parts * task.count * each;
                        if (!part && (!many || longer[many - 1] != row)) longer[many++] = row;
                    }
                    if (task.parts > most) most = task.parts;
                    if (part >= task.parts) continue;
                    if (tasks) tasks[made] = task;
                    made++;
                }
            }
        }
        if (!part) *floats = used;
    }
    return made;
}

/* Attends for all queries of a call. Returns 0, or 1 if there is too little memory. */
int paged_attention(const Call *call) {
    int64_t *starts = malloc(8 * (call->rows + 1)), *longer = malloc(8 * (call->rows + 1));
    int64_t floats = 0, failed = 0, count = starts && longer ? plan(call, NULL, NULL, &floats, longer) : 0;
    Task *tasks = malloc(sizeof(Task) * (count ? count : 1));
    float *partials = malloc(4 * (floats ? floats : 1));
    if (!starts || !longer || !tasks || !partials) failed = 1;
    else {
        starts[0] = 0;
        for (int64_t row = 0; row < call->rows; row++) starts[row + 1] = starts[row] + call->num_new[row];
        plan(call, tasks, partials, &floats, longer);
#pragma omp parallel num_threads(call->threads) reduction(| : failed)
        {
            float *memory = aligned_alloc(64, (4 * scratch_floats(call) + 63) / 64 * 64);
            failed |= !memory;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; i++)
                if (memory) run(call, tasks + i, starts, memory);
#pragma omp for schedule(dynamic, 8)
            for (int64_t i = 0; i < count; i++)
                if (tasks[i].partial && !tasks[i].part && memory) merge(call, tasks + i, starts, cut(call, memory));
            free(memory);
        }
    }
    free(partials), free(tasks), free(longer), free(starts);
    return (int)failed;
}
