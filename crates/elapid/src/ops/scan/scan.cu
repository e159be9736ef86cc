// Selective scan; see mod.rs and gpu.rs. A block takes GROUP channels of a piece, some rows of one
// segment. A thread has N states of two neighbouring channels in registers; SPLIT threads share the
// states of a pair.
//
// `coefs` holds, behind one another, as bits of f32 and u32:
//     (D_STATE, D_INNER)  decay per unit of delta as a power of two, -exp(a_log) / ln 2
//     (2, D_INNER)        delta_bias, skip
//     (n_pieces, 4)       first row, rows, first sub-chunk, segment
//     (n_segments, 2)     first piece, pieces
// States are (slot, D_STATE, D_INNER). A sub-chunk is SUB rows of a piece, or what is left of it.
// HAS_GATE, HAS_BIAS: 1 or 0; another buffer takes the place of what is not there.
//
// What belongs to one number of x (softplus, gate) is done once, by the thread that loads it, and
// goes through shared memory to the threads that hold states. The next rows are on their way
// meanwhile. Sums over the states of a channel are parts in shared memory, one of each thread,
// which the thread that finishes the number adds.
//
// With bf16 activations and 16 states (b and c are 1/48 of x at 1536 channels): bytes per number of
// x, and what a warp does for a row of its 16 channels (counted on an H200):
//     forward   x, delta, gate, y: 8 bytes, KEEP 32 / SUB  79 instructions, 9.5 exponentials
//     ends      x, delta: 4 bytes, and states of pieces    57, 8.5
// A scheduler starts an instruction a clock and an exponential every eight. For 16,384 rows of 1536
// channels an H200 thus needs 0.07 ms for the bytes of forward, 0.12 each for its exponentials and
// for its instructions, and takes 0.19, with KEEP 0.20.

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
#define N ((D_STATE + 4 * SPLIT - 1) / (4 * SPLIT) * 4) // states of a thread, by fours
#define N_PAD (N * SPLIT)
#define PAIRS (GROUP / 2)
#define LANES (32 / SPLIT)             // pairs of a warp
#define PARTS (SPLIT < 4 ? SPLIT : 4) // parts of a sum over states in shared memory
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

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

// A thread among those that hold states: its pair of channels, within the group and in all, and
// which N of the states it has.
struct Place { u32 pair, ch, part; };

DEVICE Place place_of(const Piece& piece) {
    Place at;
    at.pair = threadIdx.x / 32 * LANES + threadIdx.x % LANES;
    at.ch = piece.ch0 + 2 * at.pair;
    at.part = threadIdx.x % 32 / LANES;
    return at;
}

DEVICE bool is_there(u32 ch) { return D_INNER % GROUP == 0 || ch < D_INNER; }

// Two neighbouring numbers of a row as they lie in memory: nothing waits for them before they are
// used.
template <class X> struct Two { u32 bits; };
template <> struct Two<float> { float2 v; };

DEVICE void join(Two<float>& two, float low, float high) { two.v = make_float2(low, high); }
template <class X> DEVICE void join(Two<X>& two, X low, X high) {
    two.bits = (u32)low.bits | (u32)high.bits << 16;
}

DEVICE float2 floats(Two<float> two) { return two.v; }
DEVICE float2 floats(Two<bf16> two) {
    return make_float2(__uint_as_float(two.bits << 16), __uint_as_float(two.bits & 0xffff0000u));
}
DEVICE float2 floats(Two<f16> two) {
    return make_float2(f16_to_float((u16)two.bits), f16_to_float((u16)(two.bits >> 16)));
}

// Compilers would move a load to where it is used.
#ifdef ELAPID_EMULATED
template <class X> DEVICE void pin(X&) {}
#else
DEVICE void pin(float& x) { asm volatile("" : "+f"(x)); }
template <class X> DEVICE void pin(X& x) { asm volatile("" : "+h"(x.bits)); }
DEVICE void pin(Two<float>& two) { asm volatile("" : "+f"(two.v.x), "+f"(two.v.y)); }
template <class X> DEVICE void pin(Two<X>& two) { asm volatile("" : "+r"(two.bits)); }
#endif

template <class X> DEVICE Two<X> load_two(const X* x, size_t row, u32 ch) {
    const X* from = x + row * D_INNER + ch;
#if D_INNER % 2 == 0
    return *(const Two<X>*)from;
#else
    Two<X> two;
    join(two, from[0], ch + 1 < D_INNER ? from[1] : X{});
    return two;
#endif
}

