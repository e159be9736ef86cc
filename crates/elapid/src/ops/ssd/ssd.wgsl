// State-space duality by chunks of 64 tokens; see mod.rs for the mathematics, gpu.rs for the order
// of the kernels and what lies in `steps`, `table` and `terms`.
//
// All products are tiles of 64 x 64, steps of 16 along k, 4 x 4 numbers to a thread, 256 threads.
// Tiles lie in shared memory by fours of one k, with k as the slow axis. N: rows of a state
// (D_STATE), P: columns (D_HEAD). PASS: 0 forward in time (states, and the gradient by c), 1
// backward (their gradients, and the gradient by b). HAS_BEFORE: 0 where states begin at zero.
// RANK: 0, or Mamba-3, where a token has so many rows; `delta` is then the weight of a row for
// later tokens, `own` for its own token.

const D_INNER: u32 = N_HEAD * D_HEAD;
const WIDTH: u32 = D_INNER + 2u * N_GROUP * D_STATE;
const PER_GROUP: u32 = N_HEAD / N_GROUP;
const N_STATE: u32 = D_STATE * D_HEAD;
const N_TILES: u32 = (D_STATE + 63u) / 64u;
const P_TILES: u32 = (D_HEAD + 63u) / 64u;
const N_BLOCK: u32 = N_HEAD / N_PER;
const SQUARE: u32 = 4096u;
const ROWS: u32 = max(RANK, 1u);

const TILE: u32 = 64u;
const STEP: u32 = 16u;

struct Params {
    n_tok: u32, // of the batch
    n_chunk: u32, // of the batch
    first: u32, // chunk of this stretch, or row of a segment
    runs_at: u32, // in `table`
    delta_min: f32,
    delta_max: f32,
}

@group(0) @binding(0) var<storage, read> xbc: array<f32>; // (n_tok, WIDTH)
@group(0) @binding(1) var<storage, read> steps: array<f32>; // (6, N_HEAD, n_tok), (N_HEAD, 2)
@group(0) @binding(2) var<storage, read> table: array<u32>; // (n_chunk, 4), then runs (.., 2)
@group(0) @binding(3) var<storage, read> v: array<f32>; // (n_tok, WIDTH or D_INNER)

var<workgroup> a_tile: array<vec4<f32>, 256>; // (STEP, TILE / 4)
var<workgroup> b_tile: array<vec4<f32>, 256>;
var<workgroup> parts: array<f32, 1024>; // 64 x 16
var<workgroup> delta: array<f32, 64>; // 0 past the last token, and so are the next four
var<workgroup> own: array<f32, 64>;
var<workgroup> cum: array<f32, 64>;
var<workgroup> cum_low: array<f32, 64>;
var<workgroup> since: array<f32, 64>;
var<workgroup> until: array<f32, 64>;

var<private> acc: array<vec4<f32>, 4>;

fn zero_acc() {
    for (var i = 0u; i < 4u; i++) { acc[i] = vec4<f32>(0.0); }
}

// Where of `k` the four `row` lies: turned, so that neither those who write nor those who read meet
// in a bank.
fn place(k: u32, row: u32) -> u32 {
    return k * 16u + (row ^ k);
}

// What a thread brings to a tile: four of one k, neighbours along it, or one k of neighbours.
fn along(thread: u32) -> u32 {
    return place(thread / 16u, thread % 16u);
}

fn across(thread: u32) -> u32 {
    return place(thread % 16u, thread / 16u);
}

// acc += a^T b over the 16 k of the tiles.
fn multiply(thread: u32) {
    for (var k = 0u; k < STEP; k++) {
        let a = a_tile[place(k, thread / 16u)];
        let b = b_tile[place(k, thread % 16u)];
        acc[0] = fma(a.xxxx, b, acc[0]);
        acc[1] = fma(a.yyyy, b, acc[1]);
        acc[2] = fma(a.zzzz, b, acc[2]);
        acc[3] = fma(a.wwww, b, acc[3]);
    }
}

// Step sizes and decays of a head in a chunk; between barriers.
fn load_steps(thread: u32, head: u32, start: u32, n: u32, n_tok: u32) {
    workgroupBarrier();
    if thread < 64u {
        let at = head * n_tok + start + thread;
        let series = N_HEAD * n_tok;
        if thread < n {
            delta[thread] = steps[at];
            own[thread] = steps[at + series];
            cum[thread] = steps[at + 2u * series];
            cum_low[thread] = steps[at + 3u * series];
            since[thread] = steps[at + 4u * series];
            until[thread] = steps[at + 5u * series];
        } else {
            delta[thread] = 0.0;
            own[thread] = 0.0;
            cum[thread] = 0.0;
            cum_low[thread] = 0.0;
            since[thread] = 0.0;
            until[thread] = 0.0;
        }
    }
    workgroupBarrier();
}

