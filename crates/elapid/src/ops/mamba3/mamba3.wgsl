// What stands before and behind the products of Mamba-3, which are those of `ssd`; see mod.rs for
// the mathematics, gpu.rs for the order of the kernels and what lies in `packed`, `table`, `wide`,
// `th` and `found`.

const D_INNER: u32 = N_HEAD * D_HEAD;
const PER_GROUP: u32 = N_HEAD / N_GROUP;
const N_STATE: u32 = D_STATE * D_HEAD;
const D_BC: u32 = RANK * N_GROUP * D_STATE;
const XBC: u32 = D_INNER + 2u * D_BC; // columns of xbc
const RAW: u32 = 3u * N_HEAD + N_ANGLE; // of raw
const WIDE: u32 = D_INNER + 2u * N_HEAD * D_STATE; // of wide
const N_PAIR: u32 = D_STATE / 2u;
const N_RATIO: u32 = 2u * RANK * N_GROUP;
const N_TURN: u32 = N_HEAD * N_ANGLE;
// Places in `packed`.
const SKIP: u32 = N_HEAD;
const NORMS: u32 = 2u * N_HEAD;
const BIASES: u32 = NORMS + 2u * D_STATE;
const N_BIAS: u32 = N_HEAD * RANK * D_STATE;
const FACTORS: u32 = BIASES + 2u * N_BIAS;
// Tokens that mamba3_norm takes.
const N_TOKENS: u32 = 16u;
const TAU: f32 = 6.2831853;

struct Params {
    n_tok: u32,
    n_chunk: u32,
    first: u32, // chunk, or row of a segment
    n_segment: u32,
    has_before: u32, // whether states are given
    a_floor: f32,
    eps: f32,
}

// Bindings of several kernels.
@group(0) @binding(0) var<storage, read> xbc: array<f32>; // (n_tok, XBC)
@group(0) @binding(0) var<storage, read> raw0: array<f32>; // (n_tok, RAW)
@group(0) @binding(1) var<storage, read> raw1: array<f32>;
@group(0) @binding(1) var<storage, read> packed1: array<f32>;
@group(0) @binding(2) var<storage, read> packed2: array<f32>;
@group(0) @binding(2) var<storage, read> table2: array<u32>;
@group(0) @binding(3) var<storage, read> table3: array<u32>;
@group(0) @binding(2) var<uniform> p2: Params;
@group(0) @binding(3) var<uniform> p3: Params;
@group(0) @binding(5) var<uniform> p5: Params;
@group(0) @binding(6) var<uniform> p6: Params;
@group(0) @binding(7) var<uniform> p7: Params;
@group(0) @binding(8) var<uniform> p8: Params;

// ---- rates and angles ---------------------------------------------------------------------------

// ln(1 + e), e between 0 and 1; for small e without the 1, in which its digits would be lost.
fn log_1p(e: f32) -> f32 {
    if e < 0.03 { return e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2)))); }
    return log(1.0 + e);
}

// Softplus, and its slope.
fn softplus(x: f32) -> vec2<f32> {
    let e = exp(-abs(x));
    return vec2(max(x, 0.0) + log_1p(e), select(1.0, e, x < 0.0) / (1.0 + e));
}

// The decay rate, and its slope, from the raw one.
fn a_of(x: f32, least: f32) -> vec2<f32> {
    let below = 1.0 / (1.0 - min(x, 0.0));
    var f = vec2(select(1.0 + x, below, x < 0.0), below * below);
    if SOFTPLUS_A == 1u { f = softplus(x); }
    if f.x < least { return vec2(-least, 0.0); }
    return -f;
}

// Turns for a step size of 1, from a raw angle.
fn turn_of(x: f32) -> f32 {
    let e = exp(-2.0 * abs(x));
    return sign(x) * 0.5 * (1.0 - e) / (1.0 + e);
}

// Between -1/2 and 1/2.
fn reduced(turns: f32) -> f32 {
    return turns - round(turns);
}

// sin(2 pi x) for |x| <= 1/4; the built-in one may be off by 5e-4.
fn sin_of_turn(x: f32) -> f32 {
    let y = x * x;
    let p = fma(fma(fma(39.710918, y, -76.57499), y, 81.602234), y, -41.34168);
    return fma(p, y, TAU) * x;
}

