// Selective scan; see mod.rs and gpu.rs. A block takes GROUP channels of a piece, some rows of one
// segment; SPLIT threads share the states of a channel, N each, in registers.
//
// `coefs` holds, behind one another, as bits of f32 and u32:
//     (D_STATE, D_INNER)  decay per unit of delta as a power of two, -exp(a_log) / ln 2
//     (2, D_INNER)        delta_bias, skip
//     (n_pieces, 4)       first row, rows, first sub-chunk, segment
//     (n_segments, 2)     first piece, pieces
// States are (slot, D_STATE, D_INNER). A sub-chunk is SUB rows of a piece, or what is left of it.
// HAS_GATE, HAS_BIAS: 1 or 0; another buffer takes the place of what is not there.
//
// What belongs to one number of x (softplus, gate) is done once, by the thread that loads it, with
// neighbouring threads at neighbouring channels, and goes through shared memory to the threads that
// hold states. The next rows are on their way meanwhile.
//
// Bytes per number of x, with bf16 activations and 16 states (b and c are 1/48 of x at 1536
// channels), and what a warp does for a row of its 16 channels (counted in the code for sm_90):
//     forward   x, delta, gate, y: 8 bytes                 76 instructions, 9.5 exponentials
//     ends      x, delta: 4 bytes, and states of pieces    54, 8.5
//     states    x, delta: 4 bytes, and 64 / SUB of states  54, 8.5
// A scheduler starts an instruction a clock and an exponential every eight. For 16,384 rows of 1536
// channels an H200 thus needs 0.05 ms for the bytes of forward and 0.13 each for its exponentials
// and for its instructions: these, not the bytes, set the pace.

struct Params {
    u32 n_pieces, n_segments;
    u32 first, n_rows; // the piece where there is no table (n_pieces is 0)
    u32 n_tok, n_subs, n_parts, flags;
};

#define READ 1u  // states are there on entry, else they are zero
#define WRITE 2u // states are wanted on exit
#define BIAS (D_STATE * D_INNER)
#define SKIP (BIAS + D_INNER)
#define TABLE (SKIP + D_INNER)
#define N_GROUPS ((D_INNER + GROUP - 1) / GROUP)
#define N ((D_STATE + SPLIT - 1) / SPLIT) // states of a thread
#define N_PAD (N * SPLIT)
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

DEVICE float exp2_fast(float x) {
#ifdef ELAPID_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

DEVICE float reciprocal(float x) {
#ifdef ELAPID_EMULATED
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Softplus without loss of digits where it is small: a polynomial in e = exp(-|z|).
DEVICE float softplus_of(float z, float e) {
    float q = 5.3648297e-3f;
    q = q * e - 3.0065814e-2f;
    q = q * e + 7.920457e-2f;
    q = q * e - 1.3753805e-1f;
    q = q * e + 1.9153656e-1f;
    q = q * e - 2.4857163e-1f;
    q = q * e + 3.3321324e-1f;
    q = q * e - 4.9999648e-1f;
    // In this order a NaN stays one.
    return (z < 0.0f ? 0.0f : z) + (q * e * e + e);
}

DEVICE float softplus(float z) { return softplus_of(z, exp2_fast(-LOG2_E * fabsf(z))); }

DEVICE float silu(float z) { return z * reciprocal(1.0f + exp2_fast(-LOG2_E * z)); }

DEVICE size_t state_at(size_t slot, u32 n, u32 ch) { return (slot * D_STATE + n) * D_INNER + ch; }

struct Piece { u32 idx, first, n_rows, sub, ch0; };

DEVICE Piece piece_of(const float* coefs, const Params& p) {
    u32 group = (u32)group_of();
    Piece piece;
    piece.idx = group / N_GROUPS;
    piece.ch0 = group % N_GROUPS * GROUP;
    piece.sub = 0;
    piece.first = p.first;
    piece.n_rows = p.n_rows;
    if (p.n_pieces > 0 && piece.idx < p.n_pieces) {
        const u32* table = (const u32*)coefs + TABLE + 4 * (size_t)piece.idx;
        piece.first = table[0];
        piece.n_rows = table[1];
        piece.sub = table[2];
    }
    return piece;
}

// A thread among those that hold states: its channel, and the first of its states.
struct Place {
    u32 lane, ch, n0; // channel within the group, and in all
    bool is_there;
};

DEVICE Place place_of(const Piece& piece) {
    Place at;
    at.lane = threadIdx.x / SPLIT;
    at.ch = piece.ch0 + at.lane;
    at.n0 = threadIdx.x % SPLIT * N;
    at.is_there = at.ch < D_INNER;
    return at;
}

// N numbers of a thread; states past the last are zero.
DEVICE void load_states(const float* from, size_t slot, const Place& at, float* out) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        bool is_there = at.is_there && at.n0 + k < D_STATE;
        out[k] = is_there ? from[state_at(slot, at.n0 + k, at.ch)] : 0.0f;
    }
}

