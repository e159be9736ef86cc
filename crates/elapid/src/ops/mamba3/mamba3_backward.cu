// Backward of mamba3; behind mamba3.cu, which has the rates and angles.

#ifdef ENTRY_mamba3_found
// A group of 64 threads takes a chunk of a head: from the terms of its rows, as `ssd` leaves them,
// to `found`, gradients of its tokens by the weights for later tokens, for themselves, and by the
// log decay; and the sum of those by skip. `table` and n_tok are of rows.
KERNEL mamba3_found(const float* terms, const float* steps, const u32* table, float* found,
                    float* sums, Params p) {
    __shared__ float leaving[64], before[64], after[64];
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y, i = threadIdx.x;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], flags = table[4 * chunk + 2];
    size_t series = (size_t)N_HEAD * p.n_tok, at = (size_t)head * p.n_tok + start + i;
    const float* through_at = terms + (3 + N_TILES + P_TILES) * series;
    const float* own_at = through_at + (size_t)N_TILES * P_TILES * p.n_chunk * N_HEAD;
    float skip = 0.0f;
    if (i < n) {
        float entering = 0.0f, out = 0.0f;
        for (u32 tile = 0; tile < N_TILES; tile++) entering += terms[(3 + tile) * series + at];
        for (u32 tile = 0; tile < P_TILES; tile++) {
            out += terms[(3 + N_TILES + tile) * series + at];
        }
        leaving[i] = out;
        before[i] = out * steps[at];
        after[i] = entering;
        skip = terms[2 * series + at];
    }
    __syncthreads();
    if (i == 0) {
        float sum = 0.0f;
        if (flags == 3) {
            for (u32 tile = 0; tile < N_TILES * P_TILES; tile++) {
                sum += through_at[((size_t)tile * p.n_chunk + chunk) * N_HEAD + head];
            }
            sum *= steps[4 * series + (size_t)head * p.n_tok + start + n - 1];
        }
        for (u32 k = 0; k < n; k++) {
            float sent = before[k];
            before[k] = sum;
            sum += sent;
        }
    }
    if (i == 32) {
        for (u32 k = n - 1; k > 0; k--) after[k - 1] += after[k];
    }
    __syncthreads();
    if (i < n && i % RANK == 0) {
        float input = 0.0f, own = 0.0f;
        for (u32 r = 0; r < RANK; r++) {
            input += terms[at + r] + leaving[i + r];
            own += own_at[at + r];
        }
        size_t n_tok = p.n_tok / RANK, to = head * n_tok + (start + i) / RANK;
        found[to] = input;
        found[N_HEAD * n_tok + to] = own;
        found[2 * N_HEAD * n_tok + to] = terms[series + at] + before[i] + after[i];
    }
    skip = group_sum(skip);
    if (i == 0) sums[(size_t)chunk * 2 * N_HEAD + N_HEAD + head] = skip;
}
#endif

