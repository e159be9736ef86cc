//! Causal depthwise convolution: each channel over its own last `d_conv` inputs.
//!
//! For each segment and channel, with act the identity or SiLU:
//!
//! ```text
//! pre[t] = bias + sum over k of w[k] x[t - (d_conv - 1) + k]
//! y[t] = act(pre[t])
//!
//! dpre[t] = act'(pre[t]) dy[t]
//! dx[t] = sum over k of w[k] dpre[t + (d_conv - 1) - k], within the segment
//! dw[k] = sum over t of dpre[t] x[t - (d_conv - 1) + k]
//! dbias = sum over t of dpre[t]
//! ```
//!
//! | name     | shape                  |                                              |
//! |----------|------------------------|----------------------------------------------|
//! | `x`, `y` | (n_tok, channels)      |                                              |
//! | `w`      | (channels, d_conv)     | the last tap meets the newest input          |
//! | `bias`   | (channels)             | optional                                     |
//! | window   | (d_conv - 1, channels) | the inputs just before a segment, last newest |
//!
//! Inputs before a segment are its window, or zeros; the window is a constant for the gradient.
//! Kept for backward: `x` and the windows. `pre` is computed again, and on a GPU (gpu.rs) `y` where
//! the backward pass needs it.
//!
//! Not here: the gated product that follows the short convolution of some hybrids.

mod gpu;

use super::norm::sum_rows;
use super::{own, pieces_of, remade, transpose};
use crate::tape::{Tape, Var};
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::segment::Segments;
use crate::tensor::{Derivation, Tensor};
use gpu::{backward_gpu, forward_gpu, step_gpu};
use pulp::{Simd, WithSimd};
use std::ops::Range;
use std::sync::Arc;

/// What follows the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    None,
    /// `x sigmoid(x)`.
    Silu,
}

/// The operands of `causal_conv`; shapes in the module's header.
pub struct Conv<'a> {
    pub x: &'a Var,
    pub w: &'a Var,
    pub bias: Option<&'a Var>,
    pub activation: Activation,
}

/// Rows one task works on; sums over rows are made per task, then over tasks in order.
const N_ROWS: usize = 32;
/// Below this many products, starting threads costs more than it saves.
const PARALLEL_MIN: usize = 1 << 15;

/// Convolves each segment.
///
/// `windows` has one tensor (d_conv - 1, channels) per segment: the inputs before it on entry, the
/// last inputs up to its end on return. Other handles keep the old numbers.
pub fn causal_conv(
    tape: &Tape,
    conv: &Conv,
    segments: &Segments,
    windows: Option<&mut [&mut Tensor]>,
) -> Var {
    let (channels, d_conv) = conv.w.value().dims2();
    assert!(d_conv > 0, "conv: w of shape {:?} has no taps", conv.w.value().shape());
    conv.x.value().expect_shape("conv: x", &[segments.n_tok(), channels]);
    if let Some(bias) = conv.bias {
        bias.value().expect_shape("conv: bias", &[channels]);
    }
    if let Some(windows) = windows.as_deref() {
        assert_eq!(windows.len(), segments.len(), "conv: windows, one per segment");
        for window in windows {
            window.expect_shape("conv: window", &[d_conv - 1, channels]);
        }
    }
    let inputs = || [conv.x, conv.w].into_iter().chain(conv.bias);
    let is_recorded = tape.is_recording() && inputs().any(Var::needs_grad);
    let is_step = !is_recorded && segments.iter().all(|segment| segment.n_tok == 1);
    let windows = match (conv.x.value().device(), windows) {
        (Device::Gpu(gpu), Some(windows)) if is_step => {
            return Var::constant(step_gpu(gpu, conv, windows));
        }
        (_, windows) => windows,
    };
    let mut job = Job {
        x: conv.x.value().clone(),
        w: conv.w.value().clone(),
        bias: conv.bias.map(|bias| bias.value().clone()),
        activation: conv.activation,
        segments: segments.clone(),
        windows: Vec::new(),
    };
    match windows {
        Some(windows) => {
            for (idx, window) in windows.iter_mut().enumerate() {
                let next = job.window_after(idx, window);
                job.windows.push(std::mem::replace(*window, next));
            }
        }
        None if job.x.device().gpu().is_some() => {}
        None => {
            let zeros = Tensor::zeros(job.x.device(), &[d_conv - 1, channels]);
            job.windows = vec![zeros; segments.len()];
        }
    }
    let y = forward(&job);
    let job = Arc::new(job);
    let inputs: Vec<&Var> = inputs().collect();
    let wanted = Wanted {
        x: conv.x.needs_grad(),
        sums: conv.w.needs_grad() || conv.bias.is_some_and(Var::needs_grad),
    };
    let again = job.clone();
    let y = tape.record("conv", &inputs, y, move |dy| backward(&job, &dy, &wanted));
    remade(y, move || forward(&again))
}

