// Selective scan; see mod.rs and gpu.rs. A thread takes one channel of a piece, some rows of one
// segment, with its D_STATE states in registers.
//
// `coefs` holds, behind one another, as bits of f32 and u32:
//     (D_STATE, D_INNER)  decay per unit of delta as a power of two, -exp(a_log) / ln 2
//     (2, D_INNER)        delta_bias, skip
//     (n_pieces, 4)       first row, rows, first sub-chunk, segment
//     (n_segments, 2)     first piece, pieces
// States are (slot, D_STATE, D_INNER). A sub-chunk is SUB rows of a piece, or what is left of it.
// HAS_GATE, HAS_BIAS: 1 or 0; another buffer takes the place of what is not there.

struct Params {
    n_pieces: u32,
    n_segments: u32,
    // The piece where there is no table (n_pieces is 0).
    first: u32,
    n_rows: u32,
    n_tok: u32,
    n_subs: u32,
    n_parts: u32,
    flags: u32,
}

const READ: u32 = 1u; // states are there on entry, else they are zero
const WRITE: u32 = 2u; // states are wanted on exit
const BIAS: u32 = D_STATE * D_INNER;
const SKIP: u32 = BIAS + D_INNER;
const TABLE: u32 = SKIP + D_INNER;
const N_GROUPS: u32 = (D_INNER + GROUP - 1u) / GROUP;
const LN_2: f32 = 0.6931471805599453;

// `ch` is the channel of the first thread.
struct Piece { idx: u32, first: u32, n_rows: u32, sub: u32, ch: u32 }

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(1) var<storage, read> delta: array<f32>; // (n_tok, D_INNER), raw
@group(0) @binding(2) var<storage, read> coefs: array<u32>;
@group(0) @binding(3) var<storage, read> b: array<f32>; // (n_tok, D_STATE)
@group(0) @binding(4) var<storage, read> c: array<f32>; // (n_tok, D_STATE)
@group(0) @binding(5) var<storage, read> gate: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(7) var<storage, read_write> state: array<f32>; // (n_pieces), before and after
@group(0) @binding(8) var<uniform> p: Params;

var<private> rates: array<f32, D_STATE>;
var<private> h: array<f32, D_STATE>;

fn coef(i: u32) -> f32 { return bitcast<f32>(coefs[i]); }

// The piece of a workgroup: channels of a piece lie side by side.
fn piece_of(group: u32, params: Params) -> Piece {
    let idx = group / N_GROUPS;
    let ch = (group % N_GROUPS) * GROUP;
    if params.n_pieces == 0u { return Piece(idx, params.first, params.n_rows, 0u, ch); }
    let at = TABLE + 4u * min(idx, params.n_pieces - 1u);
    return Piece(idx, coefs[at], coefs[at + 1u], coefs[at + 2u], ch);
}

fn state_at(slot: u32, n: u32, ch: u32) -> u32 { return (slot * D_STATE + n) * D_INNER + ch; }

fn load_rates(ch: u32) {
    for (var n = 0u; n < D_STATE; n++) { rates[n] = coef(n * D_INNER + ch); }
}

// Softplus without loss of digits where it is small: a polynomial in e = exp(-|z|).
fn softplus(z: f32) -> f32 {
    let e = exp(-abs(z));
    var q = 5.3648297e-3;
    q = q * e - 3.0065814e-2;
    q = q * e + 7.920457e-2;
    q = q * e - 1.3753805e-1;
    q = q * e + 1.9153656e-1;
    q = q * e - 2.4857163e-1;
    q = q * e + 3.3321324e-1;
    q = q * e - 4.9999648e-1;
    return max(z, 0.0) + (q * e * e + e);
}

// The step of a row.
fn step_of(row: u32, ch: u32) -> f32 {
    return softplus(delta[row * D_INNER + ch] + coef(BIAS + ch));
}

