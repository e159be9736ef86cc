// State-space duality by chunks of 64 tokens; see mod.rs for the mathematics, gpu.rs for the order
// of the kernels and what lies in `steps`, `table` and `terms`.
//
// All products are tiles of 64 x 64 with 16 numbers to each of 256 threads. MMA 0: f32, steps of 16
// along k, tiles in shared memory with k as the slow axis. MMA 1: bf16 on tensor cores, steps of 64
// along k, tiles as they come from memory, four bytes or 16 at a time by ldmatrix; sums in f32. MMA
// 2: cores.cu does the most of it.
// PASS: 0 forward in time (states, and the gradient by c), 1 backward (their gradients, and the
// gradient by b). HAS_BEFORE: 0 where states begin at zero. RANK: 0, or Mamba-3, where a token has
// so many rows; `delta` is then the weight of a row for later tokens, `own` for its own token.
//
// What one layer takes, with n_tok = 16,384, 24 heads of 64, d_state 128, in bf16 (x, y, dy, dx: 50
// MB each; b, c: 4 MB each, from the cache for every head but the first; states, gradients by
// states: 100 MB each; products counted in full tiles):
//
//     ssd_states   x, states                           150 MB   6.4 GFLOP
//     ssd_scores   b, c                                 12 MB   0.3
//     ssd_output   states, x, y                        200 MB   9.7
//     forward                                          362 MB  16.4
//     ssd_states   x, states                           150 MB   6.4
//     ssd_states   dy, states, gradients               250 MB   6.4
//     ssd_dx       gradients, x, dy, dx                250 MB   9.7
//     ssd_inside   x, dy                               100 MB   3.2
//     ssd_dbc      states, dy; gradients, x            300 MB  13.4
//     backward                                        1050 MB  39.1
//
// 1.4 GB at 4 TB/s are 0.35 ms, 56 GFLOP at 400 TFLOP/s 0.14 ms.

#define TILE 64
#define SQUARE 4096
#define D_INNER (N_HEAD * D_HEAD)
#define WIDTH (D_INNER + 2 * N_GROUP * D_STATE)
#define PER_GROUP (N_HEAD / N_GROUP)
#define N_STATE (D_STATE * D_HEAD)
#if MMA == 2 // cores.cu makes whole states
#define N_TILES 1
#define P_TILES 1
#else
#define N_TILES ((D_STATE + 63) / 64)
#define P_TILES ((D_HEAD + 63) / 64)
#endif
#define N_BLOCK (N_HEAD / N_PER)
// Whether four neighbours always lie in one row of everything.
#define FOUR (D_HEAD % 4 == 0 && D_STATE % 4 == 0)

struct Params {
    u32 n_tok;   // of the batch
    u32 n_chunk; // of the batch
    u32 first;   // chunk of this stretch, or row of a segment
    u32 runs_at; // in `table`
    float delta_min, delta_max;
};

// ---- tiles --------------------------------------------------------------------------------------

#if MMA
#define STEP 64
struct Tile { u16 x[64][72]; }; // rows of 144 bytes: ldmatrix meets every bank once
#define EXP(x) __expf(x)
#else
#define STEP 16
struct Tile { float x[16][68]; };
#define EXP(x) expf(x)
#endif

struct Tiles { Tile a, b; };

// Two pairs take turns, so that one is filled while the other is still read; one barrier a step.
union __align__(16) Shared {
    Tiles tiles[2];
    float out[64][68];
};

// Row and column of the i-th number of a thread.
DEVICE u32 row_at(u32 i) {
#if MMA
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
#else
    return threadIdx.x / 16 * 4 + i / 4;
#endif
}

DEVICE u32 col_at(u32 i) {
#if MMA
    return threadIdx.x / 128 * 32 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
#else
    return threadIdx.x % 16 * 4 + i % 4;
#endif
}

DEVICE void zero(float acc[16]) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) acc[i] = 0.0f;
}

DEVICE float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

DEVICE float4 scale4(float s, float4 v) { return make_float4(s * v.x, s * v.y, s * v.z, s * v.w); }

DEVICE float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

