//! Formats with one or two f16 for 32 numbers.
//!
//! | format | bytes of a block, in order                                    |
//! |--------|---------------------------------------------------------------|
//! | Q4_0   | d: 2, q: 16                                                   |
//! | Q4_1   | d: 2, m: 2, q: 16                                             |
//! | Q5_0   | d: 2, fifth bits: 4, q: 16                                    |
//! | Q5_1   | d: 2, m: 2, fifth bits: 4, q: 16                              |
//! | Q8_0   | d: 2, q: 32                                                   |
//!
//! Byte i of a 4-bit q holds number i in its low half and number `i + 16` in its high half. The
//! fifth bit of number i is bit i of a 32-bit word.

use super::f16_at;

pub(super) const N_ELEM: usize = 32;
const HALF: usize = N_ELEM / 2;

pub(super) const Q4_0_BYTES: usize = 2 + HALF;
pub(super) const Q4_1_BYTES: usize = 4 + HALF;
pub(super) const Q5_0_BYTES: usize = 6 + HALF;
pub(super) const Q5_1_BYTES: usize = 8 + HALF;
pub(super) const Q8_0_BYTES: usize = 2 + N_ELEM;

#[inline(always)]
pub(super) fn decode_q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; N_ELEM]) {
    let d = f16_at::<0>(block);
    let q = four_bits(&block[2..]);
    for i in 0..N_ELEM {
        out[i] = d * (q[i] as i32 - 8) as f32;
    }
}

#[inline(always)]
pub(super) fn decode_q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; N_ELEM]) {
    let (d, m) = (f16_at::<0>(block), f16_at::<2>(block));
    let q = four_bits(&block[4..]);
    for i in 0..N_ELEM {
        out[i] = d * q[i] as i32 as f32 + m;
    }
}

#[inline(always)]
pub(super) fn decode_q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; N_ELEM]) {
    let d = f16_at::<0>(block);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let q = four_bits(&block[6..]);
    for i in 0..N_ELEM {
        out[i] = d * ((q[i] as i32 | fifth_bit(fifth, i)) - 16) as f32;
    }
}

#[inline(always)]
pub(super) fn decode_q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; N_ELEM]) {
    let (d, m) = (f16_at::<0>(block), f16_at::<2>(block));
    let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    let q = four_bits(&block[8..]);
    for i in 0..N_ELEM {
        out[i] = d * (q[i] as i32 | fifth_bit(fifth, i)) as f32 + m;
    }
}

/// The halves of each byte, in bytes of their own.
#[inline(always)]
fn four_bits(q: &[u8]) -> [u8; N_ELEM] {
    let mut out = [0; N_ELEM];
    for i in 0..HALF {
        out[i] = q[i] & 15;
    }
    for i in 0..HALF {
        out[i + HALF] = q[i] >> 4;
    }
    // Seen through, the compiler would take the numbers one by one, several times slower.
    std::hint::black_box(out)
}

/// The fifth bit of number `idx`, in its place.
#[inline(always)]
fn fifth_bit(fifth: u32, idx: usize) -> i32 {
    (fifth >> idx & 1) as i32 * 16
}

#[inline(always)]
pub(super) fn decode_q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; N_ELEM]) {
    let d = f16_at::<0>(block);
    let q = &block[2..];
    for i in 0..N_ELEM {
        out[i] = d * (q[i] as i8) as f32;
    }
}

/// Encodes whole blocks as Q8_0, to the same bytes as ggml.
///
/// `d = max |x| / 127`; q is rounded with the unrounded d, as there, not with the f16 that is kept.
pub fn encode_q8_0(x: &[f32], bytes: &mut [u8]) {
    assert!(
        x.len().is_multiple_of(N_ELEM) && x.len() / N_ELEM * Q8_0_BYTES == bytes.len(),
        "q8_0: {} numbers into {} bytes",
        x.len(),
        bytes.len()
    );
    for (x, block) in x.as_chunks::<N_ELEM>().0.iter().zip(bytes.as_chunks_mut::<Q8_0_BYTES>().0) {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let d = largest / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        block[..2].copy_from_slice(&half::f16::from_f32(d).to_le_bytes());
        for (q, x) in block[2..].iter_mut().zip(x) {
            *q = (x * inverse).round() as i8 as u8;
        }
    }
}
