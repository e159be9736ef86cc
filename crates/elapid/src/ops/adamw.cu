// AdamW, and the sizes of its update; see adamw.rs. A step moves 28 bytes per number.

struct Params {
    u32 n;
    float grad_scale, keep, new1, old1, beta2, new2, root2, eps, step;
};

// The new moments and m / (sqrt(v) / sqrt(1 - beta2^t) + eps).
DEVICE float moments(float g, float& m, float& v, const Params& p) {
    g *= p.grad_scale;
    // The first form loses g where m is much larger and beta1 is near zero.
    m = p.new1 < 0.5f ? m + p.new1 * (g - m) : g - p.old1 * (g - m);
    v = p.beta2 * v + p.new2 * g * g;
    return m / (sqrtf(v) / p.root2 + p.eps);
}

DEVICE float moved(float w, float g, float& m, float& v, const Params& p) {
    float ratio = moments(g, m, v, p);
    return w * p.keep - p.step * ratio;
}

#ifdef ENTRY_adamw_step
KERNEL adamw_step(const T0* g, T1* w, T2* m, T3* v, Params p) {
    size_t n4 = p.n / 4;
    for (size_t i = thread_of(); i < n4; i += n_threads()) {
        float4 g4 = load4(g, 4 * i), w4 = load4(w, 4 * i), m4 = load4(m, 4 * i),
               v4 = load4(v, 4 * i);
        w4.x = moved(w4.x, g4.x, m4.x, v4.x, p);
        w4.y = moved(w4.y, g4.y, m4.y, v4.y, p);
        w4.z = moved(w4.z, g4.z, m4.z, v4.z, p);
        w4.w = moved(w4.w, g4.w, m4.w, v4.w, p);
        store4(w, 4 * i, w4);
        store4(m, 4 * i, m4);
        store4(v, 4 * i, v4);
    }
    for (size_t i = 4 * n4 + thread_of(); i < p.n; i += n_threads()) {
        float m1 = m[i], v1 = v[i];
        w[i] = moved(w[i], load(g, i), m1, v1, p);
        m[i] = m1;
        v[i] = v1;
    }
}
#endif

#ifdef ENTRY_adamw_steps
// A row of the table; see gpu/many.rs. copy: the new numbers in bf16, where somebody wants them.
struct Row {
    const float* g;
    float *w, *m, *v;
    bf16* copy;
    Params p;
};

struct Table { u32 rows, n_groups; };

KERNEL adamw_steps(const T0* table, Table t) {
    u32 group = (u32)group_of();
    if (group >= t.n_groups) return;
    uint2 place = ((const uint2*)table)[group];
    Row row = ((const Row*)(table + t.rows))[place.x];
    u32 begin = place.y * PIECE, end = min(row.p.n, begin + PIECE), last = end / 4 * 4;
#pragma unroll 2
    for (u32 i = begin + 4 * threadIdx.x; i < last; i += 4 * THREADS) {
        float4 g4 = load4(row.g, i), w4 = load4(row.w, i), m4 = load4(row.m, i),
               v4 = load4(row.v, i);
        w4.x = moved(w4.x, g4.x, m4.x, v4.x, row.p);
        w4.y = moved(w4.y, g4.y, m4.y, v4.y, row.p);
        w4.z = moved(w4.z, g4.z, m4.z, v4.z, row.p);
        w4.w = moved(w4.w, g4.w, m4.w, v4.w, row.p);
        store4(row.w, i, w4);
        store4(row.m, i, m4);
        store4(row.v, i, v4);
        if (row.copy) store4(row.copy, i, w4);
    }
    u32 i = last + threadIdx.x;
    if (i < end) {
        float m1 = row.m[i], v1 = row.v[i], w1 = moved(row.w[i], row.g[i], m1, v1, row.p);
        row.w[i] = w1;
        row.m[i] = m1;
        row.v[i] = v1;
        if (row.copy) store(row.copy, i, w1);
    }
}
#endif

#ifdef ENTRY_adamw_sizes
// Sums of the squares of the ratio and of w, a pair for each group.
KERNEL adamw_sizes(const T0* g, const T1* w, const T2* m, const T3* v, T4* sums, Params p) {
    float ratios = 0.0f, sizes = 0.0f;
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        float m1 = m[i], v1 = v[i];
        float ratio = moments(load(g, i), m1, v1, p);
        ratios += ratio * ratio;
        sizes += w[i] * w[i];
    }
    ratios = group_sum(ratios);
    sizes = group_sum(sizes);
    if (threadIdx.x == 0) {
        sums[2 * group_of()] = ratios;
        sums[2 * group_of() + 1] = sizes;
    }
}
#endif
