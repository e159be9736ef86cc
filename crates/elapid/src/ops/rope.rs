//! Rotary position embedding: turns pairs of numbers of a head by angles that grow with position.
//!
//! With `half = d_rotary / 2`, for each head, each pair (i, i + half) and position `pos`:
//!
//! ```text
//! c = amplitude cos(pos frequency[i])          s = amplitude sin(pos frequency[i])
//! y[i]        = c x[i] - s x[i + half]
//! y[i + half] = c x[i + half] + s x[i]
//! ```
//!
//! Numbers of a head from `d_rotary` on pass through. Without scaling
//! `frequency[i] = base^(-2i / d_rotary)` and `amplitude = 1`.
//!
//! Backward turns the other way: `dx[i] = c dy[i] + s dy[i + half]`,
//! `dx[i + half] = c dy[i + half] - s dy[i]`. It keeps cosines and sines, which all layers share,
//! and no tensor; the gradient is turned in place when nobody else holds it.
//!
//! | name        | shape                     |                                           |
//! |-------------|---------------------------|-------------------------------------------|
//! | `x`, `y`    | (n_tok, n_head * d_head)  | queries or keys                           |
//! | `frequency` | (d_rotary / 2)            | radians per position, of `RopeTable`      |
//!
//! The position of a row is the offset of its segment plus its index in the segment. Frequencies
//! are f32, rounded step by step as the reference implementation rounds them; angles are f64, so
//! that position 1,000,000 is as good as position 1. On a GPU kernels read the same
//! cosines and sines, which go over once, a block of positions at a time.
//!
//! Not here: the interleaved pairing (2i, 2i + 1), which no supported family stores; the projection
//! before and attention after.

use crate::tape::{Tape, Var};
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Gpu, Kernel, Work, bind};
use crate::tensor::segment::{Segment, Segments};
use crate::tensor::{DType, Tensor};
use pulp::{Simd, WithSimd};
use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::sync::{Arc, Mutex, PoisonError};

/// How frequencies are changed for contexts longer than the one the model was trained on first.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All positions squeezed together: frequencies are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3: low frequencies are divided, high ones kept, those between are blended.
    Llama3 {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Fewer turns than this in the original context: low.
        low_freq: f64,
        /// More turns than this in the original context: high.
        high_freq: f64,
        /// Tokens of the original context.
        n_ctx_orig: usize,
    },
    /// YaRN (Peng et al., 2023): a ramp over the pairs, and an amplitude.
    Yarn {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Tokens of the original context.
        n_ctx_orig: usize,
        /// Pairs with more turns than this in the original context are kept.
        beta_fast: f64,
        /// Pairs with fewer turns than this are divided by `factor`.
        beta_slow: f64,
        /// The amplitude, where the model gives it.
        attention_factor: Option<f64>,
        /// With `mscale_all_dim` another rule for the amplitude.
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
        /// Whether the ends of the ramp are rounded outward to whole pairs.
        truncate: bool,
    },
    /// Each pair's frequency is divided by its factor, as a file gives them.
    Factors(Vec<f32>),
}

/// A rotary embedding as a model configures it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Slowest pair: about one turn in `TAU * base` positions.
    pub base: f64,
    /// Numbers of each head that are turned, from its first on; even.
    pub d_rotary: usize,
    /// The change of frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// A rotary embedding ready for use; clones share the cosines and sines computed so far.
#[derive(Clone)]
pub struct RopeTable {
    frequencies: Arc<[f32]>,
    amplitude: f32,
    /// By `position / BLOCK`; absent until used, so that one far position costs one block.
    blocks: Arc<Mutex<Blocks>>,
    /// What the GPU that used it last has of it.
    uploaded: Arc<Mutex<Option<Uploaded>>>,
}

/// Each holds, per position, `d_rotary / 2` cosines and then as many sines.
type Blocks = BTreeMap<usize, Arc<[f32]>>;

/// Cosines and sines on a GPU.
#[derive(Clone)]
struct Uploaded {
    /// (room * BLOCK, d_rotary): the blocks, in the order in which they came.
    table: Tensor,
    /// By `position / BLOCK`: which of them it is.
    slots: Tensor,
    slot_of: BTreeMap<usize, u32>,
}

/// Positions of one block of cosines and sines.
const BLOCK: usize = 64;
/// Rows a task works on.
const PIECE: usize = 64;

