// Before every kernel: places in the grid, and sums over a group in a fixed order.

// The group, where groups are laid in a plane.
fn group_of(group_id: vec3<u32>, n_groups: vec3<u32>) -> u32 {
    return group_id.y * n_groups.x + group_id.x;
}

var<workgroup> group_scratch: array<f32, THREADS>;

// Sum of `x` over the threads of a group, the same in all of them. All threads must come here.
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

// Not a number in, not a number out; and no overflow: e^-x of a large x.
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-max(x, -80.0)));
}

// The number with these sixteen bits as an IEEE half, exactly: what is below the least normal half
// is not rounded to zero, as the built-in functions may.
fn f16_to_f32(bits: u32) -> f32 {
    let sign = (bits & 0x8000u) << 16u;
    let exponent = (bits >> 10u) & 31u;
    let mantissa = bits & 1023u;
    if exponent == 0u {
        return bitcast<f32>(bitcast<u32>(f32(mantissa) * 5.9604644775390625e-08) | sign);
    }
    let wide = select(exponent + 112u, 255u, exponent == 31u);
    return bitcast<f32>(sign | (wide << 23u) | (mantissa << 13u));
}
