// What stands before and behind the products of Mamba-3, which are those of `ssd`; see mod.rs for
// the mathematics, gpu.rs for the order of the kernels and what lies in `packed`, `table`, `wide`,
// `th` and `found`.
//
// The rows v, k and q of all heads are stored for as long as the op runs, and so are their
// gradients. What one layer takes, with n_tok = 16,384, 24 heads of 64, d_state 128, rank 1, in
// bf16 (x, y, dy, dx: 50 MB each; k, q and their gradients: 100 MB each; states: 100 MB):
//
//     mamba3_rows     x; v, k, q                              300 MB
//     ssd_walk        v, k; states                            250 MB    6.4 GFLOP
//     ssd_outputs     v, k, q, states; y                      400 MB   16.1
//     forward                                                 950 MB   22.5
//     mamba3_rows     x; v, k, q                              300 MB
//     ssd_walk        v, k; states                            250 MB    6.4
//     ssd_walk        dy, q; gradients by states              250 MB    6.4
//     ssd_gradients   v, k, q, dy, both states; dv, dk, dq    750 MB   45.1
//     mamba3_back     dk, dq, half of k and q; dth            600 MB
//     mamba3_norm     dk, dq                                  200 MB
//     the rest        dv, dth; dx                             200 MB
//     backward                                               2550 MB   57.9
//
// 3.5 GB at 4 TB/s are 0.9 ms, 80 GFLOP at 400 TFLOP/s 0.2 ms. Making k and q in each of the six
// kernels that read them would save 1.2 GB, 0.3 ms, and take norms, sines and cosines six times;
// angles of all heads and tokens to make them from would be 50 MB, a quarter of k and q.

#define D_INNER (N_HEAD * D_HEAD)
#define PER_GROUP (N_HEAD / N_GROUP)
#define N_STATE (D_STATE * D_HEAD)
#define D_BC (RANK * N_GROUP * D_STATE)
#define XBC (D_INNER + 2 * D_BC)           // columns of xbc
#define RAW (3 * N_HEAD + N_ANGLE)         // of raw
#define WIDE (D_INNER + 2 * N_HEAD * D_STATE) // of wide
#define N_PAIR (D_STATE / 2)
#define N_RATIO (2 * RANK * N_GROUP)
#define N_TURN (N_HEAD * N_ANGLE)
// Places in `packed`.
#define SKIP N_HEAD
#define NORMS (2 * N_HEAD)
#define BIASES (NORMS + 2 * D_STATE)
#define N_BIAS (N_HEAD * RANK * D_STATE)
#define FACTORS (BIASES + 2 * N_BIAS)
// Tokens that mamba3_norm takes.
#define N_TOKENS 16
#define TAU 6.2831853f

struct Params {
    u32 n_tok;
    u32 n_chunk;
    u32 first; // chunk, or row of a segment
    u32 n_segment;
    u32 has_before; // whether states are given
    float a_floor, eps;
};

// ---- rates and angles ---------------------------------------------------------------------------

// Softplus, and its slope.
DEVICE float2 softplus(float x) {
    float e = expf(-fabsf(x));
    return make_float2(fmaxf(x, 0.0f) + log1pf(e), (x < 0.0f ? e : 1.0f) / (1.0f + e));
}

template <class R> DEVICE float2 delta_of(const R* raw, const float* packed, u32 tok, u32 head) {
    return softplus(load(raw, (size_t)tok * RAW + head) + packed[head]);
}

// The decay rate, and its slope.
template <class R> DEVICE float2 a_of(const R* raw, u32 tok, u32 head, float floor) {
    float x = load(raw, (size_t)tok * RAW + N_HEAD + head);
    float below = 1.0f / (1.0f - fminf(x, 0.0f));
    float2 f = SOFTPLUS_A ? softplus(x) : make_float2(x < 0.0f ? below : 1.0f + x, below * below);
    return f.x < floor ? make_float2(-floor, 0.0f) : make_float2(-f.x, -f.y);
}

