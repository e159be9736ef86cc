// loss = factor / 2 sum of (y - target)^2, and its gradient; see square_error.rs.

@group(0) @binding(0) var<storage, read> y: array<f32>; // (n)
@group(0) @binding(1) var<storage, read> goal: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> loss: array<f32>; // (1)
struct Params { n: u32, factor: f32 }
@group(0) @binding(3) var<uniform> p: Params;

// One group.
@compute @workgroup_size(THREADS)
fn square_error_forward(@builtin(local_invocation_index) thread: u32) {
    var part = 0.0;
    for (var i = thread; i < p.n; i += THREADS) {
        let off = y[i] - goal[i];
        part += off * off;
    }
    let sum = group_sum(thread, part);
    if thread == 0u { loss[0] = 0.5 * p.factor * sum; }
}

@group(0) @binding(2) var<storage, read> dloss: array<f32>; // (1)
@group(0) @binding(3) var<storage, read_write> dy: array<f32>; // (n)
@group(0) @binding(4) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn square_error_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_back.n; i += n_groups.x * THREADS) {
        dy[i] = p_back.factor * dloss[0] * (y[i] - goal[i]);
    }
}
