// What formats.wgsl has, for a matrix in f16 read by f16.wgsl or halves.wgsl.

fn number(begin: u32, i: u32) -> f32 {
    return stored(begin / 2u + i);
}

fn four(begin: u32, i: u32) -> vec4<f32> {
    let at = begin / 2u + i;
    if at % 4u == 0u { return four_stored(at); }
    return vec4(stored(at), stored(at + 1u), stored(at + 2u), stored(at + 3u));
}
