// Attention in bf16 by tensor cores, for heads of 64 and 128; see mod.rs and attention.cu, whose
// arguments and parameters these kernels share.
//
// Four warps own 16 M_TILES rows each and walk over OTHER rows of two matrices at a time, which are
// copied into shared memory while the ones before are worked on. Scores and sums stay in registers:
// the result of one product, rounded to bf16, is laid out as the left side of the next.
//
// A tile in shared memory is rows of D / 8 pieces of 16 bytes; which piece lies where is twisted by
// the row, so that eight rows of one column lie in eight different banks.

struct Params {
    u32 n_tok;        // rows of q
    u32 window;       // keys a query sees, itself included
    float scale;
    float scale_log2; // times log2(e)
    u32 first;        // cached: row of the first new token
    u32 n_new;
    u32 n_past;
};

#define OWN (64 * M_TILES)
#define N_PIECE (D / 8)             // of a row
#define OTHER_TILE (OTHER * N_PIECE) // pieces
#define OWN_TILE (OWN * N_PIECE)
#define N_STEP (D / 16)  // steps of a product along a row
#define N_COL (OTHER / 8) // runs of eight others
#define N_OUT (D / 8)     // runs of eight columns
#define N_GROUP (N_HEAD / N_KV_HEAD)
#define Q_WIDTH (N_HEAD * D)
#define KV_WIDTH (N_KV_HEAD * D)
#define SCORE_MIN -1e30f

// ---- Instructions -------------------------------------------------------------------------------

