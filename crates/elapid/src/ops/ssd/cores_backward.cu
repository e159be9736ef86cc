// Backward of cores.cu, which has the tiles; ssd_backward.cu says the same more slowly.

#if MMA == 2 && defined(ENTRY_ssd_gradients)
#define COLS (D_STATE / 4) // columns of db and dc of a warp

// Partial sums of a head, by columns or rows of 16, or by COLS.
struct Sums {
    float sent_rows[4][64], sent_cols[4][64], diagonal[64], dmix[64], delta[64];
    float entering[4][64], leaving[4][64], through[THREADS / 32];
};

// total += factor acc for 16 tokens and COLS columns of d_state, and row sums of acc with `m`, b or
// c, times `weight`. Factors of the upper and lower rows.
DEVICE void add_product(float* total, float* sums, const float* acc, const u32* m, u32 row,
                        float2 factor, float2 weight) {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (u32 e = 0; e < COLS / 2; e += 4) {
        float2 m_low = unpack(m[e / 2]), m_high = unpack(m[e / 2 + 1]);
        low += acc[e] * m_low.x + acc[e + 1] * m_low.y;
        high += acc[e + 2] * m_high.x + acc[e + 3] * m_high.y;
        total[e] += factor.x * acc[e];
        total[e + 1] += factor.x * acc[e + 1];
        total[e + 2] += factor.y * acc[e + 2];
        total[e + 3] += factor.y * acc[e + 3];
    }
    low = quad_sum(low);
    high = quad_sum(high);
    if (threadIdx.x % 4 == 0) {
        sums[row] = weight.x * low;
        sums[row + 8] = weight.y * high;
    }
}

// What a thread of the last `n_thread` has of the product of two states.
DEVICE float dot_states(u32 a, u32 b, u32 n_thread) {
    float sum = 0.0f;
    for (u32 i = (threadIdx.x + n_thread - THREADS) * 16; i < S_TILE; i += n_thread * 16) {
        uint4 x = *(const uint4*)shared_at(a + i), y = *(const uint4*)shared_at(b + i);
        const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            float2 x2 = unpack(xs[k]), y2 = unpack(ys[k]);
            sum += x2.x * y2.x + x2.y * y2.y;
        }
    }
    return sum;
}

// Terms inside the chunk, by one warp; a lane has two tokens. Token i passes on what those before
// it send to it and to those behind it: by what it adds itself and what it receives,
//     D[i + 1] = D[i] + delta[i] (sum over k > i of sent[k, i])
//                     - (sum over j < i of delta[j] sent[i, j])
DEVICE void inside(const Sums& sums, float* terms, u32 head, u32 start, u32 n, const Params& p) {
    u32 i = threadIdx.x % 32 * 2;
    float sent[2] = {}, gain[2];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        float got = 0.0f;
#pragma unroll
        for (u32 part = 0; part < 4; part++) {
            if (part >= i / 16) sent[k] += sums.sent_cols[part][i + k];
            if (part <= i / 16) got += sums.sent_rows[part][i + k];
        }
        gain[k] = sums.delta[i + k] * sent[k] - got;
    }
    float sum = gain[0] + gain[1], upto = sum_upto(sum);
    size_t series = (size_t)N_HEAD * p.n_tok;
    float* to = terms + term_at(0, head, start + i, p.n_tok);
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        if (i + k >= n) continue;
#if RANK
        to[k] = sent[k];
        terms[own_at(head, start + i + k, p)] = sums.diagonal[i + k];
#else
        to[k] = sent[k] + sums.diagonal[i + k];
#endif
        to[series + k] = upto - sum + (k == 1 ? gain[0] : 0.0f);
        to[2 * series + k] = sums.dmix[i + k];
    }
}