// Cosine and sine of an angle in turns between -1/2 and 1/2.
fn cos_sin(x: f32) -> vec2<f32> {
    let folded = max(-0.5 - x, min(x, 0.5 - x));
    return vec2(sin_of_turn(0.25 - abs(x)), sin_of_turn(folded));
}

// The two numbers of a pair within a row of k or q.
fn pair_of(pair: u32) -> vec2<u32> {
    return select(vec2(2u * pair, 2u * pair + 1u), vec2(pair, pair + N_PAIR), HALVES == 1u);
}

// First number of a head's v (0), k (1) or q (2) in a row of `wide`.
fn wide_at(which: u32, row: u32, head: u32) -> u32 {
    if which == 0u { return row * WIDE + head * D_HEAD; }
    return row * WIDE + D_INNER + ((which - 1u) * N_HEAD + head) * D_STATE;
}

// First number of rank r of b (0) or c (1) for a head in a row of xbc.
fn bc_at(side: u32, tok: u32, r: u32, head: u32) -> u32 {
    return tok * XBC + D_INNER + side * D_BC + (r * N_GROUP + head / PER_GROUP) * D_STATE;
}

// Where the factor of x in `packed` is, for a rank and a column of a head.
fn factor_at(head: u32, r: u32, col: u32) -> u32 {
    return FACTORS + (head * RANK + r) * D_HEAD + col;
}

// ---- parameters ---------------------------------------------------------------------------------

@group(0) @binding(0) var<storage, read> delta_bias: array<f32>;
@group(0) @binding(1) var<storage, read> skip: array<f32>;
@group(0) @binding(2) var<storage, read> b_norm: array<f32>;
@group(0) @binding(3) var<storage, read> c_norm: array<f32>;
@group(0) @binding(4) var<storage, read> b_bias: array<f32>;
@group(0) @binding(5) var<storage, read> c_bias: array<f32>;
@group(0) @binding(6) var<storage, read> mimo_x: array<f32>;
@group(0) @binding(7) var<storage, read_write> packed_out: array<f32>;

// All parameters, one behind the other.
@compute @workgroup_size(THREADS)
fn mamba3_pack(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    let end = FACTORS + HAS_MIMO * N_HEAD * RANK * D_HEAD;
    for (var i = id.x; i < end; i += n_groups.x * THREADS) {
        var x = 0.0;
        if i < SKIP {
            x = delta_bias[i];
        } else if i < NORMS {
            x = skip[i - SKIP];
        } else if i < NORMS + D_STATE {
            x = b_norm[i - NORMS];
        } else if i < BIASES {
            x = c_norm[i - NORMS - D_STATE];
        } else if i < BIASES + N_BIAS {
            x = b_bias[i - BIASES];
        } else if i < FACTORS {
            x = c_bias[i - BIASES - N_BIAS];
        } else {
            x = mimo_x[i - FACTORS];
        }
        packed_out[i] = x;
    }
}

// ---- rows ---------------------------------------------------------------------------------------

@group(0) @binding(1) var<storage, read_write> ratios_out: array<f32>; // (n_tok, N_RATIO)

// 1 / rms of a row of b or c; a group takes one.
@compute @workgroup_size(THREADS)
fn mamba3_ratios(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = group_of(group_id, n_groups);
    if group >= p2.n_tok * N_RATIO { return; }
    let row = group / N_RATIO * XBC + D_INNER + group % N_RATIO * D_STATE;
    var sum = 0.0;
    for (var n = thread; n < D_STATE; n += THREADS) {
        let x = xbc[row + n];
        sum += x * x;
    }
    let total = group_sum(thread, sum);
    if thread == 0u { ratios_out[group] = 1.0 / sqrt(total / f32(D_STATE) + p2.eps); }
}

@group(0) @binding(3) var<storage, read_write> steps_out: array<f32>;
@group(0) @binding(4) var<storage, read_write> angles_out: array<f32>; // (n_chunk, N_TURN)

var<workgroup> deltas: array<f32, 64>;
var<workgroup> cum: array<f32, 64>;
var<workgroup> cum_low: array<f32, 64>;

