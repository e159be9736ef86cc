// Backward of state-space duality; behind ssd.wgsl, which has the tiles and the steps.

// ---- gradient by x ------------------------------------------------------------------------------

@group(0) @binding(6) var<storage, read_write> dxbc: array<f32>; // (n_tok, WIDTH)

// The sum over columns of `values` times `x[tok, ..]`, in `parts`; then series `series` of `terms`.
fn put_row_sums(thread: u32, rows: vec4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        parts[(thread / 16u * 4u + i) * 16u + thread % 16u] = rows[i];
    }
    workgroupBarrier();
}

fn row_sum(row: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += parts[row * 16u + i]; }
    return sum;
}

// dx = mix^T dy + until delta (b dh) + skip dy, and the terms of decay that leave the chunk.
// `v` is dy, `states` the gradients by the states after each chunk.
@compute @workgroup_size(THREADS)
fn ssd_dx(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p0 = group_id.x * TILE;
    let head = group_id.y;
    let chunk = p8.first + group_id.z;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    let has_after = table[4u * chunk + 2u] >= 2u;
    let scores_at = (group_id.z * N_GROUP + head / PER_GROUP) * SQUARE;
    load_steps(thread, head, start, n, p8.n_tok);
    zero_acc();
    let tok0 = thread / 16u * 4u;
    let col0 = p0 + thread % 16u * 4u;
    let leaving = term_at(3u + N_TILES + group_id.x, head, start, p8.n_tok);
    if has_after {
        times_state(thread, 0u, head, p0, start, n, (group_id.z * N_HEAD + head) * N_STATE);
        var rows = vec4<f32>(0.0);
        for (var i = 0u; i < 4u; i++) {
            for (var j = 0u; j < 4u; j++) {
                if tok0 + i < n && col0 + j < D_HEAD {
                    let x = xbc[(start + tok0 + i) * WIDTH + head * D_HEAD + col0 + j];
                    rows[i] += acc[i][j] * x;
                }
            }
            acc[i] *= until[tok0 + i] * delta[tok0 + i];
        }
        put_row_sums(thread, rows);
        if thread < n { terms[leaving + thread] = until[thread] * row_sum(thread); }
    } else {
        if thread < n { terms[leaving + thread] = 0.0; }
    }
    for (var i0 = 0u; i0 < n; i0 += STEP) {
        var a4 = vec4<f32>();
        var b4 = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            let tok = i0 + thread / 16u;
            let r = thread % 16u * 4u + e;
            var a = 0.0;
            var b = 0.0;
            if tok < n {
                if reads(tok, r) { a = mix(tok, r, scores_at); }
                if p0 + r < D_HEAD { b = v[(start + tok) * D_INNER + head * D_HEAD + p0 + r]; }
            }
            a4[e] = a;
            b4[e] = b;
        }
        a_tile[along(thread)] = a4;
        b_tile[along(thread)] = b4;
        workgroupBarrier();
        multiply(thread);
        workgroupBarrier();
    }
    let skip = skip_of(head, p8.n_tok);
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if tok0 + i < n && col0 + j < D_HEAD {
                let dy = v[(start + tok0 + i) * D_INNER + head * D_HEAD + col0 + j];
                let at = (start + tok0 + i) * WIDTH + head * D_HEAD + col0 + j;
                dxbc[at] = acc[i][j] + skip * dy;
            }
        }
    }
}

// ---- between the tokens of a chunk --------------------------------------------------------------

@group(0) @binding(4) var<storage, read> scores_in: array<f32>; // (chunks, N_GROUP, 64, 64)
@group(0) @binding(5) var<storage, read_write> dscores_out: array<f32>; // (chunks, N_BLOCK, 64, 64)
@group(0) @binding(6) var<storage, read_write> terms6: array<f32>; // as `terms`

var<private> dscores_sum: array<vec4<f32>, 4>;