impl Rope {
    /// Computes frequencies and amplitude.
    pub fn table(&self) -> RopeTable {
        assert!(self.d_rotary.is_multiple_of(2), "rope: d_rotary is {}, not even", self.d_rotary);
        let d_rotary = self.d_rotary as f32;
        // base^(2i / d_rotary): positions per radian.
        let pace = |i: usize| (self.base as f32).powf((2 * i) as f32 / d_rotary);
        let frequency = |i: usize| match &self.scaling {
            RopeScaling::None => 1.0 / pace(i),
            RopeScaling::Factors(factors) => 1.0 / pace(i) / factors[i],
            &RopeScaling::Linear { factor } => 1.0 / pace(i) / factor as f32,
            &RopeScaling::Llama3 { factor, low_freq, high_freq, n_ctx_orig } => {
                let plain = 1.0 / pace(i);
                let n_turns = n_ctx_orig as f32 / (TAU as f32 / plain);
                let keep = (n_turns - low_freq as f32) / (high_freq - low_freq) as f32;
                let keep = keep.clamp(0.0, 1.0);
                (1.0 - keep) * plain / factor as f32 + keep * plain
            }
            &RopeScaling::Yarn { factor, .. } => {
                let (low, high) = self.yarn_ramp();
                let divide = (i as f32 - low as f32) / (high - low) as f32;
                let keep = 1.0 - divide.clamp(0.0, 1.0);
                1.0 / (factor as f32 * pace(i)) * (1.0 - keep) + 1.0 / pace(i) * keep
            }
        };
        RopeTable {
            frequencies: (0..self.d_rotary / 2).map(frequency).collect(),
            amplitude: self.amplitude() as f32,
            blocks: Arc::default(),
            uploaded: Arc::default(),
        }
    }