/// Everything `forward` and `backward` read.
struct Job {
    x: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    activation: Activation,
    segments: Segments,
    /// One per segment; on a GPU none where all are zero.
    windows: Vec<Tensor>,
}

/// Which gradients somebody wants; `sums` are those by `w` and `bias`.
struct Wanted {
    x: bool,
    sums: bool,
}

/// Some rows of one segment, the work of one task.
#[derive(Clone)]
struct Piece {
    segment_idx: usize,
    rows: Range<usize>,
}

impl Job {
    /// The window that follows a segment.
    fn window_after(&self, segment_idx: usize, window: &Tensor) -> Tensor {
        let (n_rows, channels) = window.dims2();
        let segment = self.segments[segment_idx];
        if let Device::Gpu(gpu) = window.device() {
            return self.window_after_gpu(gpu, segment, window);
        }
        let n_kept = n_rows.saturating_sub(segment.n_tok);
        let first = segment.rows().end - (n_rows - n_kept);
        let mut next = Tensor::uninit(window.device(), window.shape());
        let (old, new) = next.f32_mut().split_at_mut(n_kept * channels);
        old.copy_from_slice(&window.f32()[(n_rows - n_kept) * channels..]);
        new.copy_from_slice(&self.x.f32()[first * channels..segment.rows().end * channels]);
        next
    }

    /// Pieces of at most `n_rows`.
    fn pieces(&self, n_rows: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (segment_idx, segment) in self.segments.iter().enumerate() {
            for first in segment.rows().step_by(n_rows) {
                let rows = first..segment.rows().end.min(first + n_rows);
                pieces.push(Piece { segment_idx, rows });
            }
        }
        pieces
    }

    /// What the kernels of one piece read.
    fn source<'a>(&'a self, piece: &Piece, taps: &'a Tensor) -> Source<'a> {
        let (d_conv, channels) = taps.dims2();
        Source {
            x: self.x.f32(),
            window: self.windows[piece.segment_idx].f32(),
            start: self.segments[piece.segment_idx].start,
            taps: taps.f32(),
            bias: self.bias.as_ref().map(Tensor::f32),
            activation: self.activation,
            channels,
            d_conv,
        }
    }
}

/// `w` as (d_conv, channels): a tap of neighbouring channels is one vector.
fn taps(w: &Tensor) -> Tensor {
    let (channels, d_conv) = w.dims2();
    let mut taps = Tensor::uninit(w.device(), &[d_conv, channels]);
    transpose(w.f32(), d_conv, taps.f32_mut());
    taps
}

/// Cuts the rows of a tensor that may be absent between the pieces.
fn cut<'a>(
    y: Option<&'a mut Tensor>,
    pieces: &[Piece],
    channels: usize,
) -> Vec<Option<&'a mut [f32]>> {
    let mut y = y.map_or_else(Default::default, Tensor::f32_mut);
    pieces.iter().map(|piece| y.split_off_mut(..piece.rows.len() * channels)).collect()
}

