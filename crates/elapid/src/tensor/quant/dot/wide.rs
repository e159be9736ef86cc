//! Products of blocks with few inputs on vectors of 512 bits, for the formats people use.
//!
//! The same sums as in `mod.rs`, two groups at a time: half the instructions, which lets one thread
//! take in memory half as fast again. Formats that are not here go the narrow way.

use super::super::{BlockType, k, legacy};
use super::AHEAD;
use super::inputs::Pair;
use super::x86::Vnni;
use std::arch::x86_64::*;

/// Two groups of a row: `scale (u - zero)`, or `scale u + low`.
struct Two {
    u: __m512i,
    scale: __m512,
    low: __m512,
}

/// A format: `BYTES` bytes are `PAIRS` pairs of groups.
trait Format<const BYTES: usize, const PAIRS: usize> {
    /// Which power of two stands for zero; `None`: there are minima.
    const ZERO: Option<i32>;
    /// Whether a block takes so few instructions that the machine asks for memory early by itself.
    const IS_QUICK: bool = false;
    /// Takes the bytes apart.
    fn pairs(bytes: &[u8; BYTES]) -> [Two; PAIRS];
}

/// The products of rows with inputs, if the format is here: y is (n_row, n_tok).
pub(super) fn products(
    _: Vnni,
    block: BlockType,
    w: &[u8],
    x: &[Pair],
    n_tok: usize,
    y: &mut [f32],
) -> bool {
    // SAFETY: the first argument exists only where the set was found.
    unsafe { run(block, w, x, n_tok, y) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn run(block: BlockType, w: &[u8], x: &[Pair], n_tok: usize, y: &mut [f32]) -> bool {
    match block {
        BlockType::Q8_0 => of::<Q8_0, _, _>(w, x, n_tok, y),
        BlockType::Q4_0 => of::<Q4_0, _, _>(w, x, n_tok, y),
        BlockType::Q4_1 => of::<Q4_1, _, _>(w, x, n_tok, y),
        BlockType::Q5_0 => of::<Q5_0, _, _>(w, x, n_tok, y),
        BlockType::Q5_1 => of::<Q5_1, _, _>(w, x, n_tok, y),
        BlockType::Q4K => of::<Q4K, _, _>(w, x, n_tok, y),
        BlockType::Q5K => of::<Q5K, _, _>(w, x, n_tok, y),
        BlockType::Q6K => of::<Q6K, _, _>(w, x, n_tok, y),
        _ => return false,
    }
    true
}

/// Rows of one format, up to four inputs at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn of<F: Format<BYTES, PAIRS>, const BYTES: usize, const PAIRS: usize>(
    w: &[u8],
    x: &[Pair],
    n_tok: usize,
    y: &mut [f32],
) {
    let n_row = y.len() / n_tok;
    let (row_bytes, x) = (w.len() / n_row, x.as_chunks::<PAIRS>().0);
    let n_unit = x.len() / n_tok;
    assert_eq!(row_bytes.div_ceil(BYTES), n_unit, "rows and inputs");
    let input = |t: usize| &x[t * n_unit..(t + 1) * n_unit];
    for (w, y) in w.chunks_exact(row_bytes).zip(y.chunks_exact_mut(n_tok)) {
        let (fours, rest) = y.as_chunks_mut::<4>();
        let n_in_fours = 4 * fours.len();
        for (idx, y) in fours.iter_mut().enumerate() {
            let t = 4 * idx;
            *y = row::<F, BYTES, PAIRS, 4>(w, [input(t), input(t + 1), input(t + 2), input(t + 3)]);
        }
        for (idx, y) in rest.iter_mut().enumerate() {
            *y = row::<F, BYTES, PAIRS, 1>(w, [input(n_in_fours + idx)])[0];
        }
    }
}

/// One row with `T` inputs. Two sums for products and two for minima, in turns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn row<F: Format<BYTES, PAIRS>, const BYTES: usize, const PAIRS: usize, const T: usize>(
    w: &[u8],
    x: [&[[Pair; PAIRS]]; T],
) -> [f32; T] {
    let mut sums = [[_mm512_setzero_ps(); 4]; T];
    let (units, last) = w.as_chunks::<BYTES>();
    let (twos, one) = units.as_chunks::<2>();
    for (idx, two) in twos.iter().enumerate() {
        for turn in 0..2 {
            let bytes = &two[turn];
            for line in 0..if F::IS_QUICK { 0 } else { BYTES.div_ceil(64) } {
                let ahead = bytes.as_ptr().wrapping_add(AHEAD + 64 * line);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            }
            add::<F, BYTES, PAIRS, T>(bytes, x, 2 * idx + turn, turn, &mut sums);
        }
    }
    if let [bytes] = one {
        add::<F, BYTES, PAIRS, T>(bytes, x, 2 * twos.len(), 0, &mut sums);
    }
    if !last.is_empty() {
        let mut bytes = [0; BYTES];
        bytes[..last.len()].copy_from_slice(last);
        add::<F, BYTES, PAIRS, T>(&bytes, x, units.len(), one.len(), &mut sums);
    }
    let mut y = [0.0; T];
    for t in 0..T {
        let [a, b, c, d] = sums[t];
        y[t] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
    }
    y
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn add<F: Format<BYTES, PAIRS>, const BYTES: usize, const PAIRS: usize, const T: usize>(
    bytes: &[u8; BYTES],
    x: [&[[Pair; PAIRS]]; T],
    unit: usize,
    turn: usize,
    sums: &mut [[__m512; 4]; T],
) {
    let pairs = F::pairs(bytes);
    for p in 0..PAIRS {
        let Two { u, scale, low } = pairs[p];
        let turn = (turn + p) % 2;
        for t in 0..T {
            let x = &x[t][unit][p];
            let q = load(&x.q);
            let start = match F::ZERO {
                Some(7) => _mm512_slli_epi32::<7>(load(&x.negated)),
                Some(5) => _mm512_slli_epi32::<5>(load(&x.negated)),
                Some(4) => _mm512_slli_epi32::<4>(load(&x.negated)),
                Some(3) => _mm512_slli_epi32::<3>(load(&x.negated)),
                _ => _mm512_setzero_si512(),
            };
            let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, u, q));
            let factor = _mm512_mul_ps(scale, _mm512_castsi512_ps(load(&x.scales)));
            sums[t][turn] = _mm512_fmadd_ps(dot, factor, sums[t][turn]);
            if F::ZERO.is_none() {
                let sums_of_x = _mm512_castsi512_ps(load(&x.sums));
                sums[t][2 + turn] = _mm512_fmadd_ps(low, sums_of_x, sums[t][2 + turn]);
            }
        }
    }
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn load<T: bytemuck::Pod>(x: &T) -> __m512i {
    const { assert!(size_of::<T>() == 64) };
    // SAFETY: 64 bytes are there.
    unsafe { _mm512_loadu_si512(std::ptr::from_ref(x).cast()) }
}

