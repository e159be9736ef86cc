// The right side of product.wgsl in f32. In f16 it is read by f16.wgsl or halves.wgsl.

@group(0) @binding(0) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read> b_fours: array<vec4<f32>>;

fn stored(at: u32) -> f32 {
    return b[at];
}

fn four_stored(at: u32) -> vec4<f32> {
    return b_fours[at / 4u];
}
