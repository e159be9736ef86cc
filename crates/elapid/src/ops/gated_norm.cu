// Gated RMSNorm; see gated_norm.rs. A block takes one group of channels of one row.
// D_GROUP, N_GROUP: width and count of groups. GATE_FIRST: 1 or 0. N_ROWS: rows of a partial sum.
//
// Numbers that move, for each of x: forward 3 (x, z, y), backward 5 (x, z, dy, dx, dz), dw 3 (x, z,
// dy). A wide group is looked at twice; the second look finds it in the cache.

struct Params { u32 n_rows; float eps; };

#define D (D_GROUP * N_GROUP)
#if D_GROUP % 4 == 0
#define STEP 4
#else
#define STEP 1
#endif

// STEP numbers from `i` on.
template <class T> DEVICE void get(const T* x, size_t i, float* out) {
#if STEP == 4
    float4 v = load4(x, i);
    out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
#else
    out[0] = load(x, i);
#endif
}

template <class T> DEVICE void put(T* y, size_t i, const float* v) {
#if STEP == 4
    store4(y, i, make_float4(v[0], v[1], v[2], v[3]));
#else
    store(y, i, v[0]);
#endif
}

// Numbers of a thread; few enough are held between the two looks at a group.
#define STEPS ((D_GROUP + THREADS * STEP - 1) / (THREADS * STEP))
#if STEPS <= 4
#define HELD STEPS
#else
#define HELD 1
#endif

#ifdef ENTRY_gated_norm_forward
// u = x silu(z), and its square, or that of x.
DEVICE float product(const T0* x, const T1* z, size_t i, float* u) {
    float zs[STEP], squares = 0.0f;
    get(x, i, u);
    get(z, i, zs);
#pragma unroll
    for (int k = 0; k < STEP; k++) {
        float x_k = u[k];
        u[k] = x_k * (zs[k] * sigmoid(zs[k]));
        squares += GATE_FIRST ? u[k] * u[k] : x_k * x_k;
    }
    return squares;
}

KERNEL gated_norm_forward(const T0* x, const T1* z, const T2* w, T3* y, T4* r, Params p) {
    size_t group = group_of();
    if (group >= (size_t)p.n_rows * N_GROUP) return;
    size_t at = group * D_GROUP;
    u32 first = (u32)(group % N_GROUP) * D_GROUP;
    float squares = 0.0f, u[HELD][STEP];
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 i = (s * THREADS + threadIdx.x) * STEP;
        if (i < D_GROUP) squares += product(x, z, at + i, u[s % HELD]);
    }
    float ratio = 1.0f / sqrtf(group_sum(squares) / (float)D_GROUP + p.eps);
    if (threadIdx.x == 0) store(r, group, ratio);
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 i = (s * THREADS + threadIdx.x) * STEP;
        if (i >= D_GROUP) break;
        if (HELD < STEPS) product(x, z, at + i, u[0]);
        float ws[STEP];
        get(w, first + i, ws);
#pragma unroll
        for (int k = 0; k < STEP; k++) ws[k] *= u[s % HELD][k] * ratio;
        put(y, at + i, ws);
    }
}
#endif

#ifdef ENTRY_gated_norm_backward
// What both looks at a group need of STEP numbers.
struct Numbers { float x[STEP], z[STEP], s[STEP], wdy[STEP]; };

// Loads them; returns the sum of `w u dy`, which is g times what was normalised in either order.
DEVICE float look(const T0* x, const T1* z, const T2* w, const T4* dy, size_t i, u32 col,
                  Numbers& v) {
    float ws[STEP], dot = 0.0f;
    get(x, i, v.x);
    get(z, i, v.z);
    get(w, col, ws);
    get(dy, i, v.wdy);
#pragma unroll
    for (int k = 0; k < STEP; k++) {
        v.s[k] = sigmoid(v.z[k]);
        v.wdy[k] *= ws[k];
        dot += v.x[k] * v.z[k] * v.s[k] * v.wdy[k];
    }
    return dot;
}

KERNEL gated_norm_backward(const T0* x, const T1* z, const T2* w, const T3* r, const T4* dy,
                           T5* dx, T6* dz, Params p) {
    size_t group = group_of();
    if (group >= (size_t)p.n_rows * N_GROUP) return;
    size_t at = group * D_GROUP;
    u32 first = (u32)(group % N_GROUP) * D_GROUP;
    float ratio = load(r, group), dot = 0.0f;
    Numbers v[HELD];
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 i = (s * THREADS + threadIdx.x) * STEP;
        if (i < D_GROUP) dot += look(x, z, w, dy, at + i, first + i, v[s % HELD]);
    }
    float pull = ratio * ratio * group_sum(dot) / (float)D_GROUP;
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 i = (s * THREADS + threadIdx.x) * STEP;
        if (i >= D_GROUP) break;
        if (HELD < STEPS) look(x, z, w, dy, at + i, first + i, v[0]);
        const Numbers& of = v[s % HELD];
        float dxs[STEP], dzs[STEP];
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            float silu = of.z[k] * of.s[k], slope = of.s[k] * (1.0f + of.z[k] * (1.0f - of.s[k]));
            if (GATE_FIRST) {
                float du = ratio * (of.wdy[k] - of.x[k] * silu * pull);
                dxs[k] = silu * du;
                dzs[k] = slope * of.x[k] * du;
            } else {
                dxs[k] = ratio * (of.wdy[k] * silu - of.x[k] * pull);
                dzs[k] = slope * of.wdy[k] * of.x[k] * ratio;
            }
        }
        put(dx, at + i, dxs);
        put(dz, at + i, dzs);
    }
}
#endif

#ifdef ENTRY_gated_norm_dw
// A block sums N_ROWS rows for THREADS channels.
KERNEL gated_norm_dw(const T0* x, const T1* z, const T2* r, const T3* dy, T4* parts, Params p) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    u32 first = blockIdx.y * N_ROWS;
    u32 end = min(first + N_ROWS, p.n_rows);
    float total = 0.0f;
    for (u32 row = first; row < end; row++) {
        size_t i = (size_t)row * D + col;
        float zi = load(z, i);
        float u = load(x, i) * zi * sigmoid(zi);
        total += u * load(dy, i) * load(r, (size_t)row * N_GROUP + col / D_GROUP);
    }
    store(parts, (size_t)blockIdx.y * D + col, total);
}
#endif