// A group takes the heads of a group in a chunk, one after the other, and makes all its gradients:
//     dmix = dy x^T, which gives dscores and the terms inside
//     dx = mix^T dy + until delta (b dh) + skip dy
//     dc = dscores b + sum over heads of since (dy h^T)
//     db = dscores^T c + sum over heads of until delta (x dh^T)
// The terms of decay that enter are row sums of dy h^T with c, those that leave of x dh^T with b.
//
// Of tokens by tokens the first ten warps have 16 x 16 each, row by row up to the diagonal; the
// other six multiply h and dh.
KERNEL ssd_gradients(const bf16* xbc, const float* steps, const u32* table, const bf16* dy,
                     const bf16* h, const bf16* dh, bf16* dxbc, float* terms, Params p) {
    const u32 bs = 0, cs = S_TILE, mixes = 2 * S_TILE, tiles = mixes + V_TILE;
    const u32 buffer = 2 * (V_TILE + S_TILE), n_square = 10;
    const u32 steps_at = tiles + N_BUFFER * buffer, sums_at = steps_at + N_BUFFER * sizeof(Steps);
    u32 group = blockIdx.x, chunk = p.first + blockIdx.y, head0 = group * PER_GROUP;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    bool has_before = flags & 1, has_after = flags >> 1 & 1;
    u32 warp = threadIdx.x / 32;
    u32 i_part = (warp >= 1) + (warp >= 3) + (warp >= 6), j_part = warp - i_part * (i_part + 1) / 2;
    u32 i0 = i_part * 16, j0 = j_part * 16;
    // Places in dx, db and dc; each scheduler has all rows.
    u32 part = warp / 4, row = (warp % 4 ^ part) * 16, col = part * 16, state_col = part * COLS;
    u32 low = row + own_row(0), high = low + 8;
    const bf16* rows = xbc + (size_t)start * WIDTH;
    const bf16 *x_from = rows + head0 * 64, *dy_from = dy + (size_t)start * D_INNER + head0 * 64;
    size_t state = ((size_t)blockIdx.y * N_HEAD + head0) * N_STATE;
    const bf16 *h_from = h + state, *dh_from = dh + state;
    StepSource source = step_source(steps_at, N_BUFFER, steps, head0, start, n, p.n_tok);
    auto fetch = [&](u32 idx) {
        u32 tile = tiles + idx % N_BUFFER * buffer;
        copy_rows<8>(tile, x_from, WIDTH, n);
        copy_rows<8>(tile + V_TILE, dy_from, D_INNER, n);
        if (has_before) copy_state(tile + 2 * V_TILE, h_from);
        if (has_after) copy_state(tile + 2 * V_TILE + S_TILE, dh_from);
        copy_steps(steps_at + idx % N_BUFFER * sizeof(Steps), source, p.n_tok);
        copies_end();
        x_from += 64;
        dy_from += 64;
        h_from += N_STATE;
        dh_from += N_STATE;
    };
    // Terms that lie in `Sums` when the work of a head is done.
    bool is_entering = threadIdx.x < 64, is_first = is_entering ? has_before : has_after;
    float* term = terms + term_at(is_entering ? 3 : 4, head0, start + threadIdx.x % 64, p.n_tok);
    auto finish = [&](u32 idx) {
        const Sums& sums = *(const Sums*)shared_at(sums_at + idx % 2 * sizeof(Sums));
        u32 tok = threadIdx.x % 64;
        if (threadIdx.x < 128 && tok < n) {
            const float* parts = (is_entering ? sums.entering[0] : sums.leaving[0]) + tok;
            *term = is_first ? (parts[0] + parts[64]) + (parts[128] + parts[192]) : 0.0f;
        }
        term += p.n_tok;
        if (threadIdx.x == 128 && flags == 3) {
            float total = 0.0f;
            for (u32 i = n_square; i < THREADS / 32; i++) total += sums.through[i];
            terms[term_at(5, 0, 0, p.n_tok) + (size_t)chunk * N_HEAD + head0 + idx] = total;
        }
        if (warp == THREADS / 32 - 1) inside(sums, terms, head0 + idx, start, n, p);
    };
    copy_rows<N_PIECE>(bs, rows + column(0, group), WIDTH, n);
    copy_rows<N_PIECE>(cs, rows + column(1, group), WIDTH, n);
    copies_end();
    if (N_BUFFER == 2) fetch(0);
    copies_wait<N_BUFFER - 1>();
    __syncthreads();
    float score[8], dscore[8], dc[COLS / 2], db[COLS / 2];
    clear(score);
    clear(dscore);
    clear(dc);
    clear(db);
    if (warp < n_square) {
        product<16, D_STATE, N_PIECE, false, N_PIECE, false>(
            score, cs + left_at<N_PIECE, false>(i0), bs + right_at<N_PIECE, false>(j0));
    }
    u32 b_there[COLS / 4], c_there[COLS / 4];
#pragma unroll
    for (u32 e = 0; e < COLS / 2; e += 2) {
        u32 at = pair_at<N_PIECE>(row + own_row(e), state_col + own_col(e));
        b_there[e / 2] = *(u32*)shared_at(bs + at);
        c_there[e / 2] = *(u32*)shared_at(cs + at);
    }
    u32 i_at = left_at<8, false>(i0), j_at = right_at<8, false>(j0);
    u32 row_at = left_at<8, false>(row), state_at = right_at<8, false>(state_col);
    u32 b_at = bs + left_at<N_PIECE, false>(row), col_at = right_at<8, true>(col);
    u32 mix_at = mixes + left_at<8, true>(row), own_at = pair_at<8>(low, col + own_col(0));
    u32 square_at = mixes + pair_at<8>(i0 + own_row(0), j0 + own_col(0));
    bf16* dx_low = dxbc + (size_t)(start + low) * WIDTH + head0 * 64 + col + own_col(0);
    const float* skips = steps + 6 * (size_t)N_HEAD * p.n_tok + 1;
    for (u32 idx = 0; idx < PER_GROUP; idx++, dx_low += 64) {
        if (N_BUFFER == 1) {
            __syncthreads();
            fetch(idx);
        }
        copies_wait<0>();
        __syncthreads();
        if (N_BUFFER == 2 && idx + 1 < PER_GROUP) fetch(idx + 1);
        if (idx > 0) finish(idx - 1);
        const Steps& s = *(const Steps*)shared_at(steps_at + idx % N_BUFFER * sizeof(Steps));
        Sums& sums = *(Sums*)shared_at(sums_at + idx % 2 * sizeof(Sums));
        u32 xs = tiles + idx % N_BUFFER * buffer, dys = xs + V_TILE;
        u32 hs = dys + V_TILE, dhs = hs + S_TILE;
        float skip = skips[(head0 + idx) * 2];
        if (warp < n_square) {
            float acc[8], passed[8], cols[4] = {}, got[2] = {};
            clear(acc);
            product<16, 64, 8, false, 8, false>(acc, dys + i_at, xs + j_at);
            decays(passed, s, i0, j0, n);
            if (i_part == j_part) {
#pragma unroll
                for (u32 e = 0; e < 8; e++) {
                    if (own_row(e) != own_col(e)) continue;
                    sums.delta[i0 + own_row(e)] = s.delta[i0 + own_row(e)];
                    sums.dmix[i0 + own_row(e)] = acc[e];
                    if (RANK < 2) sums.diagonal[i0 + own_row(e)] = score[e] * acc[e];
                }
#if RANK > 1
                // All rows of a token.
#pragma unroll
                for (u32 is_high = 0; is_high < 2; is_high++) {
                    u32 row = own_row(is_high * 2);
                    float own = 0.0f;
#pragma unroll
                    for (u32 e = 0; e < 8; e++) {
                        bool is_there = e / 2 % 2 == is_high && is_own(row, own_col(e));
                        own += is_there ? score[e] * acc[e] : 0.0f;
                    }
                    own = quad_sum(own);
                    if (threadIdx.x % 4 == 0) sums.diagonal[i0 + row] = own;
                }
#endif
            }
#pragma unroll
            for (u32 e = 0; e < 8; e += 2) {
                u32 t = e / 4 * 2, is_high = e / 2 % 2;
                float2 delta = weights(s, i0 + own_row(e), j0 + own_col(e));
                float mixed[2];
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    float weight = passed[e + k] * (k == 0 ? delta.x : delta.y);
                    dscore[e + k] += weight * acc[e + k];
                    mixed[k] = weight * score[e + k];
                    // What a token sends itself is no decay.
                    bool is_self = is_own(i0 + own_row(e), j0 + own_col(e + k));
                    float product = is_self ? 0.0f : score[e + k] * acc[e + k];
                    cols[t + k] += passed[e + k] * product;
                    got[is_high] += weight * product;
                }
                *(u32*)shared_at((square_at ^ e / 4 * 16) + is_high * 1024) =
                    floats_to_bf16x2(mixed[0], mixed[1]);
            }
            got[0] = quad_sum(got[0]);
            got[1] = quad_sum(got[1]);
            if (threadIdx.x % 4 == 0) {
                sums.sent_rows[j_part][i0 + own_row(0)] = got[0];
                sums.sent_rows[j_part][i0 + own_row(2)] = got[1];
            }
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    cols[c] += __shfl_xor_sync(0xffffffffu, cols[c], lanes);
                }
                u32 j = j0 + c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2;
                if (threadIdx.x % 32 < 4) sums.sent_cols[i_part][j] = cols[c];
            }
        } else if (flags == 3) {
            float sum = warp_sum(dot_states(hs, dhs, THREADS - n_square * 32));
            if (threadIdx.x % 32 == 0) sums.through[warp] = sum;
        }
        if (has_before) {
            float acc[COLS / 2];
            clear(acc);
            product<COLS, 64, 8, false, 8, false>(acc, dys + row_at, hs + state_at);
            float2 since = make_float2(s.since[low], s.since[high]);
            add_product(dc, sums.entering[part], acc, c_there, low, since, since);
        }
        __syncthreads();
        float dx[8];
        clear(dx);
        if (has_after) {
            product<16, D_STATE, N_PIECE, false, 8, true>(dx, b_at, dhs + col_at);
            float acc[COLS / 2];
            clear(acc);
            product<COLS, 64, 8, false, 8, false>(acc, xs + row_at, dhs + state_at);
            float2 until = make_float2(s.until[low], s.until[high]);
            float2 factor = make_float2(until.x * s.delta[low], until.y * s.delta[high]);
            add_product(db, sums.leaving[part], acc, b_there, low, factor, until);
#pragma unroll
            for (u32 e = 0; e < 8; e++) dx[e] *= e / 2 % 2 == 0 ? factor.x : factor.y;
        }
        // No token is read by an earlier one.
        product<16, 64, 8, true, 8, true>(dx, mix_at, dys + col_at, row);
