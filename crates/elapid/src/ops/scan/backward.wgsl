// Backward of the selective scan for eight buffers to a kernel; goes with scan.wgsl.
//
// scan_open makes, of each number of x: the step, u = step x, and dout. scan_backward puts the sums
// over states in their place, q . rate, g . b and c . h; scan_finish puts the gradients there.

@group(0) @binding(3) var<storage, read> gate_open: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(4) var<storage, read> dy_open: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(5) var<storage, read_write> one: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(6) var<storage, read_write> two: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(7) var<storage, read_write> three: array<f32>; // (n_tok, D_INNER)

@compute @workgroup_size(THREADS)
fn scan_open(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n_tok * D_INNER; i += n_groups.x * THREADS) {
        let step = softplus(delta[i] + coef(BIAS + i % D_INNER));
        one[i] = step;
        two[i] = step * x[i];
        var dout = dy_open[i];
        if HAS_GATE == 1u { dout *= gate_open[i] * sigmoid(gate_open[i]); }
        three[i] = dout;
    }
}

@compute @workgroup_size(THREADS)
fn scan_finish(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n_tok * D_INNER; i += n_groups.x * THREADS) {
        let z = delta[i] + coef(BIAS + i % D_INNER);
        let skip = coef(SKIP + i % D_INNER);
        let q_a = one[i] * LN_2;
        let g_b = two[i];
        let out = three[i] + skip * x[i];
        var dout = dy_open[i];
        if HAS_GATE == 1u {
            let gate = gate_open[i];
            let s = sigmoid(gate);
            three[i] = dout * out * s * (1.0 + gate * (1.0 - s));
            dout *= gate * s;
        }
        one[i] = (x[i] * g_b + q_a) * sigmoid(z);
        two[i] = dout * skip + softplus(z) * g_b;
    }
}

@group(0) @binding(0) var<storage, read_write> step_in: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(1) var<storage, read_write> u_in: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(5) var<storage, read_write> dout_in: array<f32>; // (n_tok, D_INNER)
// (n_subs + n_pieces) states: before each sub-chunk; then of each piece the gradient behind it on
// entry, its part of the gradient by the rates on exit.
@group(0) @binding(6) var<storage, read_write> held_back: array<f32>;
// (N_GROUPS, n_tok, 2, D_STATE): parts of db and dc.
@group(0) @binding(7) var<storage, read_write> shared_out: array<f32>;

// The states before each row of a sub-chunk, and behind the last.
var<private> before: array<f32, (SUB + 1u) * D_STATE>;
var<private> g: array<f32, D_STATE>;
var<private> da: array<f32, D_STATE>;

const TILE: u32 = 4u;
// Terms of db and dc of TILE states, of every channel; then sums of eight of them. Of four rows
// each.
var<workgroup> terms: array<vec4<f32>, 2u * TILE * GROUP>;
var<workgroup> sums: array<vec4<f32>, 2u * TILE * 8u>;

// Writes db and dc of TILE states from `n0` on and four rows, the part of the channels of a group.
fn add_channels(thread: u32, group: u32, row: u32, n_rows: u32, n0: u32) {
    workgroupBarrier();
    for (var at = thread; at < 2u * TILE * 8u; at += GROUP) {
        var sum = vec4<f32>();
        for (var i = at % 8u; i < GROUP; i += 8u) { sum += terms[at / 8u * GROUP + i]; }
        sums[at] = sum;
    }
    workgroupBarrier();
    let which = thread / 4u;
    let r = thread % 4u;
    let n = n0 + which % TILE;
    if which < 2u * TILE && n < D_STATE && r < n_rows {
        var total = 0.0;
        for (var i = 0u; i < 8u; i++) { total += sums[which * 8u + i][r]; }
        shared_out[((group * p.n_tok + row + r) * 2u + which / TILE) * D_STATE + n] = total;
    }
}

// What a channel has of four rows, and what it finds.
struct Four {
    step: vec4<f32>,
    u: vec4<f32>,
    dout: vec4<f32>,
    out: vec4<f32>,
    g_b: vec4<f32>,
    q_rate: vec4<f32>,
    db: vec4<f32>,
    dc: vec4<f32>,
}

// State `n` at row `r` of four, the states before which are number `i`; b and c are those of `row`.
fn back(four: ptr<function, Four>, n: u32, r: u32, i: u32, row: u32) {
    let prior = before[i * D_STATE + n];
    let after = before[(i + 1u) * D_STATE + n];
    let c_n = c[row * D_STATE + n];
    let dout = (*four).dout[r];
    let step = (*four).step[r];
    (*four).out[r] += after * c_n;
    (*four).dc[r] = dout * after;
    let behind = g[n] + dout * c_n;
    (*four).db[r] = behind * (*four).u[r];
    (*four).g_b[r] += behind * b[row * D_STATE + n];
    g[n] = behind * exp2(step * rates[n]);
    let q = g[n] * prior;
    (*four).q_rate[r] += q * rates[n];
    da[n] += q * step;
}

