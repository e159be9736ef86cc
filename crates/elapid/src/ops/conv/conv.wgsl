// Causal depthwise convolution; see mod.rs. A thread takes one channel of a piece: some rows of one
// segment. Pieces are five words: first row, last row + 1, segment, first row of the segment, last
// row of the segment + 1.
// HAS_BIAS, HAS_WINDOW, SILU, WANTS_X, WANTS_SUMS: 1 or 0; another buffer takes the place of what
// is not there.

struct Params { n_pieces: u32, first: u32, n_rows: u32 }

const BEHIND: u32 = D_CONV - 1u;

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_tok, CHANNELS)
@group(0) @binding(1) var<storage, read> w: array<f32>; // (CHANNELS, D_CONV)
@group(0) @binding(2) var<storage, read> bias: array<f32>; // (CHANNELS)
@group(0) @binding(3) var<storage, read> window: array<f32>; // (n_segments, BEHIND, CHANNELS)
@group(0) @binding(4) var<storage, read> pieces: array<u32>; // (n_pieces, 5)
@group(0) @binding(5) var<storage, read_write> y: array<f32>; // (n_tok, CHANNELS)
@group(0) @binding(6) var<uniform> p: Params;

var<private> inputs: array<f32, D_CONV>; // the last D_CONV inputs, newest last
var<private> taps: array<f32, D_CONV>;

// The input `back` rows before the first row of a segment, from its window.
fn before(segment: u32, back: u32, ch: u32) -> f32 {
    if HAS_WINDOW == 0u { return 0.0; }
    return window[(segment * BEHIND + BEHIND - back) * CHANNELS + ch];
}

// Fills `inputs` with those before `row`, so that the next push is `row` itself.
fn begin(segment: u32, start: u32, row: u32, ch: u32) {
    for (var k = 0u; k < BEHIND; k++) {
        let back = BEHIND - k; // rows before `row`
        if row >= start + back {
            inputs[k + 1u] = x[(row - back) * CHANNELS + ch];
        } else {
            inputs[k + 1u] = before(segment, start + back - row, ch);
        }
    }
}

fn push(value: f32) {
    for (var k = 0u; k < BEHIND; k++) { inputs[k] = inputs[k + 1u]; }
    inputs[BEHIND] = value;
}

// The sum over the taps, from `start` on.
fn sum_taps(start: f32) -> f32 {
    var pre = start;
    for (var k = 0u; k < D_CONV; k++) { pre += taps[k] * inputs[k]; }
    return pre;
}

fn activated(pre: f32) -> f32 {
    if SILU == 1u { return pre * sigmoid(pre); }
    return pre;
}

@compute @workgroup_size(THREADS)
fn conv_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let ch = group_id.x * THREADS + thread;
    if ch >= CHANNELS { return; }
    let at = group_id.y * 5u;
    let first = pieces[at];
    let end = pieces[at + 1u];
    var offset = 0.0;
    if HAS_BIAS == 1u { offset = bias[ch]; }
    for (var k = 0u; k < D_CONV; k++) { taps[k] = w[ch * D_CONV + k]; }
    begin(pieces[at + 2u], pieces[at + 3u], first, ch);
    for (var row = first; row < end; row++) {
        push(x[row * CHANNELS + ch]);
        y[row * CHANNELS + ch] = activated(sum_taps(offset));
    }
}

@group(0) @binding(5) var<storage, read> dy: array<f32>; // (n_tok, CHANNELS)
@group(0) @binding(6) var<storage, read_write> dx: array<f32>; // (n_tok, CHANNELS), or (1)
// Of each piece a row for each tap and one for the bias: (n_pieces, D_CONV + 1, CHANNELS), or (1).
@group(0) @binding(7) var<storage, read_write> parts: array<f32>;

var<private> dpre: array<f32, D_CONV>; // of the last rows, newest last
var<private> sums: array<f32, D_CONV>;

