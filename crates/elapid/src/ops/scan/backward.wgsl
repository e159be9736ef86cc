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

var<private> before: array<f32, SUB * D_STATE>; // the states before each row of a sub-chunk
var<private> g: array<f32, D_STATE>;
var<private> da: array<f32, D_STATE>;

const TILE: u32 = 16u;
const LINE: u32 = GROUP + 1u;
var<workgroup> terms: array<f32, 2u * TILE * LINE>;

// The part of db and dc of TILE states from `n0` on, of the channels of a group.
fn add_channels(thread: u32, group: u32, row: u32, n0: u32) {
    workgroupBarrier();
    let n = n0 + thread % TILE;
    if thread < 2u * TILE && n < D_STATE {
        var total = 0.0;
        for (var i = 0u; i < GROUP; i++) { total += terms[thread * LINE + i]; }
        shared_out[((group * p.n_tok + row) * 2u + thread / TILE) * D_STATE + n] = total;
    }
    workgroupBarrier();
}

// One row on the way back, with the states after it in `h` and those before it from `at` on.
fn back(row: u32, at: u32, thread: u32, group: u32, ch: u32) {
    let is_there = ch < D_INNER;
    var step = 0.0;
    var u = 0.0;
    var dout = 0.0;
    let i = row * D_INNER + ch;
    if is_there {
        step = step_in[i];
        u = u_in[i];
        dout = dout_in[i];
    }
    var out = 0.0;
    var g_b = 0.0;
    var q_rate = 0.0;
    for (var n0 = 0u; n0 < D_STATE; n0 += TILE) {
        for (var n = n0; n < min(n0 + TILE, D_STATE); n++) {
            let after = h[n];
            let prior = before[at + n];
            out += after * c[row * D_STATE + n];
            g[n] += dout * c[row * D_STATE + n];
            terms[(n - n0) * LINE + thread] = g[n] * u;
            terms[(TILE + n - n0) * LINE + thread] = dout * after;
            g_b += g[n] * b[row * D_STATE + n];
            g[n] *= exp2(step * rates[n]);
            let q = g[n] * prior;
            q_rate += q * rates[n];
            da[n] += q * step;
            h[n] = prior;
        }
        add_channels(thread, group, row, n0);
    }
    if is_there {
        step_in[i] = q_rate;
        u_in[i] = g_b;
        dout_in[i] = out;
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
            h[n] = 0.0;
            if is_there { h[n] = held_back[state_at(piece.sub + sub - 1u, n, ch)]; }
        }
        for (var i = 0u; i < n_rows; i++) {
            let row = piece.first + first + i;
            for (var n = 0u; n < D_STATE; n++) {
                before[i * D_STATE + n] = h[n];
                if is_there {
                    let decay = exp2(step_in[row * D_INNER + ch] * rates[n]);
                    h[n] = decay * h[n] + u_in[row * D_INNER + ch] * b[row * D_STATE + n];
                }
            }
        }
        for (var i = n_rows; i > 0u; i--) {
            let row = piece.first + first + i - 1u;
            back(row, (i - 1u) * D_STATE, thread, at % N_GROUPS, ch);
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
