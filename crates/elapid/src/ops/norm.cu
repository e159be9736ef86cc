// RMSNorm and the addition before it; see norm.rs. A group takes a row of D numbers.
// HAS_W, HAS_ADDED: 0 where there is no weight, no branch or dsum; another buffer then takes its
// place.

struct Params { u32 n_rows; float eps; float factor; };

// Where rows are of whole eights and not too long (WARPED is 1) a warp takes a row, which it keeps
// in registers: every number is read once.
#if WARPED
#define N_EIGHT ((D + 255) / 256) // eights of a lane
#define WARP_ROW ((size_t)group_of() * (THREADS / 32) + threadIdx.x / 32)
#define LANE (threadIdx.x % 32)
#endif

#if defined(ENTRY_norm_forward) && WARPED
KERNEL norm_forward(const T0* x, const T1* branch, const T2* w, T3* sum, T4* y, T5* r, Params p) {
    size_t row = WARP_ROW;
    if (row >= p.n_rows) return;
    size_t at = row * D;
    Eight values[N_EIGHT];
    float squares = 0.0f;
    // In recorded work. Of many rows each would ask for the same lines once more.
    if (HAS_W && p.n_rows <= 16) {
        for (u32 i = LANE * 8; i < D; i += 256) prefetch(w + i);
    }
    await_input();
#pragma unroll
    for (int n = 0; n < N_EIGHT; n++) {
        u32 i = (n * 32 + LANE) * 8;
        if (i >= D) break;
        values[n] = load8(x, at + i);
        if (HAS_ADDED) {
            Eight more = load8(branch, at + i);
#pragma unroll
            for (int k = 0; k < 8; k++) values[n].v[k] += p.factor * more.v[k];
            store8(sum, at + i, values[n]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) squares += values[n].v[k] * values[n].v[k];
    }
    float ratio = 1.0f / sqrtf(warp_sum(squares) / (float)D + p.eps);
    if (LANE == 0) store(r, row, ratio);
#pragma unroll
    for (int n = 0; n < N_EIGHT; n++) {
        u32 i = (n * 32 + LANE) * 8;
        if (i >= D) break;
        Eight scale;
        if (HAS_W) scale = load8(w, i);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            values[n].v[k] *= ratio;
            if (HAS_W) values[n].v[k] *= scale.v[k];
        }
        store8(y, at + i, values[n]);
    }
}
#endif

#ifdef ENTRY_norm_backward_rows
// A group takes N_ROWS rows, of which it also makes a part of dw (WANTS_DW), and a copy of dx for
// products (HAS_COPY).
KERNEL norm_backward_rows(const T0* x, const T1* w, const T2* r, const T3* dy, const T4* dsum,
                          T5* dx, T6* copy, T7* parts, Params p) {
    __shared__ __align__(16) float sums[THREADS / 32][D];
    Eight dw[N_EIGHT];
#pragma unroll
    for (int n = 0; n < N_EIGHT; n++) {
#pragma unroll
        for (int k = 0; k < 8; k++) dw[n].v[k] = 0.0f;
    }
    for (u32 j = threadIdx.x / 32; j < N_ROWS; j += THREADS / 32) {
        size_t row = group_of() * N_ROWS + j, at = row * D;
        if (row >= p.n_rows) break;
        float ratio = load(r, row);
        Eight xs[N_EIGHT], wdys[N_EIGHT], outs[N_EIGHT];
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < N_EIGHT; n++) {
            u32 i = (n * 32 + LANE) * 8;
            if (i >= D) break;
            xs[n] = load8(x, at + i);
            wdys[n] = load8(dy, at + i);
            if (HAS_ADDED) outs[n] = load8(dsum, at + i);
        }
#pragma unroll
        for (int n = 0; n < N_EIGHT; n++) {
            u32 i = (n * 32 + LANE) * 8;
            if (i >= D) break;
            Eight scale;
            if (HAS_W) scale = load8(w, i);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (WANTS_DW) dw[n].v[k] += wdys[n].v[k] * xs[n].v[k] * ratio;
                if (HAS_W) wdys[n].v[k] *= scale.v[k];
                dot += wdys[n].v[k] * xs[n].v[k];
            }
        }
        float pull = -ratio * ratio * warp_sum(dot) / (float)D;
