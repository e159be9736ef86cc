//! NormalFloat of 4 bits (Dettmers et al., QLoRA, 2023), as bitsandbytes has it.
//!
//! A block is 64 numbers: the largest magnitude as f32, then 32 bytes, the first of two numbers in
//! the high half. A number is `TABLE[q] * largest`: the table holds quantiles of a normal
//! distribution, scaled to reach from -1 to 1, with an exact zero. The scales are kept in f32:
//! quantising them too would save 0.4 bits a number.
//!
//! In memory only: no file format holds it.

pub(super) const N_ELEM: usize = 64;
pub(super) const N_BYTES: usize = 4 + N_ELEM / 2;

/// bitsandbytes' `get_4bit_type("nf4")`, to the last bit.
const TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Halfway between neighbours in the table; what lies on one goes down.
const EDGES: [f32; 15] = edges();

const fn edges() -> [f32; 15] {
    let mut edges = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        edges[i] = ((TABLE[i] as f64 + TABLE[i + 1] as f64) / 2.0) as f32;
        i += 1;
    }
    edges
}

#[inline(always)]
pub(super) fn decode(block: &[u8; N_BYTES], out: &mut [f32; N_ELEM]) {
    let largest = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    // One product for each of the sixteen numbers a block can hold, not for each it holds.
    let table = TABLE.map(|x| x * largest);
    for (pair, q) in out.as_chunks_mut::<2>().0.iter_mut().zip(&block[4..]) {
        *pair = [table[(q >> 4) as usize], table[(q & 15) as usize]];
    }
}

#[inline(always)]
pub(super) fn encode(x: &[f32; N_ELEM], block: &mut [u8; N_BYTES]) {
    let largest = x.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    block[..4].copy_from_slice(&largest.to_le_bytes());
    // One over the largest, as there; blocks too small to have one become zeros.
    let inverse = if largest.recip().is_finite() { largest.recip() } else { 0.0 };
    let q = x.map(|x| {
        let x = x * inverse;
        EDGES.iter().map(|edge| (x > *edge) as u8).sum::<u8>()
    });
    for (byte, pair) in block[4..].iter_mut().zip(q.as_chunks::<2>().0) {
        *byte = pair[0] << 4 | pair[1];
    }
}
