// The backward pass of the selective scan; goes with scan.cu. In scan_backward_all a block walks
// its piece from the last sub-chunk to the first: it makes the states of SUB rows again from those
// in `held`, all in registers, then takes the rows from behind. A row past the end has a step of
// zero, which changes nothing.
//
// Sums over channels: each thread has N terms of db and N of dc; lanes of a warp fold them by
// halves (a lane keeps one half and sends the other), warps are added in shared memory, blocks in
// scan_sum_shared, all in fixed order. A lane has each four of its states in such an order, turned,
// that what it keeps is in the same registers as with any other: nothing is selected.
//
// Bytes per number of x, with bf16 activations and 16 states: x, delta, gate, dy, dx, ddelta, dgate
// 14; states 32 / SUB; parts of db and dc 128 / GROUP: 20 in all. A warp takes about 203
// instructions for a row of its 16 channels (14 to each of its 8 states, of them 1.75 exponentials;
// 16 for the sums over channels; most others belong to numbers of x): 0.33 ms for 16,384 rows of
// 1536 channels on an H200, which takes 0.47 to 0.49; 0.12 for the bytes. At 168 registers three
// blocks fit a multiprocessor; its shared memory is busy for 72% of the time.

#ifdef ENTRY_scan_ends_back
// Of each piece, the gradient it sends to the state before it, from zero behind it.
KERNEL scan_ends_back(const T0* dy, const T1* delta, const T2* coefs, const T3* c, const T4* gate,
                      T5* ends, Params p) {
    __shared__ float2 steps[TOKENS][PAIRS], douts[TOKENS][PAIRS];
    __shared__ __align__(16) float cs[TOKENS * N_PAD];
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    u32 col = threadIdx.x % PAIRS, ch = piece.ch0 + 2 * col;
    float2 bias = coefs_of(coefs, BIAS, ch);
    States rates = load_states(coefs, 0, at), g = zeros();
    for (u32 chunk = (piece.n_rows + TOKENS - 1) / TOKENS; chunk > 0; chunk--) {
        u32 first = (chunk - 1) * TOKENS, n = min((u32)TOKENS, piece.n_rows - first);
        size_t row = (size_t)piece.first + first;
        Two<T0> dys[ITEMS];
        Two<T1> deltas[ITEMS];
        Two<T4> gates[ITEMS];
        Shared<TOKENS, T3> c_next;
        fetch<ITEMS>(dys, dy, row, n, ch);
        fetch<ITEMS>(deltas, delta, row, n, ch);
        if (HAS_GATE) fetch<ITEMS>(gates, gate, row, n, ch);
        fetch_shared(c_next, c, row, n);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            u32 r = row_of_item(i);
            float2 z = floats(deltas[i]), dout = floats(dys[i]);
            if (HAS_GATE) {
                float2 gate = floats(gates[i]);
                dout = make_float2(dout.x * silu(gate.x), dout.y * silu(gate.y));
            }
            steps[r][col] = make_float2(softplus(z.x + bias.x), softplus(z.y + bias.y));
            douts[r][col] = dout;
        }
        open_shared<1, 1>(c_next, cs);
        __syncthreads();
#pragma unroll 2
        for (int t = (int)n - 1; t >= 0; t--) {
            float2 step = steps[t][at.pair], dout = douts[t][at.pair];
            float c_row[N];
            row_of(cs + t * N_PAD + at.part * N, c_row);
#pragma unroll
            for (int k = 0; k < N; k++) {
                g.v[0][k] = exp2_fast(step.x * rates.v[0][k]) * (g.v[0][k] + dout.x * c_row[k]);
                g.v[1][k] = exp2_fast(step.y * rates.v[1][k]) * (g.v[1][k] + dout.y * c_row[k]);
            }
        }
    }
    store_states(ends, piece.idx, at, g);
}
#endif

