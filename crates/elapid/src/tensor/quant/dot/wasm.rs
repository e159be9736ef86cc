//! `Isa` for WebAssembly, on pairs of vectors of 128 bits.
//!
//! Only what every browser has: not the relaxed instructions, whose results differ by machine.

use super::isa::Isa;
use std::arch::wasm32::*;

/// There in every build that has `simd128`: a module is taken whole or refused by the browser.
#[derive(Clone, Copy)]
pub struct Simd128;

#[inline(always)]
fn load<T: bytemuck::Pod>(x: &[T]) -> v128 {
    assert!(size_of_val(x) >= 16, "a vector of {} bytes", size_of_val(x));
    // SAFETY: 16 bytes are there, as was just asserted; no alignment is asked for.
    unsafe { v128_load(x.as_ptr().cast()) }
}

/// `start + q . x` of signed bytes, four products to a lane: two neighbours of each half, which
/// is not the lane that `start` counts for them. The lanes have one scale: only their sum counts.
///
/// Through 16 bits: products of bytes take engines twice as many instructions, and what is made of
/// `q` serves all inputs of a row.
#[inline(always)]
fn dot_half(q: v128, x: &[i8; 16], start: v128) -> v128 {
    // SAFETY: 8 bytes are there, twice.
    let x =
        unsafe { [i16x8_load_extend_i8x8(x.as_ptr()), i16x8_load_extend_i8x8(x.as_ptr().add(8))] };
    let low = i32x4_dot_i16x8(i16x8_extend_low_i8x16(q), x[0]);
    let high = i32x4_dot_i16x8(i16x8_extend_high_i8x16(q), x[1]);
    i32x4_add(start, i32x4_add(low, high))
}

/// Four f16 in the lower halves of lanes.
#[inline(always)]
fn halves_to_floats(x: v128) -> v128 {
    // As the bits of floats they are 2^112 too small, also where they are not normal.
    let magnitude = u32x4_shl(v128_and(x, u32x4_splat(0x7fff)), 13);
    let y = f32x4_mul(magnitude, f32x4_splat(f32::from_bits(239 << 23)));
    let is_special = f32x4_ge(y, f32x4_splat(65536.0));
    let y = v128_or(y, v128_and(is_special, u32x4_splat(0x7f80_0000)));
    v128_or(y, u32x4_shl(v128_and(x, u32x4_splat(0x8000)), 16))
}

/// 16 where bit i is set, else 0.
#[inline(always)]
fn sixteens_half(bits: u16) -> v128 {
    let own = u8x16(1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128);
    let bytes = u16x8_splat(bits);
    let bytes = u8x16_shuffle::<0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1>(bytes, bytes);
    v128_and(u8x16_eq(v128_and(bytes, own), own), u8x16_splat(16))
}

impl Isa for Simd128 {
    type Bytes = [v128; 2];
    type Ints = [v128; 2];
    type Floats = [v128; 2];

    #[inline(always)]
    fn bytes(self, x: &[u8; 32]) -> [v128; 2] {
        [load(&x[..16]), load(&x[16..])]
    }

    #[inline(always)]
    fn nibbles(self, x: &[u8; 16]) -> [v128; 2] {
        let x = load(x);
        [v128_and(x, u8x16_splat(15)), u8x16_shr(x, 4)]
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, x: [v128; 2], mask: u8) -> [v128; 2] {
        x.map(|x| v128_and(u8x16_shr(x, SHIFT as u32), u8x16_splat(mask)))
    }

    #[inline(always)]
    fn put<const SHIFT: i32>(self, a: [v128; 2], b: [v128; 2]) -> [v128; 2] {
        let b = [u8x16_shl(b[0], SHIFT as u32), u8x16_shl(b[1], SHIFT as u32)];
        [v128_or(a[0], b[0]), v128_or(a[1], b[1])]
    }

    #[inline(always)]
    fn sixteens(self, bits: u32) -> [v128; 2] {
        [sixteens_half(bits as u16), sixteens_half((bits >> 16) as u16)]
    }

    #[inline(always)]
    fn dot(self, u: [v128; 2], x: &[i8; 32], start: [v128; 2]) -> [v128; 2] {
        let (x, _) = x.as_chunks::<16>();
        [dot_half(u[0], &x[0], start[0]), dot_half(u[1], &x[1], start[1])]
    }

    #[inline(always)]
    fn dot_signed(self, q: [v128; 2], x: &[i8; 32], _: &[i32; 8]) -> [v128; 2] {
        // At most 127, an unsigned byte is a signed one: `dot` takes both.
        self.dot(q, x, [i32x4_splat(0); 2])
    }

    #[inline(always)]
    fn shifted<const SHIFT: i32>(self, x: &[i32; 8]) -> [v128; 2] {
        [i32x4_shl(load(&x[..4]), SHIFT as u32), i32x4_shl(load(&x[4..]), SHIFT as u32)]
    }

    #[inline(always)]
    fn to_floats(self, x: [v128; 2]) -> [v128; 2] {
        [f32x4_convert_i32x4(x[0]), f32x4_convert_i32x4(x[1])]
    }

    #[inline(always)]
    fn floats(self, x: &[f32; 8]) -> [v128; 2] {
        [load(&x[..4]), load(&x[4..])]
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [v128; 2] {
        [f32x4_splat(x); 2]
    }

    #[inline(always)]
    fn splat_f16(self, x: [u8; 2]) -> [v128; 2] {
        [halves_to_floats(u32x4_splat(u16::from_le_bytes(x).into())); 2]
    }

    #[inline(always)]
    fn f16s(self, x: &[u8; 16]) -> [v128; 2] {
        let x = load(x);
        let halves = [u32x4_extend_low_u16x8(x), u32x4_extend_high_u16x8(x)];
        [halves_to_floats(halves[0]), halves_to_floats(halves[1])]
    }

    #[inline(always)]
    fn bf16s(self, x: &[u8; 16]) -> [v128; 2] {
        let x = load(x);
        [u32x4_shl(u32x4_extend_low_u16x8(x), 16), u32x4_shl(u32x4_extend_high_u16x8(x), 16)]
    }

    #[inline(always)]
    fn small_ints(self, x: [u8; 8]) -> [v128; 2] {
        let x = u16x8_extend_low_u8x16(u64x2(u64::from_le_bytes(x), 0));
        let wide = [u32x4_extend_low_u16x8(x), u32x4_extend_high_u16x8(x)];
        self.to_floats(wide)
    }

    #[inline(always)]
    fn mul(self, a: [v128; 2], b: [v128; 2]) -> [v128; 2] {
        [f32x4_mul(a[0], b[0]), f32x4_mul(a[1], b[1])]
    }

    #[inline(always)]
    fn add(self, a: [v128; 2], b: [v128; 2]) -> [v128; 2] {
        [f32x4_add(a[0], b[0]), f32x4_add(a[1], b[1])]
    }

    #[inline(always)]
    fn mul_add(self, a: [v128; 2], b: [v128; 2], c: [v128; 2]) -> [v128; 2] {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn to_array(self, x: [v128; 2]) -> [f32; 8] {
        bytemuck::cast(x.map(lanes))
    }
}

#[inline(always)]
fn lanes(x: v128) -> [f32; 4] {
    [
        f32x4_extract_lane::<0>(x),
        f32x4_extract_lane::<1>(x),
        f32x4_extract_lane::<2>(x),
        f32x4_extract_lane::<3>(x),
    ]
}