/// Some bytes, as an array.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8], from: usize) -> &[u8; N] {
    bytes[from..from + N].try_into().expect("a part of a block")
}

/// 32 bytes, twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn twice(x: &[u8; 32]) -> __m512i {
    // SAFETY: 32 bytes are there.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(x.as_ptr().cast()) })
}

/// The low halves of 16 bytes, their high halves, and the same of 16 others.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw")]
fn nibbles(a: &[u8; 16], b: &[u8; 16]) -> __m512i {
    // SAFETY: 16 bytes each are there.
    let (a, b) =
        unsafe { (_mm_loadu_si128(a.as_ptr().cast()), _mm_loadu_si128(b.as_ptr().cast())) };
    let (a, b) = (_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(b));
    let all = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
    let four = 0x0004_0004_0004_0004;
    let counts = _mm512_set_epi64(four, four, 0, 0, four, four, 0, 0);
    _mm512_and_si512(_mm512_srlv_epi16(all, counts), _mm512_set1_epi8(15))
}

/// An f16 in the lower eight lanes, another in the upper.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn two_f16(a: [u8; 2], b: [u8; 2]) -> __m512 {
    let (a, b) = (_mm256_set1_epi16(i16::from_le_bytes(a)), i16::from_le_bytes(b));
    _mm512_cvtph_ps(_mm256_mask_set1_epi16(a, 0xff00, b))
}