// Four numbers of a row that begins at `row`, zero from column `width` on.
template <class T> DEVICE float4 get4(const T* x, size_t row, u32 col, u32 width) {
    float4 v = zero4();
    if (FOUR) {
        if (col < width) v = load4(x, row + col);
    } else {
        if (col < width) v.x = load(x, row + col);
        if (col + 1 < width) v.y = load(x, row + col + 1);
        if (col + 2 < width) v.z = load(x, row + col + 2);
        if (col + 3 < width) v.w = load(x, row + col + 3);
    }
    return v;
}

template <class T> DEVICE void put4(T* y, size_t row, u32 col, u32 width, float4 v) {
    if (FOUR) {
        if (col < width) store4(y, row + col, v);
    } else {
        if (col < width) store(y, row + col, v.x);
        if (col + 1 < width) store(y, row + col + 1, v.y);
        if (col + 2 < width) store(y, row + col + 2, v.z);
        if (col + 3 < width) store(y, row + col + 3, v.w);
    }
}

// Fills a tile. `at` gives four numbers: of row `slow` and k from `fast` on where K, else of k
// `slow` and rows from `fast` on.
template <bool K, class F> DEVICE void stage(Tile& tile, F at) {
#if MMA
#pragma unroll
    for (u32 i = threadIdx.x; i < 1024; i += THREADS) {
        u32 slow = i / 16, fast = i % 16 * 4;
        float4 v = at(slow, fast);
        *(uint2*)&tile.x[slow][fast] =
            make_uint2(floats_to_bf16x2(v.x, v.y), floats_to_bf16x2(v.z, v.w));
    }
#else
    u32 i = threadIdx.x;
    if (K) {
        u32 slow = i / 4, fast = i % 4 * 4;
        float4 v = at(slow, fast);
        tile.x[fast][slow] = v.x;
        tile.x[fast + 1][slow] = v.y;
        tile.x[fast + 2][slow] = v.z;
        tile.x[fast + 3][slow] = v.w;
    } else {
        u32 slow = i / 16, fast = i % 16 * 4;
        *(float4*)&tile.x[slow][fast] = at(slow, fast);
    }
#endif
}

#if MMA
// Four matrices of 8 x 8, whose rows are where the lanes say; TRANSPOSED: their columns.
template <bool TRANSPOSED> DEVICE void ldmatrix(u32 r[4], const u16* row) {
#ifdef ELAPID_EMULATED
    if (TRANSPOSED) emu_ldmatrix_x4_trans(r, row);
    else emu_ldmatrix_x4(r, row);
#else
    u32 at = (u32)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    }
#endif
}
#endif

// acc += a b over k from `begin` to `end`, which the warps of MMA round to 16; without it over the
// whole step. A_K, B_K: how the tiles were filled.
template <bool A_K, bool B_K>
DEVICE void multiply(float acc[16], const Tiles& tiles, u32 begin, u32 end) {
#if MMA
    u32 lane = threadIdx.x % 32, eight = lane % 8, matrix = lane / 8;
    u32 row = threadIdx.x / 32 % 4 * 16, col = threadIdx.x / 128 * 32;
    for (u32 k = begin / 16 * 16; k < end; k += 16) {
        u32 a[4], b[4];
        if (A_K) ldmatrix<false>(a, &tiles.a.x[row + lane % 16][k + lane / 16 * 8]);
        else ldmatrix<true>(a, &tiles.a.x[k + matrix / 2 * 8 + eight][row + matrix % 2 * 8]);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 n = col + half * 16 + matrix / 2 * 8;
            if (B_K) ldmatrix<false>(b, &tiles.b.x[n + eight][k + matrix % 2 * 8]);
            else ldmatrix<true>(b, &tiles.b.x[k + matrix % 2 * 8 + eight][n]);
            mma(acc + half * 8, a, b);
            mma(acc + half * 8 + 4, a, b + 2);
        }
    }
#else
#pragma unroll
    for (u32 k = 0; k < STEP; k++) {
        float4 a = *(const float4*)&tiles.a.x[k][threadIdx.x / 16 * 4];
        float4 b = *(const float4*)&tiles.b.x[k][threadIdx.x % 16 * 4];
        const float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i] += as[i / 4] * bs[i % 4];
    }
#endif
}

DEVICE void put_tile(float out[64][68], const float acc[16]) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) out[row_at(i)][col_at(i)] = acc[i];
}

