// What Muon does besides products; see muon.rs.

struct Params { n: u32, a: f32, b: f32 }

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n)
@group(0) @binding(1) var<storage, read_write> y: array<f32>; // (n)
@group(0) @binding(2) var<uniform> p: Params;

// y = a y + b x
@compute @workgroup_size(THREADS)
fn muon_combine(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        y[i] = p.a * y[i] + p.b * x[i];
    }
}

@group(0) @binding(1) var<storage, read_write> mu: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> ahead: array<f32>; // (n)
@group(0) @binding(3) var<uniform> p_ahead: Params;

// Moves the momentum by `a` towards b x, and says where it would be one step later.
@compute @workgroup_size(THREADS)
fn muon_look_ahead(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_ahead.n; i += n_groups.x * THREADS) {
        let g = p_ahead.b * x[i];
        let moved = mu[i] + p_ahead.a * (g - mu[i]);
        mu[i] = moved;
        ahead[i] = moved + p_ahead.a * (g - moved);
    }
}