@compute @workgroup_size(THREADS)
fn scan_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let piece = piece_of(group_of(group_id, n_groups), p);
    let ch = piece.ch + thread;
    if ch >= D_INNER || piece.idx >= max(p.n_pieces, 1u) { return; }
    load_rates(ch);
    for (var n = 0u; n < D_STATE; n++) {
        h[n] = 0.0;
        if (p.flags & READ) != 0u { h[n] = state[state_at(piece.idx, n, ch)]; }
    }
    let skip = coef(SKIP + ch);
    for (var row = piece.first; row < piece.first + piece.n_rows; row++) {
        let i = row * D_INNER + ch;
        let step = step_of(row, ch);
        let u = step * x[i];
        var out = 0.0;
        for (var n = 0u; n < D_STATE; n++) {
            h[n] = exp2(step * rates[n]) * h[n] + u * b[row * D_STATE + n];
            out += h[n] * c[row * D_STATE + n];
        }
        out += skip * x[i];
        if HAS_GATE == 1u { out *= gate[i] * sigmoid(gate[i]); }
        y[i] = out;
    }
    if (p.flags & WRITE) != 0u {
        for (var n = 0u; n < D_STATE; n++) { state[state_at(piece.idx, n, ch)] = h[n]; }
    }
}

@group(0) @binding(4) var<storage, read_write> ends: array<f32>; // (n_pieces)
@group(0) @binding(5) var<storage, read_write> totals: array<f32>; // (n_pieces, D_INNER)
@group(0) @binding(6) var<uniform> p_ends: Params;

// Of each piece, the state it ends with from zero, and the sum of its steps: their decay.
@compute @workgroup_size(THREADS)
fn scan_ends(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let piece = piece_of(group_of(group_id, n_groups), p_ends);
    let ch = piece.ch + thread;
    if ch >= D_INNER || piece.idx >= p_ends.n_pieces { return; }
    load_rates(ch);
    for (var n = 0u; n < D_STATE; n++) { h[n] = 0.0; }
    var total = 0.0;
    for (var row = piece.first; row < piece.first + piece.n_rows; row++) {
        let step = step_of(row, ch);
        let u = step * x[row * D_INNER + ch];
        total += step;
        for (var n = 0u; n < D_STATE; n++) {
            h[n] = exp2(step * rates[n]) * h[n] + u * b[row * D_STATE + n];
        }
    }
    for (var n = 0u; n < D_STATE; n++) { ends[state_at(piece.idx, n, ch)] = h[n]; }
    totals[piece.idx * D_INNER + ch] = total;
}

@group(0) @binding(0) var<storage, read> totals_in: array<f32>; // (n_pieces, D_INNER)
@group(0) @binding(1) var<storage, read> entry: array<f32>; // (n_segments), states
@group(0) @binding(3) var<storage, read_write> starts: array<f32>; // (n_pieces): ends, then starts
@group(0) @binding(4) var<uniform> p_carry: Params;

// From the ends of pieces to the states they start with.
@compute @workgroup_size(THREADS)
fn scan_carry(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_of(group_id, n_groups) * THREADS + thread;
    if i >= p_carry.n_segments * BIAS { return; }
    let ch = i % D_INNER;
    let at = TABLE + 4u * p_carry.n_pieces + 2u * (i / BIAS);
    let rate = coef(i % BIAS);
    var before = 0.0;
    if (p_carry.flags & READ) != 0u { before = entry[i]; }
    for (var piece = coefs[at]; piece < coefs[at] + coefs[at + 1u]; piece++) {
        let slot = piece * BIAS + i % BIAS;
        let end = starts[slot];
        starts[slot] = before;
        before = exp2(rate * totals_in[piece * D_INNER + ch]) * before + end;
    }
}

@group(0) @binding(4) var<storage, read> start_in: array<f32>; // (n_pieces), states
// (n_subs + n_pieces) states: before each sub-chunk; then of each piece, see below.
@group(0) @binding(5) var<storage, read_write> held: array<f32>;

