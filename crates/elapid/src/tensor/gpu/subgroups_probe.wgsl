// Sums that come out exactly, or subgroups are not what subgroups.wgsl takes them for.

@group(0) @binding(0) var<storage, read_write> out: array<f32>; // (3, THREADS)

@compute @workgroup_size(THREADS)
fn subgroups_probe(@builtin(local_invocation_index) thread: u32) {
    out[thread] = group_sum(thread, f32(thread + 1u));
    out[THREADS + thread] = group_max(thread, f32((thread * 167u) % THREADS));
    out[2u * THREADS + thread] = lanes_sum(thread, f32(thread * thread));
}
