// Before every kernel: places in the grid, and numbers. Behind it sums.wgsl or subgroups.wgsl.

// The group, where groups are laid in a plane.
fn group_of(group_id: vec3<u32>, n_groups: vec3<u32>) -> u32 {
    return group_id.y * n_groups.x + group_id.x;
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