fn delta_of_0(tok: u32, head: u32) -> vec2<f32> {
    return softplus(raw0[tok * RAW + head] + packed1[head]);
}

fn lam_of_0(tok: u32, head: u32) -> f32 {
    return sigmoid(raw0[tok * RAW + 2u * N_HEAD + head]);
}

// A group of 64 threads takes a chunk of a head: `steps` of its rows, in which log decays are
// summed as two numbers, and by how far its angles turn.
@compute @workgroup_size(THREADS)
fn mamba3_steps(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p5.first + group_id.y;
    let start = table2[4u * chunk];
    let n = table2[4u * chunk + 1u];
    let is_last = (table2[4u * chunk + 3u] & 2u) != 0u;
    let n_row = p5.n_tok * RANK;
    let series = N_HEAD * n_row;
    var gamma = 0.0;
    var s = 0.0;
    if thread < n {
        let tok = start + thread;
        let delta = delta_of_0(tok, head).x;
        gamma = lam_of_0(tok, head) * delta;
        s = gamma;
        if !is_last || thread + 1u < n {
            s += (1.0 - lam_of_0(tok + 1u, head)) * delta_of_0(tok + 1u, head).x;
        }
        deltas[thread] = delta;
        cum[thread] = a_of(raw0[tok * RAW + N_HEAD + head], p5.a_floor).x;
    }
    workgroupBarrier();
    if thread == 0u {
        var sum = 0.0;
        var low = 0.0;
        for (var t = 0u; t < n; t++) {
            // The product and what it lost.
            let x = deltas[t] * cum[t];
            low += fma(deltas[t], cum[t], -x);
            let next = sum + x;
            let added = next - sum;
            low += (sum - (next - added)) + (x - added);
            sum = next;
            cum[t] = sum;
            cum_low[t] = low;
        }
        if chunk == 0u { steps_out[6u * series + head * 2u + 1u] = packed1[SKIP + head]; }
    }
    workgroupBarrier();
    if thread < n {
        let until = exp((cum[n - 1u] - cum[thread]) + (cum_low[n - 1u] - cum_low[thread]));
        for (var r = 0u; r < RANK; r++) {
            let at = head * n_row + (start + thread) * RANK + r;
            steps_out[at] = s;
            steps_out[at + series] = gamma;
            steps_out[at + 2u * series] = cum[thread];
            steps_out[at + 3u * series] = cum_low[thread];
            steps_out[at + 4u * series] = exp(cum[thread]);
            steps_out[at + 5u * series] = until;
        }
    }
    for (var k = thread; k < N_ANGLE; k += THREADS) {
        var angle = 0.0;
        for (var t = 0u; t < n; t++) {
            let turn = turn_of(raw0[(start + t) * RAW + 3u * N_HEAD + k]);
            angle = reduced(fma(deltas[t], turn, angle));
        }
        angles_out[chunk * N_TURN + head * N_ANGLE + k] = angle;
    }
}

@group(0) @binding(0) var<storage, read> table0: array<u32>;
@group(0) @binding(1) var<storage, read_write> angles: array<f32>; // (n_chunk, N_TURN)
@group(0) @binding(2) var<storage, read_write> carry: array<f32>; // (n_segment, N_TURN)

// From how far chunks turn to the angles before them; a thread takes an angle of a segment. `carry`
// holds those before and then behind the segments, in radians.
@compute @workgroup_size(THREADS)
fn mamba3_starts(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p3.n_segment * N_TURN; i += n_groups.x * THREADS) {
        let run = 4u * p3.n_chunk + i / N_TURN * 2u;
        let first = table0[run];
        var angle = 0.0;
        if p3.has_before == 1u { angle = reduced(carry[i] / TAU); }
        for (var chunk = first; chunk < first + table0[run + 1u]; chunk++) {
            let at = chunk * N_TURN + i % N_TURN;
            let turned = angles[at];
            angles[at] = angle;
            angle = reduced(angle + turned);
        }
        if p3.has_before == 1u { carry[i] = angle * TAU; }
    }
}

var<workgroup> quarters: array<f32, 256>; // 4 x 64