@compute @workgroup_size(THREADS)
fn conv_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let ch = group_id.x * THREADS + thread;
    if ch >= CHANNELS { return; }
    let at = group_id.y * 5u;
    let first = pieces[at];
    let end = pieces[at + 1u];
    let segment_end = pieces[at + 4u];
    var offset = 0.0;
    if HAS_BIAS == 1u { offset = bias[ch]; }
    for (var k = 0u; k < D_CONV; k++) {
        taps[k] = w[ch * D_CONV + k];
        dpre[k] = 0.0;
        sums[k] = 0.0;
    }
    var bias_sum = 0.0;
    begin(pieces[at + 2u], pieces[at + 3u], first, ch);
    // dx of the last rows needs dpre of the rows after this piece: they are made twice.
    for (var row = first; row < end + BEHIND; row++) {
        var d = 0.0;
        if row < segment_end {
            push(x[row * CHANNELS + ch]);
            d = dy[row * CHANNELS + ch];
            if SILU == 1u {
                let pre = sum_taps(offset);
                let s = sigmoid(pre);
                d *= s * (1.0 + pre * (1.0 - s));
            }
        }
        for (var k = 0u; k < BEHIND; k++) { dpre[k] = dpre[k + 1u]; }
        dpre[BEHIND] = d;
        if row < end {
            bias_sum += d;
            for (var k = 0u; k < D_CONV; k++) { sums[k] += d * inputs[k]; }
        }
        if WANTS_X == 1u && row >= first + BEHIND {
            // Tap k meets the dpre that lies k rows before the newest.
            var total = 0.0;
            for (var k = 0u; k < D_CONV; k++) { total += taps[k] * dpre[BEHIND - k]; }
            dx[(row - BEHIND) * CHANNELS + ch] = total;
        }
    }
    if WANTS_SUMS == 1u {
        let part = group_id.y * (D_CONV + 1u) * CHANNELS + ch;
        for (var k = 0u; k < D_CONV; k++) { parts[part + k * CHANNELS] = sums[k]; }
        parts[part + D_CONV * CHANNELS] = bias_sum;
    }
}

@group(0) @binding(0) var<storage, read> parts_in: array<f32>; // (n_pieces, D_CONV + 1, CHANNELS)
@group(0) @binding(1) var<storage, read_write> dw: array<f32>; // (CHANNELS, D_CONV)
@group(0) @binding(2) var<storage, read_write> dbias: array<f32>; // (CHANNELS)
@group(0) @binding(3) var<uniform> p_sum: Params;

var<workgroup> lanes: array<f32, 256>; // (8, 32)

// Sums over pieces: 32 columns to a workgroup, eight threads to a column, each in order.
@compute @workgroup_size(THREADS)
fn conv_sum(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * 32u + thread % 32u;
    let width = (D_CONV + 1u) * CHANNELS;
    var total = 0.0;
    if col < width {
        for (var piece = thread / 32u; piece < p_sum.n_pieces; piece += 8u) {
            total += parts_in[piece * width + col];
        }
    }
    lanes[thread] = total;
    workgroupBarrier();
    if thread >= 32u || col >= width { return; }
    total = 0.0;
    for (var lane = 0u; lane < 8u; lane++) { total += lanes[lane * 32u + thread]; }
    let ch = col % CHANNELS;
    if col < D_CONV * CHANNELS {
        dw[ch * D_CONV + col / CHANNELS] = total;
    } else {
        dbias[ch] = total;
    }
}

@group(0) @binding(1) var<storage, read> window_old: array<f32>; // (BEHIND, CHANNELS)
@group(0) @binding(2) var<storage, read_write> window_next: array<f32>; // (BEHIND, CHANNELS)
@group(0) @binding(3) var<uniform> p_window: Params;

// The window after a segment: the last BEHIND rows of the old one and rows `first`... of x.
@compute @workgroup_size(THREADS)
fn conv_window(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= BEHIND * CHANNELS { return; }
    let source = id.x / CHANNELS + p_window.n_rows; // row of both, one below the other
    let ch = id.x % CHANNELS;
    if source < BEHIND {
        window_next[id.x] = window_old[source * CHANNELS + ch];
    } else {
        window_next[id.x] = x[(p_window.first + source - BEHIND) * CHANNELS + ch];
    }
}

@group(0) @binding(3) var<storage, read_write> window_step: array<f32>; // (BEHIND, CHANNELS)
@group(0) @binding(4) var<storage, read_write> y_step: array<f32>; // (n_tok, CHANNELS)
@group(0) @binding(5) var<uniform> p_step: Params;

// One token, row `first`; the window moves on where it is.
@compute @workgroup_size(THREADS)
fn conv_step(@builtin(global_invocation_id) id: vec3<u32>) {
    let ch = id.x;
    if ch >= CHANNELS { return; }
    for (var k = 0u; k < D_CONV; k++) { taps[k] = w[ch * D_CONV + k]; }
    for (var k = 0u; k < BEHIND; k++) { inputs[k] = window_step[k * CHANNELS + ch]; }
    inputs[BEHIND] = x[p_step.first * CHANNELS + ch];
    var offset = 0.0;
    if HAS_BIAS == 1u { offset = bias[ch]; }
    y_step[p_step.first * CHANNELS + ch] = activated(sum_taps(offset));
    for (var k = 0u; k < BEHIND; k++) { window_step[k * CHANNELS + ch] = inputs[k + 1u]; }
}
