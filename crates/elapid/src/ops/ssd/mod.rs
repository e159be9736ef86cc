//! State-space duality: the recurrence of a Mamba-2 block, as products of matrices.
//!
//! For each segment and head, with a state `h` of (d_state, d_head) numbers and a number `a` below
//! zero:
//!
//! ```text
//! delta = clamp(softplus(raw + bias), delta_min, delta_max),   a = -exp(a_log)
//! h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t]^T
//! y[t] = h[t]^T c[t] + skip x[t]
//! ```
//!
//! | name         | shape                                |                                        |
//! |--------------|--------------------------------------|----------------------------------------|
//! | `xbc`        | (n_tok, d_inner + 2 n_group d_state) | columns x, b, c, after the convolution |
//! | `delta`      | (n_tok, n_head)                      | raw step sizes                         |
//! | `delta_bias` | (n_head)                             |                                        |
//! | `a_log`      | (n_head)                             |                                        |
//! | `skip`       | (n_head)                             |                                        |
//! | `y`          | (n_tok, d_inner)                     | d_inner = n_head d_head                |
//! | a state      | (n_head, d_state, d_head)            | of one segment                         |
//!
//! Head `h` reads `b` and `c` of group `h / (n_head / n_group)`.
//!
//! # Forward
//!
//! A segment is cut into chunks. With `cum[i]` the sum of `delta a` over the chunk up to token i,
//! `h` the state before the chunk, and i, j tokens of the chunk:
//!
//! ```text
//! scores[i,j] = c[i] . b[j]                          one matrix for all heads of a group
//! mix[i,j]    = exp(cum[i] - cum[j]) scores[i,j] delta[j]       for j <= i, else 0
//! y           = mix x + since c h + skip x,          since[i] = exp(cum[i])
//! h_next      = exp(cum[last]) h + b^T (until delta x),   until[j] = exp(cum[last] - cum[j])
//! ```
//!
//! Every exponent is at most zero, so that strong decay underflows and nothing overflows. `cum` is
//! summed in f64 and kept as two f32: after a strong decay `cum[i] - cum[j]` is a small difference
//! of large numbers.
//!
//! # Backward
//!
//! Chunks are walked from the last, with `dh` the gradient by the state after the chunk:
//!
//! ```text
//! dmix     = dy x^T                                  dskip = trace of dmix
//! dx       = mix^T dy + until delta (b dh) + skip dy
//! dscores  = exp(cum[i] - cum[j]) delta[j] dmix      for j <= i, summed over heads
//! dc       = dscores b + since (dy h^T)              summed over heads
//! db       = dscores^T c + (until delta x) dh^T      summed over heads
//! dh_prev  = exp(cum[last]) dh + c^T (since dy)
//! ```
//!
//! The loss by the decay `delta[k] a` of token k is the sum of what passes over k, each term
//! being a factor times the exponential that holds `delta[k] a` in its exponent:
//!
//! ```text
//! ddecay[k] = sum over i >= k > j of mix[i,j] dmix[i,j]          inside the chunk
//!           + sum over i >= k of since[i] c[i] . (h dy[i])       from before, to tokens
//!           + sum over j < k of until[j] delta[j] b[j] . (dh x[j])     from tokens, to after
//!           + exp(cum[last]) h . dh                              straight through
//! ddelta[k] = a ddecay[k] + sum over i of exp(cum[i] - cum[k]) scores[i,k] dmix[i,k]
//!           + until[k] b[k] . (dh x[k])
//! da_log    = sum over k of a delta[k] ddecay[k]
//! draw      = ddelta sigmoid(raw + bias) where the clamp passes, else 0
//! ```
//!
//! The usual form, sums of rows less sums of columns accumulated over the chunk, cancels where
//! decay is strong; here every term is one that belongs.
//!
//! Only the inputs are kept. Backward recomputes the states at the chunk borders of one head of
//! one segment at a time.
//!
//! Not here: the convolution before, the gated norm after, the gradient by a state.

mod backward;
pub(super) mod chunk;
pub(super) mod gpu;
mod kernels;
#[cfg(test)]
mod tests;