@group(0) @binding(4) var<storage, read> ratios4: array<f32>;
@group(0) @binding(5) var<storage, read> starts5: array<f32>;
@group(0) @binding(6) var<storage, read_write> wide_out: array<f32>;
@group(0) @binding(7) var<storage, read_write> ends: array<f32>; // (n_segment, N_BIAS + D_INNER)

// Step sizes of the tokens of a chunk.
fn load_deltas(thread: u32, head: u32, start: u32, n: u32) {
    if thread < n {
        deltas[thread] = softplus(raw1[(start + thread) * RAW + head] + packed2[head]).x;
    }
    workgroupBarrier();
}

fn raw_angle(tok: u32, s: u32) -> f32 {
    return raw1[tok * RAW + 3u * N_HEAD + s];
}

// By how far a quarter of a chunk's tokens turns a pair, where it has an angle; of 256 threads each
// takes a pair of 64 and such a quarter. All threads come here.
fn sum_quarters(thread: u32, pair: u32, start: u32, begin: u32, end: u32) {
    var angle = 0.0;
    if pair < N_ANGLE {
        for (var t = begin; t < end; t++) {
            angle = reduced(fma(deltas[t], turn_of(raw_angle(start + t, pair)), angle));
        }
    }
    workgroupBarrier();
    quarters[thread] = angle;
    workgroupBarrier();
}

// From the angle before the chunk to that before the thread's quarter.
fn angle_before(thread: u32, angle_before_chunk: f32) -> f32 {
    var angle = angle_before_chunk;
    for (var k = thread % 64u; k < thread / 64u * 64u; k += 64u) {
        angle = reduced(angle + quarters[k]);
    }
    return angle;
}

// A group takes a head in a chunk: v, k and q of its rows, and where the segment ends, k and x of
// its last token.
@compute @workgroup_size(THREADS)
fn mamba3_rows(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p8.first + group_id.y;
    let start = table3[4u * chunk];
    let n = table3[4u * chunk + 1u];
    let end_of = table3[4u * chunk + 2u] * (N_BIAS + D_INNER);
    let is_end = p8.has_before == 1u && (table3[4u * chunk + 3u] & 2u) != 0u;
    load_deltas(thread, head, start, n);
    let begin = n * (thread / 64u) / 4u;
    let end = n * (thread / 64u + 1u) / 4u;
    for (var first = 0u; first < N_PAIR; first += 64u) {
        let pair = first + thread % 64u;
        sum_quarters(thread, pair, start, begin, end);
        if pair < N_PAIR {
            var angle = 0.0;
            if pair < N_ANGLE {
                angle = angle_before(thread, starts5[chunk * N_TURN + head * N_ANGLE + pair]);
            }
            let at = pair_of(pair);
            for (var t = begin; t < end; t++) {
                var turn = vec2(1.0, 0.0);
                if pair < N_ANGLE {
                    angle = reduced(fma(deltas[t], turn_of(raw_angle(start + t, pair)), angle));
                    turn = cos_sin(angle);
                }
                for (var i = 0u; i < 2u * RANK; i++) {
                    let side = i / RANK;
                    let r = i % RANK;
                    let ratio = ratios4[(start + t) * N_RATIO + i * N_GROUP + head / PER_GROUP];
                    let norm = NORMS + side * D_STATE;
                    let bias = BIASES + side * N_BIAS + (head * RANK + r) * D_STATE;
                    let from_a = xbc[bc_at(side, start + t, r, head) + at.x];
                    let from_b = xbc[bc_at(side, start + t, r, head) + at.y];
                    let a = from_a * ratio * packed2[norm + at.x] + packed2[bias + at.x];
                    let b = from_b * ratio * packed2[norm + at.y] + packed2[bias + at.y];
                    let y = vec2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
                    let to = wide_at(1u + side, (start + t) * RANK + r, head);
                    wide_out[to + at.x] = y.x;
                    wide_out[to + at.y] = y.y;
                    if is_end && side == 0u && t + 1u == n {
                        let k = end_of + (r * N_HEAD + head) * D_STATE;
                        ends[k + at.x] = y.x;
                        ends[k + at.y] = y.y;
                    }
                }
            }
        }
    }
    for (var i = thread; i < n * D_HEAD; i += THREADS) {
        let tok = start + i / D_HEAD;
        let col = i % D_HEAD;
        let x = xbc[tok * XBC + head * D_HEAD + col];
        for (var r = 0u; r < RANK; r++) {
            var factor = 1.0;
            if HAS_MIMO == 1u { factor = packed2[factor_at(head, r, col)]; }
            wide_out[wide_at(0u, tok * RANK + r, head) + col] = x * factor;
        }
        if is_end && i / D_HEAD + 1u == n { ends[end_of + N_BIAS + head * D_HEAD + col] = x; }
    }
}