// Hands the tile out, four columns of a row at a time, in whole rows: `put(row, col, numbers)`.
template <class F> DEVICE void take_tile(const float out[64][68], F put) {
#pragma unroll
    for (u32 i = threadIdx.x; i < 1024; i += THREADS) {
        u32 row = i / 16, col = i % 16 * 4;
        put(row, col, *(const float4*)&out[row][col]);
    }
}

// Both, with nobody left behind who reads or writes what they lie in.
template <class F> DEVICE void emit(Shared& shared, const float acc[16], F put) {
    __syncthreads();
    put_tile(shared.out, acc);
    __syncthreads();
    take_tile(shared.out, put);
    __syncthreads();
}

// Sum over the 16 threads that have a row in `take_tile`, the same in all of them.
DEVICE float row_sum(float x) {
#pragma unroll
    for (int half = 8; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

// Sums of the rows of a tile that threads hold, in two halves, which the caller adds behind a
// barrier.
DEVICE void put_row_sums(float halves[2][64], const float v[16]) {
    const u32 n_own = MMA ? 2 : 4;
#pragma unroll
    for (u32 own = 0; own < n_own; own++) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if ((MMA ? i / 2 % 2 : i / 4) == own) sum += v[i];
        }
        u32 row = row_at(MMA ? own * 2 : own * 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (MMA) {
            if (threadIdx.x % 4 == 0) halves[threadIdx.x / 128][row] = sum;
        } else {
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            if (threadIdx.x % 8 == 0) halves[threadIdx.x / 8 % 2][row] = sum;
        }
    }
}

// ---- steps --------------------------------------------------------------------------------------

// A series of `steps`, from the first token of a chunk on: 0 delta, 1 slope, 2 cum, 3 cum_low,
// 4 since, 5 until.
DEVICE const float* series_at(const float* steps, u32 series, u32 head, u32 start, u32 n_tok) {
    return steps + ((size_t)series * N_HEAD + head) * n_tok + start;
}

// Of a head in a chunk; zero past its last token.
struct Steps {
    float delta[64];
#if RANK
    float own[64];
#endif
    float cum[64], cum_low[64], since[64], until[64];
};

// Whether row i reads row j, and whether they are of one token; the last row of the token of row i.
#if RANK
DEVICE bool reads(u32 i, u32 j) { return j / RANK <= i / RANK; }
DEVICE bool is_own(u32 i, u32 j) { return j / RANK == i / RANK; }
DEVICE u32 last_own(u32 i) { return i / RANK * RANK + RANK - 1; }
#else
DEVICE bool reads(u32 i, u32 j) { return j <= i; }
DEVICE bool is_own(u32 i, u32 j) { return j == i; }
DEVICE u32 last_own(u32 i) { return i; }
#endif

// The weight of row j for row i; between rows of one token there is no decay.
DEVICE float weight(const Steps& s, u32 i, u32 j) {
#if RANK
    if (is_own(i, j)) return s.own[j];
#endif
    return s.delta[j];
}

DEVICE void load_steps(Steps& s, const float* steps, u32 head, u32 start, u32 n, u32 n_tok) {
    __syncthreads();
    u32 tok = threadIdx.x;
    if (tok < 64) {
        bool is_there = tok < n;
        s.delta[tok] = is_there ? series_at(steps, 0, head, start, n_tok)[tok] : 0.0f;
#if RANK
        s.own[tok] = is_there ? series_at(steps, 1, head, start, n_tok)[tok] : 0.0f;
#endif
        s.cum[tok] = is_there ? series_at(steps, 2, head, start, n_tok)[tok] : 0.0f;
        s.cum_low[tok] = is_there ? series_at(steps, 3, head, start, n_tok)[tok] : 0.0f;
        s.since[tok] = is_there ? series_at(steps, 4, head, start, n_tok)[tok] : 0.0f;
        s.until[tok] = is_there ? series_at(steps, 5, head, start, n_tok)[tok] : 0.0f;
    }
    __syncthreads();
}

DEVICE float decay(const Steps& s, u32 i, u32 j) {
    return EXP((s.cum[i] - s.cum[j]) + (s.cum_low[i] - s.cum_low[j]));
}

// What token j gives token i, for j and the three behind it, or for i and the three behind it.
DEVICE float mix(const Steps& s, float score, u32 i, u32 j, u32 n) {
    return reads(i, j) && i < n ? decay(s, i, j) * score * weight(s, i, j) : 0.0f;
}

DEVICE float4 mix4(const Steps& s, const float* scores, u32 i, u32 j, u32 n) {
    if (!reads(i, j) || i >= n) return zero4();
    float4 v = *(const float4*)(scores + i * 64 + j);
    return make_float4(mix(s, v.x, i, j, n), mix(s, v.y, i, j + 1, n), mix(s, v.z, i, j + 2, n),
                       mix(s, v.w, i, j + 3, n));
}

DEVICE float skip_of(const float* steps, u32 head, u32 n_tok) {
    return steps[6 * (size_t)N_HEAD * n_tok + head * 2 + 1];
}

// First column of b (0) or c (1) of a group.
DEVICE u32 column(u32 which, u32 group) { return D_INNER + (which * N_GROUP + group) * D_STATE; }

DEVICE size_t term_at(u32 series, u32 head, u32 tok, u32 n_tok) {
    return ((size_t)series * N_HEAD + head) * n_tok + tok;
}

// Behind all other terms of Mamba-3: what the rows of a token are to each other.
DEVICE size_t own_at(u32 head, u32 tok, const Params& p) {
    size_t through = (size_t)N_TILES * P_TILES * p.n_chunk * N_HEAD;
    return term_at(3 + N_TILES + P_TILES, head, tok, p.n_tok) + through;
}

// The step size, a softplus within limits, and its slope by the raw one. A NaN stays one.
DEVICE float2 step_size(float x, float lower, float upper) {
    float e = expf(-fabsf(x));
    float soft = fmaxf(x, 0.0f) + log1pf(e);
    if (soft < lower) return make_float2(lower, 0.0f);
    if (soft > upper) return make_float2(upper, 0.0f);
    return make_float2(soft, (x < 0.0f ? e : 1.0f) / (1.0f + e));
}

// The sum over this lane and those before it.
template <class T> DEVICE T sum_upto(T x) {
#pragma unroll
    for (u32 lanes = 1; lanes < 32; lanes *= 2) {
        T other = __shfl_up_sync(0xffffffffu, x, lanes);
        if (threadIdx.x % 32 >= lanes) x += other;
    }
    return x;
}

#ifdef ENTRY_ssd_steps
// A group takes a chunk of a head. The sum is kept in two numbers: where it is large, differences
// of it are small.
KERNEL ssd_steps(const T0* raw, const T1* delta_bias, const u32* table, const T3* a_log,
                 const T4* skip, float* steps, Params p) {
    __shared__ double first_half, whole;
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y, tok = threadIdx.x;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1];
    size_t series = (size_t)N_HEAD * p.n_tok, at = (size_t)head * p.n_tok + start + tok;
    float a = -expf(load(a_log, head));
    double cum = 0.0;
    if (tok < n) {
        float x = load(raw, (size_t)(start + tok) * N_HEAD + head) + load(delta_bias, head);
        float2 size = step_size(x, p.delta_min, p.delta_max);
        cum = (double)size.x * (double)a;
        steps[at] = size.x;
        steps[at + series] = size.y;
    }
    if (tok == 0 && chunk == 0) {
        steps[6 * series + head * 2] = a;
        steps[6 * series + head * 2 + 1] = load(skip, head);
    }
    cum = sum_upto(cum);
    if (tok == 31) first_half = cum;
    __syncthreads();
    if (tok >= 32) cum += first_half;
    if (tok == n - 1) whole = cum;
    __syncthreads();
    if (tok < n) {
        float high = (float)cum;
        steps[at + 2 * series] = high;
        steps[at + 3 * series] = (float)(cum - (double)high);
        steps[at + 4 * series] = expf(high);
        steps[at + 5 * series] = expf((float)(whole - cum));
    }
}
#endif

