// Sums of squares, one for each group; see grad_norm.rs.

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n)
@group(0) @binding(1) var<storage, read_write> sums: array<f32>; // from `first` on
struct Params { n: u32, first: u32 }
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn sum_squares(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let begin = group_id.x * PIECE;
    let end = min(begin + PIECE, p.n);
    var sum = 0.0;
    for (var i = begin + thread; i < end; i += THREADS) {
        sum += x[i] * x[i];
    }
    let total = group_sum(thread, sum);
    if thread == 0u { sums[p.first + group_id.x] = total; }
}