DEVICE void put_two(float* y, float2 v) { *(float2*)y = v; }
DEVICE void put_two(bf16* y, float2 v) { *(u32*)y = floats_to_bf16x2(v.x, v.y); }

template <class Y> DEVICE void store_two(Y* y, size_t row, u32 ch, float2 v) {
    size_t to = row * D_INNER + ch;
#if D_INNER % 2 == 0
    put_two(y + to, v);
#else
    store(y, to, v.x);
    if (ch + 1 < D_INNER) store(y, to + 1, v.y);
#endif
}

// Of `coefs`, the numbers of two channels.
DEVICE float2 coefs_of(const float* coefs, u32 first, u32 ch) {
    return make_float2(is_there(ch) ? coefs[first + ch] : 0.0f,
                       is_there(ch + 1) ? coefs[first + ch + 1] : 0.0f);
}

// N states of two channels; those past the last are zero.
struct States { float v[2][N]; };

DEVICE States zeros() {
    States s;
#pragma unroll
    for (int k = 0; k < N; k++) s.v[0][k] = s.v[1][k] = 0.0f;
    return s;
}

template <class H> DEVICE States load_states(const H* from, size_t slot, const Place& at) {
    States s = zeros();
#pragma unroll
    for (int k = 0; k < N; k++) {
        u32 n = at.part * N + k;
        if (n >= D_STATE || !is_there(at.ch)) continue;
        float2 two = floats(load_two(from, slot * D_STATE + n, at.ch));
        s.v[0][k] = two.x;
        s.v[1][k] = two.y;
    }
    return s;
}

template <class H>
DEVICE void store_states(H* to, size_t slot, const Place& at, const States& s) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        u32 n = at.part * N + k;
        if (n >= D_STATE || !is_there(at.ch)) continue;
        store_two(to, slot * D_STATE + n, at.ch, make_float2(s.v[0][k], s.v[1][k]));
    }
}

// N numbers of a row in shared memory.
DEVICE void row_of(const float* row, float* out) {
#pragma unroll
    for (int k = 0; k < N; k += 4) {
        float4 v = *(const float4*)(row + k);
        out[k] = v.x; out[k + 1] = v.y; out[k + 2] = v.z; out[k + 3] = v.w;
    }
}

// Adds numbers of more than PARTS threads to those of the first PARTS.
DEVICE float2 part_sum(float2 x) {
#pragma unroll
    for (int half = SPLIT / 2; half >= PARTS; half /= 2) {
        x.x += __shfl_xor_sync(0xffffffffu, x.x, half * LANES);
        x.y += __shfl_xor_sync(0xffffffffu, x.y, half * LANES);
    }
    return x;
}

// What a thread has loaded of ROWS rows of b or c.
template <int ROWS, class B> struct Shared { B v[(ROWS * N + 31) / 32]; };

// Zeros past row `n` and the last state.
template <int ROWS, class B>
DEVICE void fetch_shared(Shared<ROWS, B>& next, const B* b, size_t row, u32 n) {
#pragma unroll
    for (int j = 0; j < (ROWS * N + 31) / 32; j++) {
        u32 i = j * THREADS + threadIdx.x, r = i / N_PAD, k = i % N_PAD;
        next.v[j] = r < n && k < D_STATE ? b[(row + r) * D_STATE + k] : B{};
        pin(next.v[j]);
    }
}

// Into (ROWS, N_PAD / 4, STRIDE, 4): each four in several orders, k ^ turn.
template <int TURNS, int STRIDE, int ROWS, class B>
DEVICE void open_shared(const Shared<ROWS, B>& next, float* out) {
#pragma unroll
    for (int j = 0; j < (ROWS * N + 31) / 32; j++) {
        u32 i = j * THREADS + threadIdx.x, r = i / N_PAD, k = i % N_PAD;
        if (ROWS * N % 32 != 0 && r >= ROWS) break;
        float v = load(next.v, j);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            out[((r * (N_PAD / 4) + k / 4) * STRIDE + turn) * 4 + (k % 4 ^ turn)] = v;
        }
    }
}

// Rows in shared memory at a time, and the pairs of numbers of them that a thread loads: pair
// threadIdx.x % PAIRS of every SPLIT-th row.
#define TOKENS 8
#define ITEMS (TOKENS / SPLIT)

DEVICE u32 row_of_item(int i) { return threadIdx.x / PAIRS + i * SPLIT; }

