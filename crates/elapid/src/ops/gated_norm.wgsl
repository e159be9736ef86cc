// Gated RMSNorm; see gated_norm.rs. A workgroup takes one group of channels of one row.
// D_GROUP, N_GROUP: width and count of groups. GATE_FIRST: 1 or 0. N_ROWS: rows of a partial sum.

struct Params { n_rows: u32, eps: f32 }

const D: u32 = D_GROUP * N_GROUP;

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_rows, D)
@group(0) @binding(1) var<storage, read> z: array<f32>; // (n_rows, D)
@group(0) @binding(2) var<storage, read> w: array<f32>; // (D)
@group(0) @binding(3) var<storage, read_write> y: array<f32>; // (n_rows, D)
@group(0) @binding(4) var<storage, read_write> r: array<f32>; // (n_rows, N_GROUP)
@group(0) @binding(5) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn gated_norm_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = group_of(group_id, n_groups);
    if group >= p.n_rows * N_GROUP { return; }
    let at = group * D_GROUP;
    let first = (group % N_GROUP) * D_GROUP;
    var squares = 0.0;
    for (var i = thread; i < D_GROUP; i += THREADS) {
        var value = x[at + i];
        if GATE_FIRST == 1u { value *= z[at + i] * sigmoid(z[at + i]); }
        squares += value * value;
    }
    let ratio = 1.0 / sqrt(group_sum(thread, squares) / f32(D_GROUP) + p.eps);
    if thread == 0u { r[group] = ratio; }
    for (var i = thread; i < D_GROUP; i += THREADS) {
        let u = x[at + i] * z[at + i] * sigmoid(z[at + i]);
        y[at + i] = w[first + i] * u * ratio;
    }
}

@group(0) @binding(3) var<storage, read> r_back: array<f32>; // (n_rows, N_GROUP)
@group(0) @binding(4) var<storage, read> dy: array<f32>; // (n_rows, D)
@group(0) @binding(5) var<storage, read_write> dx: array<f32>; // (n_rows, D)
@group(0) @binding(6) var<storage, read_write> dz: array<f32>; // (n_rows, D)
@group(0) @binding(7) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn gated_norm_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = group_of(group_id, n_groups);
    if group >= p_back.n_rows * N_GROUP { return; }
    let at = group * D_GROUP;
    let first = (group % N_GROUP) * D_GROUP;
    let ratio = r_back[group];
    // `w u dy` is g times what was normalised in either order.
    var dot = 0.0;
    for (var i = thread; i < D_GROUP; i += THREADS) {
        let u = x[at + i] * z[at + i] * sigmoid(z[at + i]);
        dot += w[first + i] * u * dy[at + i];
    }
    let pull = ratio * ratio * group_sum(thread, dot) / f32(D_GROUP);
    for (var i = thread; i < D_GROUP; i += THREADS) {
        let xi = x[at + i];
        let zi = z[at + i];
        let s = sigmoid(zi);
        let silu = zi * s;
        let slope = s * (1.0 + zi * (1.0 - s));
        let wdy = w[first + i] * dy[at + i];
        if GATE_FIRST == 1u {
            let du = ratio * (wdy - xi * silu * pull);
            dx[at + i] = silu * du;
            dz[at + i] = slope * xi * du;
        } else {
            dx[at + i] = ratio * (wdy * silu - xi * pull);
            dz[at + i] = slope * wdy * xi * ratio;
        }
    }
}

@group(0) @binding(2) var<storage, read> r_dw: array<f32>; // (n_rows, N_GROUP)
@group(0) @binding(3) var<storage, read> dy_dw: array<f32>; // (n_rows, D)
@group(0) @binding(4) var<storage, read_write> parts: array<f32>; // (n_parts, D)

// A workgroup sums N_ROWS rows for THREADS channels.
@compute @workgroup_size(THREADS)
fn gated_norm_dw(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    let first = group_id.y * N_ROWS;
    var total = 0.0;
    for (var row = first; row < min(first + N_ROWS, p.n_rows); row++) {
        let i = row * D + col;
        let u = x[i] * z[i] * sigmoid(z[i]);
        total += u * dy_dw[i] * r_dw[row * N_GROUP + col / D_GROUP];
    }
    parts[group_id.y * D + col] = total;
}
