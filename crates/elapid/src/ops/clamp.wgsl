// y = x between -limit and limit, and its gradient; see clamp.rs.

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n)
@group(0) @binding(1) var<storage, read_write> y: array<f32>; // (n)
struct Params { n: u32, limit: f32 }
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn clamp_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        // By comparisons a NaN stays one.
        var value = x[i];
        if value > p.limit { value = p.limit; }
        if value < -p.limit { value = -p.limit; }
        y[i] = value;
    }
}

@group(0) @binding(1) var<storage, read> dy: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> dx: array<f32>; // (n)
@group(0) @binding(3) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn clamp_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_back.n; i += n_groups.x * THREADS) {
        dx[i] = select(0.0, dy[i], abs(x[i]) <= p_back.limit);
    }
}
