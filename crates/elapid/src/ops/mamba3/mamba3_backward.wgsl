// Backward of mamba3; behind mamba3.wgsl, which has the rates and angles.

@group(0) @binding(0) var<storage, read> terms: array<f32>; // of `ssd`
@group(0) @binding(1) var<storage, read> steps: array<f32>; // of `ssd`
@group(0) @binding(3) var<storage, read_write> found_out: array<f32>;
@group(0) @binding(4) var<storage, read_write> sums4: array<f32>; // (n_chunk, 2, N_HEAD)

var<workgroup> leaving: array<f32, 64>;

// A group of 64 threads takes a chunk of a head: from the terms of its rows, as `ssd` leaves them,
// to `found`, gradients of its tokens by the weights for later tokens, for themselves, and by the
// log decay; and the sum of those by skip. `table` and n_tok are of rows.
@compute @workgroup_size(THREADS)
fn mamba3_found(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p5.first + group_id.y;
    let start = table2[4u * chunk];
    let n = table2[4u * chunk + 1u];
    let series = N_HEAD * p5.n_tok;
    let at = head * p5.n_tok + start + thread;
    let through_at = (3u + N_TILES + P_TILES) * series;
    let own_at = through_at + N_TILES * P_TILES * p5.n_chunk * N_HEAD;
    var by_skip = 0.0;
    if thread < n {
        var entering = 0.0;
        var out = 0.0;
        for (var tile = 0u; tile < N_TILES; tile++) {
            entering += terms[(3u + tile) * series + at];
        }
        for (var tile = 0u; tile < P_TILES; tile++) {
            out += terms[(3u + N_TILES + tile) * series + at];
        }
        leaving[thread] = out;
        cum[thread] = out * steps[at];
        cum_low[thread] = entering;
        by_skip = terms[2u * series + at];
    }
    workgroupBarrier();
    if thread == 0u {
        var sum = 0.0;
        if table2[4u * chunk + 2u] == 3u {
            for (var tile = 0u; tile < N_TILES * P_TILES; tile++) {
                sum += terms[through_at + (tile * p5.n_chunk + chunk) * N_HEAD + head];
            }
            sum *= steps[4u * series + head * p5.n_tok + start + n - 1u];
        }
        for (var k = 0u; k < n; k++) {
            let sent = cum[k];
            cum[k] = sum;
            sum += sent;
        }
        for (var k = n - 1u; k > 0u; k--) { cum_low[k - 1u] += cum_low[k]; }
    }
    workgroupBarrier();
    if thread < n && thread % RANK == 0u {
        var input = 0.0;
        var own = 0.0;
        for (var r = 0u; r < RANK; r++) {
            input += terms[at + r] + leaving[thread + r];
            own += terms[own_at + at + r];
        }
        let n_tok = p5.n_tok / RANK;
        let to = head * n_tok + (start + thread) / RANK;
        found_out[to] = input;
        found_out[N_HEAD * n_tok + to] = own;
        found_out[2u * N_HEAD * n_tok + to] = terms[series + at] + cum[thread] + cum_low[thread];
    }
    let total = group_sum(thread, by_skip);
    if thread == 0u { sums4[chunk * 2u * N_HEAD + N_HEAD + head] = total; }
}

@group(0) @binding(0) var<storage, read> wide0: array<f32>;
@group(0) @binding(4) var<storage, read> starts4: array<f32>;
@group(0) @binding(5) var<storage, read_write> dwide5: array<f32>;
@group(0) @binding(6) var<storage, read_write> th6: array<f32>;
@group(0) @binding(7) var<storage, read_write> by_bias: array<f32>; // (n_chunk, 2, N_BIAS)

