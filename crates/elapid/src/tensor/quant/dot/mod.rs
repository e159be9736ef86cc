//! Products of matrices in blocks with few inputs, without decoding the matrix: each byte of it is
//! read once, whatever the number of inputs.
//!
//! ```text
//! y[row, t] = w[row] . x[t]
//! ```
//!
//! Matrices in blocks take inputs rounded to 8 bits (`inputs.rs`), those in f16, bf16 and f32 take
//! them as they are. A result depends on its row and its input alone, bit by bit: not on how many
//! there are, nor on how rows are dealt out to threads.
//!
//! `isa.rs` is the vocabulary, `x86.rs`, `neon.rs` and `wasm.rs` speak it, `formats.rs` says what a block is.

mod formats;
mod inputs;
mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod panel;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use self::inputs::{Group, Many, N_ROW, Pair, Rounded, Rounding};

use self::formats::{Format, Taker};
use self::isa::{Isa, Plain};
use super::BlockType;
use std::sync::OnceLock;

/// How far ahead memory is asked for, in bytes. Without, one thread reads half as fast: a block
/// takes so many instructions that too few of the next ones are in sight.
const AHEAD: usize = 2048;

/// A matrix as it is stored, or some of its rows.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Blocks of this format.
    Blocks(BlockType, &'a [u8]),
    F16(&'a [u8]),
    /// The upper halves of floats.
    BF16(&'a [u8]),
    F32(&'a [f32]),
}

/// Inputs of a product: (n_tok, d_in).
#[derive(Clone, Copy)]
pub enum Inputs<'a> {
    /// Rounded, for matrices in blocks; in pairs as well where the machine has a use for them.
    Rounded(&'a [Group], &'a [Pair]),
    /// As they are, for the others.
    Floats(&'a [f32]),
}

/// Instruction sets that products are written for.
#[derive(Clone, Copy)]
pub enum Set {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Vnni(x86::Vnni),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Wasm(wasm::Simd128),
}

impl Set {
    /// All sets of this machine, the best first.
    pub fn all() -> Vec<Set> {
        let mut list = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            list.extend(x86::Vnni::detect().map(Set::Vnni));
            list.extend(x86::Avx2::detect().map(Set::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        list.extend(neon::Neon::detect().map(Set::Neon));
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        list.push(Set::Wasm(wasm::Simd128));
        list.push(Set::Plain);
        list
    }

    /// The best set of this machine.
    pub fn best() -> Set {
        static BEST: OnceLock<Set> = OnceLock::new();
        *BEST.get_or_init(|| Set::all()[0])
    }

    pub fn name(self) -> &'static str {
        match self {
            Set::Plain => "plain",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => "neon",
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Set::Wasm(_) => "simd128",
        }
    }

    /// Whether there are products of blocks with many inputs, and a use for inputs in pairs.
    pub fn has_strips(self) -> bool {
        self.name() == "avx512-vnni"
    }

    /// The products of up to `N_ROW` rows in blocks with many inputs: y is (n_tok, N_ROW).
    ///
    /// Panics where there are none.
    pub fn strip(self, block: BlockType, w: &[u8], x: &Many, y: &mut [f32]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Set::Vnni(isa) => panel::strip(isa, block, w, x, y),
            _ => panic!("no products of {block:?} with many inputs in {}", self.name()),
        }
    }

    /// `y[row, t] = w[row] . x[t]`; y is (n_row, n_tok).
    ///
    /// Panics unless rows are whole blocks, and inputs as wide as rows.
    pub fn products(self, rows: Rows, x: Inputs, n_tok: usize, y: &mut [f32]) {
        if n_tok == 0 || y.is_empty() {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if let (Set::Vnni(isa), Rows::Blocks(block, w), Inputs::Rounded(_, pairs)) = (self, rows, x)
            && wide::products(isa, block, w, pairs, n_tok, y)
        {
            return;
        }
        let product = Product { rows, x, n_tok, y };
        match self {
            Set::Plain => product.run(Plain),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value exists only where the set was found.
            Set::Avx2(isa) => unsafe { run_avx2(isa, product) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value exists only where the set was found.
            Set::Vnni(isa) => unsafe { run_vnni(isa, product) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the value exists only where the set was found.
            Set::Neon(isa) => unsafe { run_neon(isa, product) },
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Set::Wasm(isa) => product.run(isa),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2(isa: x86::Avx2, product: Product) {
    product.run(isa);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn run_vnni(isa: x86::Vnni, product: Product) {
    product.run(isa);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon(isa: neon::Neon, product: Product) {
    product.run(isa);
}

/// What is to be computed.
struct Product<'a> {
    rows: Rows<'a>,
    x: Inputs<'a>,
    n_tok: usize,
    y: &'a mut [f32],
}

impl Product<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Product { rows, x, n_tok, y } = self;
        match (rows, x) {
            (Rows::Blocks(block, w), Inputs::Rounded(x, _)) => blocks(isa, block, w, x, n_tok, y),
            (Rows::F16(w), Inputs::Floats(x)) => {
                floats::<I, u8, 16, 2>(isa, w, x, n_tok, y, |w| isa.f16s(w));
            }
            (Rows::BF16(w), Inputs::Floats(x)) => {
                floats::<I, u8, 16, 2>(isa, w, x, n_tok, y, |w| isa.bf16s(w));
            }
            (Rows::F32(w), Inputs::Floats(x)) => {
                floats::<I, f32, 8, 1>(isa, w, x, n_tok, y, |w| isa.floats(w));
            }
            _ => panic!("inputs of another kind than the matrix takes"),
        }
    }
}

#[inline(always)]
fn blocks<I: Isa>(isa: I, block: BlockType, w: &[u8], x: &[Group], n_tok: usize, y: &mut [f32]) {
    use formats as f;
    match block {
        BlockType::Q2K => of::<I, f::Q2K, _, _>(isa, w, x, n_tok, y),
        BlockType::Q3K => of::<I, f::Q3K, _, _>(isa, w, x, n_tok, y),
        BlockType::Q4_0 => of::<I, f::Q4_0, _, _>(isa, w, x, n_tok, y),
        BlockType::Q4_1 => of::<I, f::Q4_1, _, _>(isa, w, x, n_tok, y),
        BlockType::Q5_0 => of::<I, f::Q5_0, _, _>(isa, w, x, n_tok, y),
        BlockType::Q5_1 => of::<I, f::Q5_1, _, _>(isa, w, x, n_tok, y),
        BlockType::Q8_0 => of::<I, f::Q8_0, _, _>(isa, w, x, n_tok, y),
        BlockType::Q4K => of::<I, f::Q4K, _, _>(isa, w, x, n_tok, y),
        BlockType::Q5K => of::<I, f::Q5K, _, _>(isa, w, x, n_tok, y),
        BlockType::Q6K => of::<I, f::Q6K, _, _>(isa, w, x, n_tok, y),
        BlockType::Nf4 => panic!("NF4 is multiplied after decoding"),
    }
}

/// Rows of one format, up to four inputs at a time.
#[inline(always)]
fn of<I: Isa, F: Format<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    isa: I,
    w: &[u8],
    x: &[Group],
    n_tok: usize,
    y: &mut [f32],
) {
    let (w, x) = (w.as_chunks::<BYTES>().0, x.as_chunks::<GROUPS>().0);
    let (n_row, per_row) = (y.len() / n_tok, x.len() / n_tok);
    assert_eq!((w.len(), y.len()), (n_row * per_row, n_row * n_tok), "rows, inputs and results");
    let input = |t: usize| &x[t * per_row..(t + 1) * per_row];
    // One row at a time: the CPU prefetches one stream of memory better than several.
    for (w, y) in w.chunks_exact(per_row).zip(y.chunks_exact_mut(n_tok)) {
        let (fours, rest) = y.as_chunks_mut::<4>();
        let n_in_fours = 4 * fours.len();
        for (idx, y) in fours.iter_mut().enumerate() {
            let t = 4 * idx;
            *y = row::<I, F, BYTES, GROUPS, 4>(
                isa,
                w,
                [input(t), input(t + 1), input(t + 2), input(t + 3)],
            );
        }
        for (idx, y) in rest.iter_mut().enumerate() {
            *y = row::<I, F, BYTES, GROUPS, 1>(isa, w, [input(n_in_fours + idx)])[0];
        }
    }
}

/// One row with `T` inputs.
#[inline(always)]
fn row<
    I: Isa,
    F: Format<BYTES, GROUPS>,
    const BYTES: usize,
    const GROUPS: usize,
    const T: usize,
>(
    isa: I,
    w: &[[u8; BYTES]],
    x: [&[[Group; GROUPS]]; T],
) -> [f32; T] {
    let mut dots = Dots { x: [&x[0][0]; T], sums: [[isa.splat(0.0); 4]; T], turn: 0 };
    let (pairs, last) = w.as_chunks::<2>();
    for (idx, pair) in pairs.iter().enumerate() {
        prefetch(isa, pair);
        (dots.x, dots.turn) = (at(x, 2 * idx), 0);
        F::block(isa, &pair[0], &mut dots);
        (dots.x, dots.turn) = (at(x, 2 * idx + 1), 1);
        F::block(isa, &pair[1], &mut dots);
    }
    if let [block] = last {
        (dots.x, dots.turn) = (at(x, 2 * pairs.len()), 0);
        F::block(isa, block, &mut dots);
    }
    let mut y = [0.0; T];
    for t in 0..T {
        let [a, b, c, d] = dots.sums[t];
        y[t] = isa.sum(isa.add(isa.add(a, b), isa.add(c, d)));
    }
    y
}

/// Multiplies groups with those of `T` inputs. With inputs `x = d q`:
///
/// ```text
/// y += s d ((u . q) - zero sum q) + low d sum q
/// ```
///
/// The bracket is exact: a sum of integers. Four sums are added at the end, so that no addition
/// waits for the one before: two in turns for products, two for minima.
struct Dots<'a, I: Isa, const GROUPS: usize, const T: usize> {
    x: [&'a [Group; GROUPS]; T],
    sums: [[I::Floats; 4]; T],
    turn: usize,
}

impl<I: Isa, const GROUPS: usize, const T: usize> Dots<'_, I, GROUPS, T> {
    #[inline(always)]
    fn add(&mut self, isa: I, idx: usize, t: usize, dot: I::Ints, scale: I::Floats) {
        let sum = &mut self.sums[t][(self.turn + idx) % 2];
        let factor = isa.mul(scale, isa.splat(self.x[t][idx].scale));
        *sum = isa.mul_add(isa.to_floats(dot), factor, *sum);
    }
}

impl<I: Isa, const GROUPS: usize, const T: usize> Taker<I> for Dots<'_, I, GROUPS, T> {
    #[inline(always)]
    fn signed(&mut self, isa: I, idx: usize, q: I::Bytes, scale: I::Floats) {
        for t in 0..T {
            let x = &self.x[t][idx];
            self.add(isa, idx, t, isa.dot_signed(q, &x.q, &x.negated), scale);
        }
    }

    #[inline(always)]
    fn centred<const ZERO: i32>(&mut self, isa: I, idx: usize, u: I::Bytes, scale: I::Floats) {
        for t in 0..T {
            let x = &self.x[t][idx];
            self.add(isa, idx, t, isa.dot(u, &x.q, isa.shifted::<ZERO>(&x.negated)), scale);
        }
    }

    #[inline(always)]
    fn raised(&mut self, isa: I, idx: usize, u: I::Bytes, (scale, low): (I::Floats, I::Floats)) {
        for t in 0..T {
            let x = &self.x[t][idx];
            self.add(isa, idx, t, isa.dot(u, &x.q, isa.shifted::<0>(&[0; 8])), scale);
            let sum = &mut self.sums[t][2 + (self.turn + idx) % 2];
            *sum = isa.mul_add(low, isa.floats(&x.sums), *sum);
        }
    }
}

/// Asks for the memory behind a pair of blocks.
#[inline(always)]
fn prefetch<I: Isa, const BYTES: usize>(isa: I, pair: &[[u8; BYTES]; 2]) {
    let first = pair[0].as_ptr().wrapping_add(AHEAD);
    for line in 0..(2 * BYTES).div_ceil(64) {
        isa.prefetch(first.wrapping_add(line * 64));
    }
}

/// Block `idx` of each input. A loop: what takes a closure may not be inlined.
#[inline(always)]
fn at<const GROUPS: usize, const T: usize>(
    x: [&[[Group; GROUPS]]; T],
    idx: usize,
) -> [&[Group; GROUPS]; T] {
    let mut groups = [&x[0][idx]; T];
    for t in 1..T {
        groups[t] = &x[t][idx];
    }
    groups
}

/// Rows of floats in some form: `PER` elements of `E` make eight floats, `SIZE` make one.
#[inline(always)]
fn floats<I: Isa, E: Copy + Default, const PER: usize, const SIZE: usize>(
    isa: I,
    w: &[E],
    x: &[f32],
    n_tok: usize,
    y: &mut [f32],
    eight: impl Fn(&[E; PER]) -> I::Floats + Copy,
) {
    let (n_row, d_in) = (y.len() / n_tok, x.len() / n_tok);
    assert_eq!((w.len(), y.len()), (n_row * d_in * SIZE, n_row * n_tok), "rows and results");
    for (w, y) in w.chunks_exact((d_in * SIZE).max(1)).zip(y.chunks_exact_mut(n_tok)) {
        for (x, y) in x.chunks_exact(d_in.max(1)).zip(y) {
            *y = float_row(isa, w, x, eight);
        }
    }
}

/// One row with one input: four sums in turns, added at the end.
#[inline(always)]
fn float_row<I: Isa, E: Copy + Default, const PER: usize>(
    isa: I,
    w: &[E],
    x: &[f32],
    eight: impl Fn(&[E; PER]) -> I::Floats + Copy,
) -> f32 {
    let ((x, x_rest), (w, w_rest)) = (x.as_chunks::<8>(), w.as_chunks::<PER>());
    let (x_fours, x_last) = x.as_chunks::<4>();
    let (w_fours, w_last) = w.as_chunks::<4>();
    let mut sums = [isa.splat(0.0); 4];
    for (x, w) in x_fours.iter().zip(w_fours) {
        for i in 0..4 {
            sums[i] = isa.mul_add(eight(&w[i]), isa.floats(&x[i]), sums[i]);
        }
    }
    for (x, w) in x_last.iter().zip(w_last) {
        sums[0] = isa.mul_add(eight(w), isa.floats(x), sums[0]);
    }
    if !x_rest.is_empty() {
        let (mut x, mut w) = ([0.0; 8], [E::default(); PER]);
        x[..x_rest.len()].copy_from_slice(x_rest);
        w[..w_rest.len()].copy_from_slice(w_rest);
        sums[1] = isa.mul_add(eight(&w), isa.floats(&x), sums[1]);
    }
    isa.sum(isa.add(isa.add(sums[0], sums[1]), isa.add(sums[2], sums[3])))
}

#[cfg(test)]
mod tests;