@group(0) @binding(3) var<storage, read> k3: array<f32>; // (n_segment, RANK, N_HEAD, D_STATE)
@group(0) @binding(4) var<storage, read> v4: array<f32>; // (n_segment, N_HEAD, D_HEAD)
@group(0) @binding(5) var<storage, read_write> h5: array<f32>; // (n_segment, N_HEAD, N_STATE)

// The weight of the token before a segment in its first.
fn first_w(segment: u32, head: u32, n_chunk: u32) -> f32 {
    let tok = table2[4u * table2[4u * n_chunk + 2u * segment]];
    return (1.0 - lam_of_0(tok, head)) * delta_of_0(tok, head).x;
}

fn factor_1(head: u32, r: u32, col: u32) -> f32 {
    if HAS_MIMO == 1u { return packed1[factor_at(head, r, col)]; }
    return 1.0;
}

// Adds w sum_r k v^T of the token before each segment to its state.
@compute @workgroup_size(THREADS)
fn mamba3_fold(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    let n = p6.n_segment * N_HEAD * N_STATE;
    for (var i = id.x; i < n; i += n_groups.x * THREADS) {
        let col = i % D_HEAD;
        let row = i / D_HEAD % D_STATE;
        let head = i / N_STATE % N_HEAD;
        let segment = i / N_STATE / N_HEAD;
        let x = v4[(segment * N_HEAD + head) * D_HEAD + col];
        var sum = 0.0;
        for (var r = 0u; r < RANK; r++) {
            let k = k3[((segment * RANK + r) * N_HEAD + head) * D_STATE + row];
            sum += k * x * factor_1(head, r, col);
        }
        h5[i] += first_w(segment, head, p6.n_chunk) * sum;
    }
}

@group(0) @binding(0) var<storage, read> in0: array<f32>;
@group(0) @binding(1) var<storage, read_write> out1: array<f32>;

// Between (n_tok, rank, n_head, d_head) of `ssd`, to which it goes where `first` is 1, and (n_tok,
// n_head, rank, d_head).
@compute @workgroup_size(THREADS)
fn mamba3_by_token(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p2.n_tok * RANK * D_INNER; i += n_groups.x * THREADS) {
        let tok = i / (RANK * D_INNER);
        let head = i / D_HEAD / RANK % N_HEAD;
        let r = i / D_HEAD % RANK;
        let row = (tok * RANK + r) * D_INNER + head * D_HEAD + i % D_HEAD;
        if p2.first == 1u {
            out1[row] = in0[i];
        } else {
            out1[i] = in0[row];
        }
    }
}

// ---- few tokens ---------------------------------------------------------------------------------

@group(0) @binding(3) var<storage, read_write> angle_state: array<f32>; // (N_HEAD, N_ANGLE)
@group(0) @binding(4) var<storage, read_write> h_state: array<f32>; // (N_HEAD, D_STATE, D_HEAD)
@group(0) @binding(5) var<storage, read_write> k_state: array<f32>; // (RANK, N_HEAD, D_STATE)
@group(0) @binding(6) var<storage, read_write> v_state: array<f32>; // (N_HEAD, D_HEAD)
@group(0) @binding(7) var<storage, read_write> y7: array<f32>; // (n_tok, N_HEAD, RANK, D_HEAD)

var<workgroup> kq: array<f32, 2 * RANK * D_STATE>;