// A group takes a head in a chunk: turns the gradients by k and q back, in place, adds them up for
// the biases, and leaves in `th` the gradients by its angles, summed over later tokens of the
// chunk.
@compute @workgroup_size(THREADS)
fn mamba3_back(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p8.first + group_id.y;
    let start = table3[4u * chunk];
    let n = table3[4u * chunk + 1u];
    let quarter = thread / 64u;
    let lane = thread % 64u;
    load_deltas(thread, head, start, n);
    let begin = n * quarter / 4u;
    let end = n * (quarter + 1u) / 4u;
    for (var first = 0u; first < N_PAIR; first += 64u) {
        let pair = first + lane;
        sum_quarters(thread, pair, start, begin, end);
        var before = 0.0;
        if pair < N_ANGLE {
            before = angle_before(thread, starts4[chunk * N_TURN + head * N_ANGLE + pair]);
        }
        let at = pair_of(pair);
        let own = start * N_TURN + head * N_ANGLE + pair;
        for (var i = 0u; i < 2u * RANK; i++) {
            let side = i / RANK;
            let r = i % RANK;
            var angle = before;
            var bias = vec2(0.0, 0.0);
            if pair < N_PAIR {
                for (var t = begin; t < end; t++) {
                    let row = wide_at(1u + side, (start + t) * RANK + r, head);
                    var d = vec2(dwide5[row + at.x], dwide5[row + at.y]);
                    if pair < N_ANGLE {
                        angle = reduced(fma(deltas[t], turn_of(raw_angle(start + t, pair)), angle));
                        let turn = cos_sin(angle);
                        let dth = d.y * wide0[row + at.x] - d.x * wide0[row + at.y];
                        let to = own + t * N_TURN;
                        if i == 0u {
                            th6[to] = dth;
                        } else {
                            th6[to] += dth;
                        }
                        d = vec2(d.x * turn.x + d.y * turn.y, d.y * turn.x - d.x * turn.y);
                        dwide5[row + at.x] = d.x;
                        dwide5[row + at.y] = d.y;
                    }
                    bias += d;
                }
            }
            // Sums over the quarters.
            let to = chunk * 2u * N_BIAS + side * N_BIAS + (head * RANK + r) * D_STATE;
            for (var half = 0u; half < 2u; half++) {
                workgroupBarrier();
                quarters[thread] = bias[half];
                workgroupBarrier();
                if quarter == 0u && pair < N_PAIR {
                    by_bias[to + at[half]] = (quarters[lane] + quarters[64u + lane])
                        + (quarters[128u + lane] + quarters[192u + lane]);
                }
            }
        }
        var sum = 0.0;
        if pair < N_ANGLE {
            for (var t = end; t > begin; t--) {
                sum += th6[own + (t - 1u) * N_TURN];
                th6[own + (t - 1u) * N_TURN] = sum;
            }
        }
        workgroupBarrier();
        quarters[thread] = sum;
        workgroupBarrier();
        if pair < N_ANGLE {
            var later = 0.0;
            for (var k = 3u; k > quarter; k--) { later += quarters[k * 64u + lane]; }
            for (var t = begin; t < end; t++) { th6[own + t * N_TURN] += later; }
        }
    }
}

@group(0) @binding(1) var<storage, read_write> th1: array<f32>;

// Behind `th`: for each chunk, the sum over the later chunks of its segment. A thread takes an
// angle of a segment.
@compute @workgroup_size(THREADS)
fn mamba3_after(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p2.n_segment * N_TURN; i += n_groups.x * THREADS) {
        let run = 4u * p2.n_chunk + i / N_TURN * 2u;
        let first = table0[run];
        var sum = 0.0;
        for (var chunk = first + table0[run + 1u]; chunk > first; chunk--) {
            th1[(p2.n_tok + chunk - 1u) * N_TURN + i % N_TURN] = sum;
            sum += th1[table0[4u * (chunk - 1u)] * N_TURN + i % N_TURN];
        }
    }
}

@group(0) @binding(5) var<storage, read> dh5: array<f32>; // (n_segment, N_HEAD, N_STATE)
@group(0) @binding(6) var<storage, read_write> found6: array<f32>;
@group(0) @binding(7) var<storage, read_write> by_mimo7: array<f32>; // (.., N_HEAD, RANK, D_HEAD)