/// `u` with 16 where a bit is set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn with_fifths(u: __m512i, a: u32, b: u32) -> __m512i {
    let bits = a as u64 | (b as u64) << 32;
    _mm512_mask_add_epi8(u, bits, u, _mm512_set1_epi8(16))
}

struct Q8_0;

impl Format<{ 2 * legacy::Q8_0_BYTES }, 1> for Q8_0 {
    const ZERO: Option<i32> = Some(7);
    const IS_QUICK: bool = true;
    #[inline(always)]
    fn pairs(bytes: &[u8; 2 * legacy::Q8_0_BYTES]) -> [Two; 1] {
        // SAFETY: called where the set is; 32 bytes each are there.
        unsafe {
            let a = _mm256_loadu_si256(part::<32>(bytes, 2).as_ptr().cast());
            let b = _mm256_loadu_si256(part::<32>(bytes, 36).as_ptr().cast());
            let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
            let u = _mm512_xor_si512(q, _mm512_set1_epi8(-128));
            let scale = two_f16(*part(bytes, 0), *part(bytes, 34));
            [Two { u, scale, low: scale }]
        }
    }
}

/// Two blocks of a format of 4 or 5 bits, see `legacy.rs`, in `TWO` bytes.
struct Legacy<const BITS: i32, const HAS_MIN: bool, const TWO: usize>;

type Q4_0 = Legacy<4, false, { 2 * legacy::Q4_0_BYTES }>;
type Q4_1 = Legacy<4, true, { 2 * legacy::Q4_1_BYTES }>;
type Q5_0 = Legacy<5, false, { 2 * legacy::Q5_0_BYTES }>;
type Q5_1 = Legacy<5, true, { 2 * legacy::Q5_1_BYTES }>;

impl<const BITS: i32, const HAS_MIN: bool, const TWO: usize> Format<TWO, 1>
    for Legacy<BITS, HAS_MIN, TWO>
{
    const ZERO: Option<i32> = if HAS_MIN { None } else { Some(BITS - 1) };
    #[inline(always)]
    fn pairs(bytes: &[u8; TWO]) -> [Two; 1] {
        let one = TWO / 2;
        // SAFETY: called where the set is.
        unsafe {
            let mut u = nibbles(part(bytes, one - 16), part(bytes, TWO - 16));
            if BITS == 5 {
                let word = |from: usize| u32::from_le_bytes(*part(bytes, from));
                u = with_fifths(u, word(one - 20), word(TWO - 20));
            }
            let scale = two_f16(*part(bytes, 0), *part(bytes, one));
            let low = if HAS_MIN { two_f16(*part(bytes, 2), *part(bytes, one + 2)) } else { scale };
            [Two { u, scale, low }]
        }
    }
}

/// Scales and minima of the eight groups of Q4K and Q5K, in the lower eight lanes.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
fn eight_scales(head: &[u8; 16]) -> [__m512; 2] {
    let (s, t) = k::scales_and_mins(part(head, 4));
    let widen = |x: u64| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(x as i64)));
    let f16 = |from: usize| {
        _mm256_cvtph_ps(_mm_set1_epi16(i16::from_le_bytes([head[from], head[from + 1]])))
    };
    let scales = _mm256_mul_ps(f16(0), widen(s));
    let lows = _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), f16(2)), widen(t));
    [_mm512_castps256_ps512(scales), _mm512_castps256_ps512(lows)]
}

/// Lane `2 pair` eight times, then lane `2 pair + 1`.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(x: __m512, pair: i32) -> __m512 {
    let (a, b) = (2 * pair, 2 * pair + 1);
    let idx = _mm512_set_epi32(b, b, b, b, b, b, b, b, a, a, a, a, a, a, a, a);
    _mm512_permutexvar_ps(idx, x)
}

/// Groups `2 pair` and `2 pair + 1` of nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn low_and_high(q: &[u8; 32]) -> __m512i {
    let four = 0x0004_0004_0004_0004;
    let counts = _mm512_set_epi64(four, four, four, four, 0, 0, 0, 0);
    _mm512_and_si512(_mm512_srlv_epi16(twice(q), counts), _mm512_set1_epi8(15))
}

struct Q4K;