fn decay(i: u32, j: u32) -> f32 {
    return exp((cum[i] - cum[j]) + (cum_low[i] - cum_low[j]));
}

// Whether row i reads row j, and whether they are of one token.
fn reads(i: u32, j: u32) -> bool {
    return j / ROWS <= i / ROWS;
}

fn is_own(i: u32, j: u32) -> bool {
    return j / ROWS == i / ROWS;
}

// The weight of row j for row i; between rows of one token there is no decay.
fn weight(i: u32, j: u32) -> f32 {
    if RANK > 0u && is_own(i, j) { return own[j]; }
    return delta[j];
}

// What passes between a token and a state: `since` to who reads, `until delta` from who writes.
fn state_factor(tok: u32) -> f32 {
    if PASS == 0u { return until[tok] * delta[tok]; }
    return since[tok];
}

fn skip_of(head: u32, n_tok: u32) -> f32 {
    return steps[6u * N_HEAD * n_tok + head * 2u + 1u];
}

// First column of b (0) or c (1) of a group.
fn column(which: u32, group: u32) -> u32 {
    return D_INNER + (which * N_GROUP + group) * D_STATE;
}

fn term_at(series: u32, head: u32, tok: u32, n_tok: u32) -> u32 {
    return (series * N_HEAD + head) * n_tok + tok;
}

// Behind all other terms of Mamba-3: what the rows of a token are to each other.
fn own_at(head: u32, tok: u32, n_tok: u32, n_chunk: u32) -> u32 {
    let through = N_TILES * P_TILES * n_chunk * N_HEAD;
    return term_at(3u + N_TILES + P_TILES, head, tok, n_tok) + through;
}

// ---- step sizes ---------------------------------------------------------------------------------

@group(0) @binding(0) var<storage, read> raw: array<f32>; // (n_tok, N_HEAD)
@group(0) @binding(1) var<storage, read> delta_bias: array<f32>; // (N_HEAD)
@group(0) @binding(3) var<storage, read> a_log: array<f32>; // (N_HEAD)
@group(0) @binding(4) var<storage, read> skip: array<f32>; // (N_HEAD)
@group(0) @binding(5) var<storage, read_write> steps_out: array<f32>; // as `steps`
@group(0) @binding(6) var<uniform> p_steps: Params;

// ln(1 + e), e between 0 and 1; for small e without the 1, in which its digits would be lost.
fn log_1p(e: f32) -> f32 {
    if e < 0.03 { return e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2)))); }
    return log(1.0 + e);
}

// The step size, a softplus within limits, and its slope by the raw one.
fn step_size(x: f32, lower: f32, upper: f32) -> vec2<f32> {
    let e = exp(-abs(x));
    let soft = max(x, 0.0) + log_1p(e);
    if soft < lower { return vec2(lower, 0.0); }
    if soft > upper { return vec2(upper, 0.0); }
    return vec2(soft, select(1.0, e, x < 0.0) / (1.0 + e));
}

// A group takes a chunk of a head. The sum is kept in two numbers: where it is large, differences
// of it are small.
@compute @workgroup_size(THREADS)
fn ssd_steps(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.x;
    let chunk = p_steps.first + group_id.y;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    let at = head * p_steps.n_tok + start + thread;
    let series = N_HEAD * p_steps.n_tok;
    let a = -exp(a_log[head]);
    if thread < n {
        let x = raw[(start + thread) * N_HEAD + head] + delta_bias[head];
        let size = step_size(x, p_steps.delta_min, p_steps.delta_max);
        delta[thread] = size.x;
        steps_out[at] = size.x;
        steps_out[at + series] = size.y;
    }
    workgroupBarrier();
    if thread == 0u {
        var sum = 0.0;
        var low = 0.0;
        for (var tok = 0u; tok < n; tok++) {
            let x = delta[tok] * a;
            let next = sum + x;
            let added = next - sum;
            low += (sum - (next - added)) + (x - added);
            sum = next;
            cum[tok] = sum;
            cum_low[tok] = low;
        }
        if chunk == 0u {
            steps_out[6u * series + head * 2u] = a;
            steps_out[6u * series + head * 2u + 1u] = skip[head];
        }
    }
    workgroupBarrier();
    if thread < n {
        steps_out[at + 2u * series] = cum[thread];
        steps_out[at + 3u * series] = cum_low[thread];
        steps_out[at + 4u * series] = exp(cum[thread]);
        steps_out[at + 5u * series] = decay(n - 1u, thread);
    }
}

