// Gated RMSNorm; see gated_norm.rs. A block takes one group of channels of one row.
// D_GROUP, N_GROUP: width and count of groups. GATE_FIRST: 1 or 0. N_ROWS: rows of a partial sum.
//
// Numbers that move, for each of x: forward 3 (x, z, y), backward 5 (x, z, dy, dx, dz), dw 3 (x, z,
// dy). A wide group is looked at twice; the second look finds it in the cache.
//
// Where groups are of whole eights and not too wide (EIGHTS is 1) forward has a warp for a group of
// a row; backward has a block for N_ROWS rows, a thread for eight channels of theirs, and makes
// the partial sums of dw on its way.

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

#if defined(ENTRY_gated_norm_forward) && EIGHTS
#define N_EIGHT ((D_GROUP + 255) / 256) // eights of a lane

KERNEL gated_norm_forward(const T0* x, const T1* z, const T2* w, T3* y, T4* r, Params p) {
    size_t group = group_of() * (THREADS / 32) + threadIdx.x / 32;
    if (group >= (size_t)p.n_rows * N_GROUP) return;
    size_t at = group * D_GROUP;
    u32 first = (u32)(group % N_GROUP) * D_GROUP, lane = threadIdx.x % 32 * 8;
    Eight us[N_EIGHT], zs[N_EIGHT];
    float squares = 0.0f;
#pragma unroll
    for (u32 n = 0; n < N_EIGHT; n++) {
        u32 i = n * 256 + lane;
        if (i >= D_GROUP) break;
        us[n] = load8(x, at + i);
        zs[n] = load8(z, at + i);
    }
#pragma unroll
    for (u32 n = 0; n < N_EIGHT; n++) {
        if (n * 256 + lane >= D_GROUP) break;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float x_k = us[n].v[k], z_k = zs[n].v[k];
            us[n].v[k] *= z_k * sigmoid(z_k);
            squares += GATE_FIRST ? us[n].v[k] * us[n].v[k] : x_k * x_k;
        }
    }
    float ratio = 1.0f / sqrtf(warp_sum(squares) / (float)D_GROUP + p.eps);
    if (lane == 0) store(r, group, ratio);
#pragma unroll
    for (u32 n = 0; n < N_EIGHT; n++) {
        u32 i = n * 256 + lane;
        if (i >= D_GROUP) break;
        Eight ws = load8(w, first + i);
#pragma unroll
        for (int k = 0; k < 8; k++) us[n].v[k] *= ws.v[k] * ratio;
        store8(y, at + i, us[n]);
    }
}
#endif

#ifdef ENTRY_gated_norm_backward_rows
// Eight numbers as they lie in memory: half the registers of floats.
template <class T> struct __align__(16) Pack { T v[8]; };

template <class T> DEVICE Pack<T> pack_at(const T* x, size_t i) { return *(const Pack<T>*)(x + i); }
template <class T> DEVICE Eight unpack(const Pack<T>& pack) {
    Eight x;
#pragma unroll
    for (int k = 0; k < 8; k++) x.v[k] = load(pack.v, k);
    return x;
}

// Of some row.
struct Look { Pack<T0> x; Pack<T1> z; Pack<T4> dy; float ratio; };

// `parts`: sums of dw over the rows of each block, (blocks, D). Registers for 768 threads at the
// same time.
extern "C" __global__ __launch_bounds__(THREADS, 768 / THREADS) void
gated_norm_backward_rows(const T0* x, const T1* z, const T2* w, const T3* r, const T4* dy, T5* dx,
                         T6* dz, T7* parts, Params p) {
    const u32 n_warp = THREADS / 32;
    __shared__ float dots[2][n_warp]; // they take turns: one barrier a row
    u32 first = blockIdx.y * N_ROWS, end = min(first + N_ROWS, p.n_rows);
    u32 i = threadIdx.x * 8, col = blockIdx.x * D_GROUP + i;
    bool is_there = i < D_GROUP;
    Eight ws, dw;
#pragma unroll
    for (int k = 0; k < 8; k++) ws.v[k] = dw.v[k] = 0.0f;
    if (is_there) ws = load8(w, col);
    auto look = [&](u32 row) {
        size_t at = (size_t)row * D + (is_there ? col : 0);
        size_t group = (size_t)row * N_GROUP + blockIdx.x;
        Look of = {pack_at(x, at), pack_at(z, at), pack_at(dy, at), load(r, group)};
        return of;
    };
    Look next = look(first);
    for (u32 row = first; row < end; row++) {
        Look now = next;
        next = look(min(row + 1, end - 1));
        Eight xs = unpack(now.x), zs = unpack(now.z), dys = unpack(now.dy);
        float dot = 0.0f, ratio = now.ratio;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float udy = xs.v[k] * zs.v[k] * sigmoid(zs.v[k]) * dys.v[k];
            dot += udy * ws.v[k];
            dw.v[k] += udy * ratio;
        }
        dot = warp_sum(dot);
        if (threadIdx.x % 32 == 0) dots[row % 2][threadIdx.x / 32] = dot;
        __syncthreads();
        if (!is_there) continue;
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < n_warp; warp++) sum += dots[row % 2][warp];
        float pull = ratio * ratio * sum / (float)D_GROUP;
        Eight dxs, dzs;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float x_k = xs.v[k], z_k = zs.v[k], s = sigmoid(z_k), wdy = ws.v[k] * dys.v[k];
            float silu = z_k * s, slope = s * (1.0f + z_k * (1.0f - s));
            if (GATE_FIRST) {
                float du = ratio * (wdy - x_k * silu * pull);
                dxs.v[k] = silu * du;
                dzs.v[k] = slope * x_k * du;
            } else {
                dxs.v[k] = ratio * (wdy * silu - x_k * pull);
                dzs.v[k] = slope * wdy * x_k * ratio;
            }
        }
        store8(dx, (size_t)row * D + col, dxs);
        store8(dz, (size_t)row * D + col, dzs);
    }
    if (is_there) store8(parts, (size_t)blockIdx.y * D + col, dw);
}
#endif

#if defined(ENTRY_gated_norm_forward) && !EIGHTS
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