#ifdef ENTRY_scan_carry_back
// From there to the gradient of the state behind each piece.
KERNEL scan_carry_back(const T0* totals, T1* ends, const T2* coefs, Params p) {
    size_t i = thread_of();
    if (i >= (size_t)p.n_segments * BIAS) return;
    u32 state = (u32)(i % BIAS), ch = (u32)(i % D_INNER);
    const u32* segment = (const u32*)coefs + TABLE + 4 * (size_t)p.n_pieces + 2 * (i / BIAS);
    float rate = coefs[state], behind = 0.0f;
    for (u32 left = segment[1]; left > 0; left--) {
        size_t piece = segment[0] + left - 1;
        size_t slot = piece * BIAS + state;
        float end = ends[slot];
        ends[slot] = behind;
        behind = exp2_fast(rate * totals[piece * D_INNER + ch]) * behind + end;
    }
}
#endif

#ifdef ENTRY_scan_backward_all

#define ITEMS_BACK (SUB > SPLIT ? SUB / SPLIT : 1)
#define WARPS (THREADS / 32)
#define FOURS (N / 4)
#define STRIDE 5 // of turns in shared memory: four, and one that keeps banks apart
// Terms that a lane has left when all lanes have folded.
#define LEFT (LANES >= 8 ? FOURS : 2 * FOURS)

// Numbers of a sub-chunk: what states need, what they give, what stays with the thread that loaded.
struct Rows {
    float4 bs[SUB][N_PAD / 4][STRIDE], cs[SUB][N_PAD / 4][STRIDE]; // in four turns
    float4 sums[SUB][PARTS][PAIRS];        // parts of the sums of h c and of g b, of two channels
    float2 q_rates[SUB][PARTS][PAIRS + 8]; // and of q times rate
    float terms[WARPS][SUB][LEFT][32];
    float4 step_u[SUB][PAIRS]; // steps of two channels, then step times x
    float2 dout[SUB][PAIRS], x[SUB][PAIRS], slope[SUB][PAIRS], dsilu[SUB][PAIRS];
};

// Sums over the lanes of a warp that hold the same states, of db in v[0] and dc in v[1].
DEVICE void fold(float (*v)[N]) {
#pragma unroll
    for (int k = 0; k < N; k += 4) {
#pragma unroll
        for (int kind = 0; kind < 2; kind++) {
            v[kind][k] += __shfl_xor_sync(0xffffffffu, v[kind][k + 2], 1);
            v[kind][k + 1] += __shfl_xor_sync(0xffffffffu, v[kind][k + 3], 1);
            v[kind][k] += __shfl_xor_sync(0xffffffffu, v[kind][k + 1], 2);
        }
#if LANES >= 8
        bool is_upper = threadIdx.x & 4;
        float sent = is_upper ? v[0][k] : v[1][k];
        float kept = is_upper ? v[1][k] : v[0][k];
        v[0][k] = kept + __shfl_xor_sync(0xffffffffu, sent, 4);
#pragma unroll
        for (int mask = 8; mask < LANES; mask *= 2) {
            v[0][k] += __shfl_xor_sync(0xffffffffu, v[0][k], mask);
        }
#endif
    }
}

// The order that `fold` needs: register k of a four has state k ^ turn.
DEVICE u32 turn_of() { return (threadIdx.x & 1) * 2 + (threadIdx.x & 2) / 2; }

// From the order of states to that of the lane, or back.
DEVICE States turned(const States& s) {
    u32 turn = turn_of();
    States half, whole;
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int k = 0; k < N; k++) half.v[j][k] = turn & 1 ? s.v[j][k ^ 1] : s.v[j][k];
#pragma unroll
        for (int k = 0; k < N; k++) whole.v[j][k] = turn & 2 ? half.v[j][k ^ 2] : half.v[j][k];
    }
    return whole;
}

// Writes what `fold` left, summed over warps: a lane's own term of every WARPS-th row. `to` is
// (rows, 2, D_STATE).
DEVICE void store_terms(const Rows& rows, u32 n, float* to) {
    u32 lane = threadIdx.x % 32, part = lane / LANES, turn = turn_of();
    if (lane % LANES >= 8) return;
#pragma unroll
    for (int i = 0; i < LEFT; i++) {
        u32 kind = LANES >= 8 ? lane / 4 % 2 : i / FOURS;
        u32 state = part * N + i % FOURS * 4 + turn;
#pragma unroll
        for (u32 j = 0; j < (SUB + WARPS - 1) / WARPS; j++) {
            u32 t = threadIdx.x / 32 + j * WARPS;
            if (WARPS > SUB && t >= SUB) break;
            float total = rows.terms[0][t][i][lane];
#pragma unroll
            for (int warp = 1; warp < WARPS; warp++) total += rows.terms[warp][t][i][lane];
            if (t < n && state < D_STATE) to[(t * 2 + kind) * D_STATE + state] = total;
        }
    }
}

