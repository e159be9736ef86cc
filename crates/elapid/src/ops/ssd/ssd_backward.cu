// Backward of state-space duality; behind ssd.cu, which has the tiles and the steps.

// ---- gradient by x ------------------------------------------------------------------------------

#ifdef ENTRY_ssd_dx
// dx = mix^T dy + until delta (b dh) + skip dy, and the terms of decay that leave the chunk.
// `states` are the gradients by the states after each chunk.
KERNEL ssd_dx(const T0* xbc, const float* steps, const u32* table, const T3* dy, const T4* states,
              const float* all_scores, T6* dxbc, float* terms, Params p) {
    __shared__ Shared shared;
    __shared__ Steps s;
    u32 p0 = blockIdx.x * TILE, head = blockIdx.y, chunk = p.first + blockIdx.z;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    const float* scores = all_scores + ((size_t)blockIdx.z * N_GROUP + head / PER_GROUP) * SQUARE;
    load_steps(s, steps, head, start, n, p.n_tok);
    float acc[16];
    zero(acc);
    float* leaving = terms + term_at(3 + N_TILES + blockIdx.x, head, start, p.n_tok);
    if (flags & 2) {
        const T4* state = states + ((size_t)blockIdx.z * N_HEAD + head) * N_STATE;
        times_state(acc, shared, xbc, state, 0, head, p0, start, n);
        emit(shared, acc, [&](u32 tok, u32 col, float4 v) {
            float4 x = zero4();
            size_t row = (size_t)(start + tok) * WIDTH + head * D_HEAD;
            if (tok < n) x = get4(xbc, row, p0 + col, D_HEAD);
            float sum = row_sum(dot4(v, x));
            if (col == 0 && tok < n) leaving[tok] = s.until[tok] * sum;
        });
#pragma unroll
        for (u32 i = 0; i < 16; i++) acc[i] *= s.until[row_at(i)] * s.delta[row_at(i)];
    } else if (threadIdx.x < n) {
        leaving[threadIdx.x] = 0.0f;
    }
    auto dy_at = [&](u32 tok, u32 col) {
        if (tok >= n) return zero4();
        size_t row = (size_t)(start + tok) * D_INNER + head * D_HEAD;
        return get4(dy, row, p0 + col, D_HEAD);
    };
    // No token is read by an earlier one: a warp of MMA begins at its rows.
    u32 begin = MMA && RANK < 2 ? threadIdx.x / 32 % 4 * 16 : 0;
    for (u32 k0 = 0; k0 < n; k0 += STEP) {
        Tiles& tiles = shared.tiles[k0 / STEP % 2];
        stage<false>(tiles.a, [&](u32 i, u32 j) { return mix4(s, scores, k0 + i, j, n); });
        stage<false>(tiles.b, [&](u32 i, u32 col) { return dy_at(k0 + i, col); });
        __syncthreads();
        multiply<false, false>(acc, tiles, begin, n - k0);
    }
    float skip = skip_of(steps, head, p.n_tok);
    emit(shared, acc, [&](u32 tok, u32 col, float4 v) {
        if (tok >= n) return;
        float4 d = dy_at(tok, col);
        v.x += skip * d.x;
        v.y += skip * d.y;
        v.z += skip * d.z;
        v.w += skip * d.w;
        put4(dxbc, (size_t)(start + tok) * WIDTH + head * D_HEAD, p0 + col, D_HEAD, v);
    });
}
#endif

// ---- between the tokens of a chunk --------------------------------------------------------------

#ifdef ENTRY_ssd_inside
// dmix = dy x^T of N_PER heads, one after the other: dscores, summed over them, and the terms of
// ddelta, ddecay and dskip from token to token.
KERNEL ssd_inside(const T0* xbc, const float* steps, const u32* table, const T3* dy,
                  const float* all_scores, float* dscores, float* terms, Params p) {
    __shared__ Shared shared;
    __shared__ Steps s;
    __shared__ float below[4][64];
    u32 block = blockIdx.x, chunk = p.first + blockIdx.z;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1];
    const float* scores =
        all_scores + ((size_t)blockIdx.z * N_GROUP + block * N_PER / PER_GROUP) * SQUARE;
    float score[16], total[16];
    zero(total);