// ---- states -------------------------------------------------------------------------------------

#ifdef ENTRY_ssd_states
// A group takes a tile of the states of one head along one run of chunks. PASS 0: writes the state
// before each chunk. PASS 1: the gradient by the state after it, and its product with the state
// before it (`h`), which is what decay over the whole chunk passes on. `carry` is what comes from
// outside the run, and then what leaves it.
KERNEL ssd_states(const T0* xbc, const float* steps, const u32* table, const T3* v, const T4* h,
                  float* carry, T6* states, float* terms, Params p) {
    __shared__ __align__(16) Tiles tiles;
    __shared__ __align__(16) float out[64][68];
    __shared__ float through[THREADS / 32];
    const u32 v_width = PASS == 0 ? WIDTH : D_INNER;
    u32 n0 = blockIdx.x / P_TILES * TILE, p0 = blockIdx.x % P_TILES * TILE, head = blockIdx.y;
    u32 first = table[p.runs_at + 2 * blockIdx.z], count = table[p.runs_at + 2 * blockIdx.z + 1];
    size_t carry_at = ((size_t)blockIdx.z * N_HEAD + head) * N_STATE;
    u32 matrix = column(PASS, head / PER_GROUP);
    float acc[16];
    zero(acc);
    if (HAS_BEFORE) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            u32 row = n0 + row_at(i), col = p0 + col_at(i);
            if (row < D_STATE && col < D_HEAD) acc[i] = carry[carry_at + row * D_HEAD + col];
        }
    }
    for (u32 c = 0; c < count; c++) {
        u32 chunk = PASS == 0 ? first + c : first + count - 1 - c;
        u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
        const float* delta = series_at(steps, 0, head, start, p.n_tok);
        const float* since = series_at(steps, 4, head, start, p.n_tok);
        const float* until = series_at(steps, 5, head, start, p.n_tok);
        size_t at = ((size_t)(chunk - p.first) * N_HEAD + head) * N_STATE;
        put_tile(out, acc);
        float total = since[n - 1];
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i] *= total;
        for (u32 k0 = 0; k0 < n; k0 += STEP) {
            stage<false>(tiles.a, [&](u32 k, u32 row) {
                u32 tok = k0 + k;
                if (tok >= n) return zero4();
                return get4(xbc, (size_t)(start + tok) * WIDTH + matrix, n0 + row, D_STATE);
            });
            stage<false>(tiles.b, [&](u32 k, u32 col) {
                u32 tok = k0 + k;
                if (tok >= n) return zero4();
                float factor = PASS == 0 ? until[tok] * delta[tok] : since[tok];
                size_t row = (size_t)(start + tok) * v_width + head * D_HEAD;
                return scale4(factor, get4(v, row, p0 + col, D_HEAD));
            });
            __syncthreads();
            if (k0 == 0) {
                float sum = 0.0f;
                take_tile(out, [&](u32 row, u32 col, float4 x) {
                    if (n0 + row >= D_STATE) return;
                    size_t place = at + (size_t)(n0 + row) * D_HEAD;
                    put4(states, place, p0 + col, D_HEAD, x);
                    if (PASS == 1 && flags == 3) sum += dot4(x, get4(h, place, p0 + col, D_HEAD));
                });
                if (PASS == 1) {
                    sum = warp_sum(sum);
                    if (threadIdx.x % 32 == 0) through[threadIdx.x / 32] = sum;
                }
            }
            multiply<false, false>(acc, tiles, 0, n - k0);
            __syncthreads();
        }
        if (PASS == 1 && threadIdx.x == 0) {
            float sum = 0.0f;
            for (u32 i = 0; i < THREADS / 32; i++) sum += through[i];
            size_t series = (size_t)(3 + N_TILES + P_TILES) * N_HEAD * p.n_tok;
            terms[series + ((size_t)blockIdx.x * p.n_chunk + chunk) * N_HEAD + head] = sum;
        }
    }
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        u32 row = n0 + row_at(i), col = p0 + col_at(i);
        if (row < D_STATE && col < D_HEAD) carry[carry_at + row * D_HEAD + col] = acc[i];
    }
}
#endif

