// y = a + b, and y += x; see add.rs.

@group(0) @binding(0) var<storage, read> a: array<f32>; // (n)
@group(0) @binding(1) var<storage, read> b: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n)
struct Params { n: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn add_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        y[i] = a[i] + b[i];
    }
}

@group(0) @binding(1) var<storage, read_write> sum: array<f32>; // (n)
@group(0) @binding(2) var<uniform> p_into: Params;

@compute @workgroup_size(THREADS)
fn add_into(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_into.n; i += n_groups.x * THREADS) {
        sum[i] += a[i];
    }
}
