// The gate of several outputs of a head, and their sum; see rank_gate.rs.
// D: channels of all heads. D_HEAD, RANK: of a head. WEIGHTED: 1 or 0. N_ROWS: rows of a sum.

struct Params { n: u32 } // numbers, or rows where sums are made

@group(0) @binding(0) var<storage, read> y: array<f32>; // (n_rows, D RANK)
@group(0) @binding(1) var<storage, read> z: array<f32>; // (n_rows, D)
@group(0) @binding(2) var<storage, read> of_gate: array<f32>; // (n_head, RANK, D_HEAD)
@group(0) @binding(3) var<storage, read> of_out: array<f32>; // (n_head, RANK, D_HEAD)
@group(0) @binding(4) var<storage, read> w: array<f32>; // (D)
@group(0) @binding(5) var<storage, read_write> o: array<f32>; // (n_rows, D)
@group(0) @binding(6) var<uniform> p: Params;

// Place of rank 0 of a channel, in a row of y or in a parameter.
fn first_of(col: u32) -> u32 {
    return col / D_HEAD * D_HEAD * RANK + col % D_HEAD;
}

fn weight_of(col: u32) -> f32 {
    if WEIGHTED == 1u { return w[col]; }
    return 1.0;
}

@compute @workgroup_size(THREADS)
fn rank_gate_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        let col = i % D;
        let first = first_of(col);
        let row = i / D * D * RANK;
        var sum = 0.0;
        for (var r = 0u; r < RANK; r++) {
            let at = first + r * D_HEAD;
            let g = z[i] * of_gate[at];
            sum += of_out[at] * y[row + at] * g * sigmoid(g);
        }
        o[i] = weight_of(col) * sum;
    }
}

@group(0) @binding(5) var<storage, read> dout: array<f32>; // (n_rows, D)
@group(0) @binding(6) var<storage, read_write> dy: array<f32>; // (n_rows, D RANK)
@group(0) @binding(7) var<storage, read_write> dz: array<f32>; // (n_rows, D)
@group(0) @binding(8) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn rank_gate_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_back.n; i += n_groups.x * THREADS) {
        let col = i % D;
        let first = first_of(col);
        let row = i / D * D * RANK;
        let pull = weight_of(col) * dout[i];
        var sum = 0.0;
        for (var r = 0u; r < RANK; r++) {
            let at = first + r * D_HEAD;
            let g = z[i] * of_gate[at];
            let s = sigmoid(g);
            dy[row + at] = pull * of_out[at] * g * s;
            sum += pull * of_out[at] * y[row + at] * s * (1.0 + g * (1.0 - s)) * of_gate[at];
        }
        dz[i] = sum;
    }
}

@group(0) @binding(6) var<storage, read_write> gate_parts: array<f32>; // (n_parts, D RANK)
@group(0) @binding(7) var<uniform> p_gate: Params;

// A workgroup sums N_ROWS rows for THREADS channels and all their ranks.
@compute @workgroup_size(THREADS)
fn rank_gate_of_gate(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    let begin = group_id.y * N_ROWS;
    let weight = weight_of(col);
    for (var r = 0u; r < RANK; r++) {
        let at = first_of(col) + r * D_HEAD;
        var sum = 0.0;
        for (var row = begin; row < min(begin + N_ROWS, p_gate.n); row++) {
            let i = row * D + col;
            let g = z[i] * of_gate[at];
            let s = sigmoid(g);
            let pull = weight * of_out[at] * dout[i] * y[row * D * RANK + at];
            sum += pull * s * (1.0 + g * (1.0 - s)) * z[i];
        }
        gate_parts[group_id.y * D * RANK + at] = sum;
    }
}

@group(0) @binding(6) var<storage, read_write> out_parts: array<f32>; // (n_parts, D RANK)
@group(0) @binding(7) var<storage, read_write> w_parts: array<f32>; // (n_parts, D)
@group(0) @binding(8) var<uniform> p_out: Params;

@compute @workgroup_size(THREADS)
fn rank_gate_of_out(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    let begin = group_id.y * N_ROWS;
    let weight = weight_of(col);
    var of_weight = 0.0;
    for (var r = 0u; r < RANK; r++) {
        let at = first_of(col) + r * D_HEAD;
        var sum = 0.0;
        for (var row = begin; row < min(begin + N_ROWS, p_out.n); row++) {
            let i = row * D + col;
            let g = z[i] * of_gate[at];
            sum += dout[i] * y[row * D * RANK + at] * g * sigmoid(g);
        }
        out_parts[group_id.y * D * RANK + at] = weight * sum;
        of_weight += of_out[at] * sum;
    }
    w_parts[group_id.y * D + col] = of_weight;
}