template <class X, class D, class G, class Y, class B, class C> struct NextBack {
    Two<X> x[ITEMS_BACK];
    Two<D> delta[ITEMS_BACK];
    Two<G> gate[ITEMS_BACK];
    Two<Y> dy[ITEMS_BACK];
    Shared<SUB, B> b;
    Shared<SUB, C> c;
};

struct Opened { float step, u, slope, dsilu, dout; };

DEVICE Opened open_one(float x, float delta, float gate, float dy) {
    float e = exp2_fast(-LOG2_E * fabsf(delta)), s = reciprocal(1.0f + exp2_fast(-LOG2_E * gate));
    Opened one;
    one.step = softplus_of(delta, e);
    one.u = one.step * x;
    one.slope = (delta < 0.0f ? e : 1.0f) * reciprocal(1.0f + e);
    one.dsilu = HAS_GATE ? dy * s * (1.0f + gate * (1.0f - s)) : 0.0f;
    one.dout = HAS_GATE ? dy * (gate * s) : dy;
    return one;
}

template <class Next> DEVICE void open_rows(Rows& rows, const Next& next, u32 n, float2 bias) {
    u32 col = threadIdx.x % PAIRS;
#pragma unroll
    for (int i = 0; i < ITEMS_BACK; i++) {
        u32 r = row_of_item(i);
        if (SUB < SPLIT && r >= SUB) break;
        float2 x = floats(next.x[i]), delta = floats(next.delta[i]), dy = floats(next.dy[i]);
        float2 gate = HAS_GATE ? floats(next.gate[i]) : x;
        Opened a = open_one(x.x, delta.x + bias.x, gate.x, dy.x);
        Opened b = open_one(x.y, delta.y + bias.y, gate.y, dy.y);
        bool is_row = r < n;
        rows.step_u[r][col] = make_float4(is_row ? a.step : 0.0f, is_row ? b.step : 0.0f, a.u, b.u);
        rows.dout[r][col] = make_float2(a.dout, b.dout);
        rows.x[r][col] = x;
        rows.slope[r][col] = make_float2(is_row ? a.slope : 0.0f, is_row ? b.slope : 0.0f);
        if (HAS_GATE) rows.dsilu[r][col] = make_float2(a.dsilu, b.dsilu);
    }
    open_shared<4, STRIDE>(next.b, (float*)rows.bs);
    open_shared<4, STRIDE>(next.c, (float*)rows.cs);
}

// What states need of a row.
struct Row {
    float4 step_u;
    float2 dout;
    float b[N], c[N];
};

DEVICE void turned_row(const float4 (*row)[STRIDE], const Place& at, float* out) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float4 v = row[at.part * FOURS + i][turn_of()];
        out[4 * i] = v.x; out[4 * i + 1] = v.y; out[4 * i + 2] = v.z; out[4 * i + 3] = v.w;
    }
}

DEVICE Row load_row(const Rows& rows, int t, const Place& at) {
    Row row = {rows.step_u[t][at.pair], rows.dout[t][at.pair]};
    turned_row(rows.bs[t], at, row.b);
    turned_row(rows.cs[t], at, row.c);
    return row;
}

// The states before each row of a sub-chunk and behind the last, from h[0].
DEVICE void remake(const Rows& rows, const Place& at, const States& rates, States* h) {
#pragma unroll
    for (int t = 0; t < SUB; t++) {
        float4 s = rows.step_u[t][at.pair];
        float b_row[N];
        turned_row(rows.bs[t], at, b_row);
#pragma unroll
        for (int k = 0; k < N; k++) {
            h[t + 1].v[0][k] = exp2_fast(s.x * rates.v[0][k]) * h[t].v[0][k] + s.z * b_row[k];
            h[t + 1].v[1][k] = exp2_fast(s.y * rates.v[1][k]) * h[t].v[1][k] + s.w * b_row[k];
        }
    }
}