// ---- states -------------------------------------------------------------------------------------

@group(0) @binding(4) var<storage, read> states: array<f32>; // (chunks, N_HEAD, D_STATE, D_HEAD)
@group(0) @binding(5) var<storage, read_write> carry: array<f32>; // (runs, N_HEAD, D_STATE, D_HEAD)
@group(0) @binding(6) var<storage, read_write> states_out: array<f32>; // as `states`
@group(0) @binding(7) var<storage, read_write> terms: array<f32>; // see gpu.rs
@group(0) @binding(8) var<uniform> p8: Params;

// A group takes a tile of the states of one head along one run of chunks. PASS 0: writes the state
// before each chunk. PASS 1: the gradient by the state after it, and its product with the state
// before it (`states`), which is what decay over the whole chunk passes on. `carry` is what comes
// from outside the run, and then what leaves it.
@compute @workgroup_size(THREADS)
fn ssd_states(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n0 = group_id.x / P_TILES * TILE;
    let p0 = group_id.x % P_TILES * TILE;
    let head = group_id.y;
    let run = p8.runs_at + 2u * group_id.z;
    let first = table[run];
    let count = table[run + 1u];
    let row = n0 + thread / 16u * 4u;
    let col = p0 + thread % 16u * 4u;
    let carry_at = (group_id.z * N_HEAD + head) * N_STATE;
    let v_width = select(D_INNER, WIDTH, PASS == 0u);
    let matrix = column(PASS, head / PER_GROUP) + n0;
    zero_acc();
    if HAS_BEFORE == 1u {
        for (var i = 0u; i < 4u; i++) {
            for (var j = 0u; j < 4u; j++) {
                if row + i < D_STATE && col + j < D_HEAD {
                    acc[i][j] = carry[carry_at + (row + i) * D_HEAD + col + j];
                }
            }
        }
    }
    for (var c = 0u; c < count; c++) {
        let chunk = first + select(c, count - 1u - c, PASS == 1u);
        let start = table[4u * chunk];
        let n = table[4u * chunk + 1u];
        let flags = table[4u * chunk + 2u];
        let at = ((chunk - p8.first) * N_HEAD + head) * N_STATE;
        var through = 0.0;
        for (var i = 0u; i < 4u; i++) {
            for (var j = 0u; j < 4u; j++) {
                if row + i < D_STATE && col + j < D_HEAD {
                    let place = at + (row + i) * D_HEAD + col + j;
                    states_out[place] = acc[i][j];
                    if PASS == 1u && flags == 3u { through += acc[i][j] * states[place]; }
                }
            }
        }
        if PASS == 1u {
            let sum = group_sum(thread, through);
            let series = (3u + N_TILES + P_TILES) * N_HEAD * p8.n_tok;
            if thread == 0u {
                terms[series + (group_id.x * p8.n_chunk + chunk) * N_HEAD + head] = sum;
            }
        }
        load_steps(thread, head, start, n, p8.n_tok);
        let total = since[n - 1u];
        for (var i = 0u; i < 4u; i++) { acc[i] *= total; }
        for (var j0 = 0u; j0 < n; j0 += STEP) {
            var a4 = vec4<f32>();
            var b4 = vec4<f32>();
            for (var e = 0u; e < 4u; e++) {
                let tok = j0 + thread / 16u;
                let r = thread % 16u * 4u + e;
                var a = 0.0;
                var b = 0.0;
                if tok < n {
                    if n0 + r < D_STATE { a = xbc[(start + tok) * WIDTH + matrix + r]; }
                    if p0 + r < D_HEAD {
                        b = state_factor(tok) * v[(start + tok) * v_width + head * D_HEAD + p0 + r];
                    }
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
    }
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if row + i < D_STATE && col + j < D_HEAD {
                carry[carry_at + (row + i) * D_HEAD + col + j] = acc[i][j];
            }
        }
    }
}

// ---- scores -------------------------------------------------------------------------------------

@group(0) @binding(3) var<storage, read_write> scores_out: array<f32>; // (chunks, N_GROUP, 64, 64)
@group(0) @binding(4) var<uniform> p4: Params;

// c[i] . b[j] of a chunk and group.
@compute @workgroup_size(THREADS)
fn ssd_scores(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = group_id.x;
    let chunk = p4.first + group_id.y;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    zero_acc();
    for (var n0 = 0u; n0 < D_STATE; n0 += STEP) {
        var a4 = vec4<f32>();
        var b4 = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            let tok = thread / 16u * 4u + e;
            let k = n0 + thread % 16u;
            var a = 0.0;
            var b = 0.0;
            if tok < n && k < D_STATE {
                a = xbc[(start + tok) * WIDTH + column(1u, group) + k];
                b = xbc[(start + tok) * WIDTH + column(0u, group) + k];
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
    let at = (group_id.y * N_GROUP + group) * SQUARE;
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            scores_out[at + (thread / 16u * 4u + i) * 64u + thread % 16u * 4u + j] = acc[i][j];
        }
    }
}

// ---- outputs ------------------------------------------------------------------------------------

@group(0) @binding(5) var<storage, read> scores: array<f32>; // (chunks, N_GROUP, 64, 64)
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // (n_tok, D_INNER)
@group(0) @binding(7) var<uniform> p7: Params;

// acc += (64 tokens of b (0) or c (1)) by (the state of a head), 64 columns from p0.
fn times_state(thread: u32, which: u32, head: u32, p0: u32, start: u32, n: u32, state_at: u32) {
    let matrix = column(which, head / PER_GROUP);
    for (var n0 = 0u; n0 < D_STATE; n0 += STEP) {
        var a4 = vec4<f32>();
        var b4 = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            let tok = thread / 16u * 4u + e;
            let k = n0 + thread % 16u;
            var a = 0.0;
            if tok < n && k < D_STATE { a = xbc[(start + tok) * WIDTH + matrix + k]; }
            a4[e] = a;
            let state_row = n0 + thread / 16u;
            let r = thread % 16u * 4u + e;
            var b = 0.0;
            if state_row < D_STATE && p0 + r < D_HEAD {
                b = states[state_at + state_row * D_HEAD + p0 + r];
            }
            b4[e] = b;
        }
        a_tile[across(thread)] = a4;
        b_tile[along(thread)] = b4;
        workgroupBarrier();
        multiply(thread);
        workgroupBarrier();
    }
}

