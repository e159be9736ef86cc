// Sums over the threads of a group, in a fixed order; with no more than WebGPU promises everywhere.
// All threads must come here.

var<workgroup> group_scratch: array<f32, THREADS>;

// Sum of `x` over a group, the same in all of its threads.
fn group_sum(thread: u32, x: f32) -> f32 {
    group_scratch[thread] = x;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            group_scratch[thread] += group_scratch[thread + half];
        }
        workgroupBarrier();
    }
    let sum = workgroupUniformLoad(&group_scratch[0]);
    return sum;
}

// Largest `x` in a group, likewise.
fn group_max(thread: u32, x: f32) -> f32 {
    group_scratch[thread] = x;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            group_scratch[thread] = max(group_scratch[thread], group_scratch[thread + half]);
        }
        workgroupBarrier();
    }
    let top = workgroupUniformLoad(&group_scratch[0]);
    return top;
}

// Sum of `x` over the 32 threads from a multiple of 32 on, likewise.
fn lanes_sum(thread: u32, x: f32) -> f32 {
    group_scratch[thread] = x;
    workgroupBarrier();
    for (var half = 16u; half > 0u; half /= 2u) {
        if thread % 32u < half {
            group_scratch[thread] += group_scratch[thread + half];
        }
        workgroupBarrier();
    }
    let sum = group_scratch[thread / 32u * 32u];
    workgroupBarrier();
    return sum;
}