// ---- scores -------------------------------------------------------------------------------------

#ifdef ENTRY_ssd_scores
// c[i] . b[j] of a chunk and group.
KERNEL ssd_scores(const T0* xbc, const float*, const u32* table, float* scores, Params p) {
    __shared__ Shared shared;
    u32 group = blockIdx.x, chunk = p.first + blockIdx.y;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1];
    float acc[16];
    zero(acc);
    for (u32 k0 = 0; k0 < D_STATE; k0 += STEP) {
        Tiles& tiles = shared.tiles[k0 / STEP % 2];
        auto rows = [&](u32 which, u32 tok, u32 k) {
            if (tok >= n) return zero4();
            size_t row = (size_t)(start + tok) * WIDTH + column(which, group);
            return get4(xbc, row, k0 + k, D_STATE);
        };
        stage<true>(tiles.a, [&](u32 tok, u32 k) { return rows(1, tok, k); });
        stage<true>(tiles.b, [&](u32 tok, u32 k) { return rows(0, tok, k); });
        __syncthreads();
        multiply<true, true>(acc, tiles, 0, D_STATE - k0 < STEP ? D_STATE - k0 : STEP);
    }
    float* out = scores + ((size_t)blockIdx.y * N_GROUP + group) * SQUARE;
    emit(shared, acc, [&](u32 row, u32 col, float4 v) { *(float4*)(out + row * 64 + col) = v; });
}
#endif