fn forward(job: &Job) -> Tensor {
    let cpu = match job.x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return forward_gpu(gpu, job),
    };
    let (channels, d_conv) = job.w.dims2();
    let mut y = Tensor::uninit(job.x.device(), job.x.shape());
    let (pieces, taps) = (job.pieces(N_ROWS), job.w.derived(Derivation::Taps, taps));
    let tasks = pieces.iter().zip(cut(Some(&mut y), &pieces, channels));
    let run = |(piece, y): (&Piece, Option<&mut [f32]>)| {
        let y = y.expect("pieces cover the rows");
        cpu.simd(Forward { source: job.source(piece, &taps), first: piece.rows.start, y });
    };
    if job.x.n_elem() * d_conv < PARALLEL_MIN {
        tasks.for_each(run);
    } else {
        cpu.map(tasks.collect(), run);
    }
    y
}

/// Inverts `forward`.
fn backward(job: &Job, dy: &Tensor, wanted: &Wanted) -> Vec<Option<Tensor>> {
    let (dx, sums) = match job.x.device() {
        Device::Cpu(_) => backward_cpu(job, dy, wanted),
        Device::Gpu(gpu) => backward_gpu(gpu, job, dy, wanted),
    };
    let (dw, dbias) = sums.unzip();
    let mut grads = vec![dx, dw];
    if job.bias.is_some() {
        grads.push(dbias);
    }
    grads
}

/// Gradients by `x`, and by `w` and the bias.
type Grads = (Option<Tensor>, Option<(Tensor, Tensor)>);

fn backward_cpu(job: &Job, dy: &Tensor, wanted: &Wanted) -> Grads {
    let device = job.x.device();
    let cpu = device.expect_cpu();
    let (channels, d_conv) = job.w.dims2();
    let (pieces, taps) = (job.pieces(N_ROWS), job.w.derived(Derivation::Taps, taps));
    let mut dx = wanted.x.then(|| Tensor::uninit(device, job.x.shape()));
    // Of each piece, a row for each tap and one for the bias.
    let width = (d_conv + 1) * channels;
    let mut parts = wanted.sums.then(|| Tensor::uninit(device, &[pieces.len(), width]));
    let outs =
        cut(dx.as_mut(), &pieces, channels).into_iter().zip(pieces_of(parts.as_mut(), width));
    cpu.map(pieces.iter().zip(outs).collect(), |(piece, (dx, sums))| {
        let mut dpre = Tensor::uninit(device, &[d_conv, channels]);
        cpu.simd(Backward {
            source: job.source(piece, &taps),
            rows: piece.rows.clone(),
            end: job.segments[piece.segment_idx].rows().end,
            dy: dy.f32(),
            dpre: dpre.f32_mut(),
            dx,
            sums,
        });
    });
    let sums = parts.map(|parts| {
        let sums = sum_rows(&parts);
        let (dtaps, dbias) = sums.f32().split_at(d_conv * channels);
        let mut dw = Tensor::uninit(device, job.w.shape());
        transpose(dtaps, channels, dw.f32_mut());
        (dw, Tensor::from_f32(device, &[channels], dbias))
    });
    (dx, sums)
}

/// What the kernels of one piece read.
struct Source<'a> {
    x: &'a [f32],
    window: &'a [f32],
    /// First row of the segment.
    start: usize,
    /// (d_conv, channels)
    taps: &'a [f32],
    bias: Option<&'a [f32]>,
    activation: Activation,
    channels: usize,
    d_conv: usize,
}