template <class R> DEVICE float lam_of(const R* raw, u32 tok, u32 head) {
    return 1.0f / (1.0f + expf(-load(raw, (size_t)tok * RAW + 2 * N_HEAD + head)));
}

// Turns for a step size of 1.
template <class R> DEVICE float turn_of(const R* raw, u32 tok, u32 s) {
    return 0.5f * tanhf(load(raw, (size_t)tok * RAW + 3 * N_HEAD + s));
}

// Between -1/2 and 1/2.
DEVICE float reduced(float turns) { return turns - rintf(turns); }

// sin(2 pi x) for |x| <= 1/4.
DEVICE float sin_of_turn(float x) {
    float y = x * x;
    float p = fmaf(39.710918f, y, -76.57499f);
    p = fmaf(p, y, 81.602234f);
    p = fmaf(p, y, -41.34168f);
    return fmaf(p, y, TAU) * x;
}

// Cosine and sine of an angle in turns between -1/2 and 1/2.
DEVICE float2 cos_sin(float x) {
    float folded = fmaxf(-0.5f - x, fminf(x, 0.5f - x));
    return make_float2(sin_of_turn(0.25f - fabsf(x)), sin_of_turn(folded));
}

// The two numbers of a pair within a row of k or q.
DEVICE uint2 pair_of(u32 pair) {
    return HALVES ? make_uint2(pair, pair + N_PAIR) : make_uint2(2 * pair, 2 * pair + 1);
}

// The numbers of a pair in the row that begins at `row`; at once where they lie side by side.
#define AT_ONCE (!HALVES && D_INNER % 2 == 0)

template <class X> DEVICE float2 load_pair(const X* x, size_t row, uint2 at) {
    if (AT_ONCE) return load2(x, row + at.x);
    return make_float2(load(x, row + at.x), load(x, row + at.y));
}

template <class X> DEVICE void store_pair(X* x, size_t row, uint2 at, float2 v) {
    if (AT_ONCE) {
        store2(x, row + at.x, v);
        return;
    }
    store(x, row + at.x, v.x);
    store(x, row + at.y, v.y);
}

// First number of a head's v (0), k (1) or q (2) in a row of `wide`.
DEVICE size_t wide_at(u32 which, size_t row, u32 head) {
    u32 column = which == 0 ? head * D_HEAD : D_INNER + ((which - 1) * N_HEAD + head) * D_STATE;
    return row * WIDE + column;
}

// First number of rank r of b (0) or c (1) for a head in a row of xbc.
DEVICE size_t bc_at(u32 side, size_t tok, u32 r, u32 head) {
    return tok * XBC + D_INNER + side * D_BC + (r * N_GROUP + head / PER_GROUP) * D_STATE;
}

DEVICE float factor_of(const float* packed, u32 head, u32 r, u32 p) {
    return HAS_MIMO ? packed[FACTORS + (head * RANK + r) * D_HEAD + p] : 1.0f;
}

#ifdef ENTRY_mamba3_pack
// All parameters, one behind the other.
KERNEL mamba3_pack(const T0* delta_bias, const T1* skip, const T2* b_norm, const T3* c_norm,
                   const T4* b_bias, const T5* c_bias, const T6* mimo_x, float* packed, Params) {
    u32 end = FACTORS + (HAS_MIMO ? N_HEAD * RANK * D_HEAD : 0);
    for (u32 i = thread_of(); i < end; i += n_threads()) {
        float x;
        if (i < SKIP) x = load(delta_bias, i);
        else if (i < NORMS) x = load(skip, i - SKIP);
        else if (i < NORMS + D_STATE) x = load(b_norm, i - NORMS);
        else if (i < BIASES) x = load(c_norm, i - NORMS - D_STATE);
        else if (i < BIASES + N_BIAS) x = load(b_bias, i - BIASES);
        else if (i < FACTORS) x = load(c_bias, i - BIASES - N_BIAS);
        else x = load(mimo_x, i - FACTORS);
        packed[i] = x;
    }
}
#endif