#ifdef ENTRY_mamba3_back
// A group takes a head in a chunk: turns the gradients by k and q back, in place, adds them up for
// the biases, and leaves in `th` the gradients by its angles, summed over later tokens of the
// chunk.
KERNEL mamba3_back(const T0* __restrict__ wide, const T1* __restrict__ raw,
                   const float* __restrict__ packed, const u32* __restrict__ table,
                   const float* __restrict__ starts, T5* __restrict__ dwide,
                   float* __restrict__ th, float* __restrict__ parts, Params p) {
    __shared__ float deltas[64], sums[4][64], turns[64][N_TURNS];
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], quarter = threadIdx.x / 64;
    load_deltas(deltas, raw, packed, head, start, n);
    Part part = part_of(n);
    for (u32 first = 0; first < N_PAIR; first += 64) {
        u32 pair = first + part.lane;
        load_turns(turns, raw, start, n, first);
        float angle = angle_before(sums, deltas, turns, starts, chunk, head, pair, part);
        uint2 at = pair_of(pair);
        float* own = th + (size_t)start * N_TURN + head * N_ANGLE + pair;
        float2 by_bias[2 * RANK] = {};
        float total = 0.0f;
#pragma unroll 4
        for (u32 t = part.begin; t < part.end && pair < N_PAIR; t++) {
            float2 turn = make_float2(1.0f, 0.0f);
            float dth = 0.0f;
            if (pair < N_ANGLE) {
                angle = reduced(fmaf(deltas[t], turns[t][part.lane], angle));
                turn = cos_sin(angle);
            }
#pragma unroll
            for (u32 i = 0; i < 2 * RANK; i++) {
                size_t row = wide_at(1 + i / RANK, (size_t)(start + t) * RANK + i % RANK, head);
                float2 d = load_pair(dwide, row, at);
                if (pair < N_ANGLE) {
                    float2 y = load_pair(wide, row, at);
                    dth += d.y * y.x - d.x * y.y;
                    d = make_float2(d.x * turn.x + d.y * turn.y, d.y * turn.x - d.x * turn.y);
                    store_pair(dwide, row, at, d);
                }
                by_bias[i].x += d.x;
                by_bias[i].y += d.y;
            }
            if (pair < N_ANGLE) {
                own[(size_t)t * N_TURN] = dth;
                total += dth;
            }
        }
        // Sums over the quarters.
        float* to = parts + (size_t)chunk * 2 * N_BIAS;
#pragma unroll
        for (u32 i = 0; i < 4 * RANK; i++) {
            __syncthreads();
            sums[quarter][part.lane] = i % 2 == 0 ? by_bias[i / 2].x : by_bias[i / 2].y;
            __syncthreads();
            if (quarter == 0 && pair < N_PAIR) {
                u32 lane = part.lane, side = i / 2 / RANK, r = i / 2 % RANK;
                to[side * N_BIAS + (head * RANK + r) * D_STATE + (i % 2 == 0 ? at.x : at.y)] =
                    (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
            }
        }
        __syncthreads();
        sums[quarter][part.lane] = total;
        __syncthreads();
        float later = 0.0f;
        for (u32 k = 3; k > quarter; k--) later += sums[k][part.lane];
        for (u32 t = part.end; t > part.begin && pair < N_ANGLE; t--) {
            later += own[(size_t)(t - 1) * N_TURN];
            own[(size_t)(t - 1) * N_TURN] = later;
        }
    }
}
#endif

#ifdef ENTRY_mamba3_after
// Behind `th`: for each chunk, the sum over the later chunks of its segment. A thread takes an
// angle of a segment.
KERNEL mamba3_after(const u32* table, float* th, Params p) {
    float* after = th + (size_t)p.n_tok * N_TURN;
    for (size_t i = thread_of(); i < (size_t)p.n_segment * N_TURN; i += n_threads()) {
        const u32* run = table + 4 * p.n_chunk + i / N_TURN * 2;
        float sum = 0.0f;
        for (u32 chunk = run[0] + run[1]; chunk > run[0]; chunk--) {
            after[(size_t)(chunk - 1) * N_TURN + i % N_TURN] = sum;
            sum += th[(size_t)table[4 * (chunk - 1)] * N_TURN + i % N_TURN];
        }
    }
}
#endif