// Four matrices of 8 by 8; each lane gives the address of a row.
DEVICE void load_matrices(u32 r[4], const uint4* row) {
#ifdef ELAPID_EMULATED
    emu_ldmatrix_x4(r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}

// The same, each of them the other way round.
DEVICE void load_matrices_turned(u32 r[4], const uint4* row) {
#ifdef ELAPID_EMULATED
    emu_ldmatrix_x4_trans(r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}

// ---- Tiles --------------------------------------------------------------------------------------

DEVICE u32 place(u32 row, u32 piece) { return row * N_PIECE + (piece ^ (row & 7)); }

// Rows of a matrix to a tile, `col` numbers from its left; those past `n` are zero.
DEVICE void copy_rows(uint4* tile, u32 n_row, const bf16* x, u32 width, size_t row, u32 n,
                      u32 col) {
    for (u32 i = threadIdx.x; i < n_row * N_PIECE; i += THREADS) {
        u32 r = i / N_PIECE, piece = i % N_PIECE;
        const bf16* from = x + (row + min(r, n - 1)) * width + col + piece * 8;
        copy16(tile + place(r, piece), from, r < n);
    }
}

// A left side: 16 own rows from `row` on, 16 columns.
DEVICE void load_left(u32 a[4], const uint4* tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % 32;
    load_matrices(a, tile + place(row + lane % 16, step * 2 + lane / 16));
}

// Right sides for a product along the rows of a tile: others 16 idx.. and the ones 8 further.
DEVICE void load_right(u32 b[4], const uint4* tile, u32 idx, u32 step) {
    u32 lane = threadIdx.x % 32;
    load_matrices(b, tile + place(idx * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
}

// Right sides for a product over the rows of a tile: columns 16 idx.. and the ones 8 further.
DEVICE void load_right_turned(u32 b[4], const uint4* tile, u32 idx, u32 step) {
    u32 lane = threadIdx.x % 32;
    load_matrices_turned(b, tile + place(step * 16 + lane % 16, idx * 2 + lane / 16));
}

// Sums of a product as the left side of another: columns 16 step.. of `x`.
DEVICE void to_left(u32 a[4], const float x[N_COL][4], u32 step) {
    const float* left = x[2 * step];
    const float* right = x[2 * step + 1];
    a[0] = floats_to_bf16x2(left[0], left[1]);
    a[1] = floats_to_bf16x2(left[2], left[3]);
    a[2] = floats_to_bf16x2(right[0], right[1]);
    a[3] = floats_to_bf16x2(right[2], right[3]);
}

// sums += own @ others^T, for the own rows of a warp.
DEVICE void multiply(float sums[M_TILES][N_COL][4], const uint4* own, const uint4* other) {
    u32 warp = threadIdx.x / 32;
#pragma unroll
    for (u32 step = 0; step < N_STEP; step++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) load_left(a[m], own, (warp * M_TILES + m) * 16, step);
#pragma unroll
        for (u32 idx = 0; idx < N_COL / 2; idx++) {
            u32 b[4];
            load_right(b, other, idx, step);
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++) {
                mma(sums[m][2 * idx], a[m], b);
                mma(sums[m][2 * idx + 1], a[m], b + 2);
            }
        }
    }
}

// sums += scores @ others, likewise.
DEVICE void accumulate(float sums[M_TILES][N_OUT][4], const float scores[M_TILES][N_COL][4],
                       const uint4* other) {
#pragma unroll
    for (u32 step = 0; step < N_COL / 2; step++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) to_left(a[m], scores[m], step);
#pragma unroll
        for (u32 idx = 0; idx < N_OUT / 2; idx++) {
            u32 b[4];
            load_right_turned(b, other, idx, step);
#pragma unroll
            for (u32 m = 0; m < M_TILES; m++) {
                mma(sums[m][2 * idx], a[m], b);
                mma(sums[m][2 * idx + 1], a[m], b + 2);
            }
        }
    }
}

// Own row `row` of the sums, 0 or 1 for the upper or lower eight, times `factor`.
DEVICE void store_row(bf16* out, const float sums[N_OUT][4], u32 row, float factor) {
    u32* to = (u32*)out + threadIdx.x % 4;
#pragma unroll
    for (u32 idx = 0; idx < N_OUT; idx++) {
        const float* pair = sums[idx] + 2 * row;
        to[idx * 4] = floats_to_bf16x2(pair[0] * factor, pair[1] * factor);
    }
}

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

struct Block {
    u32 row;   // the first own row
    u32 n;     // own rows
    u32 pos;   // place of the first in its sequence
    u32 n_tok; // tokens of the sequence
    u32 base;  // row of its first key
};

DEVICE Block block_of(const void* blocks, u32 idx) {
    uint4 b = ((const uint4*)blocks)[idx];
    Block block = {b.x, b.y, b.z, b.w, b.x - b.z};
    return block;
}

// Whether the query at place i sees the key at place j.
DEVICE bool sees(u32 i, u32 j, u32 window) { return j <= i && i - j < window; }

// The running softmax of a thread's two rows; the weight is that of its own columns.
struct Running {
    float top[2] = {SCORE_MIN, SCORE_MIN};
    float weight[2] = {0.0f, 0.0f};
};

// Scores of 16 own rows, the first of this thread at place i, to weights; what was summed before is
// corrected. `is_cut`: some of the keys from j0 on may not be seen.
DEVICE void soften(float scores[N_COL][4], u32 i, u32 j0, bool is_cut, const Params& p,
                   Running& running, float sums[N_OUT][4]) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        float top = running.top[r];
#pragma unroll
        for (u32 idx = 0; idx < N_COL; idx++) {
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                float score = scores[idx][2 * r + c] * p.scale_log2;
                u32 j = j0 + idx * 8 + threadIdx.x % 4 * 2 + c;
                if (is_cut && !sees(i + r * 8, j, p.window)) score = __int_as_float(0xff800000);
                scores[idx][2 * r + c] = score;
                top = fmaxf(top, score);
            }
        }
        top = quad_max(top);
        float fix = exp2_fast(running.top[r] - top), weight = running.weight[r] * fix;
        running.top[r] = top;
#pragma unroll
        for (u32 idx = 0; idx < N_COL; idx++) {
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                float one = exp2_fast(scores[idx][2 * r + c] - top);
                scores[idx][2 * r + c] = one;
                weight += one;
            }
        }
        running.weight[r] = weight;
