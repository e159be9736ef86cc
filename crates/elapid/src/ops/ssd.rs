//! State-space duality: the recurrence of a Mamba-2 block, as products of matrices.
//!
//! For each segment and head, with a state `h` of (d_state, d_head) numbers and a number `a` below
//! zero:
//!
//!     delta = clamp(softplus(raw + bias), delta_min, delta_max),   a = -exp(a_log)
//!     h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t]^T
//!     y[t] = h[t]^T c[t] + skip x[t]
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
//!     scores[i,j] = c[i] . b[j]                          one matrix for all heads of a group
//!     mix[i,j]    = exp(cum[i] - cum[j]) scores[i,j] delta[j]       for j <= i, else 0
//!     y           = mix x + since c h + skip x,          since[i] = exp(cum[i])
//!     h_next      = exp(cum[last]) h + b^T (until delta x),   until[j] = exp(cum[last] - cum[j])
//!
//! Every exponent is at most zero, so that strong decay underflows and nothing overflows. `cum` is
//! summed in f64 and kept as two f32: after a strong decay `cum[i] - cum[j]` is a small difference
//! of large numbers.
//!
//! # Backward
//!
//! Chunks are walked from the last, with `dh` the gradient by the state after the chunk:
//!
//!     dmix     = dy x^T                                  dskip = trace of dmix
//!     dx       = mix^T dy + until delta (b dh) + skip dy
//!     dscores  = exp(cum[i] - cum[j]) delta[j] dmix      for j <= i, summed over heads
//!     dc       = dscores b + since (dy h^T)              summed over heads
//!     db       = dscores^T c + (until delta x) dh^T      summed over heads
//!     dh_prev  = exp(cum[last]) dh + c^T (since dy)
//!
//! The loss by the decay `delta[k] a` of token k is the sum of what passes over k, each term
//! being a factor times the exponential that holds `delta[k] a` in its exponent:
//!
//!     ddecay[k] = sum over i >= k > j of mix[i,j] dmix[i,j]          inside the chunk
//!               + sum over i >= k of since[i] c[i] . (h dy[i])       from before, to tokens
//!               + sum over j < k of until[j] delta[j] b[j] . (dh x[j])     from tokens, to after
//!               + exp(cum[last]) h . dh                              straight through
//!     ddelta[k] = a ddecay[k] + sum over i of exp(cum[i] - cum[k]) scores[i,k] dmix[i,k]
//!               + until[k] b[k] . (dh x[k])
//!     da_log    = sum over k of a delta[k] ddecay[k]
//!     draw      = ddelta sigmoid(raw + bias) where the clamp passes, else 0
//!
//! The usual form, sums of rows less sums of columns accumulated over the chunk, cancels where
//! decay is strong; here every term is one that belongs.
//!
//! Only the inputs are kept. Backward recomputes the states at the chunk borders of one head of
//! one segment at a time.
//!
//! Not here: the convolution before, the gated norm after, the gradient by a state.

use crate::cpu::{Cpu, F32s, Mat, MatMut, Scope};
use crate::device::Device;
use crate::segment::{Segment, Segments};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Sizes of a Mamba-2 block, and the limits of its step sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsdDims {
    /// Heads.
    pub n_head: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Groups of heads that share b and c.
    pub n_group: usize,
    /// Rows of a head's state.
    pub d_state: usize,
    /// Least step size.
    pub delta_min: f32,
    /// Largest step size; may be infinity.
    pub delta_max: f32,
}

/// What the op reads; shapes in the module's header.
pub struct Ssd<'a> {
    /// x, b and c side by side.
    pub xbc: &'a Var,
    /// Raw step sizes.
    pub delta: &'a Var,
    /// Added to them.
    pub delta_bias: &'a Var,
    /// Decay is `-exp(a_log)`.
    pub a_log: &'a Var,
    /// Input passed around the state.
    pub skip: &'a Var,
    /// Sizes.
    pub dims: SsdDims,
}

/// Tokens of a chunk.
const CHUNK: usize = 64;

/// Below so many tokens in every segment the recurrence is faster than the products.
const RECURRENT: usize = 8;

/// No task is longer than this share of the work, if heads can be dealt out so finely.
const N_TASK: usize = 16;

/// State numbers that make a task of the recurrence worth starting.
const STATE_PIECE: usize = 1 << 16;

/// Runs the state space over every segment.
///
/// `states` holds one tensor (n_head, d_state, d_head) per segment: the state before its first
/// token on entry, after its last on return. Without, segments start from zero. No gradient flows
/// into or out of a state.
pub fn ssd(tape: &Tape, ssd: &Ssd, segments: &Segments, states: Option<&mut [&mut Tensor]>) -> Var {
    let vars = [ssd.xbc, ssd.delta, ssd.delta_bias, ssd.a_log, ssd.skip];
    let [xbc, delta, delta_bias, a_log, skip] = vars.map(|var| var.value().clone());
    let inputs = Inputs { xbc, delta, delta_bias, a_log, skip, dims: ssd.dims };
    inputs.expect_shapes(segments, states.as_deref());
    let recorded = tape.is_recording() && vars.iter().any(|var| var.needs_grad());
    let initial: Option<Vec<Tensor>> = match &states {
        Some(states) if recorded => Some(states.iter().map(|state| state.to_f32()).collect()),
        _ => None,
    };
    let y = forward(&inputs, segments, states);
    let segments = segments.clone();
    tape.record("ssd", &vars, y, move |dy| backward(&inputs, &segments, initial.as_deref(), &dy))
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
        self.xbc.expect_shape("ssd: xbc", &[segments.n_tok(), self.dims.width()]);
        self.delta.expect_shape("ssd: delta", &[segments.n_tok(), n_head]);
        self.delta_bias.expect_shape("ssd: delta_bias", &[n_head]);
        self.a_log.expect_shape("ssd: a_log", &[n_head]);
        self.skip.expect_shape("ssd: skip", &[n_head]);
        if let Some(states) = states {
            assert_eq!(states.len(), segments.len(), "ssd: states and segments");
            for state in states {
                state.expect_shape("ssd: state", &[n_head, d_state, d_head]);
            }
        }
    }

    fn cpu(&self) -> &Cpu {
        let Device::Cpu(cpu) = self.xbc.device();
        cpu
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
        let part = |first: usize, width| Rows { data: &rows[first..], n_tok, width, stride };
        Head {
            x: part(head * dims.d_head, dims.d_head),
            b: part(b, dims.d_state),
            c: part(c, dims.d_state),
            skip: self.skip.f32()[head],
        }
    }

    /// Step sizes and decays of one head in one segment, in a buffer of `SERIES` numbers per
    /// token.
    fn steps<'a>(&self, head: usize, segment: &Segment, buffer: &'a mut [f32]) -> Steps<'a> {
        let n_head = self.dims.n_head;
        let mut series = split(buffer, [segment.n_tok; SERIES]);
        let raw = self.delta.f32()[segment.start * n_head + head..].iter().step_by(n_head);
        let bias = self.delta_bias.f32()[head];
        for (delta, raw) in series[0].iter_mut().zip(raw) {
            *delta = raw + bias;
        }
        let a = -self.a_log.f32()[head].exp();
        let limits = (self.dims.delta_min, self.dims.delta_max);
        self.cpu().simd(StepSizes { a, limits, series: &mut series });
        let [delta, slope, cum, cum_low, since, until, weight] = series.map(|series| &*series);
        Steps { a, delta, slope, cum, cum_low, since, until, weight }
    }
}