use super::{columns, own, split, transpose};
use crate::tape::{Tape, Var};
use crate::tensor::cpu::{AddInto, Cpu, F32s, Mat, MatMut, Scope};
use crate::tensor::device::Device;
use crate::tensor::segment::{Segment, Segments};
use crate::tensor::{DType, Tensor};
use pulp::{Simd, WithSimd};
use std::ops::Range;

use backward::backward;
use chunk::*;
use kernels::*;

/// Sizes of a Mamba-2 block, and the limits of its step sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsdDims {
    pub n_head: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Groups of heads that share b and c.
    pub n_group: usize,
    /// Rows of a head's state.
    pub d_state: usize,
    pub delta_min: f32,
    /// Largest step size; may be infinity.
    pub delta_max: f32,
}

/// What the op reads; shapes in the module's header.
pub struct Ssd<'a> {
    /// x, b and c side by side.
    pub xbc: &'a Var,
    pub delta: &'a Var,
    pub delta_bias: &'a Var,
    /// Decay is `-exp(a_log)`.
    pub a_log: &'a Var,
    /// Input passed around the state.
    pub skip: &'a Var,
    pub dims: SsdDims,
}

/// Below so many tokens in every segment the recurrence is faster than the products.
const RECURRENT: usize = 8;

/// No task is longer than this share of the work, if heads can be dealt out so finely.
const N_TASK: usize = 16;

/// State numbers that make a task of the recurrence worth starting.
pub(super) const STATE_PIECE: usize = 1 << 16;

/// Runs the state space over every segment.
///
/// `states` holds one tensor (n_head, d_state, d_head) per segment: the state before its first
/// token on entry, after its last on return; other handles keep the old numbers. Without, segments
/// start from zero. No gradient flows into or out of a state.
pub fn ssd(
    tape: &Tape,
    ssd: &Ssd,
    segments: &Segments,
    mut states: Option<&mut [&mut Tensor]>,
) -> Var {
    let vars = [ssd.xbc, ssd.delta, ssd.delta_bias, ssd.a_log, ssd.skip];
    let [xbc, delta, delta_bias, a_log, skip] = vars.map(|var| var.value().clone());
    let mut inputs = Inputs { xbc, delta, delta_bias, a_log, skip, dims: ssd.dims };
    inputs.expect_shapes(segments, states.as_deref());
    let recorded = tape.is_recording() && vars.iter().any(|var| var.needs_grad());
    let initial: Option<Vec<Tensor>> = match &states {
        Some(states) if recorded => Some(states.iter().map(|state| (**state).clone()).collect()),
        _ => None,
    };
    own(states.as_deref_mut().unwrap_or_default());
    let y = forward(&inputs, segments, states);
    let segments = segments.clone();
    // What can be made again is not held meanwhile.
    let xbc = ssd.xbc.kept();
    inputs.xbc = Tensor::uninit(y.device(), &[0]);
    tape.record("ssd", &vars, y, move |dy| {
        inputs.xbc = xbc.get();
        backward(&inputs, &segments, initial.as_deref(), &dy)
    })
}

impl SsdDims {
    fn d_inner(&self) -> usize {
        self.n_head * self.d_head
    }

    /// Columns of `xbc`.
    fn width(&self) -> usize {
        self.d_inner() + 2 * self.n_group * self.d_state
    }

    fn heads_per_group(&self) -> usize {
        self.n_head / self.n_group
    }

    /// Numbers in the state of a head.
    fn n_state(&self) -> usize {
        self.d_state * self.d_head
    }

    /// First columns of b and of c of a group.
    fn columns(&self, group: usize) -> (usize, usize) {
        let b = self.d_inner() + group * self.d_state;
        (b, b + self.n_group * self.d_state)
    }
}

struct Inputs {
    xbc: Tensor,
    delta: Tensor,
    delta_bias: Tensor,
    a_log: Tensor,
    skip: Tensor,
    dims: SsdDims,
}