DEVICE void store_states(float* to, size_t slot, const Place& at, const float* v) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (at.is_there && at.n0 + k < D_STATE) to[state_at(slot, at.n0 + k, at.ch)] = v[k];
    }
}

// N numbers of a row in shared memory.
DEVICE void row_of(const float* row, float* out) {
#if (D_STATE % (4 * SPLIT)) == 0
#pragma unroll
    for (int k = 0; k < N; k += 4) {
        float4 v = *(const float4*)(row + k);
        out[k] = v.x; out[k + 1] = v.y; out[k + 2] = v.z; out[k + 3] = v.w;
    }
#else
#pragma unroll
    for (int k = 0; k < N; k++) out[k] = row[k];
#endif
}

// Sum over the threads of a channel.
DEVICE float split_sum(float x) {
#pragma unroll
    for (int half = SPLIT / 2; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

// `n` rows of b or c from `row` on, padded with zeros to N_PAD states and ROWS rows.
template <int ROWS, class B> DEVICE void stage(const B* b, size_t row, u32 n, float* out) {
    const B* first = b + row * D_STATE;
#pragma unroll
    for (int j = 0; j < (ROWS * N_PAD + THREADS - 1) / THREADS; j++) {
        u32 i = j * THREADS + threadIdx.x, r = i / N_PAD, k = i % N_PAD;
        if (r < ROWS) out[i] = r < n && k < D_STATE ? load(first, r * D_STATE + k) : 0.0f;
    }
}

// Rows in shared memory at a time, and those of them that a thread loads.
#define TOKENS 16
#define ITEMS (TOKENS / SPLIT)

// What a thread has loaded of the next rows: channel threadIdx.x % GROUP of every SPLIT-th.
struct Next { float x[ITEMS], delta[ITEMS], gate[ITEMS]; };

template <bool GATED, class X, class D, class G>
DEVICE void fetch(Next& next, const X* x, const D* delta, const G* gate, size_t row, int n,
                  u32 ch) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int r = threadIdx.x / GROUP + i * SPLIT;
        next.x[i] = next.delta[i] = next.gate[i] = 0.0f;
        if (r < n && ch < D_INNER) {
            size_t at = (row + r) * D_INNER + ch;
            next.x[i] = load(x, at);
            next.delta[i] = load(delta, at);
            if (GATED) next.gate[i] = load(gate, at);
        }
    }
}

#if defined(ENTRY_scan_forward) || defined(ENTRY_scan_ends) || defined(ENTRY_scan_states)
enum Kind { OUTPUTS, ENDS, STATES };

// A chunk of rows in shared memory.
struct Chunk {
    float steps[TOKENS][GROUP], us[TOKENS][GROUP], outs[TOKENS][GROUP];
    __align__(16) float bs[TOKENS * N_PAD];
    __align__(16) float cs[TOKENS * N_PAD];
};