/// Cuts the front of `data` into pieces of these lengths.
fn split<const N: usize>(mut data: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    lengths.map(|length| data.split_off_mut(..length).expect("the buffer holds every piece"))
}

/// The same few columns of consecutive tokens.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    n_tok: usize,
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// (n_tok, width)
    fn mat(self) -> Mat<'a> {
        Mat::strided(self.data, self.n_tok, self.width, self.stride)
    }

    #[inline(always)]
    fn row(self, tok: usize) -> &'a [f32] {
        &self.data[tok * self.stride..][..self.width]
    }

    /// Packs the rows into `to`.
    fn copy(self, to: &mut [f32]) {
        for (tok, to) in to.chunks_mut(self.width).enumerate() {
            to.copy_from_slice(self.row(tok));
        }
    }
}

/// What one head reads.
#[derive(Clone, Copy)]
struct Head<'a> {
    x: Rows<'a>,
    b: Rows<'a>,
    c: Rows<'a>,
    skip: f32,
}

/// Numbers per token in `Steps`.
const SERIES: usize = 7;

/// Step sizes and decays of one head, one number per token; sums start again at every chunk.
#[derive(Clone, Copy)]
struct Steps<'a> {
    a: f32,
    /// After softplus and clamp.
    delta: &'a [f32],
    /// Its slope by the raw step size.
    slope: &'a [f32],
    /// Sum of `delta a` from the first token of the chunk to this one.
    cum: &'a [f32],
    /// What `cum` lost in rounding.
    cum_low: &'a [f32],
    /// `exp(cum)`
    since: &'a [f32],
    /// `exp(cum[last] - cum)`
    until: &'a [f32],
    /// `until delta`
    weight: &'a [f32],
}

impl<'a> Steps<'a> {
    fn range(self, range: Range<usize>) -> Steps<'a> {
        let part = |series: &'a [f32]| &series[range.clone()];
        Steps {
            a: self.a,
            delta: part(self.delta),
            slope: part(self.slope),
            cum: part(self.cum),
            cum_low: part(self.cum_low),
            since: part(self.since),
            until: part(self.until),
            weight: part(self.weight),
        }
    }

    /// Decay over all tokens.
    fn total(&self) -> f32 {
        self.since.last().copied().unwrap_or(1.0)
    }
}

/// The chunks of `n_tok` tokens.
fn chunks(n_tok: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    (0..n_tok.div_ceil(CHUNK)).map(move |idx| idx * CHUNK..n_tok.min((idx + 1) * CHUNK))
}

/// The largest divisor of `n` that is at most `limit`, or 1.
fn divisor_at_most(n: usize, limit: usize) -> usize {
    (1..=n).rev().find(|&d| n.is_multiple_of(d) && d <= limit).unwrap_or(1)
}

/// Heads of a task: all of a group where segments are many, fewer where one is long.
fn heads_per_task(dims: &SsdDims, segments: &Segments) -> usize {
    let longest = segments.iter().map(|segment| segment.n_tok).max().unwrap_or(1);
    let limit = segments.n_tok() * dims.n_head / (longest * N_TASK);
    divisor_at_most(dims.heads_per_group(), limit)
}

/// Cuts `data` by segment, and what is a segment's into equal pieces for its `n_block` tasks, of
/// `per_tok` numbers for each token.
fn deal_pieces<'a>(
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
fn deal_columns<'a>(
    data: &'a mut [f32],
    segments: &Segments,
    n_block: usize,
    (stride, width): (usize, usize),
) -> Vec<Vec<&'a mut [f32]>> {
    let mut rows = data.chunks_mut(stride);
    let mut hands: Vec<Vec<&mut [f32]>> = Vec::with_capacity(segments.len() * n_block);
    for segment in segments.iter() {
        let first = hands.len();
        hands.resize_with(first + n_block, || Vec::with_capacity(segment.n_tok));
        for row in rows.by_ref().take(segment.n_tok) {
            let parts = row[..width].chunks_mut(width / n_block);
            hands[first..].iter_mut().zip(parts).for_each(|(hand, part)| hand.push(part));
        }
    }
    hands
}

/// A task of forward: some heads of one segment.
struct ForwardTask<'a> {
    segment: Segment,
    heads: Range<usize>,
    /// Its columns of every token's `y`.
    y: Vec<&'a mut [f32]>,
    /// Its heads' states.
    states: Option<&'a mut [f32]>,
}

