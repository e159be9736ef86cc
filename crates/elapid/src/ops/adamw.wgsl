// AdamW, and the sizes of its update; see adamw.rs.

struct Params {
    n: u32,
    grad_scale: f32,
    keep: f32,
    new1: f32,
    old1: f32,
    beta2: f32,
    new2: f32,
    root2: f32,
    eps: f32,
    step: f32,
}

@group(0) @binding(0) var<storage, read> g: array<f32>; // (n)
@group(0) @binding(1) var<storage, read_write> w: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> m: array<f32>; // (n)
@group(0) @binding(3) var<storage, read_write> v: array<f32>; // (n)
@group(0) @binding(4) var<uniform> p: Params;

// The new moments and m / (sqrt(v) / sqrt(1 - beta2^t) + eps).
fn moments(g_raw: f32, m_old: f32, v_old: f32, s: Params) -> vec3<f32> {
    let g_at = g_raw * s.grad_scale;
    // The first form loses g where m is much larger and beta1 is near zero.
    var m_new = m_old + s.new1 * (g_at - m_old);
    if s.new1 >= 0.5 { m_new = g_at - s.old1 * (g_at - m_old); }
    let v_new = s.beta2 * v_old + s.new2 * g_at * g_at;
    return vec3(m_new, v_new, m_new / (sqrt(v_new) / s.root2 + s.eps));
}

@compute @workgroup_size(THREADS)
fn adamw_step(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        let found = moments(g[i], m[i], v[i], p);
        w[i] = w[i] * p.keep - p.step * found.z;
        m[i] = found.x;
        v[i] = found.y;
    }
}

@group(0) @binding(1) var<storage, read> w_in: array<f32>; // (n)
@group(0) @binding(2) var<storage, read> m_in: array<f32>; // (n)
@group(0) @binding(3) var<storage, read> v_in: array<f32>; // (n)
@group(0) @binding(4) var<storage, read_write> sums: array<f32>; // (groups, 2)
@group(0) @binding(5) var<uniform> p_sizes: Params;

// Sums of the squares of the ratio and of w, a pair for each group.
@compute @workgroup_size(THREADS)
fn adamw_sizes(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var ratios = 0.0;
    var sizes = 0.0;
    let first = group_id.x * THREADS + thread;
    for (var i = first; i < p_sizes.n; i += n_groups.x * THREADS) {
        let ratio = moments(g[i], m_in[i], v_in[i], p_sizes).z;
        ratios += ratio * ratio;
        sizes += w_in[i] * w_in[i];
    }
    let all_ratios = group_sum(thread, ratios);
    let all_sizes = group_sum(thread, sizes);
    if thread == 0u {
        sums[group_id.x * 2u] = all_ratios;
        sums[group_id.x * 2u + 1u] = all_sizes;
    }
}
