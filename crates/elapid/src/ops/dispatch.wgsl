// Rows to experts and back; see dispatch.rs. A group takes a row of D numbers.
// N_USED rows to a token. HAS_W: 0 where rows are added plainly; HAS_Y: 0 where the weights want no
// gradient; another buffer then takes the place of what is not there.

struct Params { n_rows: u32 }

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_tok, D)
@group(0) @binding(1) var<storage, read> choices: array<u32>; // (n_rows)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n_rows, D)
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn dispatch_gather(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_rows { return; }
    let tok = choices[row] / N_USED;
    for (var i = thread; i < D; i += THREADS) {
        y[row * D + i] = x[tok * D + i];
    }
}

@group(0) @binding(0) var<storage, read> x_sum: array<f32>; // (n_tok * N_USED, D)
@group(0) @binding(1) var<storage, read> rows: array<u32>; // (n_tok * N_USED)
@group(0) @binding(2) var<storage, read> weights: array<f32>; // (n_tok, N_USED)
@group(0) @binding(3) var<storage, read_write> sum: array<f32>; // (n_tok, D)
@group(0) @binding(4) var<uniform> p_sum: Params;

// The rows of a token, in order of choice.
@compute @workgroup_size(THREADS)
fn dispatch_sum(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let tok = group_of(group_id, n_groups);
    if tok >= p_sum.n_rows { return; }
    for (var i = thread; i < D; i += THREADS) {
        var total = 0.0;
        for (var slot = 0u; slot < N_USED; slot++) {
            let choice = tok * N_USED + slot;
            let value = x_sum[rows[choice] * D + i];
            if HAS_W == 1u { total += weights[choice] * value; } else { total += value; }
        }
        sum[tok * D + i] = total;
    }
}

@group(0) @binding(0) var<storage, read> dy: array<f32>; // (n_tok, D)
@group(0) @binding(2) var<storage, read> weights_back: array<f32>; // (n_tok, N_USED)
@group(0) @binding(3) var<storage, read> y_sorted: array<f32>; // (n_rows, D)
@group(0) @binding(4) var<storage, read_write> dy_sorted: array<f32>; // (n_rows, D)
@group(0) @binding(5) var<storage, read_write> dweights: array<f32>; // (n_tok, N_USED), or (1)
@group(0) @binding(6) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn dispatch_combine_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p_back.n_rows { return; }
    let choice = choices[row];
    let tok = choice / N_USED;
    let weight = weights_back[choice];
    var part = 0.0;
    for (var i = thread; i < D; i += THREADS) {
        let d = dy[tok * D + i];
        if HAS_Y == 1u { part += d * y_sorted[row * D + i]; }
        dy_sorted[row * D + i] = weight * d;
    }
    if HAS_Y == 1u {
        let dot = group_sum(thread, part);
        if thread == 0u { dweights[choice] = dot; }
    }
}