#pragma unroll
        for (u32 idx = 0; idx < N_OUT; idx++) {
            sums[idx][2 * r] *= fix;
            sums[idx][2 * r + 1] *= fix;
        }
    }
}

// ---- Kernels ------------------------------------------------------------------------------------

#ifdef ENTRY_attention_forward_cores
// Shared memory: keys and values, twice; the queries lie there before the second of them.
KERNEL attention_forward_cores(const T0* q, const T1* k, const T2* v, const T3* blocks, T4* y,
                               T5* log_sum, Params p) {
    extern __shared__ uint4 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 head = blockIdx.y, kv_head = head / N_GROUP;
    Block block;
    if (CACHED) {
        // The last have the most to do.
        u32 at = (gridDim.x - 1 - blockIdx.x) * OWN;
        Block cached = {p.first + at, min((u32)OWN, p.n_new - at), p.n_past + at,
                        p.n_past + p.n_new, 0};
        block = cached;
    } else {
        block = block_of(blocks, blockIdx.x);
    }
    u32 end = block.pos + block.n;
    u32 start = block.pos - min(block.pos, p.window - 1);
    start -= start % OTHER;
    u32 n_turn = (end - start + OTHER - 1) / OTHER;

    copy_rows(shared + 2 * OTHER_TILE, OWN, q, Q_WIDTH, block.row, block.n, head * D);
    copies_end();
    u32 n = min((u32)OTHER, end - start);
    copy_rows(shared, OTHER, k, KV_WIDTH, (size_t)block.base + start, n, kv_head * D);
    copy_rows(shared + OTHER_TILE, OTHER, v, KV_WIDTH, (size_t)block.base + start, n, kv_head * D);
    copies_end();
    copies_wait<1>();
    __syncthreads();
    u32 own[M_TILES][N_STEP][4];
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 step = 0; step < N_STEP; step++) {
            load_left(own[m][step], shared + 2 * OTHER_TILE, (warp * M_TILES + m) * 16, step);
        }
    }
    __syncthreads();

    float sums[M_TILES][N_OUT][4] = {};
    Running running[M_TILES];
    for (u32 turn = 0; turn < n_turn; turn++) {
        u32 j0 = start + turn * OTHER;
        if (turn + 1 < n_turn) {
            uint4* next = shared + (turn + 1) % 2 * 2 * OTHER_TILE;
            size_t row = (size_t)block.base + j0 + OTHER;
            n = min((u32)OTHER, end - j0 - OTHER);
            copy_rows(next, OTHER, k, KV_WIDTH, row, n, kv_head * D);
            copy_rows(next + OTHER_TILE, OTHER, v, KV_WIDTH, row, n, kv_head * D);
        }
        copies_end();
        copies_wait<1>();
        __syncthreads();
        const uint4* keys = shared + turn % 2 * 2 * OTHER_TILE;
        bool is_cut = j0 + OTHER > block.pos + 1 || end - 1 - j0 >= p.window;

        float scores[M_TILES][N_COL][4] = {};
#pragma unroll
        for (u32 step = 0; step < N_STEP; step++) {
#pragma unroll
            for (u32 idx = 0; idx < N_COL / 2; idx++) {
                u32 b[4];
                load_right(b, keys, idx, step);
#pragma unroll
                for (u32 m = 0; m < M_TILES; m++) {
                    mma(scores[m][2 * idx], own[m][step], b);
                    mma(scores[m][2 * idx + 1], own[m][step], b + 2);
                }
            }
        }
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) {
            u32 i = block.pos + (warp * M_TILES + m) * 16 + lane / 4;
            soften(scores[m], i, j0, is_cut, p, running[m], sums[m]);
        }
        accumulate(sums, scores, keys + OTHER_TILE);
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float total = quad_sum(running[m].weight[r]), top = running[m].top[r];
            u32 i = (warp * M_TILES + m) * 16 + r * 8 + lane / 4;
            if (i >= block.n) continue;
            size_t row = (size_t)block.row + i;
            store_row(y + row * Q_WIDTH + head * D, sums[m], r, 1.0f / total);
            if (lane % 4 == 0) log_sum[(size_t)head * p.n_tok + row] = top + log2f(total);
        }
    }
}
#endif