// Row `t` of a chunk.
template <Kind KIND>
DEVICE void advance(Chunk& rows, int t, const Place& at, const float* rates, float* h,
                    float& total) {
    float step = rows.steps[t][at.lane], u = rows.us[t][at.lane], out = 0.0f;
    float b_row[N], c_row[N];
    row_of(rows.bs + t * N_PAD + at.n0, b_row);
    if (KIND == OUTPUTS) row_of(rows.cs + t * N_PAD + at.n0, c_row);
    if (KIND == ENDS) total += step;
#pragma unroll
    for (int k = 0; k < N; k++) {
        h[k] = exp2_fast(step * rates[k]) * h[k] + u * b_row[k];
        if (KIND == OUTPUTS) out += h[k] * c_row[k];
    }
    if (KIND == OUTPUTS) {
        out = split_sum(out);
        if (threadIdx.x % SPLIT == 0) rows.outs[t][at.lane] = out;
    }
}

// Walks a piece from the states `h`. OUTPUTS: sets y. ENDS: returns the sum of the steps. STATES:
// puts the states before every sub-chunk into `held`.
template <Kind KIND, class X, class D, class B, class C, class G, class Y>
DEVICE float walk(const Piece& piece, const Place& at, const X* x, const D* delta,
                  const float* coefs, const B* b, const C* c, const G* gate, Y* y, float* held,
                  float* h) {
    __shared__ Chunk rows;
    const bool gated = KIND == OUTPUTS && HAS_GATE;
    u32 col = threadIdx.x % GROUP, ch = piece.ch0 + col;
    float bias = ch < D_INNER ? coefs[BIAS + ch] : 0.0f;
    float skip = ch < D_INNER ? coefs[SKIP + ch] : 0.0f;
    float rates[N], total = 0.0f;
    load_states(coefs, 0, at, rates);
    Next next;
    fetch<gated>(next, x, delta, gate, piece.first, (int)piece.n_rows, ch);
    for (u32 first = 0; first < piece.n_rows; first += TOKENS) {
        int n = (int)min((u32)TOKENS, piece.n_rows - first);
        size_t row = (size_t)piece.first + first;
        float xs[ITEMS], gates[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int r = threadIdx.x / GROUP + i * SPLIT;
            float step = softplus(next.delta[i] + bias);
            rows.steps[r][col] = step;
            rows.us[r][col] = step * next.x[i];
            xs[i] = next.x[i];
            gates[i] = next.gate[i];
        }
        stage<TOKENS>(b, row, n, rows.bs);
        if (KIND == OUTPUTS) stage<TOKENS>(c, row, n, rows.cs);
        __syncthreads();
        if (first + TOKENS < piece.n_rows) {
            fetch<gated>(next, x, delta, gate, row + TOKENS,
                         (int)(piece.n_rows - first - TOKENS), ch);
        }
        if (n == TOKENS) {
            // Places in shared memory are then known to the compiler.
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (KIND == STATES && t % SUB == 0) {
                    store_states(held, piece.sub + (first + t) / SUB, at, h);
                }
                advance<KIND>(rows, t, at, rates, h, total);
            }
        } else {
            for (int t = 0; t < n; t++) {
                if (KIND == STATES && t % SUB == 0) {
                    store_states(held, piece.sub + (first + t) / SUB, at, h);
                }
                advance<KIND>(rows, t, at, rates, h, total);
            }
        }
        __syncthreads();
        if (KIND == OUTPUTS && ch < D_INNER) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                int r = threadIdx.x / GROUP + i * SPLIT;
                float out = rows.outs[r][col] + skip * xs[i];
                if (HAS_GATE) out *= silu(gates[i]);
                if (r < n) store(y, (row + r) * D_INNER + ch, out);
            }
        }
    }
    return total;
}
#endif

#ifdef ENTRY_scan_forward
// state: (n_pieces), before and after.
KERNEL scan_forward(const T0* x, const T1* delta, const T2* coefs, const T3* b, const T4* c,
                    const T5* gate, T6* y, T7* state, Params p) {
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= max(p.n_pieces, 1u)) return;
    Place at = place_of(piece);
    float h[N];
#pragma unroll
    for (int k = 0; k < N; k++) h[k] = 0.0f;
    if (p.flags & READ) load_states(state, piece.idx, at, h);
    walk<OUTPUTS>(piece, at, x, delta, coefs, b, c, gate, y, (float*)0, h);
    if (p.flags & WRITE) store_states(state, piece.idx, at, h);
}
#endif