fn forward(inputs: &Inputs, segments: &Segments, states: Option<&mut [&mut Tensor]>) -> Tensor {
    let dims = inputs.dims;
    let is_short = segments.iter().all(|segment| segment.n_tok < RECURRENT);
    let n_heads = if is_short {
        divisor_at_most(dims.n_head, STATE_PIECE.div_ceil(dims.n_state()))
    } else {
        heads_per_task(&dims, segments)
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
    let states: Vec<Option<&mut [f32]>> = match states {
        Some(states) => {
            let states = states.iter_mut().map(|state| state.f32_mut());
            states.flat_map(|state| state.chunks_mut(n_heads * dims.n_state())).map(Some).collect()
        }
        None => ys.iter().map(|_| None).collect(),
    };
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
        let steps = inputs.steps(head_idx, &segment, buffer);
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
    let lengths = [segment.n_tok * SERIES, n_state, square, CHUNK * d_head, CHUNK * d_head];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, zero, mix, y_chunk, x_chunk] = split(scratch.f32_mut(), lengths);
    let keeps_state = states.is_some();
    for (idx, head_idx) in heads.enumerate() {
        let steps = inputs.steps(head_idx, &segment, buffer);
        let state = match &mut states {
            Some(states) => &mut states[idx * n_state..][..n_state],
            None => &mut *zero,
        };
        for chunk in chunks(segment.n_tok) {
            let (start, n_tok) = (segment.start + chunk.start, chunk.len());
            let is_zero = !keeps_state && chunk.start == 0;
            let head = inputs.head(head_idx, start, n_tok);
            let steps = steps.range(chunk.clone());
            let (mix, y_chunk) = (&mut mix[..n_tok * n_tok], &mut y_chunk[..n_tok * d_head]);
            let scores = &scores[scores_at(&dims, start, n_tok, head_idx / dims.heads_per_group())];
            cpu.simd(Mix { steps, scores, mix });
            if is_zero {
                y_chunk.fill(0.0);
            } else {
                let state = Mat::new(state, dims.d_state, d_head);
                let y = MatMut::new(y_chunk, n_tok, d_head);
                cpu.gemm(y, 0.0, 1.0, head.c.mat(), state, Scope::Thread);
            }
            cpu.simd(Blend { y: y_chunk, scale: steps.since, x: head.x, skip: head.skip });
            let product = MatMut::new(y_chunk, n_tok, d_head);
            cpu.gemm(product, 1.0, 1.0, Mat::new(mix, n_tok, n_tok), head.x.mat(), Scope::Thread);
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

/// `state = beta state + b^T (until delta x)`, with scratch for the bracket.
fn advance(
    cpu: &Cpu,
    head: &Head,
    steps: &Steps,
    x_chunk: &mut [f32],
    (beta, state): (f32, &mut [f32]),
) {
    cpu.simd(ScaleRows { y: x_chunk, scale: steps.weight, x: head.x });
    let x = Mat::new(x_chunk, head.x.n_tok, head.x.width);
    let state = MatMut::new(state, head.b.width, head.x.width);
    cpu.gemm(state, beta, 1.0, head.b.mat().t(), x, Scope::Thread);
}

/// A task of backward: some heads of one segment, all of one group.
struct BackwardTask<'a> {
    segment: Segment,
    heads: Range<usize>,
    /// The states of its heads before the segment.
    initial: Option<&'a [f32]>,
    /// Its columns of every token's `dx`.
    dx: Vec<&'a mut [f32]>,
    /// Gradient by the raw step sizes, (heads, n_tok).
    ddelta: &'a mut [f32],
    /// What its heads add up for their group, `partial_width` numbers per token.
    partial: &'a mut [f32],
}

/// Gradients that are sums over the tokens of a head.
#[derive(Clone, Copy, Default)]
struct Sums {
    ddelta_bias: f64,
    da_log: f64,
    dskip: f64,
}

/// Numbers per token in what heads add up for their group: a row of `dscores`, `db` and `dc`.
fn partial_width(dims: &SsdDims) -> usize {
    CHUNK + 2 * dims.d_state
}

/// Lengths, within the numbers of a chunk, of `dscores` (n_tok, n_tok), a gap, `db`, and `dc`.
fn partial_lengths(dims: &SsdDims, n_tok: usize) -> [usize; 4] {
    [n_tok * n_tok, n_tok * (CHUNK - n_tok), n_tok * dims.d_state, n_tok * dims.d_state]
}

/// Inverts `forward`: gradients by xbc, delta, delta_bias, a_log and skip.
fn backward(
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Tensor]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    let (cpu, dims, device) = (inputs.cpu(), inputs.dims, inputs.xbc.device());
    let n_heads = heads_per_task(&dims, segments);
    let n_block = dims.n_head / n_heads;
    let mut dxbc = Tensor::uninit(device, inputs.xbc.shape());
    let mut by_head = inputs.scratch(segments.n_tok() * dims.n_head);
    let mut partial = inputs.scratch(segments.n_tok() * n_block * partial_width(&dims));
    let columns = (dims.width(), dims.d_inner());
    let dxs = deal_columns(dxbc.f32_mut(), segments, n_block, columns);
    let ddeltas = deal_pieces(by_head.f32_mut(), segments, n_block, n_heads);
    let partials = deal_pieces(partial.f32_mut(), segments, n_block, partial_width(&dims));
    let parts = dxs.into_iter().zip(ddeltas).zip(partials).enumerate();
    let tasks = parts.map(|(idx, ((dx, ddelta), partial))| {
        let heads = idx % n_block * n_heads..(idx % n_block + 1) * n_heads;
        let states = heads.start * dims.n_state()..heads.end * dims.n_state();
        let initial = initial.map(|initial| &initial[idx / n_block].f32()[states]);
        BackwardTask { segment: segments[idx / n_block], heads, initial, dx, ddelta, partial }
    });
    let scores = scores(inputs, segments);
    let sums = cpu.map(tasks.collect(), |task| backward_heads(inputs, scores.f32(), dy, task));
    sum_over_heads(inputs, segments, n_block, partial.f32(), &mut dxbc);
    let sums: Vec<Sums> = sums.into_iter().flatten().collect();
    let over_segments = |part: fn(&Sums) -> f64| {
        let sum = |head| sums.iter().skip(head).step_by(dims.n_head).map(part).sum::<f64>() as f32;
        let sums: Vec<f32> = (0..dims.n_head).map(sum).collect();
        Some(Tensor::from_f32(device, &[dims.n_head], &sums))
    };
    vec![
        Some(dxbc),
        Some(by_token(inputs, segments, by_head.f32())),
        over_segments(|sums| sums.ddelta_bias),
        over_segments(|sums| sums.da_log),
        over_segments(|sums| sums.dskip),
    ]
}

/// (heads, n_tok) of every segment to (n_tok, n_head).
fn by_token(inputs: &Inputs, segments: &Segments, by_head: &[f32]) -> Tensor {
    let n_head = inputs.dims.n_head;
    let mut y = Tensor::uninit(inputs.xbc.device(), &[segments.n_tok(), n_head]);
    let rows = y.f32_mut();
    for segment in segments.iter() {
        let range = segment.start * n_head..(segment.start + segment.n_tok) * n_head;
        let (rows, by_head) = (&mut rows[range.clone()], &by_head[range]);
        for (tok, row) in rows.chunks_mut(n_head).enumerate() {
            for (head, y) in row.iter_mut().enumerate() {
                *y = by_head[head * segment.n_tok + tok];
            }
        }
    }
    y
}

fn backward_heads(inputs: &Inputs, scores: &[f32], dy: &Tensor, task: BackwardTask) -> Vec<Sums> {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let BackwardTask { segment, heads, initial, mut dx, ddelta, partial } = task;
    let (d_head, n_state) = (dims.d_head, dims.n_state());
    let n_states = segment.n_tok.div_ceil(CHUNK) * n_state;
    let lengths =
        [segment.n_tok * SERIES, n_states, n_state, Work::lengths(&dims, CHUNK).iter().sum()];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, states, dstate, work] = split(scratch.f32_mut(), lengths);
    partial.fill(0.0);
    let mut all_sums = Vec::with_capacity(heads.len());
    for (idx, head_idx) in heads.enumerate() {
        let steps = inputs.steps(head_idx, &segment, buffer);
        let initial = initial.map(|initial| &initial[idx * n_state..][..n_state]);
        let x_chunk = &mut work[..CHUNK * d_head];
        recompute_states(inputs, (head_idx, &segment), steps, initial, x_chunk, states);
        let mut sums = Sums::default();
        for (chunk_idx, chunk) in chunks(segment.n_tok).enumerate().rev() {
            let (start, n_tok) = (segment.start + chunk.start, chunk.len());
            let dy = &dy.f32()[start * dims.d_inner() + head_idx * d_head..];
            let has_state = chunk_idx > 0 || initial.is_some();
            let scores_at = scores_at(&dims, start, n_tok, head_idx / dims.heads_per_group());
            let head_chunk = HeadChunk {
                head: inputs.head(head_idx, start, n_tok),
                steps: steps.range(chunk.clone()),
                scores: &scores[scores_at],
                dy: Rows { data: dy, n_tok, width: d_head, stride: dims.d_inner() },
                state: has_state.then(|| &states[chunk_idx * n_state..][..n_state]),
                is_first: chunk_idx == 0,
                is_last: chunk.end == segment.n_tok,
            };
            let mut work = Work::new(split(work, Work::lengths(&dims, n_tok)));
            let partial = &mut partial[chunk.start * partial_width(&dims)..];
            let ddelta = &mut ddelta[idx * segment.n_tok..][chunk.clone()];
            let partial = split(partial, partial_lengths(&dims, n_tok));
            head_chunk.backward(cpu, &mut work, partial, (dstate, ddelta), &mut sums);
            for (dx, from) in dx[chunk].iter_mut().zip(work.dx.chunks(d_head)) {
                dx[idx * d_head..][..d_head].copy_from_slice(from);
            }
        }
        all_sums.push(sums);
    }
    all_sums
}

/// The states of one head before every chunk of the segment.
fn recompute_states(
    inputs: &Inputs,
    (head_idx, segment): (usize, &Segment),
    steps: Steps,
    initial: Option<&[f32]>,
    x_chunk: &mut [f32],
    states: &mut [f32],
) {
    let (d_head, n_state) = (inputs.dims.d_head, inputs.dims.n_state());
    match initial {
        Some(initial) => states[..n_state].copy_from_slice(initial),
        None => states[..n_state].fill(0.0),
    }
    for (idx, chunk) in chunks(segment.n_tok).enumerate().take(segment.n_tok.div_ceil(CHUNK) - 1) {
        let [before, after] = split(&mut states[idx * n_state..], [n_state; 2]);
        after.copy_from_slice(before);
        let steps = steps.range(chunk.clone());
        let head = inputs.head(head_idx, segment.start + chunk.start, chunk.len());
        let x_chunk = &mut x_chunk[..chunk.len() * d_head];
        advance(inputs.cpu(), &head, &steps, x_chunk, (steps.total(), after));
    }
}

