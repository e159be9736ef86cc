// Attention without its matrix, forward and backward; see mod.rs for the mathematics.
//
// A group owns OWN rows of one head (queries in forward and dq, keys in dkv) and walks over those
// it meets, OTHER at a time: a product of tiles gives scores, which lie in `s` with the own rows
// side by side, and a second product adds to sums in registers. Thread (y, x) of 16 by 16 has own
// rows 4y.. and, of scores, others 2x.., of sums, columns 4x.. of each run of 64.
//
// D: d_head. CACHED: keys and values are those of one sequence from its beginning on, and queries
// its last n_new tokens; otherwise `blocks` says where the groups are, and keys lie beside queries.
//
//     q, y, dy, dq: (n_tok, N_HEAD * D)     k, v, dk, dv: (keys, N_KV_HEAD * D)
//     log_sum: (N_HEAD, n_tok)   stats: (2, N_HEAD, n_tok)   blocks: (n_block, 4), see `block_of`

struct Params {
    u32 n_tok;        // rows of q
    u32 window;       // keys a query sees, itself included
    float scale;
    float scale_log2; // times log2(e)
    u32 first;        // cached: row of the first new token
    u32 n_new;
    u32 n_past;
};

#define OWN 64
#define OTHER 32
#define STEP 16 // columns that a product takes at a time
#define OWN_LINE (OWN + 4)
#define OTHER_LINE (OTHER + 4)
#define N_GROUP (N_HEAD / N_KV_HEAD)
#define Q_WIDTH (N_HEAD * D)
#define KV_WIDTH (N_KV_HEAD * D)
#define N_RUN ((D + 63) / 64)
#define SCORE_MIN -1e30f

// STEP columns of own rows and of others, or 16 others and 64 of their columns.
struct Tile { float x[STEP * (OWN_LINE + OTHER_LINE)]; };
struct Scores { float x[OTHER * OWN_LINE]; };

struct Block {
    u32 row;   // the first own row
    u32 n;     // own rows
    u32 pos;   // place of the first in its sequence
    u32 n_tok; // tokens of the sequence
    u32 base;  // row of its first key
};

DEVICE Block block_of(const float* blocks, u32 idx) {
    uint4 b = ((const uint4*)blocks)[idx];
    Block block = {b.x, b.y, b.z, b.w, b.x - b.z};
    return block;
}

// Whether the query at place i sees the key at place j.
DEVICE bool sees(u32 i, u32 j, u32 window) { return j <= i && i - j < window; }

// Some rows and columns of a matrix, and where they go in the tile.
struct Load {
    size_t row;
    u32 n_row; // those that are there; others are zero
    u32 head;
    u32 col; // of the head
    u32 rows, cols, at, by_row, by_col;
};

DEVICE Load own_load(size_t row, u32 n, u32 head, u32 col) {
    Load to = {row, n, head, col, OWN, STEP, 0, 1, OWN_LINE};
    return to;
}

DEVICE Load other_load(size_t row, u32 n, u32 head, u32 col) {
    Load to = {row, n, head, col, OTHER, STEP, STEP * OWN_LINE, 1, OTHER_LINE};
    return to;
}

DEVICE Load wide_load(size_t row, u32 n, u32 head, u32 col) {
    Load to = {row, n, head, col, STEP, 64, 0, 64, 1};
    return to;
}

template <class T> DEVICE void load_rows(Tile& tile, const T* x, u32 width, Load to) {
    for (u32 i = 4 * threadIdx.x; i < to.rows * to.cols; i += 4 * THREADS) {
        u32 row = i / to.cols, col = i % to.cols;
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < to.n_row && to.col + col < D) {
            size_t at = (to.row + row) * width + to.head * D + to.col + col;
            if (D % 4 == 0) {
                four = load4(x, at);
            } else {
                u32 n = D - to.col - col;
                four.x = load(x, at);
                if (n > 1) four.y = load(x, at + 1);
                if (n > 2) four.z = load(x, at + 2);
                if (n > 3) four.w = load(x, at + 3);
            }
        }
        float* out = tile.x + to.at + row * to.by_row + col * to.by_col;
        out[0] = four.x;
        out[to.by_col] = four.y;
        out[2 * to.by_col] = four.z;
        out[3 * to.by_col] = four.w;
    }
}

