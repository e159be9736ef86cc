// The same as f16.wgsl with no more than WebGPU promises everywhere: numbers are made of words.

@group(0) @binding(0) var<storage, read> halves: array<vec2<u32>>;

fn stored(at: u32) -> f32 {
    return f16_to_f32((halves[at / 4u][at / 2u % 2u] >> (at % 2u * 16u)) & 65535u);
}

fn four_stored(at: u32) -> vec4<f32> {
    let words = halves[at / 4u];
    return vec4(
        f16_to_f32(words.x & 65535u), f16_to_f32(words.x >> 16u),
        f16_to_f32(words.y & 65535u), f16_to_f32(words.y >> 16u),
    );
}