#ifdef ENTRY_mamba3_ratios
// 1 / rms of a row of b or c; a group takes one.
KERNEL mamba3_ratios(const T0* xbc, float* ratios, Params p) {
    size_t group = group_of();
    if (group >= (size_t)p.n_tok * N_RATIO) return;
    size_t row = group / N_RATIO * XBC + D_INNER + group % N_RATIO * D_STATE;
    float sum = 0.0f;
    for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) {
        float x = load(xbc, row + n);
        sum += x * x;
    }
    sum = group_sum(sum);
    if (threadIdx.x == 0) ratios[group] = 1.0f / sqrtf(sum / D_STATE + p.eps);
}
#endif

#ifdef ENTRY_mamba3_steps
// A group of 64 threads takes a chunk of a head: `steps` of its rows, in which log decays are
// summed in f64, and by how far its angles turn.
KERNEL mamba3_steps(const T0* raw, const float* packed, const u32* table, float* steps,
                    float* angles, Params p) {
    __shared__ float deltas[64];
    __shared__ double sums[64];
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y, i = threadIdx.x;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], is_last = table[4 * chunk + 3] & 2;
    size_t n_row = (size_t)p.n_tok * RANK, series = N_HEAD * n_row;
    float gamma = 0.0f, s = 0.0f;
    if (i < n) {
        u32 tok = start + i;
        float delta = delta_of(raw, packed, tok, head).x;
        gamma = s = lam_of(raw, tok, head) * delta;
        if (!is_last || i + 1 < n) {
            s += (1.0f - lam_of(raw, tok + 1, head)) * delta_of(raw, packed, tok + 1, head).x;
        }
        deltas[i] = delta;
        sums[i] = (double)delta * (double)a_of(raw, tok, head, p.a_floor).x;
    }
    __syncthreads();
    if (i == 0) {
        for (u32 k = 1; k < n; k++) sums[k] += sums[k - 1];
    }
    __syncthreads();
    if (i < n) {
        float high = (float)sums[i];
        const float values[6] = {s, gamma, high, (float)(sums[i] - (double)high), expf(high),
                                 expf((float)(sums[n - 1] - sums[i]))};
        size_t at = head * n_row + (size_t)(start + i) * RANK;
        for (u32 k = 0; k < 6; k++) {
            for (u32 r = 0; r < RANK; r++) steps[k * series + at + r] = values[k];
        }
    }
    if (i == 0 && chunk == 0) steps[6 * series + head * 2 + 1] = packed[SKIP + head];
    for (u32 k = i; k < N_ANGLE; k += THREADS) {
        float angle = 0.0f;
        for (u32 t = 0; t < n; t++) {
            angle = reduced(fmaf(deltas[t], turn_of(raw, start + t, k), angle));
        }
        angles[(size_t)chunk * N_TURN + head * N_ANGLE + k] = angle;
    }
}
#endif

#ifdef ENTRY_mamba3_starts
// From how far chunks turn to the angles before them; a thread takes an angle of a segment. `carry`
// holds those before and then behind the segments, in radians.
KERNEL mamba3_starts(const u32* table, float* angles, float* carry, Params p) {
    for (size_t i = thread_of(); i < (size_t)p.n_segment * N_TURN; i += n_threads()) {
        const u32* run = table + 4 * p.n_chunk + i / N_TURN * 2;
        float angle = p.has_before ? reduced(carry[i] / TAU) : 0.0f;
        for (u32 chunk = run[0]; chunk < run[0] + run[1]; chunk++) {
            float* at = angles + (size_t)chunk * N_TURN + i % N_TURN;
            float turned = *at;
            *at = angle;
            angle = reduced(angle + turned);
        }
        if (p.has_before) carry[i] = angle * TAU;
    }
}
#endif