#ifdef ENTRY_mamba3_before
// Through the token before a segment: the gradient by w of its first token, behind all else in
// `found`, and by mimo_x, as parts behind those of the chunks. A group takes a head of a segment.
KERNEL mamba3_before(const T0* raw, const float* packed, const u32* table, const float* k,
                     const float* v, const float* dh, float* found, float* parts, Params p) {
    u32 head = blockIdx.x, segment = p.first + blockIdx.y;
    u32 tok = table[4 * table[4 * p.n_chunk + 2 * segment]];
    float w = (1.0f - lam_of(raw, tok, head)) * delta_of(raw, packed, tok, head).x;
    const float* d = dh + ((size_t)segment * N_HEAD + head) * N_STATE;
    const float* x = v + ((size_t)segment * N_HEAD + head) * D_HEAD;
    float* to = parts + ((size_t)(p.n_chunk + segment) * N_HEAD + head) * RANK * D_HEAD;
    float dw = 0.0f;
    for (u32 i = threadIdx.x; i < RANK * D_HEAD; i += THREADS) {
        u32 r = i / D_HEAD, col = i % D_HEAD;
        const float* k_there = k + (((size_t)segment * RANK + r) * N_HEAD + head) * D_STATE;
        float sum = 0.0f;
        for (u32 row = 0; row < D_STATE; row++) sum += d[row * D_HEAD + col] * k_there[row];
        dw += sum * x[col] * factor_of(packed, head, r, col);
        if (HAS_MIMO) to[i] = w * sum * x[col];
    }
    dw = group_sum(dw);
    if (threadIdx.x == 0) {
        found[(size_t)3 * N_HEAD * p.n_tok + (size_t)segment * N_HEAD + head] = dw;
    }
}
#endif

#ifdef ENTRY_mamba3_draw
// A group of 64 threads takes a chunk of a head: gradients by raw step sizes, decay rates and trap.
KERNEL mamba3_draw(const T0* raw, const float* packed, const u32* table, const float* found,
                   const float* th, T5* draw, float* sums, Params p) {
    __shared__ float turned[64];
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y, i = threadIdx.x;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1], segment = table[4 * chunk + 2];
    bool is_first = table[4 * chunk + 3] & 1;
    // A warp takes every other token.
    const float* after = th + (size_t)(p.n_tok + chunk) * N_TURN + head * N_ANGLE;
#pragma unroll 4
    for (u32 t = i / 32; t < n; t += 2) {
        const float* own = th + (size_t)(start + t) * N_TURN + head * N_ANGLE;
        float sum = 0.0f;
        for (u32 s = i % 32; s < N_ANGLE; s += 32) {
            sum += turn_of(raw, start + t, s) * (own[s] + after[s]);
        }
        sum = warp_sum(sum);
        if (i % 32 == 0) turned[t] = sum;
    }
    __syncthreads();
    float by_bias = 0.0f;
    if (i < n) {
        u32 tok = start + i;
        size_t series = (size_t)N_HEAD * p.n_tok, at = (size_t)head * p.n_tok + tok;
        float2 delta = delta_of(raw, packed, tok, head), a = a_of(raw, tok, head, p.a_floor);
        float lam = lam_of(raw, tok, head), dw = 0.0f;
        if (i > 0 || !is_first) dw = found[at - 1];
        else if (p.has_before) dw = found[3 * series + (size_t)segment * N_HEAD + head];
        float dgamma = found[series + at] + found[at], dg = found[2 * series + at];
        float ddelta = lam * dgamma + (1.0f - lam) * dw + a.x * dg + TAU * turned[i];
        by_bias = ddelta * delta.y;
        store(draw, (size_t)tok * RAW + head, by_bias);
        store(draw, (size_t)tok * RAW + N_HEAD + head, delta.x * dg * a.y);
        store(draw, (size_t)tok * RAW + 2 * N_HEAD + head,
              delta.x * (dgamma - dw) * lam * (1.0f - lam));
    }
    by_bias = group_sum(by_bias);
    if (i == 0) sums[(size_t)chunk * 2 * N_HEAD + head] = by_bias;
}
#endif

#ifdef ENTRY_mamba3_dangle
// A group takes a chunk: gradients by raw angles, summed over heads.
KERNEL mamba3_dangle(const T0* raw, const float* packed, const u32* table, const float* th,
                     T4* draw, Params p) {
    u32 chunk = p.first + blockIdx.x, start = table[4 * chunk], n = table[4 * chunk + 1];
    for (u32 i = threadIdx.x; i < n * N_ANGLE; i += THREADS) {
        u32 tok = start + i / N_ANGLE, s = i % N_ANGLE;
        const float* own = th + (size_t)tok * N_TURN + s;
        const float* after = th + (size_t)(p.n_tok + chunk) * N_TURN + s;
        float sum = 0.0f, half = turn_of(raw, tok, s);
        for (u32 head = 0; head < N_HEAD; head++) {
            float delta = delta_of(raw, packed, tok, head).x;
            sum += delta * (own[head * N_ANGLE] + after[head * N_ANGLE]);
        }
        store(draw, (size_t)tok * RAW + 3 * N_HEAD + s, TAU * sum * (0.5f - 2.0f * half * half));
    }
}
#endif