template <int COUNT, class X>
DEVICE void fetch(Two<X>* next, const X* x, size_t row, u32 n, u32 ch) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        next[i] = Two<X>{};
        if (row_of_item(i) < n && is_there(ch)) next[i] = load_two(x, row + row_of_item(i), ch);
        pin(next[i]);
    }
}

#if defined(ENTRY_scan_forward) || defined(ENTRY_scan_ends)
enum Kind { OUTPUTS, ENDS };

// A chunk of rows in shared memory. Parts of a row lie so that threads meet no bank twice.
struct Chunk {
    float2 steps[TOKENS][PAIRS], us[TOKENS][PAIRS];
    __align__(16) float bs[TOKENS * N_PAD];
    __align__(16) float cs[TOKENS * N_PAD];
    float2 outs[TOKENS][PARTS][PAIRS + 8];
};

// What a thread has loaded of a chunk.
template <class X, class D, class B, class C, class G> struct Next {
    Two<X> x[ITEMS];
    Two<D> delta[ITEMS];
    Two<G> gate[ITEMS];
    Shared<TOKENS, B> b;
    Shared<TOKENS, C> c;
};

// Row `t` of a chunk; returns the part of its outputs.
template <Kind KIND>
DEVICE float2 advance(const Chunk& rows, int t, const Place& at, const States& rates, States& h,
                      float2& total) {
    float2 step = rows.steps[t][at.pair], u = rows.us[t][at.pair];
    float2 out = make_float2(0.0f, 0.0f);
    float b_row[N], c_row[N];
    row_of(rows.bs + t * N_PAD + at.part * N, b_row);
    if (KIND == OUTPUTS) row_of(rows.cs + t * N_PAD + at.part * N, c_row);
    if (KIND == ENDS) total = make_float2(total.x + step.x, total.y + step.y);
#pragma unroll
    for (int k = 0; k < N; k++) {
        h.v[0][k] = exp2_fast(step.x * rates.v[0][k]) * h.v[0][k] + u.x * b_row[k];
        h.v[1][k] = exp2_fast(step.y * rates.v[1][k]) * h.v[1][k] + u.y * b_row[k];
        if (KIND == OUTPUTS) {
            out.x += h.v[0][k] * c_row[k];
            out.y += h.v[1][k] * c_row[k];
        }
    }
    return KIND == OUTPUTS ? part_sum(out) : out;
}

template <Kind KIND> DEVICE void put_out(Chunk& rows, int t, const Place& at, float2 out) {
    if (KIND == OUTPUTS && at.part < PARTS) rows.outs[t][at.part][at.pair] = out;
}

// Walks a piece from the states `h`. OUTPUTS: sets y and with KEEP puts the states before every
// sub-chunk into `held`. ENDS: returns the sums of the steps.
template <Kind KIND, class X, class D, class B, class C, class G, class Y, class H>
struct Walk {
    const X* x;
    const D* delta;
    const float* coefs;
    const B* b;
    const C* c;
    const G* gate;
    Y* y;
    H* held;
    u32 col, ch;
    float2 bias, skip;
    typedef Next<X, D, B, C, G> Loaded;

    DEVICE void fetch_chunk(Loaded& next, size_t row, u32 n) {
        fetch<ITEMS>(next.x, x, row, n, ch);
        fetch<ITEMS>(next.delta, delta, row, n, ch);
        fetch_shared(next.b, b, row, n);
        if (KIND != OUTPUTS) return;
        fetch_shared(next.c, c, row, n);
        if (HAS_GATE) fetch<ITEMS>(next.gate, gate, row, n, ch);
    }