// Of 256 threads each takes a pair of 64 and a quarter of the chunk's tokens.
struct Part { u32 lane, begin, end; };

DEVICE Part part_of(u32 n) {
    u32 quarter = threadIdx.x / 64;
    return {threadIdx.x % 64, n * quarter / 4, n * (quarter + 1) / 4};
}

// Step sizes of the tokens of a chunk.
template <class R>
DEVICE void load_deltas(float deltas[64], const R* raw, const float* packed, u32 head, u32 start,
                        u32 n) {
    if (threadIdx.x < n) {
        deltas[threadIdx.x] = delta_of(raw, packed, start + threadIdx.x, head).x;
    }
    __syncthreads();
}

// By how far the tokens of a chunk turn for a step size of 1: the angles of 64 pairs, or all.
#define N_TURNS (N_ANGLE < 1 ? 1 : N_ANGLE < 64 ? N_ANGLE : 64)

template <class R>
DEVICE void load_turns(float turns[64][N_TURNS], const R* raw, u32 start, u32 n, u32 first) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < n * N_TURNS; i += THREADS) {
        u32 t = i / N_TURNS, lane = i % N_TURNS;
        if (first + lane < N_ANGLE) turns[t][lane] = turn_of(raw, start + t, first + lane);
    }
    __syncthreads();
}

// The angle before a part, where there is one for the pair; all threads come here.
DEVICE float angle_before(float sums[4][64], const float deltas[64],
                          const float turns[64][N_TURNS], const float* starts, u32 chunk,
                          u32 head, u32 pair, Part part) {
    float angle = 0.0f;
    if (pair < N_ANGLE) {
        for (u32 t = part.begin; t < part.end; t++) {
            angle = reduced(fmaf(deltas[t], turns[t][part.lane], angle));
        }
    }
    sums[threadIdx.x / 64][part.lane] = angle;
    __syncthreads();
    if (pair >= N_ANGLE) return 0.0f;
    angle = starts[(size_t)chunk * N_TURN + head * N_ANGLE + pair];
    for (u32 k = 0; k < threadIdx.x / 64; k++) angle = reduced(angle + sums[k][part.lane]);
    return angle;
}

#ifdef ENTRY_mamba3_rows
// A group takes a head in a chunk: v, k and q of its rows, and where the segment ends, k and x of
// its last token.
KERNEL mamba3_rows(const T0* __restrict__ xbc, const T1* __restrict__ raw,
                   const float* __restrict__ packed, const u32* __restrict__ table,
                   const float* __restrict__ ratios, const float* __restrict__ starts,
                   T6* __restrict__ wide, float* __restrict__ ends, Params p) {
    __shared__ float deltas[64], sums[4][64], turns[64][N_TURNS];
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], is_last = table[4 * chunk + 3] & 2;
    float* end_of = ends + (size_t)table[4 * chunk + 2] * (N_BIAS + D_INNER);
    bool is_end = p.has_before && is_last;
    load_deltas(deltas, raw, packed, head, start, n);
    Part part = part_of(n);
    for (u32 first = 0; first < N_PAIR; first += 64) {
        u32 pair = first + part.lane;
        load_turns(turns, raw, start, n, first);
        float angle = angle_before(sums, deltas, turns, starts, chunk, head, pair, part);
        if (pair >= N_PAIR) continue;
        uint2 at = pair_of(pair);
        float2 norms[2], biases[2 * RANK];
        for (u32 side = 0; side < 2; side++) {
            norms[side] = load_pair(packed + NORMS + side * D_STATE, 0, at);
        }
#pragma unroll
        for (u32 i = 0; i < 2 * RANK; i++) {
            u32 row = i / RANK * N_BIAS + (head * RANK + i % RANK) * D_STATE;
            biases[i] = load_pair(packed + BIASES, row, at);
        }
#pragma unroll 4
        for (u32 t = part.begin; t < part.end; t++) {
            float2 turn = make_float2(1.0f, 0.0f);
            if (pair < N_ANGLE) {
                angle = reduced(fmaf(deltas[t], turns[t][part.lane], angle));
                turn = cos_sin(angle);
            }
#pragma unroll
            for (u32 i = 0; i < 2 * RANK; i++) {
                u32 side = i / RANK, r = i % RANK, row = i * N_GROUP + head / PER_GROUP;
                float2 x = load_pair(xbc, bc_at(side, start + t, r, head), at);
                float ratio = ratios[(size_t)(start + t) * N_RATIO + row];
                float a = x.x * ratio * norms[side].x + biases[i].x;
                float b = x.y * ratio * norms[side].y + biases[i].y;
                float2 y = make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
                store_pair(wide, wide_at(1 + side, (size_t)(start + t) * RANK + r, head), at, y);
                if (is_end && side == 0 && t + 1 == n) {
                    store_pair(end_of, (r * N_HEAD + head) * D_STATE, at, y);
                }
            }
        }
    }
    for (u32 i = threadIdx.x; i < n * D_HEAD; i += THREADS) {
        u32 tok = start + i / D_HEAD, col = i % D_HEAD;
        float x = load(xbc, (size_t)tok * XBC + head * D_HEAD + col);
        for (u32 r = 0; r < RANK; r++) {
            size_t to = wide_at(0, (size_t)tok * RANK + r, head);
            store(wide, to + col, x * factor_of(packed, head, r, col));
        }
        if (is_end && i / D_HEAD + 1 == n) end_of[N_BIAS + head * D_HEAD + col] = x;
    }
}
#endif