// dmix = dy x^T of N_PER heads, one after the other: dscores, summed over them, and the terms of
// ddelta, ddecay and dskip from token to token. `v` is dy.
@compute @workgroup_size(THREADS)
fn ssd_inside(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let block = group_id.x;
    let chunk = p7.first + group_id.z;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    let ty = thread / 16u;
    let i0 = ty * 4u;
    let j0 = thread % 16u * 4u;
    let scores_at = (group_id.z * N_GROUP + block * N_PER / PER_GROUP) * SQUARE;
    for (var i = 0u; i < 4u; i++) { dscores_sum[i] = vec4<f32>(0.0); }
    for (var head = block * N_PER; head < (block + 1u) * N_PER; head++) {
        load_steps(thread, head, start, n, p7.n_tok);
        zero_acc();
        for (var k0 = 0u; k0 < D_HEAD; k0 += STEP) {
            var a4 = vec4<f32>();
            var b4 = vec4<f32>();
            for (var e = 0u; e < 4u; e++) {
                let tok = thread / 16u * 4u + e;
                let k = k0 + thread % 16u;
                var a = 0.0;
                var b = 0.0;
                if tok < n && k < D_HEAD {
                    a = v[(start + tok) * D_INNER + head * D_HEAD + k];
                    b = xbc[(start + tok) * WIDTH + head * D_HEAD + k];
                }
                a4[e] = a;
                b4[e] = b;
            }
            a_tile[across(thread)] = a4;
            b_tile[across(thread)] = b4;
            workgroupBarrier();
            multiply(thread);
            workgroupBarrier();
        }
        // acc becomes what token j sends token i, less delta[j].
        for (var i = 0u; i < 4u; i++) {
            for (var j = 0u; j < 4u; j++) {
                let dmix = acc[i][j];
                var sent = 0.0;
                if reads(i0 + i, j0 + j) && i0 + i < n {
                    let passed = decay(i0 + i, j0 + j);
                    sent = passed * scores_in[scores_at + (i0 + i) * 64u + j0 + j] * dmix;
                    dscores_sum[i][j] += passed * weight(i0 + i, j0 + j) * dmix;
                    if i0 + i == j0 + j {
                        terms6[term_at(2u, head, start + i0 + i, p7.n_tok)] = dmix;
                    }
                }
                acc[i][j] = sent;
            }
        }
        if RANK > 0u {
            // What the rows of a token are to each other is no input and no decay.
            var rows = vec4<f32>(0.0);
            for (var i = 0u; i < 4u; i++) {
                for (var j = 0u; j < 4u; j++) {
                    if is_own(i0 + i, j0 + j) {
                        rows[i] += acc[i][j];
                        acc[i][j] = 0.0;
                    }
                }
            }
            put_row_sums(thread, rows);
            if thread < n {
                let at = own_at(head, start + thread, p7.n_tok, p7.n_chunk);
                terms6[at] = row_sum(thread);
            }
            workgroupBarrier();
        }
        // Sums over the rows from here on down.
        let column_sums = acc[0] + acc[1] + acc[2] + acc[3];
        for (var j = 0u; j < 4u; j++) { parts[ty * 64u + j0 + j] = column_sums[j]; }
        workgroupBarrier();
        var below = vec4<f32>(0.0);
        for (var t = 15u; t > ty; t--) {
            for (var j = 0u; j < 4u; j++) { below[j] += parts[t * 64u + j0 + j]; }
        }
        workgroupBarrier();
        var rows = vec4<f32>(0.0);
        for (var back = 0u; back < 4u; back++) {
            let i = 3u - back;
            below += acc[i];
            for (var j = 0u; j < 4u; j++) {
                if j0 + j < i0 + i { rows[i] += delta[j0 + j] * below[j]; }
                if j0 + j == i0 + i && i0 + i < n {
                    terms6[term_at(0u, head, start + i0 + i, p7.n_tok)] = below[j];
                }
            }
        }
        put_row_sums(thread, rows);
        if thread < n {
            terms6[term_at(1u, head, start + thread, p7.n_tok)] = row_sum(thread);
        }
    }
    let at = (group_id.z * N_BLOCK + block) * SQUARE;
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            dscores_out[at + (i0 + i) * 64u + j0 + j] = dscores_sum[i][j];
        }
    }
}

// ---- gradients by b and c -----------------------------------------------------------------------

@group(0) @binding(5) var<storage, read> dscores: array<f32>; // (chunks, N_BLOCK, 64, 64)

var<private> total_acc: array<vec4<f32>, 4>;

fn dscore(first: u32, i: u32, j: u32) -> f32 {
    var sum = 0.0;
    for (var block = 0u; block < PER_GROUP / N_PER; block++) {
        sum += dscores[first + block * SQUARE + i * 64u + j];
    }
    return sum;
}

