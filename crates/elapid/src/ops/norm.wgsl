// RMSNorm and the addition before it; see norm.rs. A group takes a row of D numbers.
// HAS_W, HAS_ADDED: 0 where there is no weight, no branch or dsum; another buffer then takes its
// place.

struct Params { n_rows: u32, eps: f32, factor: f32 }

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_rows, D)
@group(0) @binding(1) var<storage, read> branch: array<f32>; // (n_rows, D)
@group(0) @binding(2) var<storage, read> w: array<f32>; // (D)
@group(0) @binding(3) var<storage, read_write> sum: array<f32>; // (n_rows, D), or (1)
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // (n_rows, D)
@group(0) @binding(5) var<storage, read_write> r: array<f32>; // (n_rows)
@group(0) @binding(6) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn norm_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_rows { return; }
    var squares = 0.0;
    for (var i = thread; i < D; i += THREADS) {
        var value = x[row * D + i];
        if HAS_ADDED == 1u {
            value += p.factor * branch[row * D + i];
            sum[row * D + i] = value;
        }
        squares += value * value;
    }
    let ratio = 1.0 / sqrt(group_sum(thread, squares) / f32(D) + p.eps);
    if thread == 0u { r[row] = ratio; }
    for (var i = thread; i < D; i += THREADS) {
        var value: f32;
        if HAS_ADDED == 1u { value = sum[row * D + i]; } else { value = x[row * D + i]; }
        value *= ratio;
        if HAS_W == 1u { value *= w[i]; }
        y[row * D + i] = value;
    }
}

@group(0) @binding(1) var<storage, read> w_back: array<f32>; // (D)
@group(0) @binding(2) var<storage, read> r_back: array<f32>; // (n_rows)
@group(0) @binding(3) var<storage, read> dy: array<f32>; // (n_rows, D)
@group(0) @binding(4) var<storage, read> dsum: array<f32>; // (n_rows, D)
@group(0) @binding(5) var<storage, read_write> dx: array<f32>; // (n_rows, D)

@compute @workgroup_size(THREADS)
fn norm_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_rows { return; }
    let ratio = r_back[row];
    var dot = 0.0;
    for (var i = thread; i < D; i += THREADS) {
        var wdy = dy[row * D + i];
        if HAS_W == 1u { wdy *= w_back[i]; }
        dot += wdy * x[row * D + i];
    }
    let pull = -ratio * ratio * group_sum(thread, dot) / f32(D);
    for (var i = thread; i < D; i += THREADS) {
        var wdy = dy[row * D + i];
        if HAS_W == 1u { wdy *= w_back[i]; }
        var out = ratio * (wdy + x[row * D + i] * pull);
        if HAS_ADDED == 1u { out += dsum[row * D + i]; }
        dx[row * D + i] = out;
    }
}

@group(0) @binding(1) var<storage, read> r_dw: array<f32>; // (n_rows)
@group(0) @binding(2) var<storage, read> dy_dw: array<f32>; // (n_rows, D)
@group(0) @binding(3) var<storage, read_write> parts: array<f32>; // (n_parts, D)
@group(0) @binding(4) var<uniform> p_dw: Params;

// A group sums N_ROWS rows for THREADS columns.
@compute @workgroup_size(THREADS)
fn norm_dw(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    let first = group_id.y * N_ROWS;
    var total = 0.0;
    for (var row = first; row < min(first + N_ROWS, p_dw.n_rows); row++) {
        total += dy_dw[row * D + col] * x[row * D + col] * r_dw[row];
    }
    parts[group_id.y * D + col] = total;
}

@group(0) @binding(1) var<storage, read_write> total_out: array<f32>; // (D)
@group(0) @binding(2) var<uniform> p_sum: Params;

// Sum over the rows of x, in order.
@compute @workgroup_size(THREADS)
fn norm_sum_rows(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    var total = 0.0;
    for (var row = 0u; row < p_sum.n_rows; row++) {
        total += x[row * D + col];
    }
    total_out[col] = total;
}