#pragma unroll
        for (u32 e = 0; e < 8; e += 2) {
            u32 is_high = e / 2 % 2;
            float2 d = unpack(*(u32*)shared_at(dys + (own_at ^ e / 4 * 16) + is_high * 1024));
            u32 bits = floats_to_bf16x2(dx[e] + skip * d.x, dx[e + 1] + skip * d.y);
            bf16* to = dx_low + is_high * 8 * WIDTH + e / 4 * 8;
            if ((is_high ? high : low) < n) *(u32*)to = bits;
        }
    }
    __syncthreads();
    finish(PER_GROUP - 1);
    if (warp < n_square) {
#pragma unroll
        for (u32 e = 0; e < 8; e += 2) {
            *(u32*)shared_at((square_at ^ e / 4 * 16) + e / 2 % 2 * 1024) =
                floats_to_bf16x2(dscore[e], dscore[e + 1]);
        }
    }
    __syncthreads();
    u32 right = right_at<N_PIECE, true>(state_col);
    product<COLS, 64, 8, false, N_PIECE, true>(dc, mixes + row_at, bs + right, 0, row + 16);
    product<COLS, 64, 8, true, N_PIECE, true>(db, mix_at, cs + right, row);
#pragma unroll
    for (u32 e = 0; e < COLS / 2; e += 2) {
        u32 tok = row + own_row(e);
        if (tok >= n) continue;
        bf16* to = dxbc + (size_t)(start + tok) * WIDTH + state_col + own_col(e);
        *(u32*)(to + column(0, group)) = floats_to_bf16x2(db[e], db[e + 1]);
        *(u32*)(to + column(1, group)) = floats_to_bf16x2(dc[e], dc[e + 1]);
    }
}
#endif