// A group takes 64 columns of c (PASS 0) or b (PASS 1) of a group of heads in a chunk.
//     dc = dscores b + sum over heads of since dy h^T             `v` is dy, `states` are states
//     db = dscores^T c + sum over heads of (until delta x) dh^T   `v` is xbc, `states` gradients
// PASS 0 also leaves the terms of decay that enter the chunk.
@compute @workgroup_size(THREADS)
fn ssd_dbc(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n0 = group_id.x * TILE;
    let group = group_id.y;
    let chunk = p8.first + group_id.z;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    let has_state = (table[4u * chunk + 2u] >> PASS) % 2u == 1u;
    let v_width = select(WIDTH, D_INNER, PASS == 0u);
    let tok0 = thread / 16u * 4u;
    let col0 = n0 + thread % 16u * 4u;
    let to = column(1u - PASS, group);
    for (var i = 0u; i < 4u; i++) { total_acc[i] = vec4<f32>(0.0); }
    for (var head = group * PER_GROUP; head < (group + 1u) * PER_GROUP; head++) {
        let entering = term_at(3u + group_id.x, head, start, p8.n_tok);
        if !has_state {
            if PASS == 0u && thread < n { terms[entering + thread] = 0.0; }
            continue;
        }
        load_steps(thread, head, start, n, p8.n_tok);
        zero_acc();
        let state_at = (group_id.z * N_HEAD + head) * N_STATE;
        for (var k0 = 0u; k0 < D_HEAD; k0 += STEP) {
            var a4 = vec4<f32>();
            var b4 = vec4<f32>();
            for (var e = 0u; e < 4u; e++) {
                let r = thread / 16u * 4u + e;
                let k = k0 + thread % 16u;
                var a = 0.0;
                var b = 0.0;
                if k < D_HEAD {
                    if r < n {
                        var factor = since[r];
                        if PASS == 1u { factor = until[r] * delta[r]; }
                        a = factor * v[(start + r) * v_width + head * D_HEAD + k];
                    }
                    if n0 + r < D_STATE { b = states[state_at + (n0 + r) * D_HEAD + k]; }
                }
                a4[e] = a;
                b4[e] = b;
            }
            a_tile[across(thread)] = a4;
            b_tile[across(thread)] = b4;
            workgroupBarrier();
            multiply(thread);
            workgroupBarrier();
        }
        for (var i = 0u; i < 4u; i++) { total_acc[i] += acc[i]; }
        if PASS == 0u {
            var rows = vec4<f32>(0.0);
            for (var i = 0u; i < 4u; i++) {
                for (var j = 0u; j < 4u; j++) {
                    if tok0 + i < n && col0 + j < D_STATE {
                        rows[i] += acc[i][j] * xbc[(start + tok0 + i) * WIDTH + to + col0 + j];
                    }
                }
            }
            put_row_sums(thread, rows);
            if thread < n { terms[entering + thread] = row_sum(thread); }
        }
    }
    acc = total_acc;
    let first = (group_id.z * N_BLOCK + group * (PER_GROUP / N_PER)) * SQUARE;
    let other = column(PASS, group);
    for (var k0 = 0u; k0 < n; k0 += STEP) {
        var a4 = vec4<f32>();
        var b4 = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            let tok = k0 + thread / 16u;
            let r = thread % 16u * 4u + e;
            var a = 0.0;
            var b = 0.0;
            if tok < n {
                if PASS == 0u && reads(r, tok) { a = dscore(first, r, tok); }
                if PASS == 1u && reads(tok, r) { a = dscore(first, tok, r); }
                if n0 + r < D_STATE { b = xbc[(start + tok) * WIDTH + other + n0 + r]; }
            }
            a4[e] = a;
            b4[e] = b;
        }
        a_tile[along(thread)] = a4;
        b_tile[along(thread)] = b4;
        workgroupBarrier();
        multiply(thread);
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if tok0 + i < n && col0 + j < D_STATE {
                dxbc[(start + tok0 + i) * WIDTH + to + col0 + j] = acc[i][j];
            }
        }
    }
}

// ---- gradient by step sizes ---------------------------------------------------------------------

@group(0) @binding(0) var<storage, read> terms_in: array<f32>; // as `terms`
@group(0) @binding(3) var<storage, read_write> draw: array<f32>; // (n_tok, N_HEAD)
@group(0) @binding(4) var<storage, read_write> sums_out: array<f32>; // (3, N_HEAD, n_chunk)
@group(0) @binding(5) var<uniform> p5: Params;

