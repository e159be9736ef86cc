//! Products of matrices in blocks with many inputs, on AVX-512 with VNNI.
//!
//! Sixteen rows of the matrix are taken apart once, into bytes that stand as the instruction wants
//! them: lane r of a vector holds four neighbours of row r. Then they meet all inputs, a few at a
//! time, whose bytes are broadcast four by four. For row r, input t and group g of 32, or each half
//! of it where halves have scales of their own:
//!
//! ```text
//! y[r, t] += s[r, g] d[t, g] (u . q - zero sum q)  +  low[r, g] d[t, g] sum q
//! ```
//!
//! As in the products of few inputs the bracket is an exact sum of integers.

use super::super::BlockType;
use super::formats as f;
use super::formats::{Format, Taker};
use super::inputs::{Many, N_ROW};
use super::isa::Isa;
use super::x86::Vnni;
use std::arch::x86_64::*;

/// Inputs at a time.
const N_TOK: usize = 8;

/// Sixteen rows, taken apart.
struct Strip {
    /// (n_group, 8, N_ROW, 4)
    u: Vec<[[u8; 64]; 8]>,
    /// Scales and minima of halves of groups: (n_group, 2, N_ROW).
    scales: Vec<[[f32; N_ROW]; 2]>,
    lows: Vec<[[f32; N_ROW]; 2]>,
    /// What is taken from u: a power of two.
    zero: i32,
    has_lows: bool,
    has_halves: bool,
}

/// The products of up to sixteen rows with all inputs: y is (n_tok, N_ROW).
pub(super) fn strip(isa: Vnni, block: BlockType, w: &[u8], x: &Many, y: &mut [f32]) {
    // SAFETY: the value exists only where the set was found.
    unsafe { run(isa, block, w, x, y.as_chunks_mut::<N_ROW>().0) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn run(isa: Vnni, block: BlockType, w: &[u8], x: &Many, y: &mut [[f32; N_ROW]]) {
    assert_eq!(y.len(), x.n_tok, "one row of results for each input");
    let n = x.n_group;
    let strip = match block {
        BlockType::Q4_0 => pack::<f::Q4_0, _, _>(isa, w, n),
        BlockType::Q4_1 => pack::<f::Q4_1, _, _>(isa, w, n),
        BlockType::Q5_0 => pack::<f::Q5_0, _, _>(isa, w, n),
        BlockType::Q5_1 => pack::<f::Q5_1, _, _>(isa, w, n),
        BlockType::Q8_0 => pack::<f::Q8_0, _, _>(isa, w, n),
        BlockType::Q2K => pack::<f::Q2K, _, _>(isa, w, n),
        BlockType::Q3K => pack::<f::Q3K, _, _>(isa, w, n),
        BlockType::Q4K => pack::<f::Q4K, _, _>(isa, w, n),
        BlockType::Q5K => pack::<f::Q5K, _, _>(isa, w, n),
        BlockType::Q6K => pack::<f::Q6K, _, _>(isa, w, n),
        BlockType::Nf4 => panic!("NF4 is multiplied after decoding"),
    };
    let (tiles, rest) = y.as_chunks_mut::<N_TOK>();
    for (idx, y) in tiles.iter_mut().enumerate() {
        each_form(&strip, x, idx * N_TOK, y);
    }
    let done = tiles.len() * N_TOK;
    for (idx, y) in rest.as_chunks_mut::<1>().0.iter_mut().enumerate() {
        each_form(&strip, x, done + idx, y);
    }
}

/// Picks the loop without what the format does not have.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn each_form<const T: usize>(strip: &Strip, x: &Many, first: usize, y: &mut [[f32; N_ROW]; T]) {
    match (strip.has_halves, strip.has_lows) {
        (false, false) => tile::<T, 1, 0>(strip, x, first, y),
        (false, true) => tile::<T, 1, 1>(strip, x, first, y),
        (true, false) => tile::<T, 2, 0>(strip, x, first, y),
        (true, true) => tile::<T, 2, 1>(strip, x, first, y),
    }
}

/// A strip with inputs `first..first + T`. `PARTS` of a group have scales of their own; `LOWS` is
/// one where there are minima.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn tile<const T: usize, const PARTS: usize, const LOWS: usize>(
    strip: &Strip,
    x: &Many,
    first: usize,
    y: &mut [[f32; N_ROW]; T],
) {
    let n_group = x.n_group;
    let per_part = 8 / PARTS;
    // Cut to one length, so that no index below needs a check.
    let (u, scales, lows) = (&strip.u[..n_group], &strip.scales[..n_group], &strip.lows[..n_group]);
    let mut rows = [x.token(first); T];
    for t in 1..T {
        rows[t] = x.token(first + t);
    }
    let mut sums = [_mm512_setzero_ps(); T];
    for g in 0..n_group {
        for part in 0..PARTS {
            let mut dots = [_mm512_setzero_si512(); T];
            for t in 0..T {
                let negated = rows[t].negated[g];
                let start = if PARTS == 1 { negated[0] + negated[1] } else { negated[part] };
                dots[t] = _mm512_set1_epi32(start * strip.zero);
            }
            for quad in 0..per_part {
                let at = part * per_part + quad;
                // SAFETY: 64 bytes are there.
                let u = unsafe { _mm512_loadu_si512(u[g][at].as_ptr().cast()) };
                for t in 0..T {
                    let four = _mm512_set1_epi32(rows[t].q[g][at]);
                    dots[t] = _mm512_dpbusd_epi32(dots[t], u, four);
                }
            }
            // SAFETY: sixteen floats each.
            let (scale, low) = unsafe {
                (_mm512_loadu_ps(scales[g][part].as_ptr()), _mm512_loadu_ps(lows[g][part].as_ptr()))
            };
            for t in 0..T {
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(rows[t].scales[g]));
                sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), factor, sums[t]);
                if LOWS == 1 {
                    let sum = rows[t].sums[g];
                    let sum = if PARTS == 1 { sum[0] + sum[1] } else { sum[part] };
                    sums[t] = _mm512_fmadd_ps(low, _mm512_set1_ps(sum), sums[t]);
                }
            }
        }
    }
    for t in 0..T {
        // SAFETY: sixteen floats are there.
        unsafe { _mm512_storeu_ps(y[t].as_mut_ptr(), sums[t]) };
    }
}