impl Format<{ k::Q4K_BYTES }, 4> for Q4K {
    const ZERO: Option<i32> = None;
    #[inline(always)]
    fn pairs(bytes: &[u8; k::Q4K_BYTES]) -> [Two; 4] {
        // SAFETY: called where the set is.
        unsafe {
            let [scales, lows] = eight_scales(part(bytes, 0));
            let two = |pair: usize| Two {
                u: low_and_high(part(bytes, 16 + pair * 32)),
                scale: lanes(scales, pair as i32),
                low: lanes(lows, pair as i32),
            };
            [two(0), two(1), two(2), two(3)]
        }
    }
}

struct Q5K;

impl Q5K {
    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
    fn two(
        bytes: &[u8; k::Q5K_BYTES],
        fifths: __m512i,
        [scales, lows]: [__m512; 2],
        pair: usize,
    ) -> Two {
        let bit = |at: usize| (1u8 << at) as i8;
        let own = _mm512_castsi256_si512(_mm256_set1_epi8(bit(2 * pair)));
        let own = _mm512_inserti64x4::<1>(own, _mm256_set1_epi8(bit(2 * pair + 1)));
        let set = _mm512_test_epi8_mask(fifths, own);
        let u = low_and_high(part(bytes, 48 + pair * 32));
        Two {
            u: _mm512_mask_add_epi8(u, set, u, _mm512_set1_epi8(16)),
            scale: lanes(scales, pair as i32),
            low: lanes(lows, pair as i32),
        }
    }
}

impl Format<{ k::Q5K_BYTES }, 4> for Q5K {
    const ZERO: Option<i32> = None;
    #[inline(always)]
    fn pairs(bytes: &[u8; k::Q5K_BYTES]) -> [Two; 4] {
        // SAFETY: called where the set is.
        unsafe {
            let [scales, lows] = eight_scales(part(bytes, 0));
            let fifths = twice(part(bytes, 16));
            let two = |pair| Q5K::two(bytes, fifths, [scales, lows], pair);
            [two(0), two(1), two(2), two(3)]
        }
    }
}

struct Q6K;

impl Q6K {
    /// Two groups of a half: those in the low halves of its bytes, or in the high ones.
    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
    fn two(bytes: &[u8; k::Q6K_BYTES], scales: __m512, half: usize, high: usize) -> Two {
        let q = load(part::<64>(bytes, half * 64));
        let q = if high == 1 { _mm512_srli_epi16::<4>(q) } else { q };
        let (a, b) = (4 * high as i16, 4 * high as i16 + 2);
        let counts = _mm512_castsi256_si512(_mm256_set1_epi16(a));
        let counts = _mm512_inserti64x4::<1>(counts, _mm256_set1_epi16(b));
        let upper = _mm512_srlv_epi16(twice(part(bytes, 128 + half * 32)), counts);
        let upper = _mm512_and_si512(upper, _mm512_set1_epi8(3));
        let low = _mm512_and_si512(q, _mm512_set1_epi8(15));
        let s = (8 * half + 4 * high) as i32;
        let (a, b, c, d) = (s, s + 1, s + 2, s + 3);
        let idx = _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a);
        let scale = _mm512_permutexvar_ps(idx, scales);
        Two { u: _mm512_or_si512(low, _mm512_slli_epi16::<4>(upper)), scale, low: scale }
    }
}

impl Format<{ k::Q6K_BYTES }, 4> for Q6K {
    const ZERO: Option<i32> = Some(5);
    #[inline(always)]
    fn pairs(bytes: &[u8; k::Q6K_BYTES]) -> [Two; 4] {
        // SAFETY: called where the set is; what is loaded is there.
        unsafe {
            let d = i16::from_le_bytes(*part(bytes, 208));
            let d = _mm512_cvtph_ps(_mm256_set1_epi16(d));
            let scales = _mm_loadu_si128(part::<16>(bytes, 192).as_ptr().cast());
            let scales = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)));
            [
                Q6K::two(bytes, scales, 0, 0),
                Q6K::two(bytes, scales, 0, 1),
                Q6K::two(bytes, scales, 1, 0),
                Q6K::two(bytes, scales, 1, 1),
            ]
        }
    }
}