#ifdef ENTRY_scan_ends
// Of each piece, the state it ends with from zero, and the sum of its steps: their decay.
KERNEL scan_ends(const T0* x, const T1* delta, const T2* coefs, const T3* b, T4* ends, T5* totals,
                 Params p) {
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    float h[N];
#pragma unroll
    for (int k = 0; k < N; k++) h[k] = 0.0f;
    float total = walk<ENDS>(piece, at, x, delta, coefs, b, b, x, (float*)0, (float*)0, h);
    store_states(ends, piece.idx, at, h);
    if (at.is_there && at.n0 == 0) totals[(size_t)piece.idx * D_INNER + at.ch] = total;
}
#endif

#ifdef ENTRY_scan_states
// The states before each sub-chunk, from those before each piece.
KERNEL scan_states(const T0* x, const T1* delta, const T2* coefs, const T3* b, const T4* start,
                   T5* held, Params p) {
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    float h[N];
#pragma unroll
    for (int k = 0; k < N; k++) h[k] = 0.0f;
    if (p.flags & READ) load_states((const float*)start, piece.idx, at, h);
    walk<STATES>(piece, at, x, delta, coefs, b, b, x, (float*)0, held, h);
}
#endif

#ifdef ENTRY_scan_carry
// From the ends of pieces to the states they start with.
KERNEL scan_carry(const T0* totals, const T1* entry, const T2* coefs, T3* starts, Params p) {
    size_t i = thread_of();
    if (i >= (size_t)p.n_segments * BIAS) return;
    u32 state = (u32)(i % BIAS), ch = (u32)(i % D_INNER);
    const u32* segment = (const u32*)coefs + TABLE + 4 * (size_t)p.n_pieces + 2 * (i / BIAS);
    float rate = coefs[state];
    float before = p.flags & READ ? load(entry, i) : 0.0f;
    for (u32 piece = segment[0]; piece < segment[0] + segment[1]; piece++) {
        size_t slot = (size_t)piece * BIAS + state;
        float end = starts[slot];
        starts[slot] = before;
        before = exp2_fast(rate * totals[(size_t)piece * D_INNER + ch]) * before + end;
    }
}
#endif

#ifdef ENTRY_scan_ends_back
// Of each piece, the gradient it sends to the state before it, from zero behind it: in the states
// of `held` behind those of the sub-chunks.
KERNEL scan_ends_back(const T0* dy, const T1* delta, const T2* coefs, const T3* c, const T4* gate,
                      T5* held, Params p) {
    __shared__ float steps[TOKENS][GROUP], douts[TOKENS][GROUP];
    __shared__ __align__(16) float cs[TOKENS * N_PAD];
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= p.n_pieces) return;
    Place at = place_of(piece);
    u32 col = threadIdx.x % GROUP, ch = piece.ch0 + col;
    float bias = ch < D_INNER ? coefs[BIAS + ch] : 0.0f;
    float rates[N], g[N];
    load_states(coefs, 0, at, rates);
#pragma unroll
    for (int k = 0; k < N; k++) g[k] = 0.0f;
    u32 n_chunks = (piece.n_rows + TOKENS - 1) / TOKENS;
    Next next;
    u32 last = (n_chunks - 1) * TOKENS;
    fetch<HAS_GATE>(next, dy, delta, gate, (size_t)piece.first + last,
                    (int)(piece.n_rows - last), ch);
    for (u32 chunk = n_chunks; chunk > 0; chunk--) {
        u32 first = (chunk - 1) * TOKENS;
        int n = (int)min((u32)TOKENS, piece.n_rows - first);
        size_t row = (size_t)piece.first + first;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int r = threadIdx.x / GROUP + i * SPLIT;
            steps[r][col] = softplus(next.delta[i] + bias);
            douts[r][col] = HAS_GATE ? next.x[i] * silu(next.gate[i]) : next.x[i];
        }
        stage<TOKENS>(c, row, n, cs);
        __syncthreads();
        if (chunk > 1) fetch<HAS_GATE>(next, dy, delta, gate, row - TOKENS, TOKENS, ch);