// Adds STEP columns of the product of own rows and others.
DEVICE void multiply(const Tile& tile, float sums[2][4]) {
    const float* own = tile.x + threadIdx.x / 16 * 4;
    const float* other = tile.x + STEP * OWN_LINE + threadIdx.x % 16 * 2;
#pragma unroll
    for (u32 c = 0; c < STEP; c++) {
#pragma unroll
        for (u32 o = 0; o < 2; o++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[o][i] += own[c * OWN_LINE + i] * other[c * OTHER_LINE + o];
            }
        }
    }
}

// `sums` = a @ b of D columns, own rows by others.
template <class TA, class TB>
DEVICE void product(Tile& tile, const TA* a, u32 a_width, Load own, const TB* b, u32 b_width,
                    Load other, float sums[2][4]) {
    for (u32 c = 0; c < D; c += STEP) {
        own.col = c;
        other.col = c;
        __syncthreads();
        load_rows(tile, a, a_width, own);
        load_rows(tile, b, b_width, other);
        __syncthreads();
        multiply(tile, sums);
    }
}

// Puts the scores of a thread into `s`.
DEVICE void put(Scores& s, const float scores[2][4]) {
    float* out = s.x + threadIdx.x % 16 * 2 * OWN_LINE + threadIdx.x / 16 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        out[i] = scores[0][i];
        out[OWN_LINE + i] = scores[1][i];
    }
}

// Adds `s` @ others, all columns of them.
template <class T>
DEVICE void accumulate(Tile& tile, const Scores& s, const T* x, u32 width, Load to, u32 n,
                       float sums[4][N_RUN][4]) {
    size_t row = to.row;
    const float* other = tile.x + threadIdx.x % 16 * 4;
#pragma unroll
    for (u32 run = 0; run < N_RUN; run++) {
#pragma unroll
        for (u32 half = 0; half < OTHER; half += STEP) {
            to.row = row + half;
            to.n_row = n - min(n, half);
            to.col = run * 64;
            __syncthreads();
            load_rows(tile, x, width, to);
            __syncthreads();
#pragma unroll
            for (u32 k = 0; k < STEP; k++) {
                const float* own = s.x + (half + k) * OWN_LINE + threadIdx.x / 16 * 4;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
#pragma unroll
                    for (u32 c = 0; c < 4; c++) sums[i][run][c] += own[i] * other[k * 64 + c];
                }
            }
        }
    }
}

// The sums of own row `row` of the thread, times `factor`.
template <class T>
DEVICE void store_row(T* out, size_t at, const float sums[N_RUN][4], float factor) {
#pragma unroll
    for (u32 run = 0; run < N_RUN; run++) {
        u32 col = run * 64 + threadIdx.x % 16 * 4;
        if (D % 4 == 0) {
            if (col < D) {
                store4(out, at + col, make_float4(sums[run][0] * factor, sums[run][1] * factor,
                                                  sums[run][2] * factor, sums[run][3] * factor));
            }
        } else {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                if (col + c < D) store(out, at + col + c, sums[run][c] * factor);
            }
        }
    }
}

