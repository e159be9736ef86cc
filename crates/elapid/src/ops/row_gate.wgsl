// y = sigmoid(gate) x, a gate for each row of D numbers, and the gradient of the gate; see
// row_gate.rs.

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n / D, D)
@group(0) @binding(1) var<storage, read> gate: array<f32>; // (n / D)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n / D, D)
struct Params { n: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn row_gate_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        y[i] = sigmoid(gate[i / D]) * x[i];
    }
}

@group(0) @binding(2) var<storage, read> dy: array<f32>; // (n_rows, D)
@group(0) @binding(3) var<storage, read_write> dgate: array<f32>; // (n_rows)
struct ParamsBack { n_rows: u32 }
@group(0) @binding(4) var<uniform> p_back: ParamsBack;

// A group takes a row.
@compute @workgroup_size(THREADS)
fn row_gate_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p_back.n_rows { return; }
    var part = 0.0;
    for (var i = thread; i < D; i += THREADS) {
        part += x[row * D + i] * dy[row * D + i];
    }
    let dot = group_sum(thread, part);
    let s = sigmoid(gate[row]);
    if thread == 0u { dgate[row] = s * (1.0 - s) * dot; }
}
