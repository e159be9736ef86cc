//! Inputs of products on blocks, rounded to 8 bits as ggml does.
//!
//! A group of 32 numbers becomes `x = d q` with q from -127 to 127. Formats of 32 numbers take one
//! scale per group, `d = max |x| / 127`, rounded to f16 after q is found, and `d sum q` rounded to
//! f16; formats of 256 take one scale for eight groups, with the sign of the largest number, in
//! f32.

use super::super::BlockType;
use super::Inputs;
use crate::tensor::cpu::{Buffer, Pool};
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use std::ops::Range;

/// 32 inputs, and what products need to know of them.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Group {
    pub(super) q: [i8; 32],
    /// Minus their sums, four to a lane.
    pub(super) negated: [i32; 8],
    /// `d sum q`: all of it in the first lane, or four numbers to a lane.
    pub(super) sums: [f32; 8],
    pub(super) scale: f32,
    unused: [u32; 7],
}

impl Group {
    /// The numbers after rounding.
    pub fn decode(&self, out: &mut [f32; 32]) {
        out.iter_mut().zip(&self.q).for_each(|(y, q)| *y = self.scale * f32::from(*q));
    }
}

/// Two groups of an input, for vectors of twice the width. An odd last one stands beside zeros.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Pair {
    pub(super) q: [i8; 64],
    /// Minus their sums, four to a lane.
    pub(super) negated: [i32; 16],
    /// `d sum q`, four to a lane.
    pub(super) sums: [f32; 16],
    pub(super) scales: [f32; 16],
}

impl Pair {
    fn new(groups: &[Group]) -> Pair {
        let mut pair = Pair::zeroed();
        for (idx, group) in groups.iter().enumerate() {
            pair.q[idx * 32..][..32].copy_from_slice(&group.q);
            pair.sums[idx * 8..][..8].copy_from_slice(&group.sums);
            pair.scales[idx * 8..][..8].fill(group.scale);
            pair.negated[idx * 8..][..8].copy_from_slice(&group.negated);
        }
        pair
    }
}

/// Rounded inputs: (n_tok, d_in). From the pool: the heap of the C library does not reuse aligned
/// memory well, and grew by the size of the KV cache where a long prompt was read.
pub struct Rounded {
    per_tok: usize,
    groups: Buffer,
    pairs: Option<Buffer>,
}

impl Rounded {
    /// Rounds rows of `d_in` numbers, which are whole groups.
    pub fn new(pool: &Pool, x: &[f32], d_in: usize, rounding: Rounding) -> Rounded {
        let mut groups = pool.take(x.len() / 32 * size_of::<Group>());
        rounding.round(x, d_in, cast_slice_mut(groups.bytes_mut()));
        Rounded { per_tok: d_in / 32, groups, pairs: None }
    }

    /// Those for few tokens: in pairs as well, where the machine has a use for them.
    pub fn few(pool: &Pool, x: &[f32], d_in: usize, rounding: Rounding) -> Rounded {
        let mut rounded = Rounded::new(pool, x, d_in, rounding);
        if super::Set::best().has_strips() && d_in > 0 {
            let per_tok = rounded.per_tok;
            let mut pairs = pool.take(x.len() / d_in * per_tok.div_ceil(2) * size_of::<Pair>());
            let of_tok = cast_slice(rounded.groups.bytes()).chunks(per_tok);
            let made = of_tok.flat_map(|groups| groups.chunks(2).map(Pair::new));
            cast_slice_mut(pairs.bytes_mut()).iter_mut().zip(made).for_each(|(to, it)| *to = it);
            rounded.pairs = Some(pairs);
        }
        rounded
    }

    /// Those of some tokens.
    pub fn of(&self, tokens: &Range<usize>) -> Inputs<'_> {
        let range = |per_tok: usize| tokens.start * per_tok..tokens.end * per_tok;
        let pairs: &[Pair] = match &self.pairs {
            Some(pairs) => &cast_slice(pairs.bytes())[range(self.per_tok.div_ceil(2))],
            None => &[],
        };
        Inputs::Rounded(&cast_slice(self.groups.bytes())[range(self.per_tok)], pairs)
    }
}

/// Which scales inputs get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Groups,
    /// One for eight groups.
    Eights,
}

impl Rounding {
    /// What a format asks for; `None` where products are not on blocks.
    pub fn of(block: BlockType) -> Option<Rounding> {
        match block {
            BlockType::Nf4 => None,
            block if block.n_elem() == 32 => Some(Rounding::Groups),
            _ => Some(Rounding::Eights),
        }
    }

    /// Rounds rows of `d_in` numbers, which are whole groups.
    pub(super) fn round(self, x: &[f32], d_in: usize, out: &mut [Group]) {
        pulp::Arch::new().dispatch(Round { rounding: self, x, d_in, out });
    }
}

/// Rows that many inputs meet at a time.
pub const N_ROW: usize = 16;