/// What backward reads of one head in one chunk.
struct HeadChunk<'a> {
    head: Head<'a>,
    steps: Steps<'a>,
    scores: &'a [f32],
    dy: Rows<'a>,
    /// Before the chunk; none is zero.
    state: Option<&'a [f32]>,
    is_first: bool,
    is_last: bool,
}

/// Scratch for one chunk.
struct Work<'a> {
    x_chunk: &'a mut [f32],
    dy_chunk: &'a mut [f32],
    dx: &'a mut [f32],
    dc: &'a mut [f32],
    mix: &'a mut [f32],
    dmix: &'a mut [f32],
    ddecay: &'a mut [f32],
    entering: &'a mut [f32],
    leaving: &'a mut [f32],
}

impl<'a> Work<'a> {
    fn lengths(dims: &SsdDims, n_tok: usize) -> [usize; 9] {
        let (x, c, square) = (n_tok * dims.d_head, n_tok * dims.d_state, n_tok * n_tok);
        [x, x, x, c, square, square, n_tok, n_tok, n_tok]
    }

    fn new(pieces: [&'a mut [f32]; 9]) -> Work<'a> {
        let [x_chunk, dy_chunk, dx, dc, mix, dmix, ddecay, entering, leaving] = pieces;
        Work { x_chunk, dy_chunk, dx, dc, mix, dmix, ddecay, entering, leaving }
    }
}

impl HeadChunk<'_> {
    /// Sets `work.dx` and `ddelta`, adds to `partial` and `sums`, and takes `dstate` from after
    /// the chunk to before it.
    fn backward(
        &self,
        cpu: &Cpu,
        work: &mut Work,
        [dscores, _, db, dc]: [&mut [f32]; 4],
        (dstate, ddelta): (&mut [f32], &mut [f32]),
        sums: &mut Sums,
    ) {
        let Head { x, c, skip, .. } = self.head;
        let n_tok = x.n_tok;
        self.inside(cpu, work, dscores, ddelta);
        self.entering(cpu, work, dc);
        let through = self.leaving(cpu, work, db, dstate);
        self.finish(work, through, ddelta, sums);
        cpu.simd(Blend { y: work.dx, scale: self.steps.weight, x: self.dy, skip });
        let dx = MatMut::new(work.dx, n_tok, x.width);
        let mix = Mat::new(work.mix, n_tok, n_tok);
        cpu.gemm(dx, 1.0, 1.0, mix.t(), self.dy.mat(), Scope::Thread);
        if !self.is_first {
            let beta = if self.is_last { 0.0 } else { self.steps.total() };
            let dstate = MatMut::new(dstate, c.width, x.width);
            let dy = Mat::new(work.dy_chunk, n_tok, x.width);
            cpu.gemm(dstate, beta, 1.0, c.mat().t(), dy, Scope::Thread);
        }
    }

    /// From token to token: `mix`, `dmix`, `dscores`, and the first terms of `ddecay`, `ddelta`.
    fn inside(&self, cpu: &Cpu, work: &mut Work, dscores: &mut [f32], ddelta: &mut [f32]) {
        let n_tok = self.dy.n_tok;
        self.head.x.copy(work.x_chunk);
        let x = Mat::new(work.x_chunk, n_tok, self.dy.width);
        let dmix = MatMut::new(work.dmix, n_tok, n_tok);
        cpu.gemm(dmix, 0.0, 1.0, self.dy.mat(), x.t(), Scope::Thread);
        ddelta.fill(0.0);
        cpu.simd(MixBackward {
            steps: self.steps,
            scores: self.scores,
            dmix: work.dmix,
            mix: work.mix,
            dscores,
            ddelta,
            ddecay: work.ddecay,
        });
    }

    /// From the state before the chunk to its tokens; `work.dy_chunk` becomes `since dy`.
    fn entering(&self, cpu: &Cpu, work: &mut Work, dc: &mut [f32]) {
        let Some(state) = self.state else { return work.entering.fill(0.0) };
        let (n_tok, d_head, d_state) = (self.dy.n_tok, self.dy.width, self.head.c.width);
        cpu.simd(ScaleRows { y: work.dy_chunk, scale: self.steps.since, x: self.dy });
        let dy = Mat::new(work.dy_chunk, n_tok, d_head);
        let state = Mat::new(state, d_state, d_head);
        cpu.gemm(MatMut::new(work.dc, n_tok, d_state), 0.0, 1.0, dy, state.t(), Scope::Thread);
        cpu.simd(RowDots { a: work.dc, b: self.head.c, y: work.entering });
        cpu.simd(Add { x: work.dc, y: dc });
    }

    /// From the tokens to the state after the chunk; `work.dx` becomes `b dh`. Returns the term of
    /// `ddecay` that goes straight through.
    fn leaving(&self, cpu: &Cpu, work: &mut Work, db: &mut [f32], dstate: &[f32]) -> f32 {
        if self.is_last {
            work.dx.fill(0.0);
            work.leaving.fill(0.0);
            return 0.0;
        }
        let Head { x, b, .. } = self.head;
        let dh = Mat::new(dstate, b.width, x.width);
        cpu.gemm(MatMut::new(work.dx, x.n_tok, x.width), 0.0, 1.0, b.mat(), dh, Scope::Thread);
        cpu.simd(RowDots { a: work.dx, b: x, y: work.leaving });
        for (leaving, until) in work.leaving.iter_mut().zip(self.steps.until) {
            *leaving *= until;
        }
        cpu.simd(ScaleRows { y: work.x_chunk, scale: self.steps.weight, x });
        let weighted = Mat::new(work.x_chunk, x.n_tok, x.width);
        let db = MatMut::new(db, x.n_tok, b.width);
        cpu.gemm(db, 1.0, 1.0, weighted, dh.t(), Scope::Thread);
        self.state.map_or(0.0, |state| self.steps.total() * cpu.simd(Dot { a: state, b: dstate }))
    }

    /// Adds up `ddecay` and makes `ddelta` the gradient by the raw step sizes.
    fn finish(&self, work: &mut Work, through: f32, ddelta: &mut [f32], sums: &mut Sums) {
        let Steps { a, delta, slope, .. } = self.steps;
        let n_tok = delta.len();
        let mut before = through;
        for k in 0..n_tok {
            work.ddecay[k] += before;
            before += work.leaving[k] * delta[k];
        }
        let mut after = 0.0;
        for k in (0..n_tok).rev() {
            after += work.entering[k];
            let ddecay = a * (work.ddecay[k] + after);
            ddelta[k] = (ddelta[k] + work.leaving[k] + ddecay) * slope[k];
            sums.ddelta_bias += ddelta[k] as f64;
            sums.da_log += (ddecay * delta[k]) as f64;
            sums.dskip += work.dmix[k * n_tok + k] as f64;
        }
    }
}

/// Columns b and c of `dxbc`: adds what the tasks of a group found, then what `dscores` gives.
fn sum_over_heads(
    inputs: &Inputs,
    segments: &Segments,
    n_block: usize,
    partial: &[f32],
    dxbc: &mut Tensor,
) {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let (stride, d_state) = (dims.width(), dims.d_state);
    let width = partial_width(&dims);
    let per_group = n_block / dims.n_group;
    let mut rest = dxbc.f32_mut();
    let mut tasks = Vec::new();
    for segment in segments.iter() {
        for chunk in chunks(segment.n_tok) {
            let rows = rest.split_off_mut(..chunk.len() * stride).expect("rows of a chunk");
            tasks.push((segment, chunk, rows));
        }
    }
    cpu.map(tasks, |(segment, chunk, rows)| {
        let n_tok = chunk.len();
        let mut dscores_sum = inputs.scratch(n_tok * n_tok);
        let dscores_sum = dscores_sum.f32_mut();
        for group in 0..dims.n_group {
            let (b, c) = dims.columns(group);
            dscores_sum.fill(0.0);
            for row in rows.chunks_mut(stride) {
                row[b..b + d_state].fill(0.0);
                row[c..c + d_state].fill(0.0);
            }
            for block in group * per_group..(group + 1) * per_group {
                let first = segment.start * n_block + block * segment.n_tok + chunk.start;
                let part = &partial[first * width..(first + n_tok) * width];
                let (dscores, part) = part.split_at(n_tok * CHUNK);
                let (db, dc) = part.split_at(n_tok * d_state);
                cpu.simd(Add { x: &dscores[..n_tok * n_tok], y: dscores_sum });
                for (tok, row) in rows.chunks_mut(stride).enumerate() {
                    let range = tok * d_state..(tok + 1) * d_state;
                    cpu.simd(Add { x: &db[range.clone()], y: &mut row[b..b + d_state] });
                    cpu.simd(Add { x: &dc[range], y: &mut row[c..c + d_state] });
                }
            }
            let head =
                inputs.head(group * dims.heads_per_group(), segment.start + chunk.start, n_tok);
            let dscores = Mat::new(dscores_sum, n_tok, n_tok);
            let db = MatMut::strided(&mut rows[b..], n_tok, d_state, stride);
            cpu.gemm(db, 1.0, 1.0, dscores.t(), head.c.mat(), Scope::Thread);
            let dc = MatMut::strided(&mut rows[c..], n_tok, d_state, stride);
            cpu.gemm(dc, 1.0, 1.0, dscores, head.b.mat(), Scope::Thread);
        }
    });
}

/// From `raw + bias` in the first of `series` to all of them, in the order of `Steps`.
struct StepSizes<'a, 'b> {
    a: f32,
    limits: (f32, f32),
    series: &'b mut [&'a mut [f32]; SERIES],
}

