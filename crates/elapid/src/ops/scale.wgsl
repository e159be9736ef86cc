// y = factor x, a factor for each of D columns; see scale.rs.

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n / D, D)
@group(0) @binding(1) var<storage, read> factors: array<f32>; // (D)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n / D, D)
struct Params { n: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn scale_columns(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        y[i] = factors[i % D] * x[i];
    }
}