/// Takes up to sixteen rows apart; those that are missing are zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn pack<F: Format<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    isa: Vnni,
    w: &[u8],
    n_group: usize,
) -> Strip {
    let per_row = n_group / GROUPS;
    let rows = w.as_chunks::<BYTES>().0;
    let mut strip = Strip {
        u: vec![[[0; 64]; 8]; n_group],
        scales: vec![[[0.0; N_ROW]; 2]; n_group],
        lows: vec![[[0.0; N_ROW]; 2]; n_group],
        zero: 0,
        has_lows: false,
        has_halves: false,
    };
    let mut taken = Taken { u: [[0; 32]; 8], scales: [[0.0; 8]; 8], lows: [[0.0; 8]; 8], kind: 0 };
    let mut bytes = [[[0u8; 32]; N_ROW]; 8];
    for b in 0..per_row {
        for (r, row) in rows.chunks_exact(per_row).enumerate() {
            F::block(isa, &row[b], &mut taken);
            for g in 0..GROUPS {
                bytes[g][r] = taken.u[g];
                let at = b * GROUPS + g;
                for half in 0..2 {
                    strip.scales[at][half][r] = taken.scales[g][half * 4];
                    strip.lows[at][half][r] = taken.lows[g][half * 4];
                }
            }
        }
        for g in 0..GROUPS {
            turn(&bytes[g], &mut strip.u[b * GROUPS + g]);
        }
    }
    (strip.zero, strip.has_lows) =
        if taken.kind == RAISED { (0, true) } else { (1 << taken.kind, false) };
    strip.has_halves = F::HAS_HALVES;
    strip
}

/// Sixteen rows of 32 bytes, four columns after the other: lane r holds four bytes of row r.
#[inline]
#[target_feature(enable = "avx2,avx512f")]
fn turn(rows: &[[u8; 32]; N_ROW], out: &mut [[u8; 64]; 8]) {
    for half in 0..2 {
        let mut v = [_mm256_setzero_si256(); 8];
        for r in 0..8 {
            // SAFETY: 32 bytes are there.
            v[r] = unsafe { _mm256_loadu_si256(rows[half * 8 + r].as_ptr().cast()) };
        }
        let mut a = v;
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        let mut b = a;
        for i in 0..2 {
            b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
            b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
        }
        for i in 0..4 {
            let low = _mm256_permute2x128_si256::<0x20>(b[i], b[i + 4]);
            let high = _mm256_permute2x128_si256::<0x31>(b[i], b[i + 4]);
            // SAFETY: each vector of 64 bytes has two halves of 32.
            unsafe {
                _mm256_storeu_si256(out[i].as_mut_ptr().add(half * 32).cast(), low);
                _mm256_storeu_si256(out[i + 4].as_mut_ptr().add(half * 32).cast(), high);
            }
        }
    }
}

/// The groups of one block.
struct Taken {
    u: [[u8; 32]; 8],
    scales: [[f32; 8]; 8],
    lows: [[f32; 8]; 8],
    /// `RAISED`, or the power of two that is zero.
    kind: i32,
}

const RAISED: i32 = -1;

impl Taken {
    #[inline(always)]
    fn put(&mut self, isa: Vnni, idx: usize, u: __m256i, scale: __m256) {
        // SAFETY: `isa` stands for the set; 32 bytes are there.
        unsafe { _mm256_storeu_si256(self.u[idx].as_mut_ptr().cast(), u) };
        self.scales[idx] = isa.to_array(scale);
    }
}

impl Taker<Vnni> for Taken {
    #[inline(always)]
    fn signed(&mut self, isa: Vnni, idx: usize, q: __m256i, scale: __m256) {
        // SAFETY: `isa` stands for the set.
        let u = unsafe { _mm256_xor_si256(q, _mm256_set1_epi8(-128)) };
        self.centred::<7>(isa, idx, u, scale);
    }

    #[inline(always)]
    fn centred<const ZERO: i32>(&mut self, isa: Vnni, idx: usize, u: __m256i, scale: __m256) {
        self.put(isa, idx, u, scale);
        self.kind = ZERO;
    }

    #[inline(always)]
    fn raised(&mut self, isa: Vnni, idx: usize, u: __m256i, (scale, low): (__m256, __m256)) {
        self.put(isa, idx, u, scale);
        self.lows[idx] = isa.to_array(low);
        self.kind = RAISED;
    }
}
