// State-space duality where heads are 64 wide, d_state is 64 or 128 and all is bf16 (MMA is 2);
// behind ssd.cu, which has the steps. Tiles are copied as they lie in memory, the next while one is
// used; pieces of 16 bytes change places within a row, so that neither ldmatrix nor rows of pieces
// meet a bank twice. No scores go through memory. RANK, where there are ranks, divides 16.
//
// What a layer takes, counted as in ssd.cu: forward 150 MB in ssd_walk and 200 in ssd_outputs,
// backward twice 150 in ssd_walk and 350 in ssd_gradients, which multiplies 26 GFLOP.

#if MMA == 2

#define V_TILE (64 * 128)       // bytes of 64 tokens of a head
#define S_TILE (D_STATE * 128)  // bytes of a state, and of 64 tokens of b or c
#define N_STEPS (sizeof(Steps) / 4) // numbers of the steps of a head
#define N_PIECE (D_STATE / 8)   // pieces of 16 bytes in a row of b or c; one of a head has eight

// A byte of the group's memory. Tiles are named by their first one.
DEVICE char* shared_at(u32 byte) {
    extern __shared__ uint4 shared[];
    return (char*)shared + byte;
}

DEVICE void copy16(u32 to, const bf16* from, bool is_there) {
    copy16((uint4*)shared_at(to), from, is_there);
}

DEVICE void copy4(u32 to, const float* from) { copy4((float*)shared_at(to), from); }

// ---- tiles of pieces ----------------------------------------------------------------------------

// Where a piece lies in a tile of rows of P of them.
template <u32 P> DEVICE u32 place(u32 row, u32 piece) {
    return (row * P + (piece ^ (row & 7))) * 16;
}

// Where `col` lies, an even number. Sixteen bytes further, as `^`, lies `col + 8` if col is a
// multiple of 16, and eight rows further, as `+`, the same column.
template <u32 P> DEVICE u32 pair_at(u32 row, u32 col) {
    return place<P>(row, col / 8) + col % 8 * 2;
}

DEVICE float2 unpack(u32 bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

// Begins to copy 64 tokens of P pieces, zeros past the n-th; rows are `stride` numbers apart.
template <u32 P> DEVICE void copy_rows(u32 tile, const bf16* from, size_t stride, u32 n) {
    const u32 n_row = THREADS / P; // at a time
    u32 row = threadIdx.x / P, piece = threadIdx.x % P;
    u32 to = tile + place<P>(row, piece);
    from += row * stride + piece * 8;
#pragma unroll
    for (u32 i = 0; i < 64; i += n_row) {
        bool is_there = row + i < n;
        copy16(to + i * P * 16, is_there ? from + i * stride : from, is_there);
    }
}

DEVICE void copy_state(u32 tile, const bf16* from) {
    u32 to = tile + place<8>(threadIdx.x / 8, threadIdx.x % 8);
    from += threadIdx.x * 8;
#pragma unroll
    for (u32 i = 0; i < S_TILE; i += THREADS * 16) copy16(to + i, from + i / 2, true);
}

// Steps of the heads of a group, one after the other.
struct StepSource {
    const float* from[2];
    bool is_there[2];
};

// What this thread copies, and zeros past the last token in all buffers from byte `to` on.
DEVICE StepSource step_source(u32 to, u32 n_buffer, const float* steps, u32 head, u32 start, u32 n,
                              u32 n_tok) {
    StepSource source;
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        u32 i = threadIdx.x + k * THREADS, series = i / 64, tok = i % 64;
        source.is_there[k] = i < N_STEPS && tok < n;
        // The slope of Mamba-2 is not among them.
        u32 skipped = RANK == 0 && series > 0;
        source.from[k] = series_at(steps, series + skipped, head, start, n_tok) + tok;
        for (u32 buffer = 0; buffer < n_buffer; buffer++) {
            float* slot = (float*)shared_at(to + buffer * sizeof(Steps)) + i;
            if (i < N_STEPS && tok >= n) *slot = 0.0f;
        }
    }
    return source;
}

DEVICE void copy_steps(u32 to, StepSource& source, u32 n_tok) {
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        if (k * THREADS >= N_STEPS) break;
        if (source.is_there[k]) copy4(to + (threadIdx.x + k * THREADS) * 4, source.from[k]);
        source.from[k] += n_tok;
    }
}

// Where a lane finds its part of a side of a product, for the first k. The left: 16 rows. The
// right: 16 columns. A tile has them as rows of k, or TURNED: as columns, k by k.
template <u32 P, bool TURNED> DEVICE u32 left_at(u32 row) {
    u32 lane = threadIdx.x % 32;
    return TURNED ? place<P>(lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2)
                  : place<P>(row + lane % 16, lane / 16);
}