// Through the token before a segment: the gradient by w of its first token, behind all else in
// `found`, and by mimo_x, as parts behind those of the chunks. A group takes a head of a segment.
@compute @workgroup_size(THREADS)
fn mamba3_before(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let segment = p8.first + group_id.y;
    let w = first_w(segment, head, p8.n_chunk);
    var dw = 0.0;
    for (var i = thread; i < RANK * D_HEAD; i += THREADS) {
        let r = i / D_HEAD;
        let col = i % D_HEAD;
        let k = ((segment * RANK + r) * N_HEAD + head) * D_STATE;
        let d = (segment * N_HEAD + head) * N_STATE + col;
        var sum = 0.0;
        for (var row = 0u; row < D_STATE; row++) { sum += dh5[d + row * D_HEAD] * k3[k + row]; }
        let x = v4[(segment * N_HEAD + head) * D_HEAD + col];
        dw += sum * x * factor_1(head, r, col);
        if HAS_MIMO == 1u {
            by_mimo7[((p8.n_chunk + segment) * N_HEAD + head) * RANK * D_HEAD + i] = w * sum * x;
        }
    }
    let total = group_sum(thread, dw);
    if thread == 0u { found6[3u * N_HEAD * p8.n_tok + segment * N_HEAD + head] = total; }
}

@group(0) @binding(3) var<storage, read> found3: array<f32>;
@group(0) @binding(4) var<storage, read> th4: array<f32>;
@group(0) @binding(5) var<storage, read_write> draw5: array<f32>; // (n_tok, RAW)
@group(0) @binding(6) var<storage, read_write> sums6: array<f32>; // (n_chunk, 2, N_HEAD)

// A group of 64 threads takes a chunk of a head: gradients by raw step sizes, decay rates and trap.
@compute @workgroup_size(THREADS)
fn mamba3_draw(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p7.first + group_id.y;
    let start = table2[4u * chunk];
    let n = table2[4u * chunk + 1u];
    let segment = table2[4u * chunk + 2u];
    let is_first = (table2[4u * chunk + 3u] & 1u) != 0u;
    var by_delta_bias = 0.0;
    if thread < n {
        let tok = start + thread;
        let series = N_HEAD * p7.n_tok;
        let at = head * p7.n_tok + tok;
        let delta = delta_of_0(tok, head);
        let a = a_of(raw0[tok * RAW + N_HEAD + head], p7.a_floor);
        let lam = lam_of_0(tok, head);
        var dw = 0.0;
        if thread > 0u || !is_first {
            dw = found3[at - 1u];
        } else if p7.has_before == 1u {
            dw = found3[3u * series + segment * N_HEAD + head];
        }
        let dgamma = found3[series + at] + found3[at];
        let dg = found3[2u * series + at];
        var turned = 0.0;
        for (var s = 0u; s < N_ANGLE; s++) {
            let th = th4[tok * N_TURN + head * N_ANGLE + s]
                + th4[(p7.n_tok + chunk) * N_TURN + head * N_ANGLE + s];
            turned += turn_of(raw0[tok * RAW + 3u * N_HEAD + s]) * th;
        }
        let ddelta = lam * dgamma + (1.0 - lam) * dw + a.x * dg + TAU * turned;
        by_delta_bias = ddelta * delta.y;
        draw5[tok * RAW + head] = by_delta_bias;
        draw5[tok * RAW + N_HEAD + head] = delta.x * dg * a.y;
        draw5[tok * RAW + 2u * N_HEAD + head] = delta.x * (dgamma - dw) * lam * (1.0 - lam);
    }
    let total = group_sum(thread, by_delta_bias);
    if thread == 0u { sums6[chunk * 2u * N_HEAD + head] = total; }
}

@group(0) @binding(3) var<storage, read> th3: array<f32>;
@group(0) @binding(4) var<storage, read_write> draw4: array<f32>; // (n_tok, RAW)

// A group takes a chunk: gradients by raw angles, summed over heads.
@compute @workgroup_size(THREADS)
fn mamba3_dangle(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let chunk = p5.first + group_id.x;
    let start = table2[4u * chunk];
    let n = table2[4u * chunk + 1u];
    for (var i = thread; i < n * N_ANGLE; i += THREADS) {
        let tok = start + i / N_ANGLE;
        let s = i % N_ANGLE;
        let half = turn_of(raw0[tok * RAW + 3u * N_HEAD + s]);
        var sum = 0.0;
        for (var head = 0u; head < N_HEAD; head++) {
            let th = th3[tok * N_TURN + head * N_ANGLE + s]
                + th3[(p5.n_tok + chunk) * N_TURN + head * N_ANGLE + s];
            sum += delta_of_0(tok, head).x * th;
        }
        draw4[tok * RAW + 3u * N_HEAD + s] = TAU * sum * (0.5 - 2.0 * half * half);
    }
}