impl WithSimd for StepSizes<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [delta, slope, cum, cum_low, since, until, weight] = self.series;
        let n_tok = delta.len();
        let (min, max) = (F32s::splat(simd, self.limits.0), F32s::splat(simd, self.limits.1));
        let zero = F32s::zero(simd);
        for at in (0..n_tok).step_by(F32s::<S>::LANES) {
            let raw = F32s::load(simd, &delta[at..]);
            let soft = raw.softplus();
            let below_max = max.select_less(soft, zero, raw.sigmoid());
            soft.select_less(min, zero, below_max).store(&mut slope[at..]);
            soft.max(min).min(max).store(&mut delta[at..]);
        }
        for first in (0..n_tok).step_by(CHUNK) {
            let end = n_tok.min(first + CHUNK);
            let mut sum = 0.0f64;
            for tok in first..end {
                sum += delta[tok] as f64 * self.a as f64;
                cum[tok] = sum as f32;
                cum_low[tok] = (sum - cum[tok] as f64) as f32;
            }
            let last = F32s::splat(simd, cum[end - 1]);
            let last_low = F32s::splat(simd, cum_low[end - 1]);
            for at in (first..end).step_by(F32s::<S>::LANES) {
                let high = F32s::load(simd, &cum[at..end]);
                let low = F32s::load(simd, &cum_low[at..end]);
                high.exp().store(&mut since[at..end]);
                let decay = ((last - high) + (last_low - low)).exp();
                decay.store(&mut until[at..end]);
                (decay * F32s::load(simd, &delta[at..end])).store(&mut weight[at..end]);
            }
        }
    }
}

/// 0, 1, 2, ... for as many lanes as any machine has.
const LANE: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// `exp(cum[i] - cum[j])` for `LANES` tokens j from `at` on, 0 where j > i.
#[inline(always)]
fn decay<S: Simd>(simd: S, steps: &Steps, i: usize, at: usize) -> F32s<S> {
    let high = F32s::splat(simd, steps.cum[i]) - F32s::load(simd, &steps.cum[at..]);
    let low = F32s::splat(simd, steps.cum_low[i]) - F32s::load(simd, &steps.cum_low[at..]);
    let bound = F32s::splat(simd, (i - at) as f32 + 0.5);
    F32s::load(simd, &LANE).select_less(bound, (high + low).exp(), F32s::zero(simd))
}

/// `mix` from `scores`.
struct Mix<'a> {
    steps: Steps<'a>,
    scores: &'a [f32],
    mix: &'a mut [f32],
}

impl WithSimd for Mix<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Mix { steps, scores, mix } = self;
        let n_tok = steps.delta.len();
        for i in 0..n_tok {
            let (scores, mix) = (&scores[i * n_tok..][..n_tok], &mut mix[i * n_tok..][..n_tok]);
            let mut at = 0;
            while at <= i {
                let delta = F32s::load(simd, &steps.delta[at..]);
                let decay = decay(simd, &steps, i, at);
                (decay * F32s::load(simd, &scores[at..]) * delta).store(&mut mix[at..]);
                at += F32s::<S>::LANES;
            }
            if at < n_tok {
                mix[at..].fill(0.0);
            }
        }
    }
}

/// `mix` again, and from `dmix` what passes between the tokens of a chunk: adds to `dscores` and
/// to `ddelta`, sets `ddecay`.
struct MixBackward<'a> {
    steps: Steps<'a>,
    scores: &'a [f32],
    dmix: &'a [f32],
    mix: &'a mut [f32],
    dscores: &'a mut [f32],
    ddelta: &'a mut [f32],
    ddecay: &'a mut [f32],
}

impl WithSimd for MixBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let MixBackward { steps, scores, dmix, mix, dscores, ddelta, ddecay } = self;
        let n_tok = steps.delta.len();
        // From the last row up, `ddelta[j]` is the sum over the rows i >= k so far: times
        // `delta[j]`, what token j sends over k.
        for k in (0..n_tok).rev() {
            let row = k * n_tok..(k + 1) * n_tok;
            let (scores, dmix) = (&scores[row.clone()], &dmix[row.clone()]);
            let (mix, dscores) = (&mut mix[row.clone()], &mut dscores[row]);
            let mut over = F32s::zero(simd);
            let mut at = 0;
            while at <= k {
                let delta = F32s::load(simd, &steps.delta[at..]);
                let dmix = F32s::load(simd, &dmix[at..]);
                let decay = decay(simd, &steps, k, at);
                let scored = decay * F32s::load(simd, &scores[at..]);
                (scored * delta).store(&mut mix[at..]);
                let dscore = F32s::load(simd, &dscores[at..]);
                (decay * delta).mul_add(dmix, dscore).store(&mut dscores[at..]);
                let sum = scored.mul_add(dmix, F32s::load(simd, &ddelta[at..]));
                sum.store(&mut ddelta[at..]);
                let before_k = F32s::splat(simd, (k - at) as f32 - 0.5);
                let sent =
                    F32s::load(simd, &LANE).select_less(before_k, sum * delta, over.same(0.0));
                over = over + sent;
                at += F32s::<S>::LANES;
            }
            ddecay[k] = over.sum();
            if at < n_tok {
                mix[at..].fill(0.0);
            }
        }
    }
}