#ifdef ENTRY_attention_forward
KERNEL attention_forward(const T0* q, const T1* k, const T2* v, const T3* blocks, T4* y,
                         T5* log_sum, Params p) {
    __shared__ Tile tile;
    __shared__ Scores s;
    __shared__ float row_top[OWN], row_fix[OWN];
    u32 thread = threadIdx.x, head = blockIdx.y, kv_head = head / N_GROUP;
    Block block;
    if (CACHED) {
        u32 at = blockIdx.x * OWN;
        Block cached = {p.first + at, min((u32)OWN, p.n_new - at), p.n_past + at,
                        p.n_past + p.n_new, 0};
        block = cached;
    } else {
        block = block_of((const float*)blocks, blockIdx.x);
    }
    u32 y0 = thread / 16 * 4, i0 = block.pos + y0;
    float sums[4][N_RUN][4] = {};
    // Of the own row of this thread, for the first 64 of them.
    float top = SCORE_MIN, weight = 0.0f;
    u32 end = block.pos + block.n;
    u32 start = block.pos - min(block.pos, p.window - 1);
    for (u32 j0 = start - start % OTHER; j0 < end; j0 += OTHER) {
        size_t row = (size_t)block.base + j0;
        u32 n = min((u32)OTHER, end - j0);
        float scores[2][4] = {};
        product(tile, q, Q_WIDTH, own_load(block.row, block.n, head, 0), k, KV_WIDTH,
                other_load(row, n, kv_head, 0), scores);
        u32 j = j0 + thread % 16 * 2;
#pragma unroll
        for (u32 o = 0; o < 2; o++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                bool is_seen = sees(i0 + i, j + o, p.window);
                scores[o][i] = is_seen ? scores[o][i] * p.scale_log2 : SCORE_MIN;
            }
        }
        put(s, scores);
        __syncthreads();
        if (thread < OWN) {
            float next = top;
            for (u32 o = 0; o < OTHER; o++) next = fmaxf(next, s.x[o * OWN_LINE + thread]);
            row_top[thread] = next;
            row_fix[thread] = exp2f(top - next);
            top = next;
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float row_max = row_top[y0 + i], fix = row_fix[y0 + i];
#pragma unroll
            for (u32 o = 0; o < 2; o++) {
                bool is_seen = sees(i0 + i, j + o, p.window);
                scores[o][i] = is_seen ? exp2f(scores[o][i] - row_max) : 0.0f;
            }
#pragma unroll
            for (u32 run = 0; run < N_RUN; run++) {
#pragma unroll
                for (u32 c = 0; c < 4; c++) sums[i][run][c] *= fix;
            }
        }
        put(s, scores);
        __syncthreads();
        if (thread < OWN) {
            weight *= row_fix[thread];
            for (u32 o = 0; o < OTHER; o++) weight += s.x[o * OWN_LINE + thread];
        }
        accumulate(tile, s, v, KV_WIDTH, wide_load(row, n, kv_head, 0), n, sums);
    }
    __syncthreads();
    if (thread < OWN) {
        row_fix[thread] = 1.0f / weight;
        if (thread < block.n) {
            store(log_sum, (size_t)head * p.n_tok + block.row + thread, top + log2f(weight));
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (y0 + i >= block.n) break;
        size_t at = (size_t)(block.row + y0 + i) * Q_WIDTH + head * D;
        store_row(y, at, sums[i], row_fix[y0 + i]);
    }
}
#endif

#ifdef ENTRY_attention_stats
// log_sum, and dy . y: what backward needs of each query. Some lanes for each row and head, which
// take eight numbers each where that comes out even.
#define IS_EVEN (D == 64 || D == 128 || D == 256)
#define LANES (IS_EVEN ? D / 8 : 32)
KERNEL attention_stats(const T0* dy, const T1* y, const T2* log_sum, T3* stats, Params p) {
    size_t n = (size_t)p.n_tok * N_HEAD, n_turn = n_threads() / LANES;
    u32 lane = threadIdx.x % LANES;
    // All lanes of a warp make as many turns.
    for (size_t first = thread_of() / 32 * (32 / LANES); first < n; first += n_turn) {
        size_t i = first + threadIdx.x % 32 / LANES;
        float dot = 0.0f;
        if (IS_EVEN) {
            if (i < n) {
                Eight a = load8(dy, i * D + 8 * lane), b = load8(y, i * D + 8 * lane);
#pragma unroll
                for (int c = 0; c < 8; c++) dot += a.v[c] * b.v[c];
            }
        } else {
            for (u32 c = lane; c < D; c += 32) dot += load(dy, i * D + c) * load(y, i * D + c);
        }
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, half);
        }
        size_t at = i % N_HEAD * p.n_tok + i / N_HEAD;
        if (lane == 0 && i < n) {
            store(stats, at, load(log_sum, at));
            store(stats, n + at, dot);
        }
    }
}
#endif