#pragma unroll
        for (int n = 0; n < N_EIGHT; n++) {
            u32 i = (n * 32 + LANE) * 8;
            if (i >= D) break;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float through = ratio * (wdys[n].v[k] + xs[n].v[k] * pull);
                outs[n].v[k] = HAS_ADDED ? outs[n].v[k] + through : through;
            }
            store8(dx, at + i, outs[n]);
            if (HAS_COPY) store8(copy, at + i, outs[n]);
        }
    }
    if (!WANTS_DW) return;
#pragma unroll
    for (int n = 0; n < N_EIGHT; n++) {
        u32 i = (n * 32 + LANE) * 8;
        if (i < D) store8(sums[threadIdx.x / 32], i, dw[n]);
    }
    __syncthreads();
    for (u32 col = threadIdx.x; col < D; col += THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) total += sums[warp][col];
        parts[group_of() * D + col] = total;
    }
}
#endif

#if defined(ENTRY_norm_forward) && !WARPED
KERNEL norm_forward(const T0* x, const T1* branch, const T2* w, T3* sum, T4* y, T5* r, Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    size_t at = row * D;
    float squares = 0.0f;
    await_input();
    for (u32 i = threadIdx.x; i < D; i += THREADS) {
        float value = load(x, at + i);
        if (HAS_ADDED) {
            value += p.factor * load(branch, at + i);
            store(sum, at + i, value);
        }
        squares += value * value;
    }
    float ratio = 1.0f / sqrtf(group_sum(squares) / (float)D + p.eps);
    if (threadIdx.x == 0) store(r, row, ratio);
    for (u32 i = threadIdx.x; i < D; i += THREADS) {
        float value = HAS_ADDED ? load(sum, at + i) : load(x, at + i);
        value *= ratio;
        if (HAS_W) value *= load(w, i);
        store(y, at + i, value);
    }
}
#endif

#ifdef ENTRY_norm_backward
KERNEL norm_backward(const T0* x, const T1* w, const T2* r, const T3* dy, const T4* dsum, T5* dx,
                     Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    size_t at = row * D;
    float ratio = load(r, row);
    float dot = 0.0f;
    for (u32 i = threadIdx.x; i < D; i += THREADS) {
        float wdy = load(dy, at + i);
        if (HAS_W) wdy *= load(w, i);
        dot += wdy * load(x, at + i);
    }
    float pull = -ratio * ratio * group_sum(dot) / (float)D;
    for (u32 i = threadIdx.x; i < D; i += THREADS) {
        float wdy = load(dy, at + i);
        if (HAS_W) wdy *= load(w, i);
        float out = ratio * (wdy + load(x, at + i) * pull);
        if (HAS_ADDED) out += load(dsum, at + i);
        store(dx, at + i, out);
    }
}
#endif

#ifdef ENTRY_norm_dw
// A group sums N_ROWS rows for THREADS columns.
KERNEL norm_dw(const T0* x, const T1* r, const T2* dy, T3* parts, Params p) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    u32 first = blockIdx.y * N_ROWS;
    u32 end = min(first + N_ROWS, p.n_rows);
    float total = 0.0f;
    for (u32 row = first; row < end; row++) {
        size_t at = (size_t)row * D + col;
        total += load(dy, at) * load(x, at) * load(r, row);
    }
    store(parts, (size_t)blockIdx.y * D + col, total);
}
#endif

#ifdef ENTRY_norm_sum_rows
// Sum over the rows of x, in order.
KERNEL norm_sum_rows(const T0* x, T1* y, Params p) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    float total = 0.0f;
#pragma unroll 16
    for (u32 row = 0; row < p.n_rows; row++) total += load(x, (size_t)row * D + col);
    store(y, col, total);
}
#endif