/// Inputs of products with many of them.
pub struct Many {
    pub(super) n_tok: usize,
    pub(super) n_group: usize,
    /// q, four to a word: (n_tok, n_group, 8).
    pub(super) q: Vec<[i32; 8]>,
    /// Minus the sums of q, of halves of groups: (n_tok, n_group, 2).
    pub(super) negated: Vec<[i32; 2]>,
    /// `d sum q` of halves: (n_tok, n_group, 2).
    pub(super) sums: Vec<[f32; 2]>,
    /// (n_tok, n_group)
    pub(super) scales: Vec<f32>,
}

impl Many {
    /// From groups: (n_tok, n_group).
    pub fn new(groups: &[Group], n_tok: usize) -> Many {
        let half = |x: &[i32]| x.iter().sum::<i32>();
        let negated: Vec<[i32; 2]> =
            groups.iter().map(|g| [half(&g.negated[..4]), half(&g.negated[4..])]).collect();
        let part = |x: &[f32]| x.iter().sum::<f32>();
        Many {
            n_tok,
            n_group: groups.len() / n_tok.max(1),
            q: groups.iter().map(|group| bytemuck::cast(group.q)).collect(),
            sums: groups.iter().map(|g| [part(&g.sums[..4]), part(&g.sums[4..])]).collect(),
            scales: groups.iter().map(|group| group.scale).collect(),
            negated,
        }
    }
}

/// One of many inputs: everything has `n_group` items.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub q: &'a [[i32; 8]],
    pub negated: &'a [[i32; 2]],
    pub sums: &'a [[f32; 2]],
    pub scales: &'a [f32],
}

impl Many {
    #[inline(always)]
    pub(super) fn token(&self, idx: usize) -> Token<'_> {
        let (from, n) = (idx * self.n_group, self.n_group);
        Token {
            q: &self.q[from..][..n],
            negated: &self.negated[from..][..n],
            sums: &self.sums[from..][..n],
            scales: &self.scales[from..][..n],
        }
    }
}

struct Round<'a> {
    rounding: Rounding,
    x: &'a [f32],
    d_in: usize,
    out: &'a mut [Group],
}

impl pulp::WithSimd for Round<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let Round { rounding, x, d_in, out } = self;
        let groups = x.as_chunks::<32>().0;
        assert!(d_in.is_multiple_of(32) && groups.len() == out.len(), "rows of whole groups");
        match rounding {
            Rounding::Groups => {
                for (x, out) in groups.iter().zip(out) {
                    let max = largest(x);
                    let inverse = if max == 0.0 { 0.0 } else { 127.0 / max };
                    let sum = round(x, inverse, to_f16(max / 127.0), out);
                    // The sum of a group is one f16 there.
                    out.sums = [0.0; 8];
                    out.sums[0] = to_f16(max / 127.0 * sum as f32);
                }
            }
            Rounding::Eights => {
                assert!(d_in.is_multiple_of(256), "rows of whole blocks");
                for (x, out) in groups.chunks(8).zip(out.chunks_mut(8)) {
                    let max = x.iter().map(largest).fold(0.0, f32::max);
                    // The first number of this magnitude decides the sign.
                    let first = x.iter().flatten().find(|x| x.abs() == max).copied();
                    let inverse = if max == 0.0 { 0.0 } else { -127.0 / first.unwrap_or(max) };
                    let scale = if max == 0.0 { 0.0 } else { 1.0 / inverse };
                    for (x, out) in x.iter().zip(out) {
                        round(x, inverse, scale, out);
                    }
                }
            }
        }
    }
}

/// The largest magnitude; as integers, which the compiler can take many at a time.
#[inline(always)]
fn largest(x: &[f32; 32]) -> f32 {
    let mut bits = [0u32; 8];
    for x in x.as_chunks::<8>().0 {
        for i in 0..8 {
            bits[i] = bits[i].max(x[i].to_bits() & 0x7fff_ffff);
        }
    }
    f32::from_bits(bits.into_iter().fold(0, u32::max))
}

/// To the nearest f16; what is too large for one stays as it is.
#[inline(always)]
fn to_f16(x: f32) -> f32 {
    let y = half::f16::from_f32(x).to_f32();
    if y.is_finite() { y } else { x }
}

/// Returns the sum of the integers.
#[inline(always)]
fn round(x: &[f32; 32], inverse: f32, scale: f32, out: &mut Group) -> i32 {
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let mut q = [0i32; 32];
    for i in 0..32 {
        q[i] = (x[i] * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
    }
    for i in 0..32 {
        out.q[i] = q[i] as i8;
    }
    for lane in 0..8 {
        let sum = (q[4 * lane] + q[4 * lane + 1]) + (q[4 * lane + 2] + q[4 * lane + 3]);
        out.negated[lane] = -sum;
        out.sums[lane] = scale * sum as f32;
    }
    out.scale = scale;
    -out.negated.iter().sum::<i32>()
}
