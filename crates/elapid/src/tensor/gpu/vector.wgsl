
// out = alpha x @ w^T + beta out for M rows of x, at most eight; see vector.rs. 32 threads take a
// row of w as it is stored. A row of the result does not depend on how many there are.

@group(0) @binding(1) var<storage, read> x: array<f32>; // (M, k) from `x_first` on
@group(0) @binding(2) var<storage, read_write> out: array<f32>; // (M, n) from `out_first` on
struct Params {
    n: u32,
    k: u32,
    lead: u32,
    x_first: u32,
    out_first: u32,
    out_stride: u32,
    alpha: f32,
    beta: f32,
}
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn vector(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_of(group_id, n_groups) * (THREADS / 32u) + thread / 32u;
    let lane = thread % 32u;
    var sums: array<f32, M>;
    if col < p.n {
        let begin = p.lead + col * (p.k / BLOCK * BYTES);
        for (var i = lane * 4u; i < p.k; i += 128u) {
            if i + 4u <= p.k {
                let w = four(begin, i);
                for (var row = 0u; row < M; row++) {
                    let at = p.x_first + row * p.k + i;
                    sums[row] += dot(w, vec4(x[at], x[at + 1u], x[at + 2u], x[at + 3u]));
                }
            } else {
                for (var j = i; j < p.k; j++) {
                    let w = number(begin, j);
                    for (var row = 0u; row < M; row++) {
                        sums[row] += w * x[p.x_first + row * p.k + j];
                    }
                }
            }
        }
    }
    for (var row = 0u; row < M; row++) {
        let sum = lanes_sum(thread, sums[row]);
        if lane == 0u && col < p.n {
            let at = p.out_first + row * p.out_stride + col;
            var y = p.alpha * sum;
            if p.beta != 0.0 { y += p.beta * out[at]; }
            out[at] = y;
        }
    }
}