// ---- outputs ------------------------------------------------------------------------------------

// acc += (64 tokens of b (0) or c (1)) by (the state of a head), 64 columns from p0.
template <class X, class S>
DEVICE void times_state(float acc[16], Shared& shared, const X* xbc, const S* state, u32 which,
                        u32 head, u32 p0, u32 start, u32 n) {
    u32 matrix = column(which, head / PER_GROUP);
    for (u32 k0 = 0; k0 < D_STATE; k0 += STEP) {
        Tiles& tiles = shared.tiles[k0 / STEP % 2];
        stage<true>(tiles.a, [&](u32 tok, u32 k) {
            if (tok >= n) return zero4();
            return get4(xbc, (size_t)(start + tok) * WIDTH + matrix, k0 + k, D_STATE);
        });
        stage<false>(tiles.b, [&](u32 k, u32 col) {
            if (k0 + k >= D_STATE) return zero4();
            return get4(state, (size_t)(k0 + k) * D_HEAD, p0 + col, D_HEAD);
        });
        __syncthreads();
        multiply<true, false>(acc, tiles, 0, D_STATE - k0 < STEP ? D_STATE - k0 : STEP);
    }
}

// The pair that is free behind `times_state`.
#define NEXT_TURN ((D_STATE + STEP - 1) / STEP)

#ifdef ENTRY_ssd_output
// A group takes 64 columns of a head in a chunk.
KERNEL ssd_output(const T0* xbc, const float* steps, const u32* table, const T3*, const T4* states,
                  const float* all_scores, T6* y, Params p) {
    __shared__ Shared shared;
    __shared__ Steps s;
    u32 p0 = blockIdx.x * TILE, head = blockIdx.y, chunk = p.first + blockIdx.z;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    const float* scores = all_scores + ((size_t)blockIdx.z * N_GROUP + head / PER_GROUP) * SQUARE;
    load_steps(s, steps, head, start, n, p.n_tok);
    float acc[16];
    zero(acc);
    if (flags & 1) {
        const T4* state = states + ((size_t)blockIdx.z * N_HEAD + head) * N_STATE;
        times_state(acc, shared, xbc, state, 1, head, p0, start, n);
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i] *= s.since[row_at(i)];
    }
    auto x_at = [&](u32 tok, u32 col) {
        if (tok >= n) return zero4();
        size_t row = (size_t)(start + tok) * WIDTH + head * D_HEAD;
        return get4(xbc, row, p0 + col, D_HEAD);
    };
    // No token reads a later one: a warp of MMA stops behind its rows.
    u32 end = MMA && RANK < 2 ? threadIdx.x / 32 % 4 * 16 + 16 : n;
    for (u32 k0 = 0; k0 < n; k0 += STEP) {
        Tiles& tiles = shared.tiles[(NEXT_TURN + k0 / STEP) % 2];
        stage<true>(tiles.a, [&](u32 i, u32 j) { return mix4(s, scores, i, k0 + j, n); });
        stage<false>(tiles.b, [&](u32 j, u32 col) { return x_at(k0 + j, col); });
        __syncthreads();
        multiply<true, false>(acc, tiles, 0, end);
    }
    float skip = skip_of(steps, head, p.n_tok);
    emit(shared, acc, [&](u32 tok, u32 col, float4 v) {
        if (tok >= n) return;
        float4 x = x_at(tok, col);
        v.x += skip * x.x;
        v.y += skip * x.y;
        v.z += skip * x.z;
        v.w += skip * x.w;
        put4(y, (size_t)(start + tok) * D_INNER + head * D_HEAD, p0 + col, D_HEAD, v);
    });
}
#endif