#ifdef ENTRY_attention_dq
KERNEL attention_dq(const T0* q, const T1* k, const T2* v, const T3* blocks, const T4* dy,
                    const T5* stats, T6* dq, Params p) {
    __shared__ Tile tile;
    __shared__ Scores s;
    u32 thread = threadIdx.x, head = blockIdx.y, kv_head = head / N_GROUP;
    Block block = block_of((const float*)blocks, blockIdx.x);
    u32 y0 = thread / 16 * 4;
    float sums[4][N_RUN][4] = {};
    float top[4] = {}, dot[4] = {};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (y0 + i >= block.n) break;
        size_t at = (size_t)head * p.n_tok + block.row + y0 + i;
        top[i] = load(stats, at);
        dot[i] = load(stats, (size_t)N_HEAD * p.n_tok + at);
    }
    u32 end = block.pos + block.n;
    u32 start = block.pos - min(block.pos, p.window - 1);
    for (u32 j0 = start - start % OTHER; j0 < end; j0 += OTHER) {
        size_t row = (size_t)block.base + j0;
        u32 n = min((u32)OTHER, end - j0);
        float scores[2][4] = {}, dp[2][4] = {};
        Load own = own_load(block.row, block.n, head, 0), other = other_load(row, n, kv_head, 0);
        product(tile, q, Q_WIDTH, own, k, KV_WIDTH, other, scores);
        product(tile, dy, Q_WIDTH, own, v, KV_WIDTH, other, dp);
        u32 j = j0 + thread % 16 * 2;
#pragma unroll
        for (u32 o = 0; o < 2; o++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                bool is_seen = sees(block.pos + y0 + i, j + o, p.window);
                float weight = is_seen ? exp2f(scores[o][i] * p.scale_log2 - top[i]) : 0.0f;
                scores[o][i] = weight * (dp[o][i] - dot[i]);
            }
        }
        put(s, scores);
        accumulate(tile, s, k, KV_WIDTH, wide_load(row, n, kv_head, 0), n, sums);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (y0 + i >= block.n) break;
        size_t at = (size_t)(block.row + y0 + i) * Q_WIDTH + head * D;
        store_row(dq, at, sums[i], p.scale);
    }
}
#endif

#ifdef ENTRY_attention_dkv
// The own rows are keys, the others queries of one head after the other.
KERNEL attention_dkv(const T0* q, const T1* k, const T2* v, const T3* blocks, const T4* dy,
                     const T5* stats, T6* dk, T7* dv, Params p) {
    __shared__ Tile tile;
    __shared__ Scores s;
    u32 thread = threadIdx.x, kv_head = blockIdx.y;
    Block block = block_of((const float*)blocks, blockIdx.x);
    u32 y0 = thread / 16 * 4;
    float dk_sums[4][N_RUN][4] = {}, dv_sums[4][N_RUN][4] = {};
    u32 last = block.pos + block.n - 1;
    u32 end = last + min(block.n_tok - last, p.window);
    for (u32 head = kv_head * N_GROUP; head < (kv_head + 1) * N_GROUP; head++) {
        for (u32 i0 = block.pos; i0 < end; i0 += OTHER) {
            size_t row = (size_t)block.base + i0;
            u32 n = min((u32)OTHER, end - i0);
            float scores[2][4] = {}, dp[2][4] = {};
            Load own = own_load(block.row, block.n, kv_head, 0);
            Load other = other_load(row, n, head, 0);
            product(tile, k, KV_WIDTH, own, q, Q_WIDTH, other, scores);
            product(tile, v, KV_WIDTH, own, dy, Q_WIDTH, other, dp);
#pragma unroll
            for (u32 o = 0; o < 2; o++) {
                u32 i = thread % 16 * 2 + o;
                size_t at = (size_t)head * p.n_tok + row + min(i, n - 1);
                float top = load(stats, at), dot = load(stats, (size_t)N_HEAD * p.n_tok + at);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    bool is_seen = i < n && sees(i0 + i, block.pos + y0 + j, p.window);
                    float weight = is_seen ? exp2f(scores[o][j] * p.scale_log2 - top) : 0.0f;
                    scores[o][j] = weight;
                    dp[o][j] = weight * (dp[o][j] - dot);
                }
            }
            put(s, scores);
            accumulate(tile, s, dy, Q_WIDTH, wide_load(row, n, head, 0), n, dv_sums);
            __syncthreads();
            put(s, dp);
            accumulate(tile, s, q, Q_WIDTH, wide_load(row, n, head, 0), n, dk_sums);
        }
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        if (y0 + j >= block.n) break;
        size_t at = (size_t)(block.row + y0 + j) * KV_WIDTH + kv_head * D;
        store_row(dk, at, dk_sums[j], p.scale);
        store_row(dv, at, dv_sums[j], 1.0f);
    }
}
#endif