// A group of 64 threads takes a chunk of a head: adds up ddecay, makes ddelta the gradient by the
// raw step sizes, and the sums of the chunk for delta_bias, a_log and skip.
@compute @workgroup_size(THREADS)
fn ssd_finish(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p5.first + group_id.y;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    load_steps(thread, head, start, n, p5.n_tok);
    var leaving = 0.0;
    var entering = 0.0;
    if thread < n {
        for (var tile = 0u; tile < N_TILES; tile++) {
            entering += terms_in[term_at(3u + tile, head, start + thread, p5.n_tok)];
        }
        for (var tile = 0u; tile < P_TILES; tile++) {
            leaving += terms_in[term_at(3u + N_TILES + tile, head, start + thread, p5.n_tok)];
        }
    }
    parts[thread] = leaving * delta[thread];
    parts[64u + thread] = entering;
    workgroupBarrier();
    if thread == 0u {
        var through = 0.0;
        if table[4u * chunk + 2u] == 3u {
            let series = (3u + N_TILES + P_TILES) * N_HEAD * p5.n_tok;
            for (var tile = 0u; tile < N_TILES * P_TILES; tile++) {
                through += terms_in[series + (tile * p5.n_chunk + chunk) * N_HEAD + head];
            }
            through *= since[n - 1u];
        }
        for (var k = 0u; k < n; k++) {
            let sent = parts[k];
            parts[k] = through;
            through += sent;
        }
        var after = 0.0;
        for (var back = 1u; back <= n; back++) {
            after += parts[64u + n - back];
            parts[64u + n - back] = after;
        }
    }
    workgroupBarrier();
    var sums = vec3<f32>(0.0);
    if thread < n {
        let tok = start + thread;
        let inner = terms_in[term_at(1u, head, tok, p5.n_tok)];
        let a = steps[6u * N_HEAD * p5.n_tok + head * 2u];
        let ddecay = a * ((inner + parts[thread]) + parts[64u + thread]);
        let ddelta = terms_in[term_at(0u, head, tok, p5.n_tok)] + leaving + ddecay;
        let slope = steps[term_at(1u, head, tok, p5.n_tok)];
        draw[tok * N_HEAD + head] = ddelta * slope;
        let dskip = terms_in[term_at(2u, head, tok, p5.n_tok)];
        sums = vec3(ddelta * slope, ddecay * delta[thread], dskip);
    }
    for (var series = 0u; series < 3u; series++) {
        let sum = group_sum(thread, sums[series]);
        if thread == 0u { sums_out[(series * N_HEAD + head) * p5.n_chunk + chunk] = sum; }
    }
}

@group(0) @binding(0) var<storage, read> sums_in: array<f32>; // (3, N_HEAD, n_chunk)
@group(0) @binding(1) var<storage, read_write> ddelta_bias: array<f32>; // (N_HEAD)
@group(0) @binding(2) var<storage, read_write> da_log: array<f32>; // (N_HEAD)
@group(0) @binding(3) var<storage, read_write> dskip: array<f32>; // (N_HEAD)

// A group takes a head.
@compute @workgroup_size(THREADS)
fn ssd_sums(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    var totals = vec3<f32>(0.0);
    for (var series = 0u; series < 3u; series++) {
        var sum = 0.0;
        for (var chunk = thread; chunk < p4.n_chunk; chunk += THREADS) {
            sum += sums_in[(series * N_HEAD + head) * p4.n_chunk + chunk];
        }
        totals[series] = group_sum(thread, sum);
    }
    if thread == 0u {
        ddelta_bias[head] = totals.x;
        da_log[head] = totals.y;
        dskip[head] = totals.z;
    }
}

// ---- few tokens ---------------------------------------------------------------------------------

@group(0) @binding(1) var<storage, read> raw1: array<f32>; // (n_tok, N_HEAD)
@group(0) @binding(2) var<storage, read> delta_bias2: array<f32>; // (N_HEAD)
@group(0) @binding(5) var<storage, read_write> state: array<f32>; // (N_HEAD, D_STATE, D_HEAD)

// The recurrence as it is written, for `n_tok` tokens of one segment from row `first` on. A group
// takes 16 columns of a head, a thread every sixteenth row of one of them.
@compute @workgroup_size(THREADS)
fn ssd_step(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.y;
    let col = group_id.x * 16u + thread % 16u;
    let a = -exp(a_log[head]);
    let state_at = head * N_STATE + col;
    for (var tok = p7.first; tok < p7.first + p7.n_tok; tok++) {
        let row = tok * WIDTH;
        let x_raw = raw1[tok * N_HEAD + head] + delta_bias2[head];
        let size = step_size(x_raw, p7.delta_min, p7.delta_max).x;
        let passed = exp(size * a);
        var x = 0.0;
        var sum = 0.0;
        if col < D_HEAD {
            x = xbc[row + head * D_HEAD + col];
            let b = row + column(0u, head / PER_GROUP);
            let c = row + column(1u, head / PER_GROUP);
            for (var i = thread / 16u; i < D_STATE; i += 16u) {
                let h = passed * state[state_at + i * D_HEAD] + size * xbc[b + i] * x;
                state[state_at + i * D_HEAD] = h;
                sum += h * xbc[c + i];
            }
        }
        parts[thread] = sum;
        workgroupBarrier();
        if thread < 16u && col < D_HEAD {
            var total = 0.0;
            for (var i = 0u; i < 16u; i++) { total += parts[i * 16u + thread]; }
            y[tok * D_INNER + head * D_HEAD + col] = total + skip[head] * x;
        }
        workgroupBarrier();
    }
}