/// `y = scale x`, row by row.
struct ScaleRows<'a> {
    y: &'a mut [f32],
    scale: &'a [f32],
    x: Rows<'a>,
}

impl WithSimd for ScaleRows<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ScaleRows { y, scale, x } = self;
        for (tok, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(tok), F32s::splat(simd, scale[tok]));
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                (scale * F32s::load(simd, &x[at..])).store(&mut y[at..]);
            }
        }
    }
}

/// `y = scale y + skip x`, row by row.
struct Blend<'a> {
    y: &'a mut [f32],
    scale: &'a [f32],
    x: Rows<'a>,
    skip: f32,
}

impl WithSimd for Blend<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Blend { y, scale, x, skip } = self;
        let skip = F32s::splat(simd, skip);
        for (tok, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(tok), F32s::splat(simd, scale[tok]));
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                let scaled = scale * F32s::load(simd, &y[at..]);
                skip.mul_add(F32s::load(simd, &x[at..]), scaled).store(&mut y[at..]);
            }
        }
    }
}

/// `y[tok] = a[tok] . b[tok]`
struct RowDots<'a> {
    a: &'a [f32],
    b: Rows<'a>,
    y: &'a mut [f32],
}

impl WithSimd for RowDots<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let RowDots { a, b, y } = self;
        for (tok, y) in y.iter_mut().enumerate() {
            let (a, b) = (&a[tok * b.width..][..b.width], b.row(tok));
            *y = Dot { a, b }.with_simd(simd);
        }
    }
}

/// `a . b`
struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl WithSimd for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let Dot { a, b } = self;
        let mut sum = F32s::zero(simd);
        for at in (0..a.len()).step_by(F32s::<S>::LANES) {
            sum = F32s::load(simd, &a[at..]).mul_add(F32s::load(simd, &b[at..]), sum);
        }
        sum.sum()
    }
}

/// `y += x`
struct Add<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
}

impl WithSimd for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Add { x, y } = self;
        let x = &x[..y.len()];
        for at in (0..y.len()).step_by(F32s::<S>::LANES) {
            (F32s::load(simd, &y[at..]) + F32s::load(simd, &x[at..])).store(&mut y[at..]);
        }
    }
}

/// One token of one head: `state = decay state + delta b x^T`, `y = state^T c + skip x`.
struct Step<'a> {
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    delta: f32,
    decay: f32,
    skip: f32,
    state: &'a mut [f32],
    y: &'a mut [f32],
}

impl Step<'_> {
    /// `N` vectors of columns from `at` on: with four, a row of the usual state is read at once.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, at: usize) {
        let d_head = self.x.len();
        let first = |v: usize| at + v * F32s::<S>::LANES;
        let x: [F32s<S>; N] = std::array::from_fn(|v| F32s::load(simd, &self.x[first(v)..]));
        let input = x.map(|x| x.same(self.delta) * x);
        let decay = F32s::splat(simd, self.decay);
        let mut y = x.map(|x| x.same(self.skip) * x);
        for (n, row) in self.state.chunks_exact_mut(d_head).enumerate() {
            let (b, c) = (decay.same(self.b[n]), decay.same(self.c[n]));
            for v in 0..N {
                let h = decay.mul_add(F32s::load(simd, &row[first(v)..]), input[v] * b);
                h.store(&mut row[first(v)..]);
                y[v] = h.mul_add(c, y[v]);
            }
        }
        for v in 0..N {
            y[v].store(&mut self.y[first(v)..]);
        }
    }
}