#ifdef ENTRY_mamba3_fold
// Adds w sum_r k v^T of the token before each segment to its state.
KERNEL mamba3_fold(const T0* raw, const float* packed, const u32* table, const float* k,
                   const float* v, float* h, Params p) {
    for (size_t i = thread_of(); i < (size_t)p.n_segment * N_HEAD * N_STATE; i += n_threads()) {
        u32 col = i % D_HEAD, row = i / D_HEAD % D_STATE, head = i / N_STATE % N_HEAD;
        u32 segment = i / N_STATE / N_HEAD;
        u32 tok = table[4 * table[4 * p.n_chunk + 2 * segment]];
        float w = (1.0f - lam_of(raw, tok, head)) * delta_of(raw, packed, tok, head).x;
        float x = v[((size_t)segment * N_HEAD + head) * D_HEAD + col], sum = 0.0f;
        for (u32 r = 0; r < RANK; r++) {
            float k_there = k[(((size_t)segment * RANK + r) * N_HEAD + head) * D_STATE + row];
            sum += k_there * x * factor_of(packed, head, r, col);
        }
        h[i] += w * sum;
    }
}
#endif

#ifdef ENTRY_mamba3_by_token
// Between (n_tok, rank, n_head, d_head) of `ssd`, to which it goes where `first` is 1, and (n_tok,
// n_head, rank, d_head).
KERNEL mamba3_by_token(const T0* x, T1* y, Params p) {
    for (size_t i = thread_of(); i < (size_t)p.n_tok * RANK * D_INNER; i += n_threads()) {
        size_t tok = i / (RANK * D_INNER), col = i % D_HEAD;
        size_t head = i / D_HEAD / RANK % N_HEAD, r = i / D_HEAD % RANK;
        size_t row = (tok * RANK + r) * D_INNER + head * D_HEAD + col;
        if (p.first) store(y, row, load(x, i));
        else store(y, i, load(x, row));
    }
}
#endif

// ---- few tokens ---------------------------------------------------------------------------------