// Up to four rows of the backward pass, `i` the first of them in its sub-chunk. A row that is not
// there has a step of zero and takes nothing.
fn back_four(i: u32, row: u32, n_rows: u32, thread: u32, group: u32, ch: u32) {
    var four = Four();
    let n = select(0u, n_rows, ch < D_INNER);
    for (var r = 0u; r < n; r++) {
        let at = (row + r) * D_INNER + ch;
        four.step[r] = step_in[at];
        four.u[r] = u_in[at];
        four.dout[r] = dout_in[at];
    }
    let last = row + n_rows - 1u;
    for (var n0 = 0u; n0 < D_STATE; n0 += TILE) {
        for (var k = 0u; k < TILE; k++) {
            four.db = vec4<f32>();
            four.dc = vec4<f32>();
            if n0 + k < D_STATE {
                back(&four, n0 + k, 3u, i + 3u, min(row + 3u, last));
                back(&four, n0 + k, 2u, i + 2u, min(row + 2u, last));
                back(&four, n0 + k, 1u, i + 1u, min(row + 1u, last));
                back(&four, n0 + k, 0u, i, row);
            }
            terms[k * GROUP + thread] = four.db;
            terms[(TILE + k) * GROUP + thread] = four.dc;
        }
        add_channels(thread, group, row, n_rows, n0);
    }
    for (var r = 0u; r < n; r++) {
        let at = (row + r) * D_INNER + ch;
        step_in[at] = four.q_rate[r];
        u_in[at] = four.g_b[r];
        dout_in[at] = four.out[r];
    }
}

@compute @workgroup_size(THREADS)
fn scan_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let at = group_of(group_id, n_groups);
    if at >= p.n_pieces * N_GROUPS { return; }
    let piece = piece_of(at, p);
    let ch = piece.ch + thread;
    let is_there = ch < D_INNER;
    load_rates(min(ch, D_INNER - 1u));
    let slot = p.n_subs + piece.idx;
    for (var n = 0u; n < D_STATE; n++) {
        da[n] = 0.0;
        g[n] = 0.0;
        if (p.flags & READ) != 0u && is_there { g[n] = held_back[state_at(slot, n, ch)]; }
    }
    for (var sub = (piece.n_rows + SUB - 1u) / SUB; sub > 0u; sub--) {
        let first = (sub - 1u) * SUB;
        let n_rows = min(SUB, piece.n_rows - first);
        for (var n = 0u; n < D_STATE; n++) {
            before[n] = 0.0;
            if is_there { before[n] = held_back[state_at(piece.sub + sub - 1u, n, ch)]; }
        }
        for (var i = 0u; i < n_rows; i++) {
            let row = piece.first + first + i;
            var step = 0.0;
            var u = 0.0;
            if is_there {
                step = step_in[row * D_INNER + ch];
                u = u_in[row * D_INNER + ch];
            }
            for (var n = 0u; n < D_STATE; n++) {
                let h = exp2(step * rates[n]) * before[i * D_STATE + n];
                before[(i + 1u) * D_STATE + n] = h + u * b[row * D_STATE + n];
            }
        }
        for (var i = (n_rows + 3u) / 4u * 4u; i > 0u; i -= 4u) {
            let row = piece.first + first + i - 4u;
            back_four(i - 4u, row, min(4u, n_rows - (i - 4u)), thread, at % N_GROUPS, ch);
        }
    }
    if is_there {
        for (var n = 0u; n < D_STATE; n++) { held_back[state_at(slot, n, ch)] = da[n]; }
    }
}

@group(0) @binding(1) var<storage, read> gate_sum: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(2) var<storage, read> dy_sum: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(3) var<storage, read> ddelta_sum: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(4) var<storage, read_write> parts_out: array<f32>; // (n_parts, 2, D_INNER)
@group(0) @binding(5) var<uniform> p_part: Params;

// dskip and ddelta_bias over N_ROWS rows.
@compute @workgroup_size(THREADS)
fn scan_part(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let ch = group_id.x * THREADS + thread;
    if ch >= D_INNER { return; }
    let first = group_id.y * N_ROWS;
    var dskip = 0.0;
    var dbias = 0.0;
    for (var row = first; row < min(first + N_ROWS, p_part.n_tok); row++) {
        let i = row * D_INNER + ch;
        var dout = dy_sum[i];
        if HAS_GATE == 1u { dout *= gate_sum[i] * sigmoid(gate_sum[i]); }
        dskip += dout * x[i];
        dbias += ddelta_sum[i];
    }
    parts_out[2u * group_id.y * D_INNER + ch] = dskip;
    parts_out[(2u * group_id.y + 1u) * D_INNER + ch] = dbias;
}