#pragma unroll 2
        for (int t = n - 1; t >= 0; t--) {
            float step = steps[t][at.lane], dout = douts[t][at.lane];
            float c_row[N];
            row_of(cs + t * N_PAD + at.n0, c_row);
#pragma unroll
            for (int k = 0; k < N; k++) {
                g[k] = exp2_fast(step * rates[k]) * (g[k] + dout * c_row[k]);
            }
        }
        __syncthreads();
    }
    store_states(held, (size_t)p.n_subs + piece.idx, at, g);
}
#endif

#ifdef ENTRY_scan_carry_back
// From there to the gradient of the state behind each piece.
KERNEL scan_carry_back(const T0* totals, T1* held, const T2* coefs, Params p) {
    size_t i = thread_of();
    if (i >= (size_t)p.n_segments * BIAS) return;
    u32 state = (u32)(i % BIAS), ch = (u32)(i % D_INNER);
    const u32* segment = (const u32*)coefs + TABLE + 4 * (size_t)p.n_pieces + 2 * (i / BIAS);
    float rate = coefs[state], behind = 0.0f;
    for (u32 left = segment[1]; left > 0; left--) {
        size_t piece = segment[0] + left - 1;
        size_t slot = (p.n_subs + piece) * BIAS + state;
        float end = held[slot];
        held[slot] = behind;
        behind = exp2_fast(rate * totals[piece * D_INNER + ch]) * behind + end;
    }
}
#endif

#ifdef ENTRY_scan_coefs
// table: (n_parts) words.
KERNEL scan_coefs(const T0* a_log, const T1* bias, const T2* skip, const T3* table, T4* coefs,
                  Params p) {
    for (size_t i = thread_of(); i < (size_t)TABLE + p.n_parts; i += n_threads()) {
        u32 ch = (u32)(i % D_INNER);
        if (i < BIAS) {
            coefs[i] = -LOG2_E * expf(load(a_log, (size_t)ch * D_STATE + i / D_INNER));
        } else if (i < SKIP) {
            coefs[i] = HAS_BIAS ? load(bias, ch) : 0.0f;
        } else if (i < TABLE) {
            coefs[i] = load(skip, ch);
        } else {
            ((u32*)coefs)[i] = ((const u32*)table)[i - TABLE];
        }
    }
}
#endif

#ifdef ENTRY_scan_sum_shared
// db and dc (n_tok, D_STATE): over the groups of channels of shared (N_GROUPS, n_tok, 2, D_STATE).
KERNEL scan_sum_shared(const T0* shared, T1* db, T2* dc, Params p) {
    size_t len = (size_t)p.n_tok * 2 * D_STATE;
    for (size_t i = thread_of(); i < len; i += n_threads()) {
        float total = 0.0f;
#pragma unroll 8
        for (u32 group = 0; group < N_GROUPS; group++) total += shared[group * len + i];
        size_t at = i / (2 * D_STATE) * D_STATE + i % D_STATE;
        if (i / D_STATE % 2 == 0) {
            store(db, at, total);
        } else {
            store(dc, at, total);
        }
    }
}
#endif

#ifdef ENTRY_scan_sums
// da_log over pieces, dskip and ddelta_bias over parts (n_parts, 2, D_INNER).
KERNEL scan_sums(const T0* held, const T1* parts, const T2* coefs, T3* da_log, T4* dskip,
                 T5* dbias, Params p) {
    size_t i = thread_of();
    if (i >= TABLE) return;
    u32 ch = (u32)(i % D_INNER);
    float total = 0.0f;
    if (i < BIAS) {
        for (u32 piece = 0; piece < p.n_pieces; piece++) {
            total += held[((size_t)p.n_subs + piece) * BIAS + i];
        }
        store(da_log, (size_t)ch * D_STATE + i / D_INNER, total * coefs[i] * LN_2);
        return;
    }
    u32 row = (u32)((i - BIAS) / D_INNER); // 0 for skip, 1 for the bias
    for (u32 part = 0; part < p.n_parts; part++) {
        total += parts[((size_t)2 * part + row) * D_INNER + ch];
    }
    if (row == 0) {
        store(dskip, ch, total);
    } else {
        store(dbias, ch, total);
    }
}
#endif