// What token j gives token i.
fn mix(i: u32, j: u32, scores_at: u32) -> f32 {
    return decay(i, j) * scores[scores_at + i * 64u + j] * weight(i, j);
}

// A group takes 64 columns of a head in a chunk.
@compute @workgroup_size(THREADS)
fn ssd_output(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let p0 = group_id.x * TILE;
    let head = group_id.y;
    let chunk = p7.first + group_id.z;
    let start = table[4u * chunk];
    let n = table[4u * chunk + 1u];
    let has_before = table[4u * chunk + 2u] % 2u == 1u;
    let scores_at = (group_id.z * N_GROUP + head / PER_GROUP) * SQUARE;
    load_steps(thread, head, start, n, p7.n_tok);
    zero_acc();
    if has_before {
        times_state(thread, 1u, head, p0, start, n, (group_id.z * N_HEAD + head) * N_STATE);
        for (var i = 0u; i < 4u; i++) { acc[i] *= since[thread / 16u * 4u + i]; }
    }
    for (var j0 = 0u; j0 < n; j0 += STEP) {
        var a4 = vec4<f32>();
        var b4 = vec4<f32>();
        for (var e = 0u; e < 4u; e++) {
            let tok = j0 + thread / 16u;
            let r = thread % 16u * 4u + e;
            var a = 0.0;
            var b = 0.0;
            if tok < n {
                if reads(r, tok) && r < n { a = mix(r, tok, scores_at); }
                if p0 + r < D_HEAD { b = xbc[(start + tok) * WIDTH + head * D_HEAD + p0 + r]; }
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
    let skip = skip_of(head, p7.n_tok);
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            let tok = thread / 16u * 4u + i;
            let col = p0 + thread % 16u * 4u + j;
            if tok < n && col < D_HEAD {
                let x = xbc[(start + tok) * WIDTH + head * D_HEAD + col];
                y[(start + tok) * D_INNER + head * D_HEAD + col] = acc[i][j] + skip * x;
            }
        }
    }
}
