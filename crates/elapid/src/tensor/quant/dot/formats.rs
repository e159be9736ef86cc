//! How each block format becomes bytes and scales; the layouts are those of `legacy.rs` and `k.rs`.
//!
//! A block is taken apart into groups of 32 small unsigned integers u, each with a scale s and
//! perhaps a minimum: a number is `s (u - zero) + low`. Scales and minima may differ between the
//! halves of a group.

use super::super::k;
use super::super::legacy::{self, Legacy};
use super::isa::Isa;

pub(super) use super::super::legacy::{Q4_0, Q4_1, Q5_0, Q5_1};

/// What becomes of the groups of a block, one after the other.
pub(super) trait Taker<I: Isa> {
    /// Group `idx`: numbers `scale q` with signed bytes q.
    fn signed(&mut self, isa: I, idx: usize, q: I::Bytes, scale: I::Floats);
    /// Group `idx`: numbers `scale (u - 2^ZERO)`.
    fn centred<const ZERO: i32>(&mut self, isa: I, idx: usize, u: I::Bytes, scale: I::Floats);
    /// Group `idx`: numbers `scale u + low`.
    fn raised(&mut self, isa: I, idx: usize, u: I::Bytes, line: (I::Floats, I::Floats));
}

/// A format with `BYTES` bytes and `GROUPS` groups in a block.
pub(super) trait Format<const BYTES: usize, const GROUPS: usize> {
    /// Whether halves of groups have scales of their own.
    const HAS_HALVES: bool = false;

    /// Takes a block apart.
    fn block<I: Isa>(isa: I, block: &[u8; BYTES], taker: &mut impl Taker<I>);
}

/// Bytes of a block from `FROM` on.
#[inline(always)]
fn part<const N: usize>(block: &[u8], from: usize) -> &[u8; N] {
    block[from..from + N].try_into().expect("a part of a block")
}

pub(super) struct Q8_0;

impl Format<{ legacy::Q8_0_BYTES }, 1> for Q8_0 {
    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; legacy::Q8_0_BYTES], taker: &mut impl Taker<I>) {
        taker.signed(isa, 0, isa.bytes(part(block, 2)), isa.splat_f16(*part(block, 0)));
    }
}

impl<const BITS: u32, const HAS_MIN: bool, const BYTES: usize> Format<BYTES, 1>
    for Legacy<BITS, HAS_MIN, BYTES>
{
    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; BYTES], taker: &mut impl Taker<I>) {
        let mut u = isa.nibbles(part(block, BYTES - 16));
        if BITS == 5 {
            u = isa.put::<0>(u, isa.sixteens(u32::from_le_bytes(*part(block, BYTES - 20))));
        }
        let scale = isa.splat_f16(*part(block, 0));
        match (HAS_MIN, BITS) {
            (true, _) => taker.raised(isa, 0, u, (scale, isa.splat_f16(*part(block, 2)))),
            (false, 4) => taker.centred::<3>(isa, 0, u, scale),
            (false, _) => taker.centred::<4>(isa, 0, u, scale),
        }
    }
}

/// Scales and minima of the eight groups of Q4K and Q5K: `d s` and `-m t`.
#[inline(always)]
fn eight_scales<I: Isa>(isa: I, head: &[u8; 4 + k::SCALES]) -> ([f32; 8], [f32; 8]) {
    let (s, t) = k::scales_and_mins(part(head, 4));
    let d = isa.splat_f16(*part(head, 0));
    let minus_m = isa.mul(isa.splat_f16(*part(head, 2)), isa.splat(-1.0));
    let scales = isa.mul(d, isa.small_ints(s.to_le_bytes()));
    let lows = isa.mul(minus_m, isa.small_ints(t.to_le_bytes()));
    (isa.to_array(scales), isa.to_array(lows))
}

pub(super) struct Q4K;

impl Format<{ k::Q4K_BYTES }, 8> for Q4K {
    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; k::Q4K_BYTES], taker: &mut impl Taker<I>) {
        let (s, low) = eight_scales(isa, part(block, 0));
        for pair in 0..4 {
            let q = isa.bytes(part(block, 16 + pair * 32));
            let groups = [isa.field::<0>(q, 15), isa.field::<4>(q, 15)];
            for half in 0..2 {
                let (u, idx) = (groups[half], 2 * pair + half);
                taker.raised(isa, idx, u, (isa.splat(s[idx]), isa.splat(low[idx])));
            }
        }
    }
}

pub(super) struct Q5K;

impl Q5K {
    /// Groups `2 PAIR` and `2 PAIR + 1`, whose fifth bits are at `LOW` and `HIGH = LOW + 1`.
    #[inline(always)]
    fn pair<I: Isa, const LOW: i32, const HIGH: i32>(
        isa: I,
        block: &[u8; k::Q5K_BYTES],
        fifth: I::Bytes,
    ) -> [I::Bytes; 2] {
        let q = isa.bytes(part(block, 48 + LOW as usize * 16));
        let [a, b] = [isa.field::<0>(q, 15), isa.field::<4>(q, 15)];
        let (of_a, of_b) = (isa.field::<LOW>(fifth, 1), isa.field::<HIGH>(fifth, 1));
        [isa.put::<4>(a, of_a), isa.put::<4>(b, of_b)]
    }
}

