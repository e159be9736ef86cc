//! Dropout of an adapter's input: `y = mask x / (1 - rate)`.
//!
//! Whether a number stays is a function of (seed, stream, counter, row, column), so the mask is
//! made again wherever it is needed and never kept: in backward, and when a checkpointed span runs
//! a second time. One block of random bits decides eight numbers, sixteen bits each; the rate is
//! rounded to a multiple of 2^-16.

use super::columns::{BIAS, Put, each_window};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Kernel, Word, Work};
use crate::tensor::product::Rows;
use crate::tensor::rng::Rng;
use pulp::{Simd, WithSimd};

static DROPOUT: Kernel = Kernel { entry: "linear_dropout", ..BIAS };

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
    /// `y = drop(x)` or `y += drop(x)`, its own gradient; the first row of x is `first_row` to the
    /// mask.
    pub(super) fn run(&self, first_row: usize, x: &Tensor, mut y: Rows, put: Put) {
        let (_, d) = x.dims2();
        // Of sixteen random bits those below `dropped` leave a number out; the others are scaled.
        let dropped = (self.rate as f64 * 65536.0).round().clamp(0.0, 65535.0) as u32;
        let factor = (65536.0 / (65536 - dropped) as f64) as f32;
        let key = Rng::new(self.seed, self.stream).bits(self.counter);
        match x.device() {
            Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), N_ROWS * d, |idx, y| {
                let (rng, x) =
                    (Rng::new(key, self.stream), &x.f32()[idx * N_ROWS * d..][..y.len()]);
                let first_row = first_row + idx * N_ROWS;
                cpu.simd(Drop { rng, dropped, factor, first_row, d, x, y, put });
            }),
            Device::Gpu(gpu) => each_window(gpu, &mut y, |y, rows, bytes, lead| {
                let x = x.rows(rows.clone());
                let seeds = [key, self.stream].into_iter();
                let seeds = seeds.flat_map(|n| [n as u32, (n >> 32) as u32]).map(Word);
                let sizes = [rows.len(), first_row + rows.start, lead].map(Word::from);
                let last = [dropped.into(), factor.into()];
                let params: Vec<Word> = seeds.chain(sizes).chain(last).collect();
                let work = Work::each(rows.len() * d.div_ceil(128) * 16);
                let mut args = [Arg::In(&x), Arg::Window(y, bytes)];
                gpu.launch(&DROPOUT, work, &put.consts(d), &mut args, &params);
            }),
        }
    }
}

struct Drop<'a> {
    rng: Rng,
    dropped: u32,
    factor: f32,
    first_row: usize,
    d: usize,
    x: &'a [f32],
    y: &'a mut [f32],
    put: Put,
}

impl WithSimd for Drop<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Drop { rng, dropped, factor, first_row, d, x, y, put } = self;
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
                let numbers = x.iter().zip(y).zip(&mask);
                match put {
                    Put::Set => numbers.for_each(|((x, y), mask)| *y = x * mask),
                    Put::Add => numbers.for_each(|((x, y), mask)| *y += x * mask),
                }
            }
        }
    }
}