// Row `t` of a sub-chunk, from behind. `before`, `behind`: its states; g: the gradient of those
// behind; da: the gradient by the rates.
DEVICE void recede(Rows& rows, int t, const Row& row, const Place& at, const States& rates,
                   const States& before, const States& behind, States& g, States& da) {
    float v[2][N], out[2], g_b[2], q_rate[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float step = j ? row.step_u.y : row.step_u.x, u = j ? row.step_u.w : row.step_u.z;
        float dout = j ? row.dout.y : row.dout.x;
        out[j] = g_b[j] = q_rate[j] = 0.0f;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float& g_k = g.v[j][k];
            out[j] += behind.v[j][k] * row.c[k];
            g_k += dout * row.c[k];
            v[0][k] = j ? v[0][k] + g_k * u : g_k * u;
            v[1][k] = j ? v[1][k] + dout * behind.v[j][k] : dout * behind.v[j][k];
            g_b[j] += g_k * row.b[k];
            g_k *= exp2_fast(step * rates.v[j][k]);
            float q = g_k * before.v[j][k];
            q_rate[j] += q * rates.v[j][k];
            da.v[j][k] += q * step;
        }
    }
    float2 outs = part_sum(make_float2(out[0], out[1]));
    float2 g_bs = part_sum(make_float2(g_b[0], g_b[1]));
    float2 q_rates = part_sum(make_float2(q_rate[0], q_rate[1]));
    if (at.part < PARTS) {
        rows.sums[t][at.part][at.pair] = make_float4(outs.x, outs.y, g_bs.x, g_bs.y);
        rows.q_rates[t][at.part][at.pair] = q_rates;
    }
    fold(v);
#pragma unroll
    for (int i = 0; i < LEFT; i++) {
        rows.terms[threadIdx.x / 32][t][i][threadIdx.x % 32] = v[i / FOURS][i % FOURS * 4];
    }
}

// What row `r` of a pair sends to the sums over rows.
struct Sums { float2 dskip, dbias; };

template <class X, class D, class G>
DEVICE void finish_rows(const Rows& rows, u32 n, size_t row, u32 ch, float2 skip, X* dx,
                        D* ddelta, G* dgate, Sums& sums) {
    u32 col = threadIdx.x % PAIRS;
    if (!is_there(ch)) return;
#pragma unroll
    for (int i = 0; i < ITEMS_BACK; i++) {
        u32 r = row_of_item(i);
        if (SUB < SPLIT && r >= SUB) break;
        float4 two = rows.sums[r][0][col]; // of h c, of g b
        float2 q_rate = rows.q_rates[r][0][col];
#pragma unroll
        for (int part = 1; part < PARTS; part++) {
            float4 v = rows.sums[r][part][col];
            float2 q = rows.q_rates[r][part][col];
            two = make_float4(two.x + v.x, two.y + v.y, two.z + v.z, two.w + v.w);
            q_rate = make_float2(q_rate.x + q.x, q_rate.y + q.y);
        }
        float2 x = rows.x[r][col], dout = rows.dout[r][col], slope = rows.slope[r][col];
        float2 step = *(const float2*)&rows.step_u[r][col];
        float2 d = make_float2((x.x * two.z + q_rate.x * LN_2) * slope.x,
                               (x.y * two.w + q_rate.y * LN_2) * slope.y);
        float2 d_x = make_float2(dout.x * skip.x + step.x * two.z,
                                 dout.y * skip.y + step.y * two.w);
        float2 dsilu = HAS_GATE ? rows.dsilu[r][col] : x;
        float2 d_gate = make_float2(dsilu.x * (two.x + skip.x * x.x),
                                    dsilu.y * (two.y + skip.y * x.y));
        if (r < n) {
            store_two(ddelta, row + r, ch, d);
            store_two(dx, row + r, ch, d_x);
            if (HAS_GATE) store_two(dgate, row + r, ch, d_gate);
        }
        sums.dskip.x += dout.x * x.x;
        sums.dskip.y += dout.y * x.y;
        sums.dbias.x += d.x;
        sums.dbias.y += d.y;
    }
}