template <u32 P, bool TURNED> DEVICE u32 right_at(u32 col) {
    u32 lane = threadIdx.x % 32;
    return TURNED ? place<P>(lane % 16, col / 8 + lane / 16)
                  : place<P>(col + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// The same for another k, a multiple of 16.
template <u32 P, bool TURNED> DEVICE u32 along(u32 at, u32 k) {
    return TURNED ? at + k * P * 16 : at ^ k * 2;
}

// The next 16 columns of a right side that begins at a multiple of 32.
template <u32 P, bool TURNED> DEVICE u32 beside(u32 at) { return TURNED ? at ^ 32 : at + P * 256; }

template <bool TURNED> DEVICE void matrices(u32 r[4], u32 at) {
    ldmatrix<TURNED>(r, (const u16*)shared_at(at));
}

// acc += left right, 16 rows and COLS columns, 16 or 32, over k from `begin` to `end`, at most K.
template <u32 COLS, u32 K, u32 PA, bool A_TURNED, u32 PB, bool B_TURNED>
DEVICE void product(float* acc, u32 a_at, u32 b_at, u32 begin = 0, u32 end = K) {
#pragma unroll
    for (u32 k = 0; k < K; k += 16) {
        if (k < begin || k >= end) continue;
        u32 a[4], b[4];
        matrices<A_TURNED>(a, along<PA, A_TURNED>(a_at, k));
#pragma unroll
        for (u32 half = 0; half < COLS / 16; half++) {
            u32 at = along<PB, B_TURNED>(b_at, k);
            matrices<B_TURNED>(b, half == 0 ? at : beside<PB, B_TURNED>(at));
            mma(acc + half * 8, a, b);
            mma(acc + half * 8 + 4, a, b + 2);
        }
    }
}

// Row and column of the i-th number of a thread within its part of a product.
DEVICE u32 own_row(u32 i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
DEVICE u32 own_col(u32 i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <u32 N> DEVICE void clear(float (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) x[i] = 0.0f;
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The weights of tokens j and j + 1 for token i.
DEVICE float2 weights(const Steps& s, u32 i, u32 j) {
    float2 delta = *(const float2*)&s.delta[j];
#if RANK
    if (is_own(i, j)) delta.x = s.own[j];
    if (is_own(i, j + 1)) delta.y = s.own[j + 1];
#endif
    return delta;
}

// Decay from the tokens j0 + own_col to i0 + own_row, zero where none reaches; 8 for each 16 x 16.
template <u32 N> DEVICE void decays(float (&passed)[N], const Steps& s, u32 i0, u32 j0, u32 n) {
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        u32 i = i0 + own_row(row * 2);
        int last = i < n ? (int)last_own(i) : -1;
        float cum = s.cum[i], cum_low = s.cum_low[i];
#pragma unroll
        for (u32 t = 0; t < N / 4; t++) {
            u32 j = j0 + own_col(t * 4);
            float2 from = *(const float2*)&s.cum[j], from_low = *(const float2*)&s.cum_low[j];
            float x = (cum - from.x) + (cum_low - from_low.x);
            float y = (cum - from.y) + (cum_low - from_low.y);
            // No branch for what underflows.
            passed[t * 4 + row * 2] = EXP((int)j <= last ? x : -1e30f);
            passed[t * 4 + row * 2 + 1] = EXP((int)j + 1 <= last ? y : -1e30f);
        }
    }
}

// ---- states -------------------------------------------------------------------------------------

#ifdef ENTRY_ssd_walk
// As ssd_states, without the product by `h`. A group takes a whole state, a warp 32 x 32 of it.
// Chunks of a run lie one behind the other, all but the last of 64 tokens.
extern "C" __global__ __launch_bounds__(THREADS, 768 / THREADS) void
ssd_walk(const bf16* xbc, const float* steps, const u32* table, const bf16* v, const void*,
         float* carry, bf16* states, float*, Params p) {
    // Scaled v, twice b or c, the state, twice decay over a chunk: a register for what all threads
    // load would have to be there at once.
    const u32 vs = 0, ms = V_TILE, outs = ms + 2 * S_TILE, totals = outs + S_TILE;
    const u32 n_row_warp = D_STATE / 32, n_ahead = 512 / THREADS, rows_ahead = THREADS / 8;
    const u32 v_width = PASS == 0 ? WIDTH : D_INNER;
    u32 head = blockIdx.y, warp = threadIdx.x / 32;
    u32 row = warp % n_row_warp * 32, col = warp / n_row_warp * 32;
    u32 first = table[p.runs_at + 2 * blockIdx.z], count = table[p.runs_at + 2 * blockIdx.z + 1];
    u32 begin = table[4 * first], n_last = table[4 * (first + count - 1) + 1];
    carry += ((size_t)blockIdx.z * N_HEAD + head) * N_STATE;
    float acc[2][16];
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            u32 at = (row + m * 16 + own_row(i)) * 64 + col + own_col(i);
            acc[m][i] = HAS_BEFORE ? carry[at] : 0.0f;
        }
    }
    u32 tok = threadIdx.x / 8, v_to = vs + place<8>(tok, threadIdx.x % 8);
    u32 a_at = left_at<N_PIECE, true>(row), b_at = vs + right_at<8, true>(col);
    u32 out_at = outs + pair_at<8>(row + own_row(0), col + own_col(0));
    const float* delta = series_at(steps, 0, head, begin, p.n_tok);
    const float* since = series_at(steps, 4, head, begin, p.n_tok);
    const float* until = series_at(steps, 5, head, begin, p.n_tok);
    const bf16* v_from = v + (size_t)(begin + tok) * v_width + head * 64 + threadIdx.x % 8 * 8;
    const bf16* m_from = xbc + (size_t)begin * WIDTH + column(PASS, head / PER_GROUP);
    // Pieces of v of the next chunk, and the two parts of their factors: a product would wait.
    uint4 next[n_ahead];
    float factor[n_ahead], other[n_ahead];
    auto fetch = [&](u32 turn, u32 chunk) {
        u32 at = chunk * 64, n = chunk + 1 == count ? n_last : 64;
        copy_rows<N_PIECE>(ms + turn % 2 * S_TILE, m_from + (size_t)at * WIDTH, WIDTH, n);
        if (threadIdx.x == 0) copy4(totals + turn % 2 * 4, since + at + n - 1);
        copies_end();
#pragma unroll
        for (u32 i = 0; i < n_ahead; i++) {
            u32 ahead = at + i * rows_ahead;
            next[i] = make_uint4(0, 0, 0, 0);
            factor[i] = other[i] = 0.0f;
            if (tok + i * rows_ahead < n) {
                next[i] = *(const uint4*)(v_from + (size_t)ahead * v_width);
                factor[i] = PASS == 0 ? until[ahead + tok] : since[ahead + tok];
                other[i] = PASS == 0 ? delta[ahead + tok] : 1.0f;
            }
        }
    };
    fetch(0, PASS == 0 ? 0 : count - 1);
    for (u32 turn = 0; turn < count; turn++) {
        u32 chunk = PASS == 0 ? turn : count - 1 - turn;
#pragma unroll
        for (u32 i = 0; i < n_ahead; i++) {
            u32 words[4] = {next[i].x, next[i].y, next[i].z, next[i].w};
            float scale = factor[i] * other[i];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                float2 x = unpack(words[k]);
                words[k] = floats_to_bf16x2(scale * x.x, scale * x.y);
            }
            *(uint4*)shared_at(v_to + i * rows_ahead * 128) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
#pragma unroll
            for (u32 i = 0; i < 16; i += 2) {
                u32 to = (out_at ^ i / 4 * 16) + (m * 16 + i / 2 % 2 * 8) * 128;
                *(u32*)shared_at(to) = floats_to_bf16x2(acc[m][i], acc[m][i + 1]);
            }
        }
        copies_wait<0>();
        __syncthreads();
        float total = *(float*)shared_at(totals + turn % 2 * 4);
#pragma unroll
        for (u32 i = 0; i < 32; i++) acc[i / 16][i % 16] *= total;
        if (turn + 1 < count) fetch(turn + 1, PASS == 0 ? turn + 1 : chunk - 1);
        size_t state = (size_t)(first + chunk - p.first) * N_HEAD + head;
        uint4* to = (uint4*)(states + state * N_STATE) + threadIdx.x;
        u32 out = outs + place<8>(tok, threadIdx.x % 8);
#pragma unroll
        for (u32 i = 0; i < D_STATE * 8; i += THREADS) to[i] = *(uint4*)shared_at(out + i * 16);
        u32 m_at = ms + turn % 2 * S_TILE + a_at;
#pragma unroll
        for (u32 k = 0; k < 64; k += 16) {
            u32 a[2][4], b[4];
            matrices<true>(a[0], along<N_PIECE, true>(m_at, k));
            matrices<true>(a[1], along<N_PIECE, true>(m_at ^ 32, k));
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                matrices<true>(b, along<8, true>(half == 0 ? b_at : beside<8, true>(b_at), k));
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma(acc[m] + half * 8, a[m], b);
                    mma(acc[m] + half * 8 + 4, a[m], b + 2);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            carry[(row + m * 16 + own_row(i)) * 64 + col + own_col(i)] = acc[m][i];
        }
    }
}
#endif

// ---- outputs ------------------------------------------------------------------------------------

#ifdef ENTRY_ssd_outputs
// A group takes N_PER heads in a chunk, one after the other.
extern "C" __global__ __launch_bounds__(THREADS, 2) void
ssd_outputs(const bf16* xbc, const float* steps, const u32* table, const bf16* states, bf16* y,
            Params p) {
    const u32 cs = 0, mixes = S_TILE, tiles = mixes + V_TILE, buffer = V_TILE + S_TILE;
    const u32 steps_at = tiles + 2 * buffer;
    u32 head0 = blockIdx.x * N_PER, chunk = p.first + blockIdx.y, group = head0 / PER_GROUP;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    u32 warp = threadIdx.x / 32, row = warp % 4 * 16, col = warp / 4 * 32;
    u32 low = row + own_row(0), high = low + 8;
    const bf16* rows = xbc + (size_t)start * WIDTH;
    const bf16* x_from = rows + head0 * 64;
    const bf16* h_from = states + ((size_t)blockIdx.y * N_HEAD + head0) * N_STATE;
    StepSource source = step_source(steps_at, 2, steps, head0, start, n, p.n_tok);
    auto fetch = [&](u32 idx) {
        u32 tile = tiles + idx % 2 * buffer;
        copy_rows<8>(tile, x_from, WIDTH, n);
        if (flags & 1) copy_state(tile + V_TILE, h_from);
        copy_steps(steps_at + idx % 2 * sizeof(Steps), source, p.n_tok);
        copies_end();
        x_from += 64;
        h_from += N_STATE;
    };
    // b lies where the state of the second head will.
    u32 bs = tiles + buffer + V_TILE;
    copy_rows<N_PIECE>(cs, rows + column(1, group), WIDTH, n);
    copy_rows<N_PIECE>(bs, rows + column(0, group), WIDTH, n);
    copies_end();
    fetch(0);
    copies_wait<1>();
    __syncthreads();
    u32 c_at = cs + left_at<N_PIECE, false>(row), mix_at = mixes + left_at<8, false>(row);
    u32 col_at = right_at<8, true>(col), own_at = pair_at<8>(low, col + own_col(0));
    float score[16];
    clear(score);
    u32 b_at = bs + right_at<N_PIECE, false>(col);
    product<32, D_STATE, N_PIECE, false, N_PIECE, false>(score, c_at, b_at);
    bf16* y_low = y + (size_t)(start + low) * D_INNER + head0 * 64 + col + own_col(0);
    const float* skips = steps + 6 * (size_t)N_HEAD * p.n_tok + 1;
    for (u32 idx = 0; idx < N_PER; idx++, y_low += 64) {
        copies_wait<0>();
        __syncthreads();
        if (idx + 1 < N_PER) fetch(idx + 1);
        const Steps& s = *(const Steps*)shared_at(steps_at + idx % 2 * sizeof(Steps));
        u32 xs = tiles + idx % 2 * buffer, hs = xs + V_TILE;
        float skip = skips[(head0 + idx) * 2], acc[16];
        if (col < row + 16) {
            decays(acc, s, row, col, n);
#pragma unroll
            for (u32 e = 0; e < 16; e += 2) {
                float2 delta = weights(s, row + own_row(e), col + own_col(e));
                u32 to = mixes + (own_at ^ e / 4 * 16) + e / 2 % 2 * 1024;
                *(u32*)shared_at(to) = floats_to_bf16x2(acc[e] * score[e] * delta.x,
                                                        acc[e + 1] * score[e + 1] * delta.y);
            }
        }
        clear(acc);
        if (flags & 1) {
            product<32, D_STATE, N_PIECE, false, 8, true>(acc, c_at, hs + col_at);
            float since_low = s.since[low], since_high = s.since[high];
#pragma unroll
            for (u32 e = 0; e < 16; e++) acc[e] *= e / 2 % 2 == 0 ? since_low : since_high;
        }
        __syncthreads();
        // No token reads a later one.
        product<32, 64, 8, false, 8, true>(acc, mix_at, xs + col_at, 0, row + 16);
#pragma unroll
        for (u32 e = 0; e < 16; e += 2) {
            u32 is_high = e / 2 % 2;
            float2 x = unpack(*(u32*)shared_at(xs + (own_at ^ e / 4 * 16) + is_high * 1024));
            u32 bits = floats_to_bf16x2(acc[e] + skip * x.x, acc[e + 1] + skip * x.y);
            bf16* to = y_low + is_high * 8 * D_INNER + e / 4 * 8;
            if ((is_high ? high : low) < n) *(u32*)to = bits;
        }
    }
}
#endif

#endif
