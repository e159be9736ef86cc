// The same as sums.wgsl where threads of a subgroup exchange numbers without a barrier. Subgroups
// hold threads in their order; wgpu/probe.rs sees that it is so before it takes this file.

var<workgroup> group_scratch: array<f32, THREADS>;

// Sum over `n` neighbours in a subgroup, in an order that depends on `n` alone.
fn subgroup_sum(n: u32, x: f32) -> f32 {
    var sum = x;
    for (var half = n / 2u; half > 0u; half /= 2u) {
        sum += subgroupShuffleXor(sum, half);
    }
    return sum;
}

// Keeps a number of each thread, once nobody reads any more what was kept before.
fn group_keep(thread: u32, x: f32) {
    workgroupBarrier();
    group_scratch[thread] = x;
    workgroupBarrier();
}

fn group_sum(thread: u32, x: f32) -> f32 {
    let size = subgroupAdd(1u);
    group_keep(thread, subgroup_sum(size, x));
    var sum = 0.0;
    for (var i = 0u; i < THREADS; i += size) {
        sum += group_scratch[i];
    }
    return sum;
}

fn group_max(thread: u32, x: f32) -> f32 {
    let size = subgroupAdd(1u);
    var top = x;
    for (var half = size / 2u; half > 0u; half /= 2u) {
        top = max(top, subgroupShuffleXor(top, half));
    }
    group_keep(thread, top);
    for (var i = 0u; i < THREADS; i += size) {
        top = max(top, group_scratch[i]);
    }
    return top;
}

fn lanes_sum(thread: u32, x: f32) -> f32 {
    let size = min(subgroupAdd(1u), 32u);
    let part = subgroup_sum(size, x);
    if SUBGROUP_MIN >= 32u {
        return part;
    }
    group_keep(thread, part);
    let first = thread / 32u * 32u;
    var sum = 0.0;
    for (var i = first; i < first + 32u; i += size) {
        sum += group_scratch[i];
    }
    return sum;
}