impl Format<{ k::Q5K_BYTES }, 8> for Q5K {
    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; k::Q5K_BYTES], taker: &mut impl Taker<I>) {
        let (s, low) = eight_scales(isa, part(block, 0));
        let fifth = isa.bytes(part(block, 16));
        let pairs = [
            Q5K::pair::<I, 0, 1>(isa, block, fifth),
            Q5K::pair::<I, 2, 3>(isa, block, fifth),
            Q5K::pair::<I, 4, 5>(isa, block, fifth),
            Q5K::pair::<I, 6, 7>(isa, block, fifth),
        ];
        for idx in 0..8 {
            let u = pairs[idx / 2][idx % 2];
            taker.raised(isa, idx, u, (isa.splat(s[idx]), isa.splat(low[idx])));
        }
    }
}

pub(super) struct Q6K;

impl Format<{ k::Q6K_BYTES }, 8> for Q6K {
    const HAS_HALVES: bool = true;

    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; k::Q6K_BYTES], taker: &mut impl Taker<I>) {
        let d = isa.splat_f16(*part(block, 208));
        let scales: &[u8; 16] = part(block, 192);
        // Signed bytes, through unsigned ones.
        let of = |from: usize| {
            let flipped = u64::from_le_bytes(*part(scales, from)) ^ 0x8080_8080_8080_8080;
            let raised = isa.small_ints(flipped.to_le_bytes());
            isa.to_array(isa.mul(d, isa.add(raised, isa.splat(-128.0))))
        };
        let s = [of(0), of(8)];
        for half in 0..2 {
            let q = [isa.bytes(part(block, half * 64)), isa.bytes(part(block, half * 64 + 32))];
            let upper = isa.bytes(part(block, 128 + half * 32));
            let groups = [
                isa.put::<4>(isa.field::<0>(q[0], 15), isa.field::<0>(upper, 3)),
                isa.put::<4>(isa.field::<0>(q[1], 15), isa.field::<2>(upper, 3)),
                isa.put::<4>(isa.field::<4>(q[0], 15), isa.field::<4>(upper, 3)),
                isa.put::<4>(isa.field::<4>(q[1], 15), isa.field::<6>(upper, 3)),
            ];
            for idx in 0..4 {
                let u = groups[idx];
                let scale = isa.halves(s[half][2 * idx], s[half][2 * idx + 1]);
                taker.centred::<5>(isa, half * 4 + idx, u, scale);
            }
        }
    }
}

pub(super) struct Q3K;

impl Q3K {
    /// Group of 128 numbers at `SHIFT`, with its third bits at `BIT`.
    #[inline(always)]
    fn plane<I: Isa, const SHIFT: i32, const BIT: i32>(
        isa: I,
        q: I::Bytes,
        third: I::Bytes,
    ) -> I::Bytes {
        isa.put::<2>(isa.field::<SHIFT>(q, 3), isa.field::<BIT>(third, 1))
    }
}

impl Format<{ k::Q3K_BYTES }, 8> for Q3K {
    const HAS_HALVES: bool = true;

    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; k::Q3K_BYTES], taker: &mut impl Taker<I>) {
        let d = isa.to_array(isa.splat_f16(*part(block, 108)))[0];
        let third = isa.bytes(part(block, 0));
        let (a, b) = (isa.bytes(part(block, 32)), isa.bytes(part(block, 64)));
        let planes = [
            Q3K::plane::<I, 0, 0>(isa, a, third),
            Q3K::plane::<I, 2, 1>(isa, a, third),
            Q3K::plane::<I, 4, 2>(isa, a, third),
            Q3K::plane::<I, 6, 3>(isa, a, third),
            Q3K::plane::<I, 0, 4>(isa, b, third),
            Q3K::plane::<I, 2, 5>(isa, b, third),
            Q3K::plane::<I, 4, 6>(isa, b, third),
            Q3K::plane::<I, 6, 7>(isa, b, third),
        ];
        let scales: &[u8; k::SCALES] = part(block, 96);
        for idx in 0..8 {
            let u = planes[idx];
            let of = |at: usize| d * (k::scale_q3k(scales, at) - 32) as f32;
            let scale = isa.halves(of(2 * idx), of(2 * idx + 1));
            taker.centred::<2>(isa, idx, u, scale);
        }
    }
}

pub(super) struct Q2K;

impl Format<{ k::Q2K_BYTES }, 8> for Q2K {
    const HAS_HALVES: bool = true;

    #[inline(always)]
    fn block<I: Isa>(isa: I, block: &[u8; k::Q2K_BYTES], taker: &mut impl Taker<I>) {
        let d = isa.to_array(isa.splat_f16(*part(block, 80)))[0];
        let m = isa.to_array(isa.splat_f16(*part(block, 82)))[0];
        for half in 0..2 {
            let q = isa.bytes(part(block, 16 + half * 32));
            let planes = [
                isa.field::<0>(q, 3),
                isa.field::<2>(q, 3),
                isa.field::<4>(q, 3),
                isa.field::<6>(q, 3),
            ];
            for plane in 0..4 {
                let (u, idx) = (planes[plane], half * 4 + plane);
                let [a, b] = [block[2 * idx], block[2 * idx + 1]];
                let scale = isa.halves(d * (a & 15) as f32, d * (b & 15) as f32);
                let low = isa.halves(-m * (a >> 4) as f32, -m * (b >> 4) as f32);
                taker.raised(isa, idx, u, (scale, low));
            }
        }
    }
}