impl Inputs {
    fn expect_shapes(&self, segments: &Segments, states: Option<&[&mut Tensor]>) {
        let SsdDims { n_head, d_head, n_group, d_state, .. } = self.dims;
        assert!(
            n_group > 0 && n_head.is_multiple_of(n_group),
            "ssd: {n_head} heads in {n_group} groups"
        );
        let n_tok = segments.n_tok();
        self.xbc.expect_shape("ssd: xbc", &[n_tok, self.dims.width()]);
        self.delta.expect_shape("ssd: delta", &[n_tok, n_head]);
        for per_head in [&self.delta_bias, &self.a_log, &self.skip] {
            per_head.expect_shape("ssd: a number of each head", &[n_head]);
        }
        if let Some(states) = states {
            assert_eq!(states.len(), segments.len(), "ssd: states and segments");
            for state in states {
                state.expect_shape("ssd: state", &[n_head, d_state, d_head]);
            }
        }
    }

    fn cpu(&self) -> &Cpu {
        self.xbc.device().expect_cpu()
    }

    fn scratch(&self, n_elem: usize) -> Tensor {
        Tensor::uninit(self.xbc.device(), &[n_elem])
    }

    /// What one head reads in `n_tok` tokens from row `start` on.
    fn head(&self, head: usize, start: usize, n_tok: usize) -> Head<'_> {
        let dims = self.dims;
        let (b, c) = dims.columns(head / dims.heads_per_group());
        let stride = dims.width();
        let rows = &self.xbc.f32()[start * stride..(start + n_tok) * stride];
        let part = |first: usize, width| Rows { data: &rows[first..], n_row: n_tok, width, stride };
        Head {
            x: part(head * dims.d_head, dims.d_head),
            b: part(b, dims.d_state),
            c: part(c, dims.d_state),
            skip: self.skip.f32()[head],
        }
    }

    /// Step sizes and decays of one head in a chunk of `n_tok` tokens from row `start` on, in a
    /// buffer of `SERIES` numbers per token.
    fn steps<'a>(
        &self,
        head: usize,
        (start, n_tok): (usize, usize),
        buffer: &'a mut [f32],
    ) -> StepSeries<'a> {
        let n_head = self.dims.n_head;
        let mut series = split(buffer, [n_tok; SERIES]);
        let raw = self.delta.f32()[start * n_head + head..].iter().step_by(n_head);
        let bias = self.delta_bias.f32()[head];
        for (delta, raw) in series[0].iter_mut().zip(raw) {
            *delta = raw + bias;
        }
        let a = -self.a_log.f32()[head].exp();
        let limits = (self.dims.delta_min, self.dims.delta_max);
        self.cpu().simd(StepSizes { a, limits, series: &mut series });
        let [delta, slope, cum, cum_low, since, until, weight] = series.map(|series| &*series);
        let (input, own) = (delta, delta);
        let steps = Steps { rank: 1, input, own, cum, cum_low, since, until, weight };
        StepSeries { a, delta, slope, steps }
    }
}

/// Numbers per token in `StepSeries`.
const SERIES: usize = 7;

/// Step sizes and decays of one head in a chunk, one number per token.
#[derive(Clone, Copy)]
struct StepSeries<'a> {
    a: f32,
    /// After softplus and clamp.
    delta: &'a [f32],
    /// Its slope by the raw step size.
    slope: &'a [f32],
    steps: Steps<'a>,
}

/// The chunks of `n_tok` tokens.
fn chunks(n_tok: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    chunks_of(n_tok, CHUNK)
}

/// The largest divisor of `n` that is at most `limit`, or 1.
pub(super) fn divisor_at_most(n: usize, limit: usize) -> usize {
    (1..=n).rev().find(|&d| n.is_multiple_of(d) && d <= limit).unwrap_or(1)
}

/// Heads of a task: all of a group where segments are many, fewer where one is long.
pub(super) fn heads_per_task(
    (n_head, heads_per_group): (usize, usize),
    segments: &Segments,
) -> usize {
    let longest = segments.iter().map(|segment| segment.n_tok).max().unwrap_or(1);
    let limit = segments.n_tok() * n_head / (longest * N_TASK);
    divisor_at_most(heads_per_group, limit)
}

