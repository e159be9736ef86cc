// Backward of the selective scan in one kernel; goes with scan.cu. A block walks its piece from the
// last sub-chunk to the first: it makes the states of SUB rows again from those in `held`, all in
// registers, then takes the rows from behind. A row past the end has a step of zero, which changes
// nothing.
//
// Sums over channels: each thread has N terms of db and N of dc; lanes of a warp fold them by
// halves (a lane keeps one half and sends the other: 2 N - 1 exchanges, not 4 times 2 N), warps are
// added in shared memory, blocks in scan_sum_shared, all in fixed order.
//
// Bytes per number of x, with bf16 activations and 16 states: x, delta, gate, dy, dx, ddelta, dgate
// 14; states 64 / SUB; parts of db and dc 128 / GROUP: 24 in all. A warp takes about 255
// instructions for a row of its 16 channels (13 and two exponentials to each of its 8 states, 60
// for the sums over channels, the rest before and after): 0.43 ms for 16,384 rows of 1536 channels
// on an H200, against 0.15 for the bytes. At 168 registers three blocks fit a multiprocessor.

#ifdef ENTRY_scan_backward_all

#define ITEMS_BACK (SUB / SPLIT)
#define WARPS (THREADS / 32)
// Terms of a thread, rounded up to a power of two.
#define POWER(n) ((n) <= 2 ? 2 : (n) <= 4 ? 4 : (n) <= 8 ? 8 : (n) <= 16 ? 16 : (n) <= 32 ? 32 \
                  : (n) <= 64 ? 64 : (n) <= 128 ? 128 : (n) <= 256 ? 256 : 512)
#define TERMS POWER(2 * N)
// Terms that a lane has left when all lanes of its part have folded.
#define LEFT (TERMS * SPLIT >= 32 ? TERMS * SPLIT / 32 : 1)

// Adds CNT terms over the lanes that differ in bits from MASK on; a lane is left with those from
// `at` on.
template <int CNT, int MASK> DEVICE void fold(float* v, u32& at) {
    if constexpr (MASK < 32) {
        if constexpr (CNT > 1) {
            bool is_upper = threadIdx.x & MASK;
#pragma unroll
            for (int i = 0; i < CNT / 2; i++) {
                float sent = is_upper ? v[i] : v[i + CNT / 2];
                float kept = is_upper ? v[i + CNT / 2] : v[i];
                v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, MASK);
            }
            if (is_upper) at += CNT / 2;
            fold<CNT / 2, MASK * 2>(v, at);
        } else {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], MASK);
            fold<1, MASK * 2>(v, at);
        }
    }
}

struct NextBack { float x[ITEMS_BACK], delta[ITEMS_BACK], gate[ITEMS_BACK], dy[ITEMS_BACK]; };

// Numbers of a sub-chunk: what states need, what they give, what stays with the thread that loaded.
struct Rows {
    float step[SUB][GROUP], u[SUB][GROUP], dout[SUB][GROUP];
    float out[SUB][GROUP], g_b[SUB][GROUP], q_rate[SUB][GROUP];
    float x[SUB][GROUP], slope[SUB][GROUP], dsilu[SUB][GROUP];
};

template <class X, class D, class G, class Y>
DEVICE void fetch_back(NextBack& next, const X* x, const D* delta, const G* gate, const Y* dy,
                       size_t row, u32 n, u32 ch) {
#pragma unroll
    for (int i = 0; i < ITEMS_BACK; i++) {
        u32 r = threadIdx.x / GROUP + i * SPLIT;
        next.x[i] = next.delta[i] = next.gate[i] = next.dy[i] = 0.0f;
        if (r < n && ch < D_INNER) {
            size_t at = (row + r) * D_INNER + ch;
            next.x[i] = load(x, at);
            next.delta[i] = load(delta, at);
            next.dy[i] = load(dy, at);
            if (HAS_GATE) next.gate[i] = load(gate, at);
        }
    }
}

