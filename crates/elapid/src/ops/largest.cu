// The largest logits of rows, in order; see largest.rs. A group takes a row.

struct Params { u32 n_row; u32 n_vocab; u32 k; };

// Whether a number is NaN or plus infinity.
DEVICE bool is_bad(float x) {
    return !(x <= 3.4028234e38f);
}

// The best of a thread's own tokens that come after (last, last_id) in the order; n_vocab if none.
DEVICE u32 best_after(const T0* logits, size_t row, float last, u32 last_id, Params p) {
    const float none = -3.4028234e38f;
    u32 best = p.n_vocab;
    float top = none;
    for (u32 id = threadIdx.x; id < p.n_vocab; id += THREADS) {
        float x = load(logits, row * p.n_vocab + id);
        bool is_after = x < last || (x == last && (id > last_id || last_id == p.n_vocab));
        if (!is_bad(x) && is_after && x >= none && (x > top || best == p.n_vocab)) {
            best = id;
            top = x;
        }
    }
    return best;
}

KERNEL largest(const T0* logits, T1* out, Params p) {
    __shared__ float tops[THREADS];
    __shared__ u32 ids[THREADS];
    size_t row = group_of();
    if (row >= p.n_row) return;
    const float none = -3.4028234e38f;
    u32 thread = threadIdx.x;
    size_t at = row * (2 + 2 * p.k);
    float n_bad = 0.0f;
    for (u32 id = thread; id < p.n_vocab; id += THREADS) {
        if (is_bad(load(logits, row * p.n_vocab + id))) n_bad += 1.0f;
    }
    float n_bad_all = group_sum(n_bad);
    u32 id = best_after(logits, row, 3.4028234e38f, p.n_vocab, p);
    float first = none;
    for (u32 n = 0; n < p.k; n++) {
        tops[thread] = id < p.n_vocab ? load(logits, row * p.n_vocab + id) : none;
        ids[thread] = id;
        __syncthreads();
        for (u32 half = THREADS / 2; half > 0; half /= 2) {
            if (thread < half) {
                u32 other = thread + half;
                bool is_same = tops[other] == tops[thread];
                if (tops[other] > tops[thread] || (is_same && ids[other] < ids[thread])) {
                    tops[thread] = tops[other];
                    ids[thread] = ids[other];
                }
            }
            __syncthreads();
        }
        float top = tops[0];
        u32 top_id = ids[0];
        __syncthreads();
        if (n == 0) first = top;
        if (thread == 0) {
            store(out, at + 2 + 2 * n, top_id < p.n_vocab ? (float)top_id : -1.0f);
            store(out, at + 3 + 2 * n, top);
        }
        if (top_id < p.n_vocab && top_id % THREADS == thread) {
            id = best_after(logits, row, top, top_id, p);
        }
    }
    float sum = 0.0f;
    for (u32 id = thread; id < p.n_vocab; id += THREADS) {
        sum += expf(load(logits, row * p.n_vocab + id) - first);
    }
    float total = group_sum(sum);
    if (thread == 0) {
        store(out, at, first + logf(total));
        store(out, at + 1, n_bad_all);
    }
}