/// Cuts `data` by segment, and what is a segment's into equal pieces for its `n_block` tasks, of
/// `per_tok` numbers for each token.
pub(super) fn deal_pieces<'a>(
    mut data: &'a mut [f32],
    segments: &Segments,
    n_block: usize,
    per_tok: usize,
) -> Vec<&'a mut [f32]> {
    let lengths = segments.iter().flat_map(|segment| (0..n_block).map(|_| segment.n_tok * per_tok));
    lengths.map(|length| data.split_off_mut(..length).expect("a piece for every task")).collect()
}

/// Cuts every row of `data` (n_tok, stride) among the `n_block` tasks of its segment, which share
/// its first `width` columns equally.
pub(super) fn deal_columns<'a>(
    mut data: &'a mut [f32],
    segments: &Segments,
    n_block: usize,
    (stride, width): (usize, usize),
) -> Vec<Vec<&'a mut [f32]>> {
    let rows = |segment: &Segment| data.split_off_mut(..segment.n_tok * stride);
    let rows = segments.iter().filter_map(rows);
    rows.flat_map(|rows| columns(rows, (stride, width), width / n_block)).collect()
}

/// A task of forward: some heads of one segment.
struct ForwardTask<'a> {
    segment: Segment,
    heads: Range<usize>,
    /// Its columns of every token's `y`.
    y: Vec<&'a mut [f32]>,
    states: Option<&'a mut [f32]>,
}

fn forward(inputs: &Inputs, segments: &Segments, states: Option<&mut [&mut Tensor]>) -> Tensor {
    if let Device::Gpu(gpu) = inputs.xbc.device() {
        return gpu::forward(gpu, inputs, segments, states);
    }
    let dims = inputs.dims;
    let is_short = segments.iter().all(|segment| segment.n_tok < RECURRENT);
    let n_heads = if is_short {
        divisor_at_most(dims.n_head, STATE_PIECE.div_ceil(dims.n_state()))
    } else {
        heads_per_task((dims.n_head, dims.heads_per_group()), segments)
    };
    let path = if is_short { Path::Recurrent } else { Path::Chunked };
    forward_by(path, inputs, segments, states, n_heads)
}

/// How `forward` is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    Recurrent,
    Chunked,
}

fn forward_by(
    path: Path,
    inputs: &Inputs,
    segments: &Segments,
    states: Option<&mut [&mut Tensor]>,
    n_heads: usize,
) -> Tensor {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let (n_block, d_inner) = (dims.n_head / n_heads, dims.d_inner());
    let mut y = Tensor::uninit(inputs.xbc.device(), &[segments.n_tok(), d_inner]);
    let ys = deal_columns(y.f32_mut(), segments, n_block, (d_inner, d_inner));
    let states = states.unwrap_or_default().iter_mut();
    let states = states.flat_map(|state| state.f32_mut().chunks_mut(n_heads * dims.n_state()));
    let states = states.map(Some).chain(std::iter::repeat_with(|| None));
    let tasks = ys.into_iter().zip(states).enumerate().map(|(idx, (y, states))| {
        let first = idx % n_block * n_heads;
        ForwardTask { segment: segments[idx / n_block], heads: first..first + n_heads, y, states }
    });
    match path {
        Path::Recurrent => {
            cpu.map(tasks.collect(), |task| recurrent(inputs, task));
        }
        Path::Chunked => {
            let scores = scores(inputs, segments);
            cpu.map(tasks.collect(), |task| chunked(inputs, scores.f32(), task));
        }
    }
    y
}

/// The recurrence as it is written, one token after the other.
fn recurrent(inputs: &Inputs, task: ForwardTask) {
    let ForwardTask { segment, heads, mut y, mut states } = task;
    let (d_head, n_state) = (inputs.dims.d_head, inputs.dims.n_state());
    let lengths = [segment.n_tok * SERIES, n_state];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, zero] = split(scratch.f32_mut(), lengths);
    for (idx, head_idx) in heads.enumerate() {
        let steps = inputs.steps(head_idx, (segment.start, segment.n_tok), buffer);
        let state = match &mut states {
            Some(states) => &mut states[idx * n_state..][..n_state],
            None => {
                zero.fill(0.0);
                &mut *zero
            }
        };
        let head = inputs.head(head_idx, segment.start, segment.n_tok);
        for (tok, y) in y.iter_mut().enumerate() {
            inputs.cpu().simd(Step {
                x: head.x.row(tok),
                b: head.b.row(tok),
                c: head.c.row(tok),
                delta: steps.delta[tok],
                decay: (steps.delta[tok] * steps.a).exp(),
                skip: head.skip,
                state,
                y: &mut y[idx * d_head..][..d_head],
            });
        }
    }
}