#ifdef ENTRY_mamba3_norm
// A group takes a row of b or c in a few tokens: adds the gradients of the heads of its group and
// takes them back through the norm; parts of those by its weight.
KERNEL mamba3_norm(const T0* xbc, const float* packed, const float* ratios, const T3* dwide,
                   T4* dxbc, float* parts, Params p) {
    __shared__ float d[D_STATE], dw[D_STATE];
    size_t piece = group_of() / N_RATIO;
    u32 row = group_of() % N_RATIO, side = row / (RANK * N_GROUP);
    u32 r = row / N_GROUP % RANK, group = row % N_GROUP;
    if (piece * N_TOKENS >= p.n_tok) return;
    const float* w = packed + NORMS + side * D_STATE;
    for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) dw[n] = 0.0f;
    for (size_t tok = piece * N_TOKENS; tok < (piece + 1) * N_TOKENS && tok < p.n_tok; tok++) {
        size_t at = tok * XBC + D_INNER + row * D_STATE;
        float ratio = ratios[tok * N_RATIO + row], sum = 0.0f;
        for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) {
            size_t from = wide_at(1 + side, tok * RANK + r, group * PER_GROUP) + n;
            float all = 0.0f, x = load(xbc, at + n);
            for (u32 head = 0; head < PER_GROUP; head++) all += load(dwide, from + head * D_STATE);
            d[n] = all;
            dw[n] += all * x * ratio;
            sum += all * w[n] * x;
        }
        sum = group_sum(sum) * ratio * ratio / D_STATE;
        for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) {
            store(dxbc, at + n, ratio * (d[n] * w[n] - load(xbc, at + n) * sum));
        }
    }
    float* to = parts + (piece * RANK * N_GROUP + row % (RANK * N_GROUP)) * 2 * D_STATE;
    for (u32 n = threadIdx.x; n < D_STATE; n += THREADS) to[side * D_STATE + n] = dw[n];
}
#endif

#ifdef ENTRY_mamba3_dx
// A group takes a head in a chunk: from the gradients by v to those by x, and parts of those by
// mimo_x.
KERNEL mamba3_dx(const T0* xbc, const float* packed, const u32* table, const T3* dwide, T4* dxbc,
                 float* parts, Params p) {
    u32 head = blockIdx.x, chunk = p.first + blockIdx.y;
    u32 start = table[4 * chunk], n = table[4 * chunk + 1];
    for (u32 i = threadIdx.x; i < n * D_HEAD; i += THREADS) {
        u32 tok = start + i / D_HEAD, col = i % D_HEAD;
        float sum = 0.0f;
        for (u32 r = 0; r < RANK; r++) {
            float dv = load(dwide, wide_at(0, (size_t)tok * RANK + r, head) + col);
            sum += dv * factor_of(packed, head, r, col);
        }
        store(dxbc, (size_t)tok * XBC + head * D_HEAD + col, sum);
    }
    for (u32 i = threadIdx.x; i < RANK * D_HEAD && HAS_MIMO; i += THREADS) {
        u32 r = i / D_HEAD, col = i % D_HEAD;
        float sum = 0.0f;
        for (u32 tok = start; tok < start + n; tok++) {
            float dv = load(dwide, wide_at(0, (size_t)tok * RANK + r, head) + col);
            sum += dv * load(xbc, (size_t)tok * XBC + head * D_HEAD + col);
        }
        parts[((size_t)chunk * N_HEAD + head) * RANK * D_HEAD + i] = sum;
    }
}
#endif