    DEVICE void open(Chunk& rows, const Loaded& next) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            u32 r = row_of_item(i);
            float2 x = floats(next.x[i]), z = floats(next.delta[i]);
            float2 step = make_float2(softplus(z.x + bias.x), softplus(z.y + bias.y));
            rows.steps[r][col] = step;
            rows.us[r][col] = make_float2(step.x * x.x, step.y * x.y);
        }
        open_shared<1, 1>(next.b, rows.bs);
        if (KIND == OUTPUTS) open_shared<1, 1>(next.c, rows.cs);
    }

    // Outputs of the `n` rows from `row` on.
    DEVICE void finish(const Chunk& rows, const Loaded& done, size_t row, u32 n) {
        if (KIND != OUTPUTS || !is_there(ch)) return;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            u32 r = row_of_item(i);
            float2 x = floats(done.x[i]), out = make_float2(skip.x * x.x, skip.y * x.y);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float2 v = rows.outs[r][part][col];
                out = make_float2(out.x + v.x, out.y + v.y);
            }
            if (HAS_GATE) {
                float2 gate = floats(done.gate[i]);
                out = make_float2(out.x * silu(gate.x), out.y * silu(gate.y));
            }
            if (r < n) store_two(y, row + r, ch, out);
        }
    }

    DEVICE float2 go(const Piece& piece, const Place& at, States& h) {
        __shared__ Chunk chunks[2];
        States rates = load_states(coefs, 0, at);
        float2 total = make_float2(0.0f, 0.0f);
        Loaded next, done;
        fetch_chunk(next, piece.first, piece.n_rows);
        open(chunks[0], next);
        for (u32 first = 0; first < piece.n_rows; first += TOKENS) {
            u32 n = min((u32)TOKENS, piece.n_rows - first);
            size_t row = (size_t)piece.first + first;
            Chunk& rows = chunks[first / TOKENS % 2];
            Chunk& other = chunks[1 - first / TOKENS % 2];
            __syncthreads();
            if (first > 0) finish(other, done, row - TOKENS, TOKENS);
            done = next;
            bool is_last = first + TOKENS >= piece.n_rows;
            if (!is_last) fetch_chunk(next, row + TOKENS, piece.n_rows - first - TOKENS);
            if (n == TOKENS) {
                // Nothing is written to shared memory between rows: they overlap.
                float2 outs[TOKENS];
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    if (KIND == OUTPUTS && KEEP && t % SUB == 0) {
                        store_states(held, piece.sub + (first + t) / SUB, at, h);
                    }
                    outs[t] = advance<KIND>(rows, t, at, rates, h, total);
                }
#pragma unroll
                for (int t = 0; t < TOKENS; t++) put_out<KIND>(rows, t, at, outs[t]);
            } else {
                for (int t = 0; t < n; t++) {
                    if (KIND == OUTPUTS && KEEP && t % SUB == 0) {
                        store_states(held, piece.sub + (first + t) / SUB, at, h);
                    }
                    put_out<KIND>(rows, t, at, advance<KIND>(rows, t, at, rates, h, total));
                }
            }
            if (!is_last) open(other, next);
            if (is_last) {
                __syncthreads();
                finish(rows, done, row, n);
            }
        }
        return total;
    }
};

template <Kind KIND, class X, class D, class B, class C, class G, class Y, class H>
DEVICE float2 walk(const Piece& piece, const Place& at, const X* x, const D* delta,
                   const float* coefs, const B* b, const C* c, const G* gate, Y* y, H* held,
                   States& h) {
    u32 col = threadIdx.x % PAIRS, ch = piece.ch0 + 2 * col;
    float2 bias = coefs_of(coefs, BIAS, ch), skip = coefs_of(coefs, SKIP, ch);
    Walk<KIND, X, D, B, C, G, Y, H> walk = {x, delta, coefs, b, c, gate, y, held, col, ch, bias,
                                            skip};
    return walk.go(piece, at, h);
}
#endif

#ifdef ENTRY_scan_forward
// state: (n_pieces), before and after. held: (n_subs), with KEEP.
KERNEL scan_forward(const T0* x, const T1* delta, const T2* coefs, const T3* b, const T4* c,
                    const T5* gate, T6* y, T7* state, T8* held, Params p) {
    Piece piece = piece_of(coefs, p);
    if (piece.idx >= max(p.n_pieces, 1u)) return;
    Place at = place_of(piece);
    States h = zeros();
    if (p.flags & READ) h = load_states(state, piece.idx, at);
    walk<OUTPUTS>(piece, at, x, delta, coefs, b, c, gate, y, held, h);
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
    States h = zeros();
    float2 total = walk<ENDS>(piece, at, x, delta, coefs, b, b, x, (float*)0, (float*)0, h);
    store_states(ends, piece.idx, at, h);
    if (is_there(at.ch) && at.part == 0) store_two(totals, piece.idx, at.ch, total);
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
KERNEL scan_sums(const T0* ends, const T1* parts, const T2* coefs, T3* da_log, T4* dskip,
                 T5* dbias, Params p) {
    size_t i = thread_of();
    if (i >= TABLE) return;
    u32 ch = (u32)(i % D_INNER);
    float total = 0.0f;
    if (i < BIAS) {
        for (u32 piece = 0; piece < p.n_pieces; piece++) {
            total += ends[(size_t)piece * BIAS + i];
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