impl<'a> Source<'a> {
    /// Points `inputs` at the `d_conv` rows that make output row `row`.
    #[inline(always)]
    fn inputs(&self, row: usize, inputs: &mut [&'a [f32]]) {
        let behind = self.d_conv - 1;
        for (tap, input) in inputs.iter_mut().enumerate() {
            let begin = match (row + tap).checked_sub(self.start + behind) {
                Some(_) => &self.x[(row + tap - behind) * self.channels..],
                None => &self.window[(row + tap - self.start) * self.channels..],
            };
            *input = &begin[..self.channels];
        }
    }

    /// `pre` at the channels from `ch` on.
    #[inline(always)]
    fn pre<S: Simd>(&self, simd: S, inputs: &[&[f32]], ch: usize) -> F32s<S> {
        let mut pre = match self.bias {
            Some(bias) => F32s::load(simd, &bias[ch..]),
            None => F32s::zero(simd),
        };
        for (input, taps) in inputs.iter().zip(self.taps.chunks_exact(self.channels)) {
            pre = F32s::load(simd, &taps[ch..]).mul_add(F32s::load(simd, &input[ch..]), pre);
        }
        pre
    }
}

struct Forward<'a> {
    source: Source<'a>,
    /// Row of `x` that `y` begins at.
    first: usize,
    y: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { source, first, y } = self;
        let channels = source.channels;
        let mut inputs: Vec<&[f32]> = vec![&[]; source.d_conv];
        for (row, y) in y.chunks_exact_mut(channels).enumerate() {
            source.inputs(first + row, &mut inputs);
            for ch in (0..channels).step_by(F32s::<S>::LANES) {
                let pre = source.pre(simd, &inputs, ch);
                let out = match source.activation {
                    Activation::None => pre,
                    Activation::Silu => pre * pre.sigmoid(),
                };
                out.store(&mut y[ch..]);
            }
        }
    }
}

struct Backward<'a> {
    source: Source<'a>,
    rows: Range<usize>,
    /// End of the segment.
    end: usize,
    dy: &'a [f32],
    /// The last `d_conv` rows of `dpre`; row t at `t % d_conv`.
    dpre: &'a mut [f32],
    /// The rows of this piece.
    dx: Option<&'a mut [f32]>,
    /// (d_conv + 1, channels): of `w` by taps, then of the bias.
    sums: Option<&'a mut [f32]>,
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { source, rows, end, dy, dpre, mut dx, mut sums } = self;
        let (channels, d_conv) = (source.channels, source.d_conv);
        let behind = d_conv - 1;
        if let Some(sums) = &mut sums {
            sums.fill(0.0);
        }
        let mut inputs: Vec<&[f32]> = vec![&[]; d_conv];
        // dx of the last rows needs dpre of the rows after this piece: they are made twice.
        let last = if dx.is_some() { rows.end + behind } else { rows.end };
        for row in rows.start..last {
            let slot = &mut dpre[row % d_conv * channels..][..channels];
            if row < end {
                source.inputs(row, &mut inputs);
                let dy = &dy[row * channels..][..channels];
                dpre_row(simd, &source, &inputs, dy, slot);
            } else {
                slot.fill(0.0);
            }
            if let Some(sums) = &mut sums
                && row < rows.end
            {
                add_to_sums(simd, &inputs, slot, sums);
            }
            if let Some(dx) = &mut dx
                && row >= rows.start + behind
            {
                let at = (row - behind - rows.start) * channels;
                dx_row(simd, &source, dpre, row, &mut dx[at..][..channels]);
            }
        }
    }
}

/// `dpre = act'(pre) dy` of one row.
#[inline(always)]
fn dpre_row<S: Simd>(simd: S, source: &Source, inputs: &[&[f32]], dy: &[f32], dpre: &mut [f32]) {
    for ch in (0..dy.len()).step_by(F32s::<S>::LANES) {
        let dy = F32s::load(simd, &dy[ch..]);
        let out = match source.activation {
            Activation::None => dy,
            Activation::Silu => {
                let one = F32s::splat(simd, 1.0);
                let pre = source.pre(simd, inputs, ch);
                let s = pre.sigmoid();
                s * pre.mul_add(one - s, one) * dy
            }
        };
        out.store(&mut dpre[ch..]);
    }
}