#pragma unroll
    for (u32 i = 0; i < 16; i++) score[i] = scores[row_at(i) * 64 + col_at(i)];
    for (u32 head = block * N_PER; head < (block + 1) * N_PER; head++) {
        load_steps(s, steps, head, start, n, p.n_tok);
        float acc[16];
        zero(acc);
        for (u32 k0 = 0; k0 < D_HEAD; k0 += STEP) {
            Tiles& tiles = shared.tiles[k0 / STEP % 2];
            stage<true>(tiles.a, [&](u32 tok, u32 k) {
                if (tok >= n) return zero4();
                return get4(dy, (size_t)(start + tok) * D_INNER + head * D_HEAD, k0 + k, D_HEAD);
            });
            stage<true>(tiles.b, [&](u32 tok, u32 k) {
                if (tok >= n) return zero4();
                return get4(xbc, (size_t)(start + tok) * WIDTH + head * D_HEAD, k0 + k, D_HEAD);
            });
            __syncthreads();
            multiply<true, true>(acc, tiles, 0, D_HEAD - k0 < STEP ? D_HEAD - k0 : STEP);
        }
        __syncthreads();
        // What token j sends token i, less delta[j].
#pragma unroll
        for (u32 e = 0; e < 16; e++) {
            u32 i = row_at(e), j = col_at(e);
            float sent = 0.0f;
            if (reads(i, j) && i < n) {
                float passed = decay(s, i, j);
                sent = passed * score[e] * acc[e];
                total[e] += passed * weight(s, i, j) * acc[e];
                if (i == j) terms[term_at(2, head, start + i, p.n_tok)] = acc[e];
            }
            shared.out[i][j] = sent;
        }
        __syncthreads();
#if RANK
        // What the rows of a token are to each other is no input and no decay.
        if (threadIdx.x < n) {
            u32 i = threadIdx.x, first = i / RANK * RANK;
            float own = 0.0f;
            for (u32 j = first; j < first + RANK; j++) {
                own += shared.out[i][j];
                shared.out[i][j] = 0.0f;
            }
            terms[own_at(head, start + i, p)] = own;
        }
        __syncthreads();
#endif
        // Sums over the rows from each one on down; a thread has 16 rows of a column.
        u32 j = threadIdx.x % 64, quarter = threadIdx.x / 64;
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 16; i++) sum += shared.out[quarter * 16 + i][j];
        below[quarter][j] = sum;
        __syncthreads();
        sum = 0.0f;
        for (u32 later = 3; later > quarter; later--) sum += below[later][j];
#pragma unroll
        for (u32 back = 1; back <= 16; back++) {
            u32 i = quarter * 16 + 16 - back;
            sum += shared.out[i][j];
            shared.out[i][j] = sum;
            if (i == j && i < n) terms[term_at(0, head, start + i, p.n_tok)] = sum;
        }
        __syncthreads();
        // Sums over the columns before each row; four threads have a row.
        u32 i = threadIdx.x / 4;
        float over = 0.0f;
#pragma unroll
        for (u32 c = 0; c < 16; c++) {
            u32 col = c * 4 + threadIdx.x % 4;
            if (col < i) over += s.delta[col] * shared.out[i][col];
        }
        over += __shfl_xor_sync(0xffffffffu, over, 1);
        over += __shfl_xor_sync(0xffffffffu, over, 2);
        if (threadIdx.x % 4 == 0 && i < n) {
            terms[term_at(1, head, start + i, p.n_tok)] = over;
        }
    }
    float* out = dscores + ((size_t)blockIdx.z * N_BLOCK + block) * SQUARE;
    emit(shared, total, [&](u32 row, u32 col, float4 v) { *(float4*)(out + row * 64 + col) = v; });
}
#endif

// ---- gradients by b and c -----------------------------------------------------------------------

