//! `Isa` for NEON, on pairs of vectors of 128 bits.
//!
//! Only what every aarch64 machine has: not the instructions that add four products of bytes.

use super::isa::Isa;
use std::arch::aarch64::*;

#[derive(Clone, Copy)]
pub struct Neon(());

impl Neon {
    /// If the machine has it.
    pub fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }

    /// Half of `dot`: `start + q . x` of signed bytes, four products to a lane.
    #[inline(always)]
    fn dot_half(self, q: uint8x16_t, x: int8x16_t, start: int32x4_t) -> int32x4_t {
        // SAFETY: `self` stands for the set.
        unsafe {
            let q = vreinterpretq_s8_u8(q);
            let (low, high) = (vmull_s8(vget_low_s8(q), vget_low_s8(x)), vmull_high_s8(q, x));
            // Two products of at most 128 * 127 fit 16 bits.
            vpadalq_s16(start, vpaddq_s16(low, high))
        }
    }

    /// 16 where bit i is set, else 0.
    #[inline(always)]
    fn sixteens_half(self, bits: [u8; 2]) -> uint8x16_t {
        const OWN: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            // Byte i of the bits to lanes 8 i to 8 i + 7, then each lane tests its own bit.
            let bytes = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
            vandq_u8(vtstq_u8(bytes, vld1q_u8(OWN.as_ptr())), vdupq_n_u8(16))
        }
    }
}

impl Isa for Neon {
    type Bytes = [uint8x16_t; 2];
    type Ints = [int32x4_t; 2];
    type Floats = [float32x4_t; 2];

    #[inline(always)]
    fn bytes(self, x: &[u8; 32]) -> [uint8x16_t; 2] {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        unsafe { [vld1q_u8(x.as_ptr()), vld1q_u8(x.as_ptr().add(16))] }
    }

    #[inline(always)]
    fn nibbles(self, x: &[u8; 16]) -> [uint8x16_t; 2] {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            let x = vld1q_u8(x.as_ptr());
            [vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8::<4>(x)]
        }
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, [a, b]: [uint8x16_t; 2], mask: u8) -> [uint8x16_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe {
            // To the left by a negative number: the shift to the right does not take 0.
            let (shift, mask) = (vdupq_n_s8(-SHIFT as i8), vdupq_n_u8(mask));
            [vandq_u8(vshlq_u8(a, shift), mask), vandq_u8(vshlq_u8(b, shift), mask)]
        }
    }

    #[inline(always)]
    fn put<const SHIFT: i32>(self, a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe {
            let b = [vshlq_n_u8::<SHIFT>(b[0]), vshlq_n_u8::<SHIFT>(b[1])];
            [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])]
        }
    }

    #[inline(always)]
    fn sixteens(self, bits: u32) -> [uint8x16_t; 2] {
        let [a, b, c, d] = bits.to_le_bytes();
        [self.sixteens_half([a, b]), self.sixteens_half([c, d])]
    }

    #[inline(always)]
    fn dot(self, u: [uint8x16_t; 2], x: &[i8; 32], start: [int32x4_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        let x = unsafe { [vld1q_s8(x.as_ptr()), vld1q_s8(x.as_ptr().add(16))] };
        [self.dot_half(u[0], x[0], start[0]), self.dot_half(u[1], x[1], start[1])]
    }

    #[inline(always)]
    fn dot_signed(self, q: [uint8x16_t; 2], x: &[i8; 32], _: &[i32; 8]) -> [int32x4_t; 2] {
        // At most 127, an unsigned byte is a signed one: `dot` takes both.
        self.dot(q, x, self.shifted::<0>(&[0; 8]))
    }

    #[inline(always)]
    fn shifted<const SHIFT: i32>(self, x: &[i32; 8]) -> [int32x4_t; 2] {
        // SAFETY: `self` stands for the set; 8 integers are there.
        unsafe {
            let x = [vld1q_s32(x.as_ptr()), vld1q_s32(x.as_ptr().add(4))];
            [vshlq_n_s32::<SHIFT>(x[0]), vshlq_n_s32::<SHIFT>(x[1])]
        }
    }

    #[inline(always)]
    fn to_floats(self, x: [int32x4_t; 2]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vcvtq_f32_s32(x[0]), vcvtq_f32_s32(x[1])] }
    }

    #[inline(always)]
    fn floats(self, x: &[f32; 8]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set; 8 floats are there.
        unsafe { [vld1q_f32(x.as_ptr()), vld1q_f32(x.as_ptr().add(4))] }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vdupq_n_f32(x); 2] }
    }

    #[inline(always)]
    fn splat_f16(self, x: [u8; 2]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(u16::from_le_bytes(x)))); 2] }
    }

    #[inline(always)]
    fn f16s(self, x: &[u8; 16]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            let x = vreinterpretq_f16_u8(vld1q_u8(x.as_ptr()));
            [vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)]
        }
    }

    #[inline(always)]
    fn bf16s(self, x: &[u8; 16]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            let x = vreinterpretq_u16_u8(vld1q_u8(x.as_ptr()));
            let (low, high) = (vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x));
            let wide = [vshlq_n_u32::<16>(low), vshlq_n_u32::<16>(high)];
            [vreinterpretq_f32_u32(wide[0]), vreinterpretq_f32_u32(wide[1])]
        }
    }

    #[inline(always)]
    fn small_ints(self, x: [u8; 8]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set; 8 bytes are there.
        unsafe {
            let x = vmovl_u8(vld1_u8(x.as_ptr()));
            [vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_high_u16(x))]
        }
    }

    #[inline(always)]
    fn mul(self, a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn add(self, a: [float32x4_t; 2], b: [float32x4_t; 2]) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(
        self,
        a: [float32x4_t; 2],
        b: [float32x4_t; 2],
        c: [float32x4_t; 2],
    ) -> [float32x4_t; 2] {
        // SAFETY: `self` stands for the set.
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    fn to_array(self, x: [float32x4_t; 2]) -> [f32; 8] {
        let mut out = [0.0; 8];
        // SAFETY: `self` stands for the set; there is room for 8 floats.
        unsafe {
            vst1q_f32(out.as_mut_ptr(), x[0]);
            vst1q_f32(out.as_mut_ptr().add(4), x[1]);
        }
        out
    }
}