DEVICE void open_rows(Rows& rows, const NextBack& next, u32 n, u32 col, float bias) {
#pragma unroll
    for (int i = 0; i < ITEMS_BACK; i++) {
        u32 r = threadIdx.x / GROUP + i * SPLIT;
        float z = next.delta[i] + bias, e = exp2_fast(-LOG2_E * fabsf(z));
        float step = r < n ? softplus_of(z, e) : 0.0f;
        rows.step[r][col] = step;
        rows.u[r][col] = step * next.x[i];
        rows.x[r][col] = next.x[i];
        rows.slope[r][col] = (z < 0.0f ? e : 1.0f) * reciprocal(1.0f + e);
        float dout = next.dy[i];
        if (HAS_GATE) {
            float gate = next.gate[i], s = reciprocal(1.0f + exp2_fast(-LOG2_E * gate));
            rows.dsilu[r][col] = dout * s * (1.0f + gate * (1.0f - s));
            dout *= gate * s;
        }
        rows.dout[r][col] = dout;
    }
}

// held: (n_subs + n_pieces) states: before each sub-chunk; then of each piece the gradient behind
// it on entry (flag READ), its part of the gradient by the rates on exit.
// shared: (N_GROUPS, n_tok, 2, D_STATE), parts of db and dc.
// parts: (n_pieces, 2, D_INNER), of dskip and ddelta_bias.
KERNEL scan_backward_all(const T0* x, const T1* delta, const T2* coefs, const T3* b, const T4* c,
                         const T5* gate, const T6* dy, T7* held, T8* dx, T9* ddelta, T10* dgate,
                         T11* shared, T12* parts, Params p) {
    __shared__ Rows rows;
    __shared__ __align__(16) float bs[SUB * N_PAD];
    __shared__ __align__(16) float cs[SUB * N_PAD];
    __shared__ float terms[WARPS][SUB][SPLIT][TERMS];
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    u32 col = threadIdx.x % GROUP, ch = piece.ch0 + col, group = piece.ch0 / GROUP;
    float bias = ch < D_INNER ? coefs[BIAS + ch] : 0.0f;
    float skip = ch < D_INNER ? coefs[SKIP + ch] : 0.0f;
    float rates[N], g[N], da[N], ahead[N], dskip = 0.0f, dbias = 0.0f;
    load_states(coefs, 0, at, rates);
#pragma unroll
    for (int k = 0; k < N; k++) g[k] = da[k] = 0.0f;
    size_t own = (size_t)p.n_subs + piece.idx;
    if (p.flags & READ) load_states(held, own, at, g);
    u32 n_sub = (piece.n_rows + SUB - 1) / SUB;
    NextBack next;
    fetch_back(next, x, delta, gate, dy, (size_t)piece.first + (n_sub - 1) * SUB,
               piece.n_rows - (n_sub - 1) * SUB, ch);
    load_states(held, piece.sub + n_sub - 1, at, ahead);
    for (u32 sub = n_sub; sub > 0; sub--) {
        u32 first = (sub - 1) * SUB;
        u32 n = min((u32)SUB, piece.n_rows - first);
        size_t row = (size_t)piece.first + first;
        open_rows(rows, next, n, col, bias);
        stage<SUB>(b, row, n, bs);
        stage<SUB>(c, row, n, cs);
        __syncthreads();
        float h[SUB + 1][N];
#pragma unroll
        for (int k = 0; k < N; k++) h[0][k] = ahead[k];
        if (sub > 1) {
            fetch_back(next, x, delta, gate, dy, row - SUB, SUB, ch);
            load_states(held, piece.sub + sub - 2, at, ahead);
        }
#pragma unroll
        for (int t = 0; t < SUB; t++) {
            float step = rows.step[t][at.lane], u = rows.u[t][at.lane], b_row[N];
            row_of(bs + t * N_PAD + at.n0, b_row);
#pragma unroll
            for (int k = 0; k < N; k++) {
                h[t + 1][k] = exp2_fast(step * rates[k]) * h[t][k] + u * b_row[k];
            }
        }
#pragma unroll
        for (int t = SUB - 1; t >= 0; t--) {
            float step = rows.step[t][at.lane], u = rows.u[t][at.lane];
            float dout = rows.dout[t][at.lane], b_row[N], c_row[N], v[TERMS];
            row_of(bs + t * N_PAD + at.n0, b_row);
            row_of(cs + t * N_PAD + at.n0, c_row);
            float out = 0.0f, g_b = 0.0f, q_rate = 0.0f;
#pragma unroll
            for (int k = N; k < TERMS / 2; k++) v[k] = v[TERMS / 2 + k] = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) {
                out += h[t + 1][k] * c_row[k];
                g[k] += dout * c_row[k];
                v[k] = g[k] * u;
                v[TERMS / 2 + k] = dout * h[t + 1][k];
                g_b += g[k] * b_row[k];
                g[k] *= exp2_fast(step * rates[k]);
                float q = g[k] * h[t][k];
                q_rate += q * rates[k];
                da[k] += q * step;
            }
            out = split_sum(out);
            g_b = split_sum(g_b);
            q_rate = split_sum(q_rate);
            if (threadIdx.x % SPLIT == 0) {
                rows.out[t][at.lane] = out;
                rows.g_b[t][at.lane] = g_b;
                rows.q_rate[t][at.lane] = q_rate;
            }
            u32 from = 0;
            fold<TERMS, SPLIT>(v, from);
#pragma unroll
            for (int i = 0; i < LEFT; i++) {
                terms[threadIdx.x / 32][t][threadIdx.x % SPLIT][from + i] = v[i];
            }
        }
        __syncthreads();
        if (ch < D_INNER) {
#pragma unroll
            for (int i = 0; i < ITEMS_BACK; i++) {
                u32 r = threadIdx.x / GROUP + i * SPLIT;
                if (r >= n) continue;
                size_t to = (row + r) * D_INNER + ch;
                float x_r = rows.x[r][col], dout = rows.dout[r][col], g_b = rows.g_b[r][col];
                float d = (x_r * g_b + rows.q_rate[r][col] * LN_2) * rows.slope[r][col];
                store(ddelta, to, d);
                store(dx, to, dout * skip + rows.step[r][col] * g_b);
                if (HAS_GATE) {
                    store(dgate, to, rows.dsilu[r][col] * (rows.out[r][col] + skip * x_r));
                }
                dskip += dout * x_r;
                dbias += d;
            }
        }
#pragma unroll
        for (int j = 0; j < (SUB * 2 * D_STATE + THREADS - 1) / THREADS; j++) {
            u32 i = j * THREADS + threadIdx.x;
            u32 t = i / (2 * D_STATE), kind = i / D_STATE % 2, state = i % D_STATE;
            if (t >= n) break;
            float total = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) {
                total += terms[warp][t][state / N][kind * (TERMS / 2) + state % N];
            }
            shared[(((size_t)group * p.n_tok + row + t) * 2 + kind) * D_STATE + state] = total;
        }
    }
    store_states(held, own, at, da);
    __syncthreads();
    rows.x[threadIdx.x / GROUP][col] = dskip;
    rows.out[threadIdx.x / GROUP][col] = dbias;
    __syncthreads();
    if (threadIdx.x < GROUP && ch < D_INNER) {
        dskip = dbias = 0.0f;
#pragma unroll
        for (int i = 0; i < SPLIT; i++) {
            dskip += rows.x[i][col];
            dbias += rows.out[i][col];
        }
        parts[((size_t)piece.idx * 2) * D_INNER + ch] = dskip;
        parts[((size_t)piece.idx * 2 + 1) * D_INNER + ch] = dbias;
    }
}
#endif