#ifdef ENTRY_ssd_dbc
// A group takes 64 columns of c (PASS 0) or b (PASS 1) of a group of heads in a chunk.
//     dc = dscores b + sum over heads of since dy h^T             `v` is dy, `states` are states
//     db = dscores^T c + sum over heads of (until delta x) dh^T   `v` is xbc, `states` gradients
// PASS 0 also leaves the terms of decay that enter the chunk.
KERNEL ssd_dbc(const T0* xbc, const float* steps, const u32* table, const T3* v, const T4* states,
               const float* all_dscores, T6* dxbc, float* terms, Params p) {
    __shared__ Shared shared;
    __shared__ float halves[2][64];
    const u32 v_width = PASS == 0 ? D_INNER : WIDTH;
    u32 n0 = blockIdx.x * TILE, group = blockIdx.y, chunk = p.first + blockIdx.z;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    u32 to = column(1 - PASS, group), other = column(PASS, group);
    float total[16], c_there[16];
    zero(total);
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        u32 tok = row_at(i), col = n0 + col_at(i);
        c_there[i] = 0.0f;
        if (PASS == 0 && tok < n && col < D_STATE) {
            c_there[i] = load(xbc, (size_t)(start + tok) * WIDTH + to + col);
        }
    }
    u32 turn = 0;
    for (u32 head = group * PER_GROUP; head < (group + 1) * PER_GROUP; head++) {
        float* entering = terms + term_at(3 + blockIdx.x, head, start, p.n_tok);
        if (!(flags >> PASS & 1)) {
            if (PASS == 0 && threadIdx.x < n) entering[threadIdx.x] = 0.0f;
            continue;
        }
        const float* delta = series_at(steps, 0, head, start, p.n_tok);
        const float* since = series_at(steps, 4, head, start, p.n_tok);
        const float* until = series_at(steps, 5, head, start, p.n_tok);
        const T4* state = states + ((size_t)blockIdx.z * N_HEAD + head) * N_STATE;
        float acc[16];
        zero(acc);
        for (u32 k0 = 0; k0 < D_HEAD; k0 += STEP) {
            Tiles& tiles = shared.tiles[turn++ % 2];
            stage<true>(tiles.a, [&](u32 tok, u32 k) {
                if (tok >= n) return zero4();
                float factor = PASS == 0 ? since[tok] : until[tok] * delta[tok];
                size_t row = (size_t)(start + tok) * v_width + head * D_HEAD;
                return scale4(factor, get4(v, row, k0 + k, D_HEAD));
            });
            stage<true>(tiles.b, [&](u32 row, u32 k) {
                if (n0 + row >= D_STATE) return zero4();
                return get4(state, (size_t)(n0 + row) * D_HEAD, k0 + k, D_HEAD);
            });
            __syncthreads();
            multiply<true, true>(acc, tiles, 0, D_HEAD - k0 < STEP ? D_HEAD - k0 : STEP);
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++) total[i] += acc[i];
        if (PASS == 0) {
#pragma unroll
            for (u32 i = 0; i < 16; i++) acc[i] *= c_there[i];
            put_row_sums(halves, acc);
            __syncthreads();
            u32 tok = threadIdx.x;
            if (tok < n) entering[tok] = halves[0][tok] + halves[1][tok];
            // The barrier of the next step stands before the next sums.
        }
    }
    const float* dscores =
        all_dscores + ((size_t)blockIdx.z * N_BLOCK + group * (PER_GROUP / N_PER)) * SQUARE;
    // dscores[i, j] and the three behind it, summed over the blocks of heads.
    auto dscores_at = [&](u32 i, u32 j) {
        float4 sum = zero4();
        if (i >= n || !reads(i, j)) return sum;
        for (u32 block = 0; block < PER_GROUP / N_PER; block++) {
            float4 d = *(const float4*)(dscores + block * SQUARE + i * 64 + j);
            sum.x += d.x;
            sum.y += d.y;
            sum.z += d.z;
            sum.w += d.w;
        }
        return sum;
    };
    for (u32 k0 = 0; k0 < n; k0 += STEP) {
        Tiles& tiles = shared.tiles[turn++ % 2];
        if (PASS == 0) {
            stage<true>(tiles.a, [&](u32 i, u32 j) { return dscores_at(i, k0 + j); });
        } else {
            stage<false>(tiles.a, [&](u32 i, u32 j) { return dscores_at(k0 + i, j); });
        }
        stage<false>(tiles.b, [&](u32 k, u32 col) {
            if (k0 + k >= n) return zero4();
            return get4(xbc, (size_t)(start + k0 + k) * WIDTH + other, n0 + col, D_STATE);
        });
        __syncthreads();
        multiply<PASS == 0, false>(total, tiles, 0, n - k0);
    }
    emit(shared, total, [&](u32 tok, u32 col, float4 d) {
        if (tok < n) put4(dxbc, (size_t)(start + tok) * WIDTH + to, n0 + col, D_STATE, d);
    });
}
#endif

// ---- gradient by step sizes ---------------------------------------------------------------------

