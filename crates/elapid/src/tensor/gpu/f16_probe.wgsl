// N numbers in f16, the way products take them: read by fours and one by one, kept in shared memory
// for other threads, multiplied. See wgpu/probe.rs.

@group(0) @binding(1) var<storage, read_write> out: array<f32>; // (2, N)
struct Params { one: f32 }
@group(0) @binding(2) var<uniform> p: Params;

var<workgroup> tile: array<f32, THREADS * 4u>;

@compute @workgroup_size(THREADS)
fn f16_probe(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = group_id.x * THREADS * 4u;
    let four = four_stored(first + thread * 4u);
    for (var i = 0u; i < 4u; i++) { tile[thread * 4u + i] = four[i]; }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let at = i * THREADS + thread;
        out[first + at] = p.one * tile[at];
        out[N + first + at] = p.one * stored(first + at);
    }
}