    /// Pairs before the first are kept, pairs from the second on are divided.
    fn yarn_ramp(&self) -> (f64, f64) {
        let RopeScaling::Yarn { n_ctx_orig, beta_fast, beta_slow, truncate, .. } = self.scaling
        else {
            panic!("rope: a ramp of {:?}", self.scaling)
        };
        let d_rotary = self.d_rotary as f64;
        // The pair that makes `n_turns` in the original context.
        let pair = |n_turns: f64| {
            d_rotary * (n_ctx_orig as f64 / (n_turns * TAU)).ln() / (2.0 * self.base.ln())
        };
        let (low, high) = (pair(beta_fast), pair(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        // The published bound is d_rotary - 1, although there are only d_rotary / 2 pairs.
        let (low, high) = (low.max(0.0), high.min(d_rotary - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }

    /// What cosines and sines are multiplied with.
    fn amplitude(&self) -> f64 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } =
            self.scaling
        else {
            return 1.0;
        };
        let growth =
            |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let given = |mscale: Option<f64>| mscale.filter(|mscale| *mscale != 0.0);
        match (attention_factor, given(mscale), given(mscale_all_dim)) {
            (Some(amplitude), _, _) => amplitude,
            (None, Some(mscale), Some(all_dim)) => growth(mscale) / growth(all_dim),
            _ => growth(1.0),
        }
    }
}

impl RopeTable {
    /// Radians per position of each pair.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Numbers of each head that are turned.
    pub fn d_rotary(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The blocks that hold the positions of `segments`.
    fn blocks(&self, device: &Device, segments: &Segments) -> Blocks {
        let n_ahead = segments.n_ahead();
        let ranges = segments.iter().map(|segment| block_range(segment, n_ahead));
        let mut used: Vec<usize> = ranges.flatten().collect();
        used.sort_unstable();
        used.dedup();
        // The lock is not held while threads work: one of them may come here for another call.
        let known = || self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let is_missing = |idx: &usize| !known().contains_key(idx);
        let missing = used.iter().copied().filter(is_missing).collect();
        let fresh = device.host().map(missing, |idx| (idx, self.block(idx)));
        let mut known = known();
        known.extend(fresh);
        used.into_iter().map(|idx| (idx, known[&idx].clone())).collect()
    }

    /// The same on a GPU; blocks that are there already stay where they are.
    fn upload(&self, gpu: &Gpu, segments: &Segments) -> Uploaded {
        let device = Device::Gpu(gpu.clone());
        let is_here = |it: &Uploaded| {
            let is_whole = !it.table.is_spoiled() && !it.slots.is_spoiled();
            is_whole && it.table.device().is_same(&device)
        };
        let mut kept = self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        let before = kept.take().filter(is_here);
        let n_ahead = segments.n_ahead();
        let wanted = segments.iter().flat_map(|segment| block_range(segment, n_ahead));
        let missing = |it: &Uploaded| !wanted.clone().all(|idx| it.slot_of.contains_key(&idx));
        let whole = match before {
            Some(before) if !missing(&before) => before,
            before => self.extended(&device, before, self.blocks(&device, segments)),
        };
        *kept = Some(whole.clone());
        whole
    }

    /// `before` and the blocks that it lacks.
    fn extended(&self, device: &Device, before: Option<Uploaded>, blocks: Blocks) -> Uploaded {
        let n_bytes = BLOCK * self.d_rotary() * 4;
        let mut slot_of = before.as_ref().map_or_else(BTreeMap::new, |it| it.slot_of.clone());
        let n_before = slot_of.len();
        let fresh: Vec<_> = blocks.iter().filter(|it| !slot_of.contains_key(it.0)).collect();
        let n_slot = n_before + fresh.len();
        let room = before.as_ref().map_or(0, |it| it.table.shape()[0] / BLOCK);
        let table = match before {
            Some(before) if n_slot <= room => before.table,
            before => {
                let shape = [n_slot.next_power_of_two() * BLOCK, self.d_rotary()];
                let table = Tensor::uninit(device, &shape);
                if let Some(before) = before {
                    let (from, to) = (before.table.gpu_buffer().0, table.gpu_buffer().0);
                    to.gpu().copy((from, 0), (to, 0), n_before * n_bytes);
                }
                table
            }
        };
        for (slot, (idx, block)) in (n_before..).zip(fresh) {
            let (buffer, _) = table.gpu_buffer();
            buffer.gpu().upload(buffer, slot * n_bytes, bytemuck::cast_slice(block));
            slot_of.insert(*idx, slot as u32);
        }
        let n_block = slot_of.keys().last().map_or(0, |last| last + 1);
        let slots: Vec<u32> =
            (0..n_block).map(|idx| slot_of.get(&idx).copied().unwrap_or(0)).collect();
        Uploaded { table, slots: Tensor::from_u32(device, &slots), slot_of }
    }

    fn block(&self, idx: usize) -> Arc<[f32]> {
        let half = self.frequencies.len();
        let mut block = vec![0.0; BLOCK * 2 * half];
        for i in 0..BLOCK * half {
            let (pos, pair) = (i / half, i % half);
            let angle = (idx * BLOCK + pos) as f64 * self.frequencies[pair] as f64;
            let (sin, cos) = angle.sin_cos();
            block[pos * 2 * half + pair] = cos as f32 * self.amplitude;
            block[pos * 2 * half + half + pair] = sin as f32 * self.amplitude;
        }
        block.into()
    }
}

/// The blocks that hold the positions of a segment.
fn block_range(segment: &Segment, n_ahead: usize) -> std::ops::RangeInclusive<usize> {
    let last = segment.offset + segment.n_tok - 1 + n_ahead;
    segment.offset / BLOCK..=last / BLOCK
}

/// Turns the heads of `x`, each row by its position.
pub fn rope(tape: &Tape, x: &Var, table: &RopeTable, d_head: usize, segments: &Segments) -> Var {
    let (n_tok, width) = x.value().dims2();
    let d_rotary = table.d_rotary();
    assert!(d_rotary <= d_head, "rope: d_rotary {d_rotary} in heads of {d_head}");
    assert!(width.is_multiple_of(d_head), "rope: width {width} in heads of {d_head}");
    assert_eq!(segments.n_tok(), n_tok, "rope: rows of the segments and of x");
    let device = x.value().device();
    let Device::Gpu(gpu) = device else {
        let blocks = table.blocks(device, segments);
        let turns = Turns { blocks, d_rotary, d_head, segments: segments.clone() };
        let y = turned(x.value().clone(), &turns, 1.0);
        return tape.record("rope", &[x], y, move |dy| vec![Some(turned(dy, &turns, -1.0))]);
    };
    let (uploaded, positions) = (table.upload(gpu, segments), segments.positions(device));
    let turns = GpuTurns { uploaded, positions, d_head, d_rotary };
    let mut y = Tensor::activation(device, x.value().shape());
    turns.turn(gpu, x.value(), 1.0, &mut y);
    let (gpu, dtype) = (gpu.clone(), x.value().dtype());
    tape.record("rope", &[x], y, move |dy| {
        // A gradient is stored as what it is the gradient of.
        let mut dx = match dtype {
            DType::F32 => Tensor::uninit(dy.device(), dy.shape()),
            _ => Tensor::activation(dy.device(), dy.shape()),
        };
        turns.turn(&gpu, &dy, -1.0, &mut dx);
        vec![Some(dx)]
    })
}

/// What forward and backward share.
struct Turns {
    blocks: Blocks,
    d_rotary: usize,
    d_head: usize,
    segments: Segments,
}

impl Turns {
    /// Cosines and sines of a row.
    fn of_row(&self, row: usize) -> &[f32] {
        let after = self.segments.partition_point(|segment| segment.start <= row);
        let segment = self.segments[after - 1];
        let pos = segment.offset + row - segment.start;
        &self.blocks[&(pos / BLOCK)][pos % BLOCK * self.d_rotary..][..self.d_rotary]
    }
}

static TURN: Kernel = Kernel::new("rope_turn", include_str!("rope.wgsl"), include_str!("rope.cu"));

/// What forward and backward share on a GPU.
struct GpuTurns {
    uploaded: Uploaded,
    /// (n_tok), whole numbers
    positions: Tensor,
    d_head: usize,
    d_rotary: usize,
}

impl GpuTurns {
    /// `sign`: as in `turned`.
    fn turn(&self, gpu: &Gpu, x: &Tensor, sign: f32, y: &mut Tensor) {
        let GpuTurns { uploaded, positions, d_head, d_rotary } = self;
        let ((n_tok, width), half) = (x.dims2(), d_rotary / 2);
        let n_head = width / d_head;
        // A thread takes eight numbers of some heads, where it can and widths allow it.
        let is_wide = half.is_multiple_of(8) && d_head.is_multiple_of(8) && gpu.caps().wide_loads;
        let n_heads = (1..=4).rev().find(|&n| n_head.is_multiple_of(n)).unwrap_or(1);
        let (n_wide, n_heads) = if is_wide { (8, n_heads) } else { (1, 1) };
        // Else one for each pair and for each number that passes through.
        let n = n_tok * n_head * (d_head - half) / (n_wide * n_heads);
        let consts = [
            ("D_HEAD", *d_head),
            ("D_ROTARY", *d_rotary),
            ("N_HEAD", n_head),
            ("BLOCK", BLOCK),
            ("WIDE", n_wide),
            ("HEADS", n_heads),
        ];
        let mut args = bind([x, positions, &uploaded.slots, &uploaded.table], [y]);
        let work = Work::each(n).early();
        gpu.launch(&TURN, work, &consts, &mut args, &[n.into(), sign.into()]);
    }
}

/// Turns rows, in place where nobody else has them; `sign` is 1 forward, -1 backward.
fn turned(mut x: Tensor, turns: &Turns, sign: f32) -> Tensor {
    let cpu = x.device().expect_cpu().clone();
    let (_, width) = x.dims2();
    let (mut y, from) = match x.is_unique() {
        true => (x, None),
        false => (Tensor::uninit(x.device(), x.shape()), Some(x)),
    };
    cpu.each_piece(y.f32_mut(), PIECE * width, |idx, y| {
        if let Some(x) = &from {
            y.copy_from_slice(&x.f32()[idx * PIECE * width..][..y.len()]);
        }
        let rows = idx * PIECE..idx * PIECE + y.len() / width;
        let turns_of_rows: Vec<&[f32]> = rows.map(|row| turns.of_row(row)).collect();
        cpu.simd(Turn { y, width, d_head: turns.d_head, turns: &turns_of_rows, sign });
    });
    y
}

/// Turns rows in place.
struct Turn<'a> {
    y: &'a mut [f32],
    width: usize,
    d_head: usize,
    turns: &'a [&'a [f32]],
    sign: f32,
}

impl WithSimd for Turn<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Turn { y, width, d_head, turns, sign } = self;
        let sign = F32s::splat(simd, sign);
        for (row, turn) in y.chunks_exact_mut(width).zip(turns) {
            let half = turn.len() / 2;
            let (cos, sin) = turn.split_at(half);
            for head in row.chunks_exact_mut(d_head) {
                let (a, rest) = head.split_at_mut(half);
                let b = &mut rest[..half];
                for at in (0..half).step_by(F32s::<S>::LANES) {
                    let c = F32s::load(simd, &cos[at..]);
                    let s = F32s::load(simd, &sin[at..]) * sign;
                    let (x, y) = (F32s::load(simd, &a[at..]), F32s::load(simd, &b[at..]));
                    (x * c - y * s).store(&mut a[at..]);
                    (y * c + x * s).store(&mut b[at..]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    fn plain(base: f64, d_rotary: usize) -> Rope {
        Rope { base, d_rotary, scaling: RopeScaling::None }
    }

    fn yarn(factor: f64, n_ctx_orig: usize) -> RopeScaling {
        RopeScaling::Yarn {
            factor,
            n_ctx_orig,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    fn run(x: &Tensor, table: &RopeTable, d_head: usize, segments: &Segments) -> Tensor {
        rope(&Tape::off(), &Var::constant(x.clone()), table, d_head, segments).value().clone()
    }

    /// Worst difference to the formula in f64.
    fn worst(x: &Tensor, table: &RopeTable, d_head: usize, positions: &[usize], y: &Tensor) -> f64 {
        let (half, width) = (table.frequencies().len(), x.dims2().1);
        let (x, y) = (x.f32(), y.f32());
        let mut worst = 0.0f64;
        for at in 0..x.len() {
            let (row, i) = (at / width, at % d_head);
            let angle = |pair: usize| positions[row] as f64 * table.frequencies()[pair] as f64;
            let a = table.amplitude as f64;
            let want = if i < half {
                a * (angle(i).cos() * x[at] as f64 - angle(i).sin() * x[at + half] as f64)
            } else if i < 2 * half {
                let pair = i - half;
                a * (angle(pair).cos() * x[at] as f64 + angle(pair).sin() * x[at - half] as f64)
            } else {
                x[at] as f64
            };
            let error = (y[at] as f64 - want).abs();
            // A maximum would drop what is not a number.
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
        worst
    }

    #[test]
    fn gradients() {
        let scaled = |d_rotary| Rope { base: 100.0, d_rotary, scaling: yarn(8.0, 64) };
        // (rope, d_head, n_head, segments as (length, offset))
        let cases = [
            (plain(1e4, 2), 2, 1, vec![(1, 0)]),
            (plain(1e4, 6), 6, 3, vec![(5, 7)]),
            (plain(50.0, 10), 19, 2, vec![(3, 0), (1, 0), (6, 61)]),
            (scaled(64), 64, 2, vec![(65, 0), (1, 9), (70, 100)]),
        ];
        for (rope_config, d_head, n_head, parts) in cases {
            let segments = Segments::continuing(&parts);
            let table = rope_config.table();
            let x = Input::normal(1, &[segments.n_tok(), n_head * d_head], 1.0);
            check_gradients(&[x], |tape, vars| {
                vec![rope(tape, &vars[0], &table, d_head, &segments)]
            });
        }
    }

    #[test]
    fn rows_are_turned_by_their_position_in_their_sequence() {
        let device = Device::cpu(2).unwrap();
        let segments = Segments::continuing(&[(130, 0), (1, 0), (3, 63), (70, 1_000_000)]);
        let positions: Vec<usize> =
            segments.iter().flat_map(|s| s.offset..s.offset + s.n_tok).collect();
        let scaled = Rope { base: 1e4, d_rotary: 64, scaling: yarn(8.0, 64) };
        let cases =
            [(scaled, 64), (plain(1e4, 64), 64), (plain(1e4, 32), 64), (plain(1e4, 10), 19)];
        for (rope_config, d_head) in cases {
            let table = rope_config.table();
            let x = Input::normal(1, &[positions.len(), 3 * d_head], 1.0).tensor(&device);
            let y = run(&x, &table, d_head, &segments);
            let worst = worst(&x, &table, d_head, &positions, &y);
            assert!(worst < 1e-6, "{rope_config:?} in heads of {d_head}: {worst}");
        }
    }

    #[test]
    fn a_sequence_in_pieces_gives_the_same_bits_as_whole() {
        let device = Device::cpu(1).unwrap();
        let table = plain(1e4, 16).table();
        let x = Input::normal(1, &[130, 32], 1.0).tensor(&device);
        let whole = run(&x, &table, 16, &Segments::from_lengths(&[130]));
        for split in [1, 63, 64, 65, 129] {
            let first = run(&x.rows(0..split), &table, 16, &Segments::from_lengths(&[split]));
            let rest = Segments::continuing(&[(130 - split, split)]);
            let second = run(&x.rows(split..130), &table, 16, &rest);
            assert_eq!([first.f32(), second.f32()].concat(), whole.f32(), "split at {split}");
        }
    }

    #[test]
    fn every_device_turns_by_the_same_cosines_and_sines() {
        let host = Device::cpu(1).unwrap();
        let passes = [
            vec![(130, 0), (1, 0), (3, 63), (70, 1_000_000)],
            // Blocks that are there, one between, and more than there was room for.
            vec![(1, 130), (1, 500_000)],
            vec![(700, 0), (1, 192)],
        ];
        let numbers = Input::normal(1, &[800, 3 * 64], 1.0);
        for (device, tolerance) in crate::ops::check::devices() {
            let table = plain(1e4, 32).table();
            for parts in &passes {
                let segments = Segments::continuing(parts);
                let [here, there] = [&host, device].map(|device| {
                    let x = numbers.tensor(device).rows(0..segments.n_tok());
                    run(&x, &table, 64, &segments).to_vec()
                });
                crate::ops::check::compare_devices(
                    &format!("{device:?}"),
                    &here,
                    &there,
                    *tolerance,
                );
            }
        }
    }

    #[test]
    fn a_token_changes_its_own_row_only() {
        let device = Device::cpu(1).unwrap();
        let table = plain(1e4, 8).table();
        let segments = Segments::from_lengths(&[4, 5]);
        let mut x = Input::normal(1, &[9, 8], 1.0).tensor(&device);
        let before = run(&x, &table, 8, &segments);
        x.f32_mut()[5 * 8 + 1] += 1.0;
        let after = run(&x, &table, 8, &segments);
        for row in 0..9 {
            let same = before.rows(row..row + 1).f32() == after.rows(row..row + 1).f32();
            assert_eq!(same, row != 5, "row {row}");
        }
    }

    #[test]
    fn changing_the_base_or_the_scaling_changes_the_output() {
        let device = Device::cpu(1).unwrap();
        let segments = Segments::from_lengths(&[9]);
        let x = Input::normal(1, &[9, 16], 1.0).tensor(&device);
        let of = |base, scaling| {
            let table = Rope { base, d_rotary: 16, scaling }.table();
            let y = run(&x, &table, 16, &segments).f32().to_vec();
            assert!(y.iter().all(|y| y.is_finite()));
            y
        };
        let plain = of(1e4, RopeScaling::None);
        assert!(plain != of(5e5, RopeScaling::None));
        assert!(plain != of(1e4, RopeScaling::Linear { factor: 2.0 }));
        assert!(plain != of(1e4, yarn(4.0, 8)));
    }

    #[test]
    fn the_gradient_is_right_whether_or_not_it_is_shared() {
        let device = Device::cpu(1).unwrap();
        let table = plain(1e4, 4).table();
        let segments = Segments::continuing(&[(3, 2)]);
        let turns = Turns {
            blocks: table.blocks(&device, &segments),
            d_rotary: 4,
            d_head: 6,
            segments: segments.clone(),
        };
        let dy = Input::normal(1, &[3, 12], 1.0).tensor(&device);
        let dx_shared = turned(dy.clone(), &turns, -1.0);
        assert!(dx_shared.f32() != dy.f32());
        assert_eq!(turned(dy, &turns, -1.0).f32(), dx_shared.f32());
    }

    fn expect_frequencies(table: &RopeTable, want: impl Fn(f64) -> f64) {
        for (i, &got) in table.frequencies().iter().enumerate() {
            let want = want(i as f64);
            assert!((got as f64 - want).abs() < 2e-6 * want, "pair {i}: {got}, not {want}");
        }
    }

    #[test]
    fn plain_and_linear_frequencies_are_the_published_ones() {
        let plain_frequency = |i: f64| 5e5f64.powf(-2.0 * i / 64.0);
        expect_frequencies(&plain(5e5, 64).table(), plain_frequency);
        let scaling = RopeScaling::Linear { factor: 3.0 };
        let table = Rope { base: 5e5, d_rotary: 64, scaling }.table();
        expect_frequencies(&table, |i| plain_frequency(i) / 3.0);
        assert_eq!(table.amplitude, 1.0);
    }

    #[test]
    fn llama3_frequencies_are_the_published_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 32.0, low_freq: 1.0, high_freq: 4.0, n_ctx_orig: 8192 };
        let table = Rope { base: 5e5, d_rotary: 64, scaling }.table();
        let mut n_of_kind = [0; 3];
        for (i, &got) in table.frequencies().iter().enumerate() {
            let plain = 5e5f64.powf(-2.0 * i as f64 / 64.0);
            let wavelength = TAU / plain;
            let (kind, want) = if wavelength < 8192.0 / 4.0 {
                (0, plain)
            } else if wavelength > 8192.0 / 1.0 {
                (1, plain / 32.0)
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                (2, (1.0 - smooth) * plain / 32.0 + smooth * plain)
            };
            n_of_kind[kind] += 1;
            // Where the blend cancels, f32 leaves a few more units than one.
            assert!((got as f64 - want).abs() < 5e-6 * want, "pair {i}: {got}, not {want}");
        }
        assert!(n_of_kind.iter().all(|n| *n > 0), "every kind is met: {n_of_kind:?}");
        assert_eq!(table.amplitude, 1.0);
    }

    #[test]
    fn yarn_frequencies_are_the_published_ones() {
        let pair = |base: f64, n_ctx: f64, n_turns: f64| {
            64.0 * (n_ctx / (n_turns * TAU)).ln() / (2.0 * base.ln())
        };
        let (fast, slow) = (pair(1e4, 4096.0, 32.0), pair(1e4, 4096.0, 1.0));
        // (base, n_ctx_orig, beta_fast, truncate, ends of the ramp)
        let cases = [
            (1e4, 4096, 32.0, true, (fast.floor(), slow.ceil())),
            (1e4, 4096, 32.0, false, (fast, slow)),
            // The slow end would be pair 65: it is bounded by 63, and the fast end by 0.
            (100.0, 1 << 16, 1e3, true, (pair(100.0, 65536.0, 1e3).floor(), 63.0)),
            (100.0, 1 << 16, 1e5, true, (0.0, 63.0)),
        ];
        assert_eq!((fast.floor(), slow.ceil()), (10.0, 23.0));
        for (base, n_ctx_orig, beta_fast, truncate, (low, high)) in cases {
            let scaling = RopeScaling::Yarn {
                factor: 4.0,
                n_ctx_orig,
                beta_fast,
                beta_slow: 1.0,
                attention_factor: None,
                mscale: None,
                mscale_all_dim: None,
                truncate,
            };
            let table = Rope { base, d_rotary: 64, scaling }.table();
            expect_frequencies(&table, |i| {
                let ramp = ((i - low) / (high - low)).clamp(0.0, 1.0);
                let plain = base.powf(-2.0 * i / 64.0);
                plain / 4.0 * ramp + plain * (1.0 - ramp)
            });
            assert_eq!(table.amplitude, (0.1 * 4f64.ln() + 1.0) as f32);
        }
    }

    #[test]
    fn the_yarn_amplitude_follows_what_the_model_gives() {
        let amplitude = |attention_factor, mscale, mscale_all_dim, factor| {
            let scaling = RopeScaling::Yarn {
                factor,
                n_ctx_orig: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor,
                mscale,
                mscale_all_dim,
                truncate: true,
            };
            Rope { base: 1e4, d_rotary: 64, scaling }.table().amplitude
        };
        let g = |factor: f64, mscale: f64| 0.1 * mscale * factor.ln() + 1.0;
        assert_eq!(amplitude(Some(1.25), Some(0.7), Some(0.3), 40.0), 1.25);
        let ratio = (g(40.0, 0.7) / g(40.0, 0.3)) as f32;
        assert_eq!(amplitude(None, Some(0.7), Some(0.3), 40.0), ratio);
        assert_eq!(amplitude(None, Some(0.7), None, 40.0), g(40.0, 1.0) as f32);
        assert_eq!(amplitude(None, Some(0.7), Some(0.0), 40.0), g(40.0, 1.0) as f32);
        assert_eq!(amplitude(None, None, None, 0.5), 1.0);
    }
}