/// Adds what one row gives to the gradients of `w` and the bias.
#[inline(always)]
fn add_to_sums<S: Simd>(simd: S, inputs: &[&[f32]], dpre: &[f32], sums: &mut [f32]) {
    let channels = dpre.len();
    for (tap, sums) in sums.chunks_exact_mut(channels).enumerate() {
        for ch in (0..channels).step_by(F32s::<S>::LANES) {
            let dpre = F32s::load(simd, &dpre[ch..]);
            let sum = F32s::load(simd, &sums[ch..]);
            let sum = match inputs.get(tap) {
                Some(input) => dpre.mul_add(F32s::load(simd, &input[ch..]), sum),
                None => dpre + sum,
            };
            sum.store(&mut sums[ch..]);
        }
    }
}

/// dx of the row whose newest `dpre` is that of `row`.
#[inline(always)]
fn dx_row<S: Simd>(simd: S, source: &Source, dpre: &[f32], row: usize, dx: &mut [f32]) {
    let channels = source.channels;
    for ch in (0..channels).step_by(F32s::<S>::LANES) {
        let mut sum = F32s::zero(simd);
        for (tap, taps) in source.taps.chunks_exact(channels).enumerate() {
            // Tap k meets the dpre that lies k rows before the newest.
            let slot = (row - tap) % source.d_conv * channels;
            let dpre = F32s::load(simd, &dpre[slot + ch..slot + channels]);
            sum = F32s::load(simd, &taps[ch..]).mul_add(dpre, sum);
        }
        sum.store(&mut dx[ch..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    const ACTIVATIONS: [Activation; 2] = [Activation::None, Activation::Silu];

    fn inputs(n_tok: usize, channels: usize, d_conv: usize) -> Vec<Input> {
        vec![
            Input::normal(1, &[n_tok, channels], 1.0),
            Input::normal(2, &[channels, d_conv], 0.7),
            Input::normal(3, &[channels], 0.5),
        ]
    }

    fn windows(device: &Device, n: usize, d_conv: usize, channels: usize) -> Vec<Tensor> {
        let one = |seed: u64| Input::normal(90 + seed, &[d_conv - 1, channels], 1.0).tensor(device);
        (0..n as u64).map(one).collect()
    }

    /// Runs the op on constants; `windows` are updated.
    fn run(
        inputs: &[Tensor],
        act: Activation,
        lengths: &[usize],
        windows: &mut [Tensor],
    ) -> Tensor {
        let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
        let conv = Conv { x: &v[0], w: &v[1], bias: v.get(2), activation: act };
        let segments = Segments::from_lengths(lengths);
        let mut windows: Vec<&mut Tensor> = windows.iter_mut().collect();
        let windows = (!windows.is_empty()).then_some(windows.as_mut_slice());
        causal_conv(&Tape::off(), &conv, &segments, windows).value().clone()
    }

    /// One sequence, number by number in f64.
    fn slow(inputs: &[Tensor], act: Activation, window: Option<&Tensor>) -> Vec<f64> {
        let (n_tok, channels) = inputs[0].dims2();
        let d_conv = inputs[1].dims2().1;
        let mut y = vec![0.0; n_tok * channels];
        for (tok, ch) in (0..n_tok).flat_map(|tok| (0..channels).map(move |ch| (tok, ch))) {
            let mut pre = inputs.get(2).map_or(0.0, |bias| bias.f32()[ch] as f64);
            for k in 0..d_conv {
                let from = tok as isize - (d_conv as isize - 1) + k as isize;
                let x = match (from, window) {
                    (0.., _) => inputs[0].f32()[from as usize * channels + ch],
                    (_, Some(window)) => {
                        window.f32()[(from + d_conv as isize - 1) as usize * channels + ch]
                    }
                    (_, None) => 0.0,
                };
                pre += inputs[1].f32()[ch * d_conv + k] as f64 * x as f64;
            }
            y[tok * channels + ch] = match act {
                Activation::None => pre,
                Activation::Silu => pre / (1.0 + (-pre).exp()),
            };
        }
        y
    }

    #[test]
    fn gradients() {
        let crossing = [N_ROWS - 1, 1, N_ROWS, N_ROWS + 1, 2 * N_ROWS + 2, 2];
        for activation in ACTIVATIONS {
            for d_conv in [1, 2, 3, 4, 6] {
                for (lengths, channels) in [(&[1][..], 1), (&[1, 5, 2], 19), (&crossing, 3)] {
                    let segments = Segments::from_lengths(lengths);
                    let inputs = inputs(segments.n_tok(), channels, d_conv);
                    for n_inputs in [2, 3] {
                        check_gradients(&inputs[..n_inputs], |tape, v| {
                            let conv = Conv { x: &v[0], w: &v[1], bias: v.get(2), activation };
                            vec![causal_conv(tape, &conv, &segments, None)]
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_with_windows_take_them_as_constants() {
        let (channels, d_conv) = (5, 4);
        let segments = Segments::from_lengths(&[2, 40, 1]);
        let inputs = inputs(segments.n_tok(), channels, d_conv);
        check_gradients(&inputs, |tape, v| {
            let activation = Activation::Silu;
            let conv = Conv { x: &v[0], w: &v[1], bias: v.get(2), activation };
            let mut windows = windows(v[0].value().device(), 3, d_conv, channels);
            let mut windows: Vec<&mut Tensor> = windows.iter_mut().collect();
            vec![causal_conv(tape, &conv, &segments, Some(&mut windows))]
        });
    }

    #[test]
    fn gradients_at_the_edges_of_pieces_and_groups_of_a_gpu() {
        let n = gpu::N_ROWS;
        // Channels in fours and not, past a group of threads.
        for (lengths, channels) in [(&[n - 1, n, n + 1, 2 * n + 3][..], 8), (&[3, 70], 260)] {
            let segments = Segments::from_lengths(lengths);
            let inputs = inputs(segments.n_tok(), channels, 4);
            check_gradients(&inputs, |tape, v| {
                let activation = Activation::Silu;
                let conv = Conv { x: &v[0], w: &v[1], bias: v.get(2), activation };
                vec![causal_conv(tape, &conv, &segments, None)]
            });
        }
    }

    #[test]
    fn devices_go_on_from_a_window_in_pieces_and_tokens() {
        let (n_tok, channels) = (gpu::N_ROWS + 30, 68);
        for (d_conv, activation) in
            [(1, Activation::Silu), (4, Activation::None), (7, Activation::Silu)]
        {
            let inputs = inputs(n_tok, channels, d_conv);
            let pieces = |device: &Device, ends: &[usize]| {
                let inputs: Vec<Tensor> = inputs.iter().map(|x| x.tensor(device)).collect();
                let mut window = windows(device, 1, d_conv, channels);
                let (mut y, mut first) = (Vec::new(), 0);
                for &end in ends {
                    let kept = (window[0].clone(), window[0].to_vec());
                    let own = [inputs[0].rows(first..end), inputs[1].clone(), inputs[2].clone()];
                    y.extend(run(&own, activation, &[end - first], &mut window).to_vec());
                    assert_eq!(kept.0.to_vec(), kept.1, "another handle changed");
                    first = end;
                }
                (y, window[0].to_vec())
            };
            let want = pieces(&Device::cpu(1).unwrap(), &[n_tok]);
            for (device, tolerance) in crate::ops::check::devices() {
                let ones: Vec<usize> = (1..=n_tok).collect();
                for ends in [&[n_tok][..], &[1, 3, 4, 5, gpu::N_ROWS + 8, n_tok], &ones] {
                    let (y, window) = pieces(device, ends);
                    crate::ops::check::compare_devices("y", &want.0, &y, *tolerance);
                    assert_eq!(window, want.1, "{d_conv} taps");
                }
                device.check().unwrap();
            }
        }
    }

    #[test]
    fn devices_take_several_segments_with_windows_as_the_cpu_does() {
        let (lengths, channels, d_conv) = ([1, 1, 70, 2], 12, 4);
        for lengths in [&lengths[..], &[1, 1, 1]] {
            let n_tok = lengths.iter().sum();
            let run = |device: &Device| {
                let inputs: Vec<Tensor> =
                    inputs(n_tok, channels, d_conv).iter().map(|x| x.tensor(device)).collect();
                let mut windows = windows(device, lengths.len(), d_conv, channels);
                let y = run(&inputs, Activation::Silu, lengths, &mut windows).to_vec();
                (y, windows.iter().map(Tensor::to_vec).collect::<Vec<_>>())
            };
            let want = run(&Device::cpu(1).unwrap());
            for (device, tolerance) in crate::ops::check::devices() {
                let got = run(device);
                crate::ops::check::compare_devices("y", &want.0, &got.0, *tolerance);
                assert_eq!(got.1, want.1);
            }
        }
    }

    #[test]
    fn agrees_with_the_slow_twin() {
        let device = Device::cpu(2).unwrap();
        for activation in ACTIVATIONS {
            for (n_tok, channels, d_conv) in [(1, 1, 1), (70, 33, 4), (3, 16, 5)] {
                let inputs: Vec<Tensor> =
                    inputs(n_tok, channels, d_conv).iter().map(|x| x.tensor(&device)).collect();
                for n_inputs in [2, 3] {
                    let inputs = &inputs[..n_inputs];
                    let mut window = windows(&device, 1, d_conv, channels);
                    let before = window[0].clone();
                    let pairs = [
                        (
                            run(inputs, activation, &[n_tok], &mut []),
                            slow(inputs, activation, None),
                        ),
                        (
                            run(inputs, activation, &[n_tok], &mut window),
                            slow(inputs, activation, Some(&before)),
                        ),
                    ];
                    for (got, want) in pairs {
                        for (got, want) in got.f32().iter().zip(want) {
                            assert!((*got as f64 - want).abs() < 3e-6, "{got} {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn segments_do_not_see_each_other() {
        let device = Device::cpu(1).unwrap();
        let lengths = [3, 1, 40, 2];
        let inputs: Vec<Tensor> = inputs(46, 7, 4).iter().map(|x| x.tensor(&device)).collect();
        let together = run(&inputs, Activation::Silu, &lengths, &mut []);
        let mut start = 0;
        for n_tok in lengths {
            let rows = start..start + n_tok;
            let own = [inputs[0].rows(rows.clone()), inputs[1].clone(), inputs[2].clone()];
            let alone = run(&own, Activation::Silu, &[n_tok], &mut []);
            assert_eq!(alone.f32(), together.rows(rows).f32());
            start += n_tok;
        }
    }

    #[test]
    fn steps_with_a_window_equal_the_whole_from_any_split() {
        let device = Device::cpu(1).unwrap();
        let (n_tok, channels) = (N_ROWS + 9, 18);
        for d_conv in [1, 2, 4, 7] {
            let inputs: Vec<Tensor> =
                inputs(n_tok, channels, d_conv).iter().map(|x| x.tensor(&device)).collect();
            let step = |rows: Range<usize>, window: &mut [Tensor]| {
                let n_tok = rows.len();
                let own = [inputs[0].rows(rows), inputs[1].clone(), inputs[2].clone()];
                run(&own, Activation::Silu, &[n_tok], window).f32().to_vec()
            };
            let mut window = vec![Tensor::zeros(&device, &[d_conv - 1, channels])];
            let whole = step(0..n_tok, &mut window);
            let last = inputs[0].rows(n_tok + 1 - d_conv..n_tok);
            assert_eq!(window[0].f32(), last.f32());
            for split in [1, 2, 5, N_ROWS, n_tok - 1] {
                let mut carried = vec![Tensor::zeros(&device, &[d_conv - 1, channels])];
                let mut y = step(0..split, &mut carried);
                for tok in split..n_tok {
                    y.extend(step(tok..tok + 1, &mut carried));
                }
                assert_eq!(y, whole, "split at {split}");
                assert_eq!(carried[0].f32(), last.f32());
            }
        }
    }

    #[test]
    fn steps_of_many_sequences_have_the_bits_of_each_alone_on_any_number_of_threads() {
        let (n_seq, channels) = (9, 1001);
        for d_conv in [1, 2, 4] {
            let steps = |n_threads: usize| {
                let device = Device::cpu(n_threads).unwrap();
                let inputs: Vec<Tensor> =
                    inputs(n_seq, channels, d_conv).iter().map(|x| x.tensor(&device)).collect();
                let mut together = windows(&device, n_seq, d_conv, channels);
                let mut alone = windows(&device, n_seq, d_conv, channels);
                let y = run(&inputs, Activation::Silu, &vec![1; n_seq], &mut together);
                for seq in 0..n_seq {
                    let own = [inputs[0].rows(seq..seq + 1), inputs[1].clone(), inputs[2].clone()];
                    let one = run(&own, Activation::Silu, &[1], &mut alone[seq..seq + 1]);
                    assert_eq!(one.f32(), y.rows(seq..seq + 1).f32());
                    assert_eq!(alone[seq].f32(), together[seq].f32());
                }
                y.f32().to_vec()
            };
            let one = steps(1);
            assert!(one == steps(2) && one == steps(3), "{d_conv} taps");
        }
    }

    #[test]
    fn a_step_sees_new_weights() {
        let device = Device::cpu(1).unwrap();
        let mut inputs: Vec<Tensor> = inputs(2, 19, 4).iter().map(|x| x.tensor(&device)).collect();
        let mut window = windows(&device, 1, 4, 19);
        for round in 0..2 {
            let entry = window[0].to_f32();
            let own = [inputs[0].rows(0..1), inputs[1].clone(), inputs[2].clone()];
            let y = run(&own, Activation::None, &[1], &mut window);
            drop(own);
            let whole = run(&inputs, Activation::None, &[2], &mut [entry]);
            assert_eq!(y.f32(), whole.rows(0..1).f32(), "round {round}");
            inputs[1].f32_mut()[5] += 1.0;
        }
    }

    #[test]
    fn another_handle_of_a_window_keeps_its_numbers() {
        let device = Device::cpu(1).unwrap();
        let inputs: Vec<Tensor> = inputs(5, 3, 4).iter().map(|x| x.tensor(&device)).collect();
        let mut window = windows(&device, 1, 4, 3);
        let (snapshot, before) = (window[0].clone(), window[0].f32().to_vec());
        run(&inputs, Activation::None, &[5], &mut window);
        assert_eq!(snapshot.f32(), before);
        assert_eq!(window[0].f32(), inputs[0].rows(2..5).f32());
    }

    #[test]
    fn a_token_changes_nothing_before_it() {
        let device = Device::cpu(1).unwrap();
        let (n_tok, channels) = (N_ROWS + 6, 5);
        let inputs: Vec<Tensor> =
            inputs(n_tok, channels, 4).iter().map(|x| x.tensor(&device)).collect();
        let before = run(&inputs, Activation::Silu, &[n_tok], &mut []);
        for tok in [0, 3, N_ROWS, n_tok - 1] {
            let mut x = inputs[0].to_f32();
            x.f32_mut()[tok * channels..][..channels].fill(3.0);
            let changed = [x, inputs[1].clone(), inputs[2].clone()];
            let after = run(&changed, Activation::Silu, &[n_tok], &mut []);
            assert_eq!(before.rows(0..tok).f32(), after.rows(0..tok).f32());
            assert_ne!(before.rows(tok..n_tok).f32(), after.rows(tok..n_tok).f32());
        }
    }
}