/// Where the scores of one chunk and group are: the chunk begins at row `start` of the batch.
fn scores_at(dims: &SsdDims, start: usize, n_tok: usize, group: usize) -> Range<usize> {
    let first = (start * dims.n_group + group * n_tok) * CHUNK;
    first..first + n_tok * n_tok
}

/// `scores` of every chunk and group, each (n_tok, n_tok) for the tokens of the chunk.
fn scores(inputs: &Inputs, segments: &Segments) -> Tensor {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let mut scores = inputs.scratch(segments.n_tok() * dims.n_group * CHUNK);
    let mut rest = scores.f32_mut();
    let mut tasks = Vec::new();
    for segment in segments.iter() {
        for chunk in chunks(segment.n_tok) {
            for group in 0..dims.n_group {
                let piece = rest.split_off_mut(..chunk.len() * CHUNK).expect("rows of a chunk");
                tasks.push((segment.start + chunk.start, chunk.len(), group, piece));
            }
        }
    }
    cpu.map(tasks, |(start, n_tok, group, scores)| {
        let head = inputs.head(group * dims.heads_per_group(), start, n_tok);
        // Rows of `xbc` are a power of two apart in many models, where the product is slow to
        // transpose; from a dense copy it is not.
        let mut b = inputs.scratch(n_tok * dims.d_state);
        head.b.copy(b.f32_mut());
        let b = Mat::new(b.f32(), n_tok, dims.d_state);
        let scores = MatMut::new(scores, n_tok, n_tok);
        cpu.gemm(scores, 0.0, 1.0, head.c.mat(), b.t(), Scope::Thread);
    });
    scores
}

/// The same as `recurrent` by products over chunks.
fn chunked(inputs: &Inputs, scores: &[f32], task: ForwardTask) {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let ForwardTask { segment, heads, mut y, mut states } = task;
    let (d_head, n_state) = (dims.d_head, dims.n_state());
    let square = CHUNK * CHUNK;
    let lengths = [CHUNK * SERIES, n_state, square, CHUNK * d_head, CHUNK * d_head];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, zero, mix, y_chunk, x_chunk] = split(scratch.f32_mut(), lengths);
    let keeps_state = states.is_some();
    for (idx, head_idx) in heads.enumerate() {
        let state = match &mut states {
            Some(states) => &mut states[idx * n_state..][..n_state],
            None => &mut *zero,
        };
        for chunk in chunks(segment.n_tok) {
            let (start, n_tok) = (segment.start + chunk.start, chunk.len());
            let is_zero = !keeps_state && chunk.start == 0;
            let head = inputs.head(head_idx, start, n_tok);
            let steps = inputs.steps(head_idx, (start, n_tok), buffer).steps;
            let (mix, y_chunk) = (&mut mix[..n_tok * n_tok], &mut y_chunk[..n_tok * d_head]);
            let scores = &scores[scores_at(&dims, start, n_tok, head_idx / dims.heads_per_group())];
            let before = (!is_zero).then_some(&*state);
            Chunk { head, steps, scores, state: before }.forward(cpu, mix, y_chunk);
            for (y, from) in y[chunk.clone()].iter_mut().zip(y_chunk.chunks(d_head)) {
                y[idx * d_head..][..d_head].copy_from_slice(from);
            }
            if keeps_state || chunk.end < segment.n_tok {
                let beta = if is_zero { 0.0 } else { steps.total() };
                advance(cpu, &head, &steps, &mut x_chunk[..n_tok * d_head], (beta, state));
            }
        }
    }
}