#ifdef ENTRY_ssd_finish
// A group of 64 threads takes a chunk of a head: adds up ddecay, makes ddelta the gradient by the
// raw step sizes, and the sums of the chunk for delta_bias, a_log and skip.
KERNEL ssd_finish(const float* terms, const float* steps, const u32* table, T3* draw, float* sums,
                  Params p) {
    __shared__ Steps s;
    __shared__ float first_half, second_half;
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y, i = threadIdx.x;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    load_steps(s, steps, head, start, n, p.n_tok);
    float leaving = 0.0f, entering = 0.0f;
    if (i < n) {
        for (u32 tile = 0; tile < N_TILES; tile++) {
            entering += terms[term_at(3 + tile, head, start + i, p.n_tok)];
        }
        for (u32 tile = 0; tile < P_TILES; tile++) {
            leaving += terms[term_at(3 + N_TILES + tile, head, start + i, p.n_tok)];
        }
    }
    // What passes through the chunk and what earlier tokens send out of it; what enters for later
    // ones.
    float through = 0.0f;
    if (flags == 3) {
        size_t series = (size_t)(3 + N_TILES + P_TILES) * N_HEAD * p.n_tok;
        for (u32 tile = 0; tile < N_TILES * P_TILES; tile++) {
            through += terms[series + ((size_t)tile * p.n_chunk + chunk) * N_HEAD + head];
        }
        through *= s.since[n - 1];
    }
    float upto = sum_upto(leaving * s.delta[i]);
    float before = __shfl_up_sync(0xffffffffu, upto, 1), after = entering;
    if (i % 32 == 0) before = 0.0f;
#pragma unroll
    for (u32 lanes = 1; lanes < 32; lanes *= 2) {
        float other = __shfl_down_sync(0xffffffffu, after, lanes);
        if (i % 32 + lanes < 32) after += other;
    }
    if (i == 31) first_half = upto;
    if (i == 32) second_half = after;
    __syncthreads();
    before += i < 32 ? through : through + first_half;
    if (i < 32) after += second_half;
    float raw_sum = 0.0f, decay_sum = 0.0f, skip_sum = 0.0f;
    if (i < n) {
        u32 tok = start + i;
        float a = steps[6 * (size_t)N_HEAD * p.n_tok + head * 2];
        float inner = terms[term_at(1, head, tok, p.n_tok)];
        float ddecay = a * ((inner + before) + after);
        float ddelta = terms[term_at(0, head, tok, p.n_tok)] + leaving + ddecay;
        raw_sum = ddelta * steps[term_at(1, head, tok, p.n_tok)];
        decay_sum = ddecay * s.delta[i];
        skip_sum = terms[term_at(2, head, tok, p.n_tok)];
        store(draw, (size_t)tok * N_HEAD + head, raw_sum);
    }
    raw_sum = group_sum(raw_sum);
    decay_sum = group_sum(decay_sum);
    skip_sum = group_sum(skip_sum);
    if (i == 0) {
        sums[(size_t)head * p.n_chunk + chunk] = raw_sum;
        sums[(size_t)(N_HEAD + head) * p.n_chunk + chunk] = decay_sum;
        sums[(size_t)(2 * N_HEAD + head) * p.n_chunk + chunk] = skip_sum;
    }
}
#endif

#ifdef ENTRY_ssd_sums
// A group takes a head.
KERNEL ssd_sums(const float* sums, float* ddelta_bias, float* da_log, float* dskip, Params p) {
    u32 head = blockIdx.x;
    float totals[3];
    for (u32 series = 0; series < 3; series++) {
        float sum = 0.0f;
        for (u32 chunk = threadIdx.x; chunk < p.n_chunk; chunk += THREADS) {
            sum += sums[(size_t)(series * N_HEAD + head) * p.n_chunk + chunk];
        }
        totals[series] = group_sum(sum);
    }
    if (threadIdx.x == 0) {
        ddelta_bias[head] = totals[0];
        da_log[head] = totals[1];
        dskip[head] = totals[2];
    }
}
#endif

// ---- few tokens ---------------------------------------------------------------------------------

#ifdef ENTRY_ssd_step
// The recurrence as it is written, for `n_tok` tokens of one segment from row `first` on. A group
// takes 16 columns of a head, a thread every sixteenth row of one of them. A token reads and writes
// the state once: 1.6 MB of a layer with 24 heads of 64 and d_state 128.
KERNEL ssd_step(const T0* xbc, const T1* raw, const T2* delta_bias, const T3* a_log, const T4* skip,
                float* state, T6* y, Params p) {
    __shared__ float parts[16][16];
    u32 head = blockIdx.y, lane = threadIdx.x % 16, part = threadIdx.x / 16;
    u32 col = blockIdx.x * 16 + lane;
    float a = -expf(load(a_log, head));
    float* h_at = state + (size_t)head * N_STATE + col;
    for (u32 tok = p.first; tok < p.first + p.n_tok; tok++) {
        const T0* row = xbc + (size_t)tok * WIDTH;
        float x_raw = load(raw, (size_t)tok * N_HEAD + head) + load(delta_bias, head);
        float size = step_size(x_raw, p.delta_min, p.delta_max).x;
        float passed = expf(size * a), x = 0.0f, sum = 0.0f;
        if (col < D_HEAD) {
            x = load(row, head * D_HEAD + col);
            u32 b = column(0, head / PER_GROUP), c = column(1, head / PER_GROUP);
#pragma unroll 4
            for (u32 i = part; i < D_STATE; i += 16) {
                float h = passed * h_at[i * D_HEAD] + size * load(row, b + i) * x;
                h_at[i * D_HEAD] = h;
                sum += h * load(row, c + i);
            }
        }
        parts[part][lane] = sum;
        __syncthreads();
        if (part == 0 && col < D_HEAD) {
            float total = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 16; i++) total += parts[i][lane];
            store(y, (size_t)tok * D_INNER + head * D_HEAD + col, total + load(skip, head) * x);
        }
        __syncthreads();
    }
}
#endif