// held: (n_subs) states, before each sub-chunk. ends: (n_pieces), of each piece the gradient behind
// it on entry (flag READ), its part of the gradient by the rates on exit.
// shared: (N_GROUPS, n_tok, 2, D_STATE), parts of db and dc.
// parts: (n_pieces, 2, D_INNER), of dskip and ddelta_bias.
extern "C" __global__ __launch_bounds__(THREADS, 384 / THREADS)
void scan_backward_all(const T0* x, const T1* delta, const T2* coefs, const T3* b, const T4* c,
                       const T5* gate, const T6* dy, const T7* held, T8* ends, T9* dx,
                       T10* ddelta, T11* dgate, T12* shared, T13* parts, Params p) {
    __shared__ Rows rows;
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    u32 col = threadIdx.x % PAIRS, ch = piece.ch0 + 2 * col, group = piece.ch0 / GROUP;
    float2 bias = coefs_of(coefs, BIAS, ch), skip = coefs_of(coefs, SKIP, ch);
    Sums sums = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
    States rates = turned(load_states(coefs, 0, at)), g = zeros(), da = zeros();
    if (p.flags & READ) g = turned(load_states(ends, piece.idx, at));
    NextBack<T0, T1, T5, T6, T3, T4> next;
    auto fetch_rows = [&](u32 first) {
        size_t row = (size_t)piece.first + first;
        u32 n = piece.n_rows - first;
        fetch<ITEMS_BACK>(next.x, x, row, n, ch);
        fetch<ITEMS_BACK>(next.delta, delta, row, n, ch);
        fetch<ITEMS_BACK>(next.dy, dy, row, n, ch);
        if (HAS_GATE) fetch<ITEMS_BACK>(next.gate, gate, row, n, ch);
        fetch_shared(next.b, b, row, n);
        fetch_shared(next.c, c, row, n);
    };
    u32 n_sub = (piece.n_rows + SUB - 1) / SUB;
    fetch_rows((n_sub - 1) * SUB);
    States ahead = load_states(held, piece.sub + n_sub - 1, at);
    open_rows(rows, next, piece.n_rows - (n_sub - 1) * SUB, bias);
    for (u32 sub = n_sub; sub > 0; sub--) {
        u32 first = (sub - 1) * SUB;
        u32 n = min((u32)SUB, piece.n_rows - first);
        size_t row = (size_t)piece.first + first;
        __syncthreads();
        States h[SUB + 1];
        h[0] = turned(ahead);
        // At the end once more the same rows, which nothing reads.
        u32 before = sub > 1 ? sub - 2 : 0;
        fetch_rows(before * SUB);
        ahead = load_states(held, piece.sub + before, at);
        remake(rows, at, rates, h);
        Row next_row = load_row(rows, SUB - 1, at);
#pragma unroll
        for (int t = SUB - 1; t >= 0; t--) {
            // Loaded before anything is written: the row is there in time.
            Row row = next_row;
            if (t > 0) next_row = load_row(rows, t - 1, at);
            recede(rows, t, row, at, rates, h[t], h[t + 1], g, da);
        }
        __syncthreads();
        finish_rows(rows, n, row, ch, skip, dx, ddelta, dgate, sums);
        store_terms(rows, n, shared + ((size_t)group * p.n_tok + row) * 2 * D_STATE);
        open_rows(rows, next, SUB, bias);
    }
    store_states(ends, piece.idx, at, turned(da));
    __syncthreads();
    float4* all = (float4*)rows.sums;
    all[threadIdx.x] = make_float4(sums.dskip.x, sums.dskip.y, sums.dbias.x, sums.dbias.y);
    __syncthreads();
    if (threadIdx.x < PAIRS && is_there(ch)) {
        float4 two = all[threadIdx.x];
#pragma unroll
        for (int i = 1; i < SPLIT; i++) {
            float4 v = all[i * PAIRS + threadIdx.x];
            two = make_float4(two.x + v.x, two.y + v.y, two.z + v.z, two.w + v.w);
        }
        store_two(parts, (size_t)piece.idx * 2, ch, make_float2(two.x, two.y));
        store_two(parts, (size_t)piece.idx * 2 + 1, ch, make_float2(two.z, two.w));
    }
}
#endif
