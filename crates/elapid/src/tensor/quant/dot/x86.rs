//! `Isa` for AVX2 (with FMA and F16C) and for AVX-512 with VNNI, on vectors of 256 bits.
//!
//! Reading memory bounds these products: twice the width would save instructions, not time.

use super::isa::Isa;
use std::arch::x86_64::*;

/// AVX2, FMA and F16C; with `VNNI` also AVX-512 with its dot products of bytes.
#[derive(Clone, Copy)]
pub struct X86<const VNNI: bool>(());

pub type Avx2 = X86<false>;
pub type Vnni = X86<true>;

impl<const VNNI: bool> X86<VNNI> {
    /// If the machine has it.
    pub fn detect() -> Option<Self> {
        let has_avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let has_vnni = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        (has_avx2 && (has_vnni || !VNNI)).then_some(X86(()))
    }
}

impl<const VNNI: bool> Isa for X86<VNNI> {
    type Bytes = __m256i;
    type Ints = __m256i;
    type Floats = __m256;

    #[inline(always)]
    fn prefetch(self, x: *const u8) {
        // SAFETY: a prefetch reads nothing; any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.cast()) }
    }

    #[inline(always)]
    fn bytes(self, x: &[u8; 32]) -> __m256i {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn nibbles(self, x: &[u8; 16]) -> __m256i {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            let low = _mm_loadu_si128(x.as_ptr().cast());
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
            _mm256_and_si256(both, _mm256_set1_epi8(15))
        }
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, x: __m256i, mask: u8) -> __m256i {
        // SAFETY: `self` stands for the set.
        unsafe {
            let x = if SHIFT == 0 { x } else { _mm256_srli_epi16::<SHIFT>(x) };
            _mm256_and_si256(x, _mm256_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    fn put<const SHIFT: i32>(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_or_si256(a, _mm256_slli_epi16::<SHIFT>(b)) }
    }

    #[inline(always)]
    fn sixteens(self, bits: u32) -> __m256i {
        // SAFETY: `self` stands for the set.
        unsafe {
            if VNNI {
                return _mm256_maskz_set1_epi8(bits, 16);
            }
            // Byte i of the bits to lanes 8 i to 8 i + 7, then each lane keeps its own bit.
            let spread = _mm256_set_epi64x(
                0x0303_0303_0303_0303,
                0x0202_0202_0202_0202,
                0x0101_0101_0101_0101,
                0,
            );
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
            let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        }
    }

    #[inline(always)]
    fn dot(self, u: __m256i, x: &[i8; 32], start: __m256i) -> __m256i {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        unsafe {
            let x = _mm256_loadu_si256(x.as_ptr().cast());
            if VNNI {
                return _mm256_dpbusd_epi32(start, u, x);
            }
            // Two products of at most 127 * 127 fit 16 bits.
            let pairs = _mm256_maddubs_epi16(u, x);
            _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn dot_signed(self, q: __m256i, x: &[i8; 32], negated: &[i32; 8]) -> __m256i {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        unsafe {
            if VNNI {
                // u = q + 128, so 128 times the sum of x is too much.
                let u = _mm256_xor_si256(q, _mm256_set1_epi8(-128));
                return self.dot(u, x, self.shifted::<7>(negated));
            }
            // |q| times x with the sign of q; two products of at most 128 * 127 fit 16 bits.
            let x = _mm256_loadu_si256(x.as_ptr().cast());
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    fn shifted<const SHIFT: i32>(self, x: &[i32; 8]) -> __m256i {
        // SAFETY: `self` stands for the set; 32 bytes are there.
        unsafe { _mm256_slli_epi32::<SHIFT>(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn to_floats(self, x: __m256i) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn floats(self, x: &[f32; 8]) -> __m256 {
        // SAFETY: `self` stands for the set; 8 floats are there.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn splat_f16(self, x: [u8; 2]) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(i16::from_le_bytes(x))) }
    }

    #[inline(always)]
    fn f16s(self, x: &[u8; 16]) -> __m256 {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn bf16s(self, x: &[u8; 16]) -> __m256 {
        // SAFETY: `self` stands for the set; 16 bytes are there.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn small_ints(self, x: [u8; 8]) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe {
            let x = _mm_cvtsi64_si128(i64::from_le_bytes(x));
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x))
        }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` stands for the set.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn to_array(self, x: __m256) -> [f32; 8] {
        let mut out = [0.0; 8];
        // SAFETY: `self` stands for the set; there is room for 8 floats.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
        out
    }
}