#ifdef ENTRY_attention_dq_cores
// Shared memory: queries and dy; keys and values, twice.
KERNEL attention_dq_cores(const T0* q, const T1* k, const T2* v, const T3* blocks, const T4* dy,
                          const T5* stats, T6* dq, Params p) {
    extern __shared__ uint4 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 head = blockIdx.y, kv_head = head / N_GROUP;
    Block block = block_of(blocks, blockIdx.x);
    u32 end = block.pos + block.n;
    u32 start = block.pos - min(block.pos, p.window - 1);
    start -= start % OTHER;
    u32 n_turn = (end - start + OTHER - 1) / OTHER;
    uint4* others = shared + 2 * OWN_TILE;

    copy_rows(shared, OWN, q, Q_WIDTH, block.row, block.n, head * D);
    copy_rows(shared + OWN_TILE, OWN, dy, Q_WIDTH, block.row, block.n, head * D);
    u32 n = min((u32)OTHER, end - start);
    size_t row = (size_t)block.base + start;
    copy_rows(others, OTHER, k, KV_WIDTH, row, n, kv_head * D);
    copy_rows(others + OTHER_TILE, OTHER, v, KV_WIDTH, row, n, kv_head * D);
    copies_end();
    float top[M_TILES][2] = {}, dot[M_TILES][2] = {};
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 i = (warp * M_TILES + m) * 16 + r * 8 + lane / 4;
            if (i >= block.n) continue;
            size_t at = (size_t)head * p.n_tok + block.row + i;
            top[m][r] = stats[at];
            dot[m][r] = stats[(size_t)N_HEAD * p.n_tok + at];
        }
    }
    float sums[M_TILES][N_OUT][4] = {};
    for (u32 turn = 0; turn < n_turn; turn++) {
        u32 j0 = start + turn * OTHER;
        if (turn + 1 < n_turn) {
            uint4* next = others + (turn + 1) % 2 * 2 * OTHER_TILE;
            row = (size_t)block.base + j0 + OTHER;
            n = min((u32)OTHER, end - j0 - OTHER);
            copy_rows(next, OTHER, k, KV_WIDTH, row, n, kv_head * D);
            copy_rows(next + OTHER_TILE, OTHER, v, KV_WIDTH, row, n, kv_head * D);
        }
        copies_end();
        copies_wait<1>();
        __syncthreads();
        const uint4* keys = others + turn % 2 * 2 * OTHER_TILE;
        bool is_cut = j0 + OTHER > block.pos + 1 || end - 1 - j0 >= p.window;
        float scores[M_TILES][N_COL][4] = {}, dp[M_TILES][N_COL][4] = {};
        multiply(scores, shared, keys);
        multiply(dp, shared + OWN_TILE, keys + OTHER_TILE);
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) {
            u32 i0 = block.pos + (warp * M_TILES + m) * 16 + lane / 4;
#pragma unroll
            for (u32 idx = 0; idx < N_COL; idx++) {
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    u32 i = i0 + c / 2 * 8, j = j0 + idx * 8 + lane % 4 * 2 + c % 2;
                    float weight = exp2_fast(scores[m][idx][c] * p.scale_log2 - top[m][c / 2]);
                    if (is_cut && !sees(i, j, p.window)) weight = 0.0f;
                    scores[m][idx][c] = weight * (dp[m][idx][c] - dot[m][c / 2]);
                }
            }
        }
        accumulate(sums, scores, keys);
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 i = (warp * M_TILES + m) * 16 + r * 8 + lane / 4;
            if (i >= block.n) continue;
            store_row(dq + ((size_t)block.row + i) * Q_WIDTH + head * D, sums[m], r, p.scale);
        }
    }
}
#endif

