//! Dropout of an adapter's input: `y = mask x / (1 - rate)`.
//!
//! Whether a number stays is a function of (seed, stream, counter, row, column), so the mask is
//! made again wherever it is needed and never kept: in backward, and when a checkpointed span runs
//! a second time. One block of random bits decides eight numbers, sixteen bits each; the rate is
//! rounded to a multiple of 2^-16.

use crate::tensor::cpu::Cpu;
use crate::tensor::rng::Rng;
use pulp::{Simd, WithSimd};

/// Which numbers are left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share of numbers that become zero, from 0 to below 1.
    pub rate: f32,
    /// Seed of the run.
    pub seed: u64,
    /// What tells adapters apart.
    pub stream: u64,
    /// What tells steps and micro-batches apart.
    pub counter: u64,
}

/// Blocks made at once, and the numbers they decide.
const N_BLOCKS: usize = 16;
const GROUP: usize = 8 * N_BLOCKS;
/// Rows of a task.
const N_ROWS: usize = 16;

impl Dropout {
    /// `y = drop(x)`; both are rows of `d` numbers, of which the first is row `first_row`.
    pub(super) fn copy(&self, cpu: &Cpu, first_row: usize, d: usize, x: &[f32], y: &mut [f32]) {
        self.each(cpu, first_row, d, x, y, |y, kept| *y = kept);
    }

    /// `y += drop(x)`: the gradient of `copy` is the same map.
    pub(super) fn add(&self, cpu: &Cpu, first_row: usize, d: usize, x: &[f32], y: &mut [f32]) {
        self.each(cpu, first_row, d, x, y, |y, kept| *y += kept);
    }

    /// What the mask is made of: seed and stream of its random bits, below what sixteen of them
    /// leave a number out, and what those that stay are multiplied by.
    pub(super) fn mask(&self) -> (u64, u64, u32, f32) {
        let dropped = (self.rate as f64 * 65536.0).round().clamp(0.0, 65535.0) as u32;
        let factor = (65536.0 / (65536 - dropped) as f64) as f32;
        (Rng::new(self.seed, self.stream).bits(self.counter), self.stream, dropped, factor)
    }

    /// Calls `f(y, kept)` for each number, with `drop(x)` in `kept`.
    #[allow(clippy::too_many_arguments)] // `copy` and `add`, but for the last
    fn each(
        &self,
        cpu: &Cpu,
        first_row: usize,
        d: usize,
        x: &[f32],
        y: &mut [f32],
        f: impl Fn(&mut f32, f32) + Copy + Send + Sync,
    ) {
        let (key, stream, dropped, factor) = self.mask();
        let rng = Rng::new(key, stream);
        cpu.each_piece(y, N_ROWS * d, |idx, y| {
            let x = &x[idx * N_ROWS * d..][..y.len()];
            let first_row = first_row + idx * N_ROWS;
            cpu.simd(Rows { rng, dropped, factor, first_row, d, x, y, f });
        });
    }
}

struct Rows<'a, F> {
    rng: Rng,
    dropped: u32,
    factor: f32,
    first_row: usize,
    d: usize,
    x: &'a [f32],
    y: &'a mut [f32],
    f: F,
}

impl<F: Fn(&mut f32, f32)> WithSimd for Rows<'_, F> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Rows { rng, dropped, factor, first_row, d, x, y, f } = self;
        let n_groups = d.div_ceil(GROUP);
        let rows = x.chunks_exact(d.max(1)).zip(y.chunks_exact_mut(d.max(1)));
        for (row, (x, y)) in rows.enumerate() {
            let first = (first_row + row) * n_groups;
            for (group, (x, y)) in x.chunks(GROUP).zip(y.chunks_mut(GROUP)).enumerate() {
                let words = rng.blocks::<N_BLOCKS>(((first + group) * N_BLOCKS) as u64);
                let mut mask = [0.0; GROUP];
                for (word, mask) in words.iter().zip(mask.as_chunks_mut::<{ 2 * N_BLOCKS }>().0) {
                    for i in 0..N_BLOCKS {
                        mask[i] = if word[i] & 0xffff < dropped { 0.0 } else { factor };
                        mask[i + N_BLOCKS] = if word[i] >> 16 < dropped { 0.0 } else { factor };
                    }
                }
                for ((x, y), mask) in x.iter().zip(y).zip(&mask) {
                    f(y, x * mask);
                }
            }
        }
    }
}