// The states before each sub-chunk.
@compute @workgroup_size(THREADS)
fn scan_states(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let piece = piece_of(group_of(group_id, n_groups), p_ends);
    let ch = piece.ch + thread;
    if ch >= D_INNER || piece.idx >= p_ends.n_pieces { return; }
    load_rates(ch);
    for (var n = 0u; n < D_STATE; n++) {
        h[n] = 0.0;
        if (p_ends.flags & READ) != 0u { h[n] = start_in[state_at(piece.idx, n, ch)]; }
    }
    for (var i = 0u; i < piece.n_rows; i++) {
        if i % SUB == 0u {
            let slot = piece.sub + i / SUB;
            for (var n = 0u; n < D_STATE; n++) { held[state_at(slot, n, ch)] = h[n]; }
        }
        let row = piece.first + i;
        let step = step_of(row, ch);
        let u = step * x[row * D_INNER + ch];
        for (var n = 0u; n < D_STATE; n++) {
            h[n] = exp2(step * rates[n]) * h[n] + u * b[row * D_STATE + n];
        }
    }
}

@group(0) @binding(0) var<storage, read> dy_ends: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(3) var<storage, read> c_ends: array<f32>; // (n_tok, D_STATE)
@group(0) @binding(4) var<storage, read> gate_ends: array<f32>; // (n_tok, D_INNER)

// Of each piece, the gradient it sends to the state before it, from zero behind it.
@compute @workgroup_size(THREADS)
fn scan_ends_back(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let piece = piece_of(group_of(group_id, n_groups), p_ends);
    let ch = piece.ch + thread;
    if ch >= D_INNER || piece.idx >= p_ends.n_pieces { return; }
    load_rates(ch);
    for (var n = 0u; n < D_STATE; n++) { h[n] = 0.0; }
    for (var i = piece.n_rows; i > 0u; i--) {
        let row = piece.first + i - 1u;
        let step = step_of(row, ch);
        var dout = dy_ends[row * D_INNER + ch];
        if HAS_GATE == 1u {
            let z = gate_ends[row * D_INNER + ch];
            dout *= z * sigmoid(z);
        }
        for (var n = 0u; n < D_STATE; n++) {
            h[n] = exp2(step * rates[n]) * (h[n] + dout * c_ends[row * D_STATE + n]);
        }
    }
    let slot = p_ends.n_subs + piece.idx;
    for (var n = 0u; n < D_STATE; n++) { held[state_at(slot, n, ch)] = h[n]; }
}

@group(0) @binding(1) var<storage, read_write> held_carry: array<f32>; // as `held`
@group(0) @binding(3) var<uniform> p_carry_back: Params;

// From there to the gradient of the state behind each piece.
@compute @workgroup_size(THREADS)
fn scan_carry_back(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = group_of(group_id, n_groups) * THREADS + thread;
    if i >= p_carry_back.n_segments * BIAS { return; }
    let ch = i % D_INNER;
    let at = TABLE + 4u * p_carry_back.n_pieces + 2u * (i / BIAS);
    let rate = coef(i % BIAS);
    var behind = 0.0;
    for (var left = coefs[at + 1u]; left > 0u; left--) {
        let piece = coefs[at] + left - 1u;
        let slot = (p_carry_back.n_subs + piece) * BIAS + i % BIAS;
        let end = held_carry[slot];
        held_carry[slot] = behind;
        behind = exp2(rate * totals_in[piece * D_INNER + ch]) * behind + end;
    }
}

@group(0) @binding(0) var<storage, read> a_log: array<f32>; // (D_INNER, D_STATE)
@group(0) @binding(1) var<storage, read> bias_in: array<f32>; // (D_INNER)
@group(0) @binding(2) var<storage, read> skip_in: array<f32>; // (D_INNER)
@group(0) @binding(3) var<storage, read> table_in: array<u32>; // (n_parts)
@group(0) @binding(4) var<storage, read_write> coefs_out: array<u32>;
@group(0) @binding(5) var<uniform> p_coefs: Params;

@compute @workgroup_size(THREADS)
fn scan_coefs(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < TABLE + p_coefs.n_parts; i += n_groups.x * THREADS) {
        let ch = i % D_INNER;
        var value = 0.0;
        if i < BIAS {
            value = -1.4426950408889634 * exp(a_log[ch * D_STATE + i / D_INNER]);
        } else if i < SKIP {
            if HAS_BIAS == 1u { value = bias_in[ch]; }
        } else if i < TABLE {
            value = skip_in[ch];
        } else {
            coefs_out[i] = table_in[i - TABLE];
            continue;
        }
        coefs_out[i] = bitcast<u32>(value);
    }
}
