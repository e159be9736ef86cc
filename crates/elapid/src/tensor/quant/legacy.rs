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
//!
//! Encoding takes the extremes of a block for its scale, without a search, and gives the bytes of
//! ggml for all finite numbers.

use super::{f16_at, put_f16};

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

#[inline(always)]
pub(super) fn encode_q8_0(x: &[f32; N_ELEM], block: &mut [u8; Q8_0_BYTES]) {
    let d = fold(x, 0.0, |largest, x| if x.abs() > largest { x.abs() } else { largest }) / 127.0;
    let inverse = inverse(d);
    put_f16::<0>(block, d);
    for (q, x) in block[2..].iter_mut().zip(x) {
        *q = low_byte((x * inverse).round());
    }
}

#[inline(always)]
pub(super) fn encode_q4_0(x: &[f32; N_ELEM], block: &mut [u8; Q4_0_BYTES]) {
    let (d, q) = signed::<8>(x);
    put_f16::<0>(block, d);
    put_four_bits(&q, &mut block[2..]);
}

#[inline(always)]
pub(super) fn encode_q5_0(x: &[f32; N_ELEM], block: &mut [u8; Q5_0_BYTES]) {
    let (d, q) = signed::<16>(x);
    put_f16::<0>(block, d);
    block[2..6].copy_from_slice(&fifth_bits(&q).to_le_bytes());
    put_four_bits(&q, &mut block[6..]);
}

#[inline(always)]
pub(super) fn encode_q4_1(x: &[f32; N_ELEM], block: &mut [u8; Q4_1_BYTES]) {
    let (d, m, q) = unsigned::<15>(x);
    put_f16::<0>(block, d);
    put_f16::<2>(block, m);
    put_four_bits(&q, &mut block[4..]);
}

#[inline(always)]
pub(super) fn encode_q5_1(x: &[f32; N_ELEM], block: &mut [u8; Q5_1_BYTES]) {
    let (d, m, q) = unsigned::<31>(x);
    put_f16::<0>(block, d);
    put_f16::<2>(block, m);
    block[4..8].copy_from_slice(&fifth_bits(&q).to_le_bytes());
    put_four_bits(&q, &mut block[8..]);
}

/// `d` and `q` with x about `d (q - ZERO)`: the number farthest from zero, the first if several,
/// becomes `q = 0`, whatever its sign.
#[inline(always)]
fn signed<const ZERO: i32>(x: &[f32; N_ELEM]) -> (f32, [u8; N_ELEM]) {
    let largest = fold(x, 0.0, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    let is_farthest = |x: &f32| x.abs() == largest && largest > 0.0;
    let d = x.iter().copied().find(is_farthest).unwrap_or(0.0) / -(ZERO as f32);
    let inverse = inverse(d);
    let q_max = (2 * ZERO - 1) as i8;
    let q = x.map(|x| (low_byte(x * inverse + (ZERO as f32 + 0.5)) as i8).min(q_max) as u8);
    (d, q)
}

/// `d`, `m` and `q` with x about `d q + m`: the least number becomes 0, the largest `Q_MAX`.
#[inline(always)]
fn unsigned<const Q_MAX: i32>(x: &[f32; N_ELEM]) -> (f32, f32, [u8; N_ELEM]) {
    let least = fold(x, f32::MAX, |least, x| if x < least { x } else { least });
    let largest = fold(x, f32::MIN, |largest, x| if x > largest { x } else { largest });
    // Of zeros of either sign, the first.
    let first = |zero: f32| x.iter().copied().find(|x| *x == zero).unwrap_or(zero);
    let m = if least == 0.0 { first(least) } else { least };
    let d = (if largest == 0.0 { first(largest) } else { largest } - m) / Q_MAX as f32;
    let inverse = inverse(d);
    let q = x.map(|x| (low_byte((x - m) * inverse + 0.5) as i8).min(Q_MAX as i8) as u8);
    (d, m, q)
}

/// One over `d`, or zero for zero. The unrounded d makes q, not the f16 that is kept.
#[inline(always)]
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Folds in lanes, so that it becomes vectors: `f` must not care about the order.
#[inline(always)]
fn fold(x: &[f32; N_ELEM], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; 8];
    for x in x.as_chunks::<8>().0 {
        for i in 0..8 {
            lanes[i] = f(lanes[i], x[i]);
        }
    }
    lanes.into_iter().fold(start, f)
}

/// The low byte of the integer part; zero for NaN and for what exceeds an i32.
///
/// Blocks so small that `1 / d` is infinite come by such numbers; this is what x86 makes of them.
#[inline(always)]
fn low_byte(x: f32) -> u8 {
    let fits = x < -(i32::MIN as f32);
    (if fits { x as i32 } else { 0 }) as u8
}

/// The low four bits of each number, two to a byte.
#[inline(always)]
fn put_four_bits(q: &[u8; N_ELEM], out: &mut [u8]) {
    for i in 0..HALF {
        out[i] = q[i] & 15 | q[i + HALF] << 4;
    }
}

/// The fifth bit of each number, in a word.
#[inline(always)]
fn fifth_bits(q: &[u8; N_ELEM]) -> u32 {
    q.iter().enumerate().fold(0, |bits, (i, q)| bits | ((*q as u32 >> 4) & 1) << i)
}