impl WithSimd for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, d_head) = (F32s::<S>::LANES, self.x.len());
        let mut at = 0;
        while at + 4 * lanes <= d_head {
            self.columns::<S, 4>(simd, at);
            at += 4 * lanes;
        }
        while at < d_head {
            self.columns::<S, 1>(simd, at);
            at += lanes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::tape::Gradients;

    fn dims(n_head: usize, d_head: usize, n_group: usize, d_state: usize) -> SsdDims {
        SsdDims { n_head, d_head, n_group, d_state, delta_min: 0.0, delta_max: f32::INFINITY }
    }

    /// xbc, delta, delta_bias, a_log, skip.
    fn random(dims: SsdDims, n_tok: usize) -> [Input; 5] {
        [
            Input::normal(1, &[n_tok, dims.width()], 1.0),
            Input::normal(2, &[n_tok, dims.n_head], 1.0),
            Input::normal(3, &[dims.n_head], 0.5),
            Input::map(4, &[dims.n_head], |x| 0.5 * x - 1.0),
            Input::normal(5, &[dims.n_head], 1.0),
        ]
    }

    fn to_inputs(values: [Tensor; 5], dims: SsdDims) -> Inputs {
        let [xbc, delta, delta_bias, a_log, skip] = values;
        Inputs { xbc, delta, delta_bias, a_log, skip, dims }
    }

    fn run(tape: &Tape, v: &[Var], dims: SsdDims, segments: &Segments) -> Var {
        let [xbc, delta, delta_bias, a_log, skip] = v else { panic!("five inputs") };
        ssd(tape, &Ssd { xbc, delta, delta_bias, a_log, skip, dims }, segments, None)
    }

    #[test]
    fn gradients() {
        let cases: [(SsdDims, &[usize]); 6] = [
            (dims(1, 1, 1, 1), &[1]),
            (dims(2, 3, 1, 5), &[7]), // forward by the recurrence
            (dims(2, 3, 2, 5), &[CHUNK - 1, 1, CHUNK, 2]), // edges of one chunk
            (dims(4, 5, 2, 3), &[CHUNK + 1, 2 * CHUNK + 20]), // a state between chunks
            (dims(6, 17, 2, 19), &[20, 9]), // tails of vectors, tasks by head
            (dims(4, 2, 1, 2), &[9; 20]), // several heads in a task
        ];
        for (dims, lengths) in cases {
            let segments = Segments::from_lengths(lengths);
            let inputs = random(dims, segments.n_tok());
            check_gradients(&inputs, |tape, v| vec![run(tape, v, dims, &segments)]);
        }
    }

    #[test]
    fn gradients_with_a_state_before_and_a_clamp() {
        let dims = SsdDims { delta_min: 0.3, delta_max: 1.5, ..dims(2, 3, 1, 5) };
        let segments = Segments::from_lengths(&[CHUNK + 9, 3]);
        let mut inputs = random(dims, segments.n_tok());
        // Away from the edges of the clamp, which are at -1.05 and 1.25: finite differences would
        // straddle them.
        inputs[1] = Input::map(2, &[segments.n_tok(), 2], |x| {
            let clear =
                |x: f32, edge: f32| x + (0.1 - (x - edge).abs()).max(0.0).copysign(x - edge);
            clear(clear(2.0 * x, -1.05), 1.25)
        });
        inputs[2] = Input::normal(3, &[2], 0.0);
        let before = Input::normal(6, &[2, 5, 3], 1.0);
        // The bias would move every token over the edges at once.
        let (bias, moved) = (inputs[2].clone(), [0, 1, 3, 4].map(|idx: usize| inputs[idx].clone()));
        check_gradients(&moved, |tape, v| {
            let device = v[0].value().device();
            let mut states = [before.tensor(device), before.tensor(device)];
            let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
            let delta_bias = &Var::constant(bias.tensor(device));
            let [xbc, delta, a_log, skip] = v else { panic!("four inputs") };
            let inputs = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
            vec![ssd(tape, &inputs, &segments, Some(&mut states))]
        });
    }

    /// Outputs, gradients in the order of the inputs and last states, by the recurrence in f64.
    struct Twin {
        y: Vec<f64>,
        grads: [Vec<f64>; 5],
        states: Vec<f64>,
    }

    fn twin(inputs: &Inputs, segments: &Segments, initial: &[f32], dy: &[f32]) -> Twin {
        let d = inputs.dims;
        let wide =
            |tensor: &Tensor| -> Vec<f64> { tensor.f32().iter().map(|&x| x as f64).collect() };
        let all = [&inputs.xbc, &inputs.delta, &inputs.delta_bias, &inputs.a_log, &inputs.skip];
        let [xbc, raw, bias, a_log, skip] = all.map(wide);
        let mut twin = Twin {
            y: vec![0.0; segments.n_tok() * d.d_inner()],
            grads: all.map(|tensor| vec![0.0; tensor.n_elem()]),
            states: initial.iter().map(|&h| h as f64).collect(),
        };
        for (segment_idx, segment) in segments.iter().enumerate() {
            for head in 0..d.n_head {
                let (b, c) = d.columns(head / d.heads_per_group());
                let a = -a_log[head].exp();
                let softplus = |tok: usize| (raw[tok * d.n_head + head] + bias[head]).exp().ln_1p();
                let delta = |tok| softplus(tok).clamp(d.delta_min as f64, d.delta_max as f64);
                let at = |tok: usize, column: usize| tok * d.width() + column;
                let x = |tok, p: usize| at(tok, head * d.d_head + p);
                let out = |tok: usize, p: usize| tok * d.d_inner() + head * d.d_head + p;
                for (n, p) in (0..d.d_state).flat_map(|n| (0..d.d_head).map(move |p| (n, p))) {
                    let state_idx =
                        ((segment_idx * d.n_head + head) * d.d_state + n) * d.d_head + p;
                    let mut h = vec![twin.states[state_idx]];
                    for tok in segment.rows() {
                        let input = delta(tok) * xbc[at(tok, b + n)] * xbc[x(tok, p)];
                        let next = (delta(tok) * a).exp() * h[h.len() - 1] + input;
                        twin.y[out(tok, p)] += xbc[at(tok, c + n)] * next;
                        h.push(next);
                    }
                    twin.states[state_idx] = h[segment.n_tok];
                    let mut dh = 0.0;
                    let [dxbc, draw, dbias, da_log, _] = &mut twin.grads;
                    for tok in segment.rows().rev() {
                        let (before, after) = (h[tok - segment.start], h[tok - segment.start + 1]);
                        let dy = dy[out(tok, p)] as f64;
                        let (delta, decay) = (delta(tok), (delta(tok) * a).exp());
                        dxbc[at(tok, c + n)] += dy * after;
                        dh += dy * xbc[at(tok, c + n)];
                        dxbc[at(tok, b + n)] += dh * delta * xbc[x(tok, p)];
                        dxbc[x(tok, p)] += dh * delta * xbc[at(tok, b + n)];
                        let ddecay = dh * before * decay;
                        let ddelta = dh * xbc[at(tok, b + n)] * xbc[x(tok, p)] + a * ddecay;
                        da_log[head] += ddecay * delta * a;
                        if delta == softplus(tok) {
                            let slope = 1.0 - (-delta).exp();
                            draw[tok * d.n_head + head] += ddelta * slope;
                            dbias[head] += ddelta * slope;
                        }
                        dh *= decay;
                    }
                }
                for (tok, p) in segment.rows().flat_map(|tok| (0..d.d_head).map(move |p| (tok, p)))
                {
                    let dy = dy[out(tok, p)] as f64;
                    twin.y[out(tok, p)] += skip[head] * xbc[x(tok, p)];
                    twin.grads[0][x(tok, p)] += skip[head] * dy;
                    twin.grads[4][head] += xbc[x(tok, p)] * dy;
                }
            }
        }
        twin
    }

    /// Largest difference, by the largest number.
    fn difference(got: &[f32], want: &[f64]) -> f64 {
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(1e-30f64, |largest, x| largest.max(x.abs()));
        let differences = got.iter().zip(want).map(|(got, want)| (*got as f64 - want).abs());
        // Not `max`, which would drop a NaN.
        differences.fold(0.0f64, |worst, x| if x <= worst { worst } else { x }) / largest
    }

    /// Compares outputs, gradients and states with the twin.
    fn compare(dims: SsdDims, lengths: &[usize], inputs: [Input; 5], tolerance: f64) {
        let device = Device::cpu(2).unwrap();
        let segments = Segments::from_lengths(lengths);
        let state_shape = [dims.n_head, dims.d_state, dims.d_head];
        let mut states: Vec<Tensor> = (0..lengths.len() as u64)
            .map(|idx| Input::normal(10 + idx, &state_shape, 1.0).tensor(&device))
            .collect();
        let initial: Vec<f32> = states.iter().flat_map(|state| state.f32().to_vec()).collect();
        let dy = Input::normal(20, &[segments.n_tok(), dims.d_inner()], 1.0).tensor(&device);
        let values = inputs.map(|input| input.tensor(&device));
        let want = twin(&to_inputs(values.clone(), dims), &segments, &initial, dy.f32());

        let tape = Tape::new();
        let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
        let (xbc, delta, delta_bias, a_log, skip) = (&v[0], &v[1], &v[2], &v[3], &v[4]);
        let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
        let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
        let y = ssd(&tape, &all, &segments, Some(&mut states));
        let off = difference(y.value().f32(), &want.y);
        assert!(off < tolerance, "y is off by {off:e}");
        let last: Vec<f32> = states.iter().flat_map(|state| state.f32().to_vec()).collect();
        let off = difference(&last, &want.states);
        assert!(off < tolerance, "states are off by {off:e}");
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy)], &mut grads);
        for (key, want) in want.grads.iter().enumerate() {
            let off = difference(grads.get(key).unwrap().f32(), want);
            assert!(off < tolerance, "gradient {key} is off by {off:e}");
        }
    }

    #[test]
    fn agrees_with_the_recurrence_in_f64_forward_and_backward() {
        let cases: [(SsdDims, &[usize]); 5] = [
            (dims(1, 1, 1, 1), &[1]),
            (dims(2, 3, 2, 5), &[1, 7, 3]),
            (dims(4, 5, 2, 3), &[CHUNK, 2 * CHUNK + 1, 1, CHUNK - 1, 300]),
            (dims(3, 20, 1, 18), &[150]),
            (dims(4, 4, 1, 4), &[5; 40]),
        ];
        for (dims, lengths) in cases {
            let inputs = random(dims, lengths.iter().sum());
            compare(dims, lengths, inputs, 4e-6);
        }
    }

    #[test]
    fn strong_decay_is_finite_and_right_forward_and_backward() {
        let dims = dims(3, 4, 1, 6);
        let mut inputs = random(dims, 200);
        // Steps between 1e-5 and 12 side by side, decays up to exp(3): the sum over a chunk passes
        // -5000, where a plain f32 keeps four digits of a small step.
        inputs[1] = Input::map(2, &[200, 3], |x| (8.0 * x).clamp(-12.0, 12.0));
        inputs[2] = Input::normal(3, &[3], 0.0);
        inputs[3] = Input::map(4, &[3], |x| if x > 0.0 { 3.0 } else { 2.5 });
        compare(dims, &[70, 130], inputs.clone(), 4e-6);
        // Everything underflows.
        inputs[1] = Input::map(2, &[200, 3], |x| 12.0 - x.abs().min(1.0));
        compare(dims, &[70, 130], inputs, 4e-6);
    }

    #[test]
    fn the_clamp_limits_steps_and_stops_their_gradient() {
        let dims = SsdDims { delta_min: 0.2, delta_max: 0.9, ..dims(2, 3, 1, 4) };
        let mut inputs = random(dims, 90);
        inputs[1] = Input::normal(2, &[90, 2], 2.0);
        compare(dims, &[90], inputs.clone(), 4e-6);

        let device = Device::cpu(1).unwrap();
        let tape = Tape::new();
        let v: Vec<Var> =
            inputs.iter().enumerate().map(|(key, x)| tape.leaf(key, &x.tensor(&device))).collect();
        let y = run(&tape, &v, dims, &Segments::from_lengths(&[90]));
        let ones = Tensor::from_f32(&device, &[90, 6], &[1.0; 540]);
        let mut grads = Gradients::default();
        tape.walk(vec![(y, ones)], &mut grads);
        let mut n_stopped = 0;
        for (idx, grad) in grads.get(1).unwrap().f32().iter().enumerate() {
            let soft = (v[1].value().f32()[idx] + v[2].value().f32()[idx % 2]).exp().ln_1p();
            let stopped = !(0.2..=0.9).contains(&soft);
            n_stopped += stopped as usize;
            assert_eq!(*grad == 0.0, stopped, "step {soft}, gradient {grad}");
        }
        assert!((40..160).contains(&n_stopped), "{n_stopped} of 180 stopped");
    }

    #[test]
    fn steps_of_zero_leave_the_state_alone() {
        let dims = dims(2, 3, 1, 4);
        for n_tok in [3, 80] {
            let mut inputs = random(dims, n_tok);
            inputs[1] = Input::map(2, &[n_tok, 2], |_| -200.0);
            compare(dims, &[n_tok], inputs, 4e-6);
        }
    }

    #[test]
    fn chunks_agree_with_the_recurrence() {
        let device = Device::cpu(2).unwrap();
        let dims = dims(6, 24, 2, 20);
        let segments = Segments::from_lengths(&[1, CHUNK, 2 * CHUNK + 5, 7]);
        let values = random(dims, segments.n_tok()).map(|input| input.tensor(&device));
        let inputs = to_inputs(values, dims);
        let by = |path, n_heads| {
            let mut states: Vec<Tensor> =
                (0..4).map(|idx| Input::normal(idx, &[6, 20, 24], 1.0).tensor(&device)).collect();
            let mut handles: Vec<&mut Tensor> = states.iter_mut().collect();
            let y = forward_by(path, &inputs, &segments, Some(&mut handles), n_heads);
            let states: Vec<f32> = states.iter().flat_map(|state| state.f32().to_vec()).collect();
            (y.f32().to_vec(), states)
        };
        let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<f64>>();
        let (y, states) = by(Path::Recurrent, 6);
        for n_heads in [1, 3] {
            let (y_chunked, states_chunked) = by(Path::Chunked, n_heads);
            assert!(difference(&y_chunked, &wide(&y)) < 2e-6);
            assert!(difference(&states_chunked, &wide(&states)) < 2e-6);
        }
    }

    #[test]
    fn a_sequence_in_parts_with_its_state_equals_the_whole() {
        let device = Device::cpu(2).unwrap();
        let dims = dims(2, 5, 1, 6);
        let n_tok = CHUNK + 40;
        let values = random(dims, n_tok).map(|input| input.tensor(&device));
        let part = |rows: Range<usize>, state: &mut Tensor| {
            let v = values.each_ref().map(|x| {
                let part = if x.shape().len() == 2 { x.rows(rows.clone()) } else { x.clone() };
                Var::constant(part)
            });
            let [xbc, delta, delta_bias, a_log, skip] = &v;
            let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
            let segments = Segments::continuing(&[(rows.len(), rows.start)]);
            let y = ssd(&Tape::off(), &all, &segments, Some(&mut [state]));
            y.value().f32().iter().map(|&y| y as f64).collect::<Vec<f64>>()
        };
        let zero = || Tensor::zeros(&device, &[2, 6, 5]);
        let mut last = zero();
        let whole = part(0..n_tok, &mut last);
        let last: Vec<f64> = last.f32().iter().map(|&h| h as f64).collect();
        let steps: Vec<usize> = (1..n_tok).collect();
        for cuts in [&[1][..], &[RECURRENT - 1], &[50], &[CHUNK], &[30, 31, n_tok - 1], &steps] {
            let mut state = zero();
            let mut y = Vec::new();
            let (mut start, mut ends) = (0, cuts.to_vec());
            ends.push(n_tok);
            for end in ends {
                y.extend(part(start..end, &mut state).iter().map(|&y| y as f32));
                start = end;
            }
            assert!(difference(&y, &whole) < 2e-6, "cut at {cuts:?}");
            assert!(difference(state.f32(), &last) < 2e-6, "cut at {cuts:?}");
        }
    }

    #[test]
    fn no_token_sees_a_later_one_or_another_segment() {
        let device = Device::cpu(2).unwrap();
        let dims = dims(2, 3, 1, 5);
        let segments = Segments::from_lengths(&[30, CHUNK + 30]);
        let inputs = random(dims, segments.n_tok());
        let plain = |inputs: &[Tensor; 5]| {
            let inputs = to_inputs(inputs.clone(), dims);
            forward(&inputs, &segments, None).f32().to_vec()
        };
        let values = inputs.each_ref().map(|input| input.tensor(&device));
        let y = plain(&values);
        for tok in [0, 17, 29, 30, 31, 30 + CHUNK - 1, 30 + CHUNK, segments.n_tok() - 1] {
            let mut changed = inputs.each_ref().map(|input| input.tensor(&device));
            for (x, width) in [(0, dims.width()), (1, 2)] {
                changed[x].f32_mut()[tok * width..][..width].fill(3.0);
            }
            let y_changed = plain(&changed);
            let segment = segments.iter().find(|segment| segment.rows().contains(&tok)).unwrap();
            let end = segment.rows().end;
            assert_eq!(y[..tok * 6], y_changed[..tok * 6]);
            assert_ne!(y[tok * 6..end * 6], y_changed[tok * 6..end * 6]);
            assert_eq!(y[end * 6..], y_changed[end * 6..]);
        }
    }

    #[test]
    fn a_second_run_takes_no_memory_and_gives_the_same_bits() {
        let device = Device::cpu(1).unwrap();
        let dims = dims(4, 8, 2, 8);
        let segments = Segments::from_lengths(&[100, 40, 60]);
        let values = random(dims, segments.n_tok()).map(|input| input.tensor(&device));
        let dy = Input::normal(20, &[segments.n_tok(), 32], 1.0).tensor(&device);
        let step = || {
            let tape = Tape::new();
            let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
            let y = run(&tape, &v, dims, &segments);
            let mut bits = y.value().f32().to_vec();
            let mut grads = Gradients::default();
            tape.walk(vec![(y, dy.clone())], &mut grads);
            grads.iter().for_each(|(_, grad)| bits.extend(grad.f32()));
            (bits, device.memory().n_alloc)
        };
        // The second finds in its buffers what the first left there.
        assert!(step() == step());
    }
}
