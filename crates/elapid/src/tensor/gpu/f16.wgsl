// A matrix in f16, the first argument of a kernel, where the adapter computes with such numbers.
// wgpu/probe.rs sees that all of them come out right before it takes this file.

@group(0) @binding(0) var<storage, read> halves: array<vec4<f16>>;

// Number `at` of the argument.
fn stored(at: u32) -> f32 {
    return f32(halves[at / 4u][at % 4u]);
}

// Four from there on; `at` is a multiple of four.
fn four_stored(at: u32) -> vec4<f32> {
    return vec4<f32>(halves[at / 4u]);
}