@group(0) @binding(2) var<storage, read> ratios2: array<f32>;
@group(0) @binding(3) var<storage, read> dwide3: array<f32>;
@group(0) @binding(4) var<storage, read_write> dxbc4: array<f32>; // (n_tok, XBC)
@group(0) @binding(5) var<storage, read_write> parts5: array<f32>;

var<workgroup> d_row: array<f32, D_STATE>;
var<workgroup> dw_row: array<f32, D_STATE>;

// A group takes a row of b or c in a few tokens: adds the gradients of the heads of its group and
// takes them back through the norm; parts of those by its weight.
@compute @workgroup_size(THREADS)
fn mamba3_norm(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let piece = group_of(group_id, n_groups) / N_RATIO;
    let row = group_of(group_id, n_groups) % N_RATIO;
    let side = row / (RANK * N_GROUP);
    let r = row / N_GROUP % RANK;
    let group = row % N_GROUP;
    if piece * N_TOKENS >= p6.n_tok { return; }
    let w = NORMS + side * D_STATE;
    for (var n = thread; n < D_STATE; n += THREADS) { dw_row[n] = 0.0; }
    let end = min(p6.n_tok, (piece + 1u) * N_TOKENS);
    for (var tok = piece * N_TOKENS; tok < end; tok++) {
        let at = tok * XBC + D_INNER + row * D_STATE;
        let ratio = ratios2[tok * N_RATIO + row];
        var sum = 0.0;
        for (var n = thread; n < D_STATE; n += THREADS) {
            let row_at = wide_at(1u + side, tok * RANK + r, group * PER_GROUP) + n;
            let x = xbc[at + n];
            var total = 0.0;
            for (var head = 0u; head < PER_GROUP; head++) {
                total += dwide3[row_at + head * D_STATE];
            }
            d_row[n] = total;
            dw_row[n] += total * x * ratio;
            sum += total * packed1[w + n] * x;
        }
        let share = group_sum(thread, sum) * ratio * ratio / f32(D_STATE);
        for (var n = thread; n < D_STATE; n += THREADS) {
            dxbc4[at + n] = ratio * (d_row[n] * packed1[w + n] - xbc[at + n] * share);
        }
    }
    let to = (piece * RANK * N_GROUP + row % (RANK * N_GROUP)) * 2u * D_STATE + side * D_STATE;
    for (var n = thread; n < D_STATE; n += THREADS) { parts5[to + n] = dw_row[n]; }
}

// A group takes a head in a chunk: from the gradients by v to those by x, and parts of those by
// mimo_x.
@compute @workgroup_size(THREADS)
fn mamba3_dx(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p6.first + group_id.y;
    let start = table2[4u * chunk];
    let n = table2[4u * chunk + 1u];
    for (var i = thread; i < n * D_HEAD; i += THREADS) {
        let tok = start + i / D_HEAD;
        let col = i % D_HEAD;
        var sum = 0.0;
        for (var r = 0u; r < RANK; r++) {
            let dv = dwide3[wide_at(0u, tok * RANK + r, head) + col];
            sum += dv * factor_1(head, r, col);
        }
        dxbc4[tok * XBC + head * D_HEAD + col] = sum;
    }
    if HAS_MIMO == 1u {
        for (var i = thread; i < RANK * D_HEAD; i += THREADS) {
            let r = i / D_HEAD;
            let col = i % D_HEAD;
            var sum = 0.0;
            for (var tok = start; tok < start + n; tok++) {
                let dv = dwide3[wide_at(0u, tok * RANK + r, head) + col];
                sum += dv * xbc[tok * XBC + head * D_HEAD + col];
            }
            parts5[(chunk * N_HEAD + head) * RANK * D_HEAD + i] = sum;
        }
    }
}
