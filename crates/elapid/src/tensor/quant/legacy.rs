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

/// A format of 4 or 5 bits, with or without a minimum; q are its last bytes, fifth bits before.
pub(super) struct Legacy<const BITS: u32, const HAS_MIN: bool, const BYTES: usize>;

pub(super) type Q4_0 = Legacy<4, false, Q4_0_BYTES>;
pub(super) type Q4_1 = Legacy<4, true, Q4_1_BYTES>;
pub(super) type Q5_0 = Legacy<5, false, Q5_0_BYTES>;
pub(super) type Q5_1 = Legacy<5, true, Q5_1_BYTES>;

impl<const BITS: u32, const HAS_MIN: bool, const BYTES: usize> Legacy<BITS, HAS_MIN, BYTES> {
    #[inline(always)]
    pub(super) fn decode(block: &[u8; BYTES], out: &mut [f32; N_ELEM]) {
        let d = f16_at::<0>(block);
        let m = if HAS_MIN { f16_at::<2>(block) } else { 0.0 };
        let fifth = match BITS {
            4 => 0,
            _ => u32::from_le_bytes([20, 19, 18, 17].map(|back| block[BYTES - back])),
        };
        let q = four_bits(&block[BYTES - HALF..]);
        for i in 0..N_ELEM {
            let q = q[i] as i32 | fifth_bit(fifth, i);
            out[i] = if HAS_MIN { d * q as f32 + m } else { d * (q - (1 << (BITS - 1))) as f32 };
        }
    }

    #[inline(always)]
    pub(super) fn encode(x: &[f32; N_ELEM], block: &mut [u8; BYTES]) {
        let (d, m, q) = if HAS_MIN { unsigned::<BITS>(x) } else { signed::<BITS>(x) };
        put_f16::<0>(block, d);
        if HAS_MIN {
            put_f16::<2>(block, m);
        }
        if BITS == 5 {
            block[BYTES - HALF - 4..][..4].copy_from_slice(&fifth_bits(&q).to_le_bytes());
        }
        // The low four bits of each number, two to a byte.
        for i in 0..HALF {
            block[BYTES - HALF + i] = q[i] & 15 | q[i + HALF] << 4;
        }
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

/// `d`, no `m`, and `q` with x about `d (q - zero)`, zero in the middle: the number farthest from
/// zero, the first if several, becomes `q = 0`, whatever its sign.
#[inline(always)]
fn signed<const BITS: u32>(x: &[f32; N_ELEM]) -> (f32, f32, [u8; N_ELEM]) {
    let largest = fold(x, 0.0, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    let is_farthest = |x: &f32| x.abs() == largest && largest > 0.0;
    let zero = (1 << (BITS - 1)) as f32;
    let d = x.iter().copied().find(is_farthest).unwrap_or(0.0) / -zero;
    let inverse = inverse(d);
    let q_max = (1 << BITS) - 1;
    let q = x.map(|x| (low_byte(x * inverse + (zero + 0.5)) as i8).min(q_max) as u8);
    (d, 0.0, q)
}

/// `d`, `m` and `q` with x about `d q + m`: the least number becomes 0, the largest the largest q.
#[inline(always)]
fn unsigned<const BITS: u32>(x: &[f32; N_ELEM]) -> (f32, f32, [u8; N_ELEM]) {
    let least = fold(x, f32::MAX, |least, x| if x < least { x } else { least });
    let largest = fold(x, f32::MIN, |largest, x| if x > largest { x } else { largest });
    // Of zeros of either sign, the first.
    let first = |zero: f32| x.iter().copied().find(|x| *x == zero).unwrap_or(zero);
    let m = if least == 0.0 { first(least) } else { least };
    let q_max: i8 = (1 << BITS) - 1;
    let d = (if largest == 0.0 { first(largest) } else { largest } - m) / q_max as f32;
    let inverse = inverse(d);
    let q = x.map(|x| (low_byte((x - m) * inverse + 0.5) as i8).min(q_max) as u8);
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

/// The fifth bit of each number, in a word.
#[inline(always)]
fn fifth_bits(q: &[u8; N_ELEM]) -> u32 {
    q.iter().enumerate().fold(0, |bits, (i, q)| bits | ((*q as u32 >> 4) & 1) << i)
}