#ifdef ENTRY_attention_dkv_cores
// The own rows are keys, the others queries of one head after the other.
// Shared memory: keys and values; queries and dy, twice; their stats, twice.
KERNEL attention_dkv_cores(const T0* q, const T1* k, const T2* v, const T3* blocks, const T4* dy,
                           const T5* stats, T6* dk, T7* dv, Params p) {
    extern __shared__ uint4 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    // The first keys are seen by the most queries: the other way round than in the table.
    Block block = block_of(blocks, gridDim.x - 1 - blockIdx.x);
    u32 last = block.pos + block.n - 1;
    u32 end = last + min(block.n_tok - last, p.window);
    u32 n_per_head = (end - block.pos + OTHER - 1) / OTHER;
    u32 n_turn = n_per_head * N_GROUP;
    uint4* others = shared + 2 * OWN_TILE;
    float* other_stats = (float*)(others + 4 * OTHER_TILE); // (2, 2, OTHER)

    copy_rows(shared, OWN, k, KV_WIDTH, block.row, block.n, kv_head * D);
    copy_rows(shared + OWN_TILE, OWN, v, KV_WIDTH, block.row, block.n, kv_head * D);
    float dk_sums[M_TILES][N_OUT][4] = {}, dv_sums[M_TILES][N_OUT][4] = {};
    // A turn copies for the next one; the turn before the first has nothing else to do.
    for (u32 turn = 0; turn <= n_turn; turn++) {
        if (turn < n_turn) {
            uint4* next = others + turn % 2 * 2 * OTHER_TILE;
            u32 head = kv_head * N_GROUP + turn / n_per_head;
            u32 i0 = block.pos + turn % n_per_head * OTHER;
            u32 n = min((u32)OTHER, end - i0);
            size_t row = (size_t)block.base + i0;
            copy_rows(next, OTHER, q, Q_WIDTH, row, n, head * D);
            copy_rows(next + OTHER_TILE, OTHER, dy, Q_WIDTH, row, n, head * D);
            for (u32 i = threadIdx.x; i < 2 * OTHER; i += THREADS) {
                size_t at = ((size_t)(i / OTHER) * N_HEAD + head) * p.n_tok + row;
                copy4(other_stats + turn % 2 * 2 * OTHER + i, stats + at + min(i % OTHER, n - 1));
            }
        }
        copies_end();
        if (turn == 0) continue;
        copies_wait<1>();
        __syncthreads();
        u32 now = turn - 1, i0 = block.pos + now % n_per_head * OTHER;
        const uint4* queries = others + now % 2 * 2 * OTHER_TILE;
        const float* top = other_stats + now % 2 * 2 * OTHER;
        bool is_cut = i0 < block.pos + OWN || i0 + OTHER > end
            || i0 + OTHER - 1 - block.pos >= p.window;
        float scores[M_TILES][N_COL][4] = {}, dp[M_TILES][N_COL][4] = {};
        multiply(scores, shared, queries);
        multiply(dp, shared + OWN_TILE, queries + OTHER_TILE);
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++) {
            u32 j0 = block.pos + (warp * M_TILES + m) * 16 + lane / 4;
#pragma unroll
            for (u32 idx = 0; idx < N_COL; idx++) {
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    u32 other = idx * 8 + lane % 4 * 2 + c % 2, i = i0 + other;
                    float weight = exp2_fast(scores[m][idx][c] * p.scale_log2 - top[other]);
                    if (is_cut && !(i < end && sees(i, j0 + c / 2 * 8, p.window))) weight = 0.0f;
                    scores[m][idx][c] = weight;
                    dp[m][idx][c] = weight * (dp[m][idx][c] - top[OTHER + other]);
                }
            }
        }
        accumulate(dv_sums, scores, queries + OTHER_TILE);
        accumulate(dk_sums, dp, queries);
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            u32 j = (warp * M_TILES + m) * 16 + r * 8 + lane / 4;
            if (j >= block.n) continue;
            size_t at = ((size_t)block.row + j) * KV_WIDTH + kv_head * D;
            store_row(dk + at, dk_sums[m], r, p.scale);
            store_row(dv + at, dv_sums[m], r, 1.0f);
        }
    }
}
#endif