#ifdef ENTRY_mamba3_step
// The recurrence as it is written, for `n_tok` tokens of one segment from row `first` on, in the
// storage of its states. A group takes a head, 64 threads a row of its state at a time. A token
// reads and writes the state once: 1.6 MB of a layer with 24 heads of 64 and d_state 128.
KERNEL mamba3_step(const T0* xbc, const T1* raw, const float* packed, float* angles, float* h,
                   float* k, float* v, T7* y, Params p) {
    const u32 n_part = THREADS / 64;
    __shared__ float kq[2 * RANK][D_STATE], parts[n_part][64];
    u32 head = blockIdx.x, lane = threadIdx.x % 64, part = threadIdx.x / 64;
    float* h_at = h + (size_t)head * N_STATE;
    for (u32 tok = p.first; tok < p.first + p.n_tok; tok++) {
        float delta = delta_of(raw, packed, tok, head).x, lam = lam_of(raw, tok, head);
        float decay = expf(delta * a_of(raw, tok, head, p.a_floor).x);
        float gamma = lam * delta, beta = decay * (1.0f - lam) * delta;
        for (u32 i = 0; i < 2 * RANK; i++) {
            u32 side = i / RANK, r = i % RANK;
            size_t from = bc_at(side, tok, r, head);
            float sum = 0.0f;
            for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) {
                float x = load(xbc, from + n);
                sum += x * x;
            }
            float ratio = 1.0f / sqrtf(group_sum(sum) / D_STATE + p.eps);
            const float* norm = packed + NORMS + side * D_STATE;
            const float* bias = packed + BIASES + side * N_BIAS + (head * RANK + r) * D_STATE;
            for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) {
                kq[i][n] = load(xbc, from + n) * ratio * norm[n] + bias[n];
            }
        }
        __syncthreads();
        for (u32 s = threadIdx.x; s < N_ANGLE; s += THREADS) {
            float angle = reduced(fmaf(delta, turn_of(raw, tok, s),
                                       reduced(angles[head * N_ANGLE + s] / TAU)));
            angles[head * N_ANGLE + s] = angle * TAU;
            float2 turn = cos_sin(angle);
            uint2 at = pair_of(s);
            for (u32 i = 0; i < 2 * RANK; i++) {
                float a = kq[i][at.x], b = kq[i][at.y];
                kq[i][at.x] = a * turn.x - b * turn.y;
                kq[i][at.y] = a * turn.y + b * turn.x;
            }
        }
        __syncthreads();
        for (u32 first = 0; first < D_HEAD; first += 64) {
            u32 col = first + lane;
            float x = 0.0f, sums[RANK] = {};
            if (col < D_HEAD) {
                x = load(xbc, (size_t)tok * XBC + head * D_HEAD + col);
                float x_before = v[head * D_HEAD + col];
#pragma unroll 4
                for (u32 n = part; n < D_STATE; n += n_part) {
                    float next = decay * h_at[n * D_HEAD + col];
#pragma unroll
                    for (u32 r = 0; r < RANK; r++) {
                        float factor = factor_of(packed, head, r, col);
                        float k_before = k[((size_t)r * N_HEAD + head) * D_STATE + n];
                        next += factor * (beta * k_before * x_before + gamma * kq[r][n] * x);
                    }
                    h_at[n * D_HEAD + col] = next;
#pragma unroll
                    for (u32 r = 0; r < RANK; r++) sums[r] += next * kq[RANK + r][n];
                }
            }
#pragma unroll
            for (u32 r = 0; r < RANK; r++) {
                __syncthreads();
                parts[part][lane] = sums[r];
                __syncthreads();
                if (part == 0 && col < D_HEAD) {
                    float all = packed[SKIP + head] * x * factor_of(packed, head, r, col);
                    for (u32 i = 0; i < n_part; i++) all += parts[i][lane];
                    size_t to = (size_t)tok * RANK * D_INNER + (head * RANK + r) * D_HEAD + col;
                    store(y, to, all);
                    if (r + 1 == RANK) v[head * D_HEAD + col] = x;
                }
            }
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < RANK * D_STATE; i += THREADS) {
            k[((size_t)(i / D_STATE) * N_HEAD + head) * D_STATE + i % D_STATE] =
                kq[i / D_STATE][i % D_STATE];
        }
        __syncthreads();
    }
}
#endif