// The recurrence as it is written, for `n_tok` tokens of one segment from row `first` on, in the
// storage of its states. A group takes a head, 64 threads a row of its state at a time.
@compute @workgroup_size(THREADS)
fn mamba3_step(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let lane = thread % 64u;
    let quarter = thread / 64u;
    let h_at = head * N_STATE;
    for (var tok = p8.first; tok < p8.first + p8.n_tok; tok++) {
        let delta = softplus(raw1[tok * RAW + head] + packed2[head]).x;
        let lam = sigmoid(raw1[tok * RAW + 2u * N_HEAD + head]);
        let decay = exp(delta * a_of(raw1[tok * RAW + N_HEAD + head], p8.a_floor).x);
        let gamma = lam * delta;
        let beta = decay * (1.0 - lam) * delta;
        for (var i = 0u; i < 2u * RANK; i++) {
            let side = i / RANK;
            let r = i % RANK;
            let row_at = bc_at(side, tok, r, head);
            var sum = 0.0;
            for (var n = thread; n < D_STATE; n += THREADS) {
                let x = xbc[row_at + n];
                sum += x * x;
            }
            let ratio = 1.0 / sqrt(group_sum(thread, sum) / f32(D_STATE) + p8.eps);
            let norm = NORMS + side * D_STATE;
            let bias = BIASES + side * N_BIAS + (head * RANK + r) * D_STATE;
            for (var n = thread; n < D_STATE; n += THREADS) {
                let x = xbc[row_at + n] * ratio;
                kq[i * D_STATE + n] = x * packed2[norm + n] + packed2[bias + n];
            }
        }
        workgroupBarrier();
        for (var s = thread; s < N_ANGLE; s += THREADS) {
            let before = reduced(angle_state[head * N_ANGLE + s] / TAU);
            let angle = reduced(fma(delta, turn_of(raw_angle(tok, s)), before));
            angle_state[head * N_ANGLE + s] = angle * TAU;
            let turn = cos_sin(angle);
            let at = pair_of(s);
            for (var i = 0u; i < 2u * RANK; i++) {
                let a = kq[i * D_STATE + at.x];
                let b = kq[i * D_STATE + at.y];
                kq[i * D_STATE + at.x] = a * turn.x - b * turn.y;
                kq[i * D_STATE + at.y] = a * turn.y + b * turn.x;
            }
        }
        workgroupBarrier();
        for (var first = 0u; first < D_HEAD; first += 64u) {
            let col = first + lane;
            var x = 0.0;
            var sums: array<f32, RANK>;
            for (var r = 0u; r < RANK; r++) { sums[r] = 0.0; }
            if col < D_HEAD {
                x = xbc[tok * XBC + head * D_HEAD + col];
                let x_before = v_state[head * D_HEAD + col];
                for (var n = quarter; n < D_STATE; n += 4u) {
                    var next = decay * h_state[h_at + n * D_HEAD + col];
                    for (var r = 0u; r < RANK; r++) {
                        var factor = 1.0;
                        if HAS_MIMO == 1u { factor = packed2[factor_at(head, r, col)]; }
                        let k_before = k_state[(r * N_HEAD + head) * D_STATE + n];
                        let now = gamma * kq[r * D_STATE + n] * x;
                        next += factor * (beta * k_before * x_before + now);
                    }
                    h_state[h_at + n * D_HEAD + col] = next;
                    for (var r = 0u; r < RANK; r++) {
                        sums[r] += next * kq[(RANK + r) * D_STATE + n];
                    }
                }
            }
            for (var r = 0u; r < RANK; r++) {
                workgroupBarrier();
                quarters[thread] = sums[r];
                workgroupBarrier();
                if quarter == 0u && col < D_HEAD {
                    var factor = 1.0;
                    if HAS_MIMO == 1u { factor = packed2[factor_at(head, r, col)]; }
                    let total = (quarters[lane] + quarters[64u + lane])
                        + (quarters[128u + lane] + quarters[192u + lane]);
                    y7[tok * RANK * D_INNER + (head * RANK + r) * D_HEAD + col] =
                        total + packed2[SKIP + head] * x * factor;
                    if r + 1u == RANK { v_state[head * D_HEAD + col] = x; }
                }
            }
            workgroupBarrier();
        }
        for (var i = thread; i < RANK * D_STATE; i += THREADS) {
            k_state[(i / D_STATE * N_HEAD + head) * D_STATE + i % D_STATE] = kq[i];
        }
        workgroupBarrier();
    }
}
