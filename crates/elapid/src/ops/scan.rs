//! Selective scan: the recurrence of a Mamba-1 block, with its step size, skip and gate.
//!
//! For each segment and channel, with a state `h` of `d_state` numbers that starts at zero or at
//! the state carried over, and with `a = -exp(a_log)`:
//!
//!     delta[t] = softplus(delta_raw[t] + delta_bias)
//!     h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t]
//!     out[t] = c[t] . h[t] + skip x[t]
//!     y[t] = out[t] silu(gate[t])
//!
//! Backward, with `g[t]` the gradient of the loss by `h[t]`, from the last token to the first, and
//! `q[t] = g[t] exp(delta[t] a) h[t-1]`:
//!
//!     dout[t] = dy[t] silu(gate[t])                dgate[t] = dy[t] out[t] silu'(gate[t])
//!     g[t] = dout[t] c[t] + exp(delta[t+1] a) g[t+1]
//!     dx[t] = dout[t] skip + delta[t] (g[t] . b[t])
//!     ddelta[t] = x[t] (g[t] . b[t]) + q[t] . a    times sigmoid(delta_raw[t] + delta_bias)
//!     dc[t] = sum over channels of dout[t] h[t]    dskip = sum over t of dout[t] x[t]
//!     db[t] = sum over channels of g[t] delta[t] x[t]
//!     da_log = a times the sum over t of delta[t] q[t]
//!
//! | name              | shape              |                                            |
//! |-------------------|--------------------|--------------------------------------------|
//! | `x`, `gate`, `y`  | (n_tok, d_inner)   | `gate` is optional                         |
//! | `delta`           | (n_tok, d_inner)   | `delta_raw` above: before bias and softplus |
//! | `delta_bias`      | (d_inner)          | optional                                   |
//! | `a_log`           | (d_inner, d_state) |                                            |
//! | `b`, `c`          | (n_tok, d_state)   | shared by all channels                     |
//! | `skip`            | (d_inner)          |                                            |
//! | state             | (d_state, d_inner) | constant for the gradient                  |
//!
//! Neighbouring channels are the lanes of a vector, so a state lies transposed. Kept for backward:
//! the inputs. Keeping every state would cost `d_state` times the memory of `x`: backward walks a
//! segment once to find the states at the start of each chunk, then makes those of one chunk and
//! one vector of channels at a time.
//!
//! Not here: the projections that make `delta`, `b` and `c`; the scan of Mamba-2, whose decay is
//! one number per head.

use super::norm::sum_rows;
use crate::cpu::{Cpu, F32s};
use crate::device::Device;
use crate::segment::{Segment, Segments};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// The operands of `selective_scan`.
pub struct Scan<'a> {
    /// (n_tok, d_inner)
    pub x: &'a Var,
    /// (n_tok, d_inner), before bias and softplus
    pub delta: &'a Var,
    /// (d_inner)
    pub delta_bias: Option<&'a Var>,
    /// (d_inner, d_state)
    pub a_log: &'a Var,
    /// (n_tok, d_state)
    pub b: &'a Var,
    /// (n_tok, d_state)
    pub c: &'a Var,
    /// (d_inner)
    pub skip: &'a Var,
    /// (n_tok, d_inner)
    pub gate: Option<&'a Var>,
}

/// Channels of one task.
const GROUP: usize = 64;
/// Tokens forward works on at a time: what it holds of them stays in the first cache.
const CHUNK_FORWARD: usize = 32;
/// Tokens whose states backward holds at a time. More would leave the second cache, fewer would
/// make more states twice.
const CHUNK: usize = 256;
/// States that the innermost loops hold in registers: a tile. States are padded to whole tiles.
const TILE: usize = 8;
/// The widest vector of any machine.
const LANES_MAX: usize = 16;
/// Below this many state numbers, starting threads costs more than it saves.
const PARALLEL_MIN: usize = 1 << 16;

/// Scans each segment.
///
/// `states` has one tensor (d_state, d_inner) per segment: the state before it on entry, and on
/// return a new tensor with the state after it. Other handles keep the old numbers.
pub fn selective_scan(
    tape: &Tape,
    scan: &Scan,
    segments: &Segments,
    states: Option<&mut [&mut Tensor]>,
) -> Var {
    let mut job = Job::new(scan, segments);
    let y = match states {
        Some(states) => {
            let shape = [job.d_state, job.d_inner];
            assert_eq!(states.len(), segments.len(), "scan: states, one per segment");
            for state in states.iter_mut() {
                state.expect_shape("scan: state", &shape);
                let exit = Tensor::uninit(job.x.device(), &shape);
                job.entry.push(std::mem::replace(*state, exit));
            }
            forward(&job, states)
        }
        None => forward(&job, &mut []),
    };
    let inputs = [scan.x, scan.delta, scan.a_log, scan.b, scan.c, scan.skip];
    let inputs: Vec<&Var> = inputs.into_iter().chain(scan.delta_bias).chain(scan.gate).collect();
    tape.record("scan", &inputs, y, move |dy| backward(&job, &dy))
}

/// Everything `forward` and `backward` read.
struct Job {
    x: Tensor,
    delta: Tensor,
    delta_bias: Option<Tensor>,
    a_log: Tensor,
    /// (n_tok, n_pad), as `c`.
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    gate: Option<Tensor>,
    segments: Segments,
    /// The states before the segments, or none when they are zero.
    entry: Vec<Tensor>,
    d_inner: usize,
    d_state: usize,
    /// `d_state` rounded up to whole tiles.
    n_pad: usize,
}

impl Job {
    fn new(scan: &Scan, segments: &Segments) -> Job {
        let (d_inner, d_state) = scan.a_log.value().dims2();
        let n_tok = segments.n_tok();
        let wide = [n_tok, d_inner];
        scan.x.value().expect_shape("scan: x", &wide);
        scan.delta.value().expect_shape("scan: delta", &wide);
        scan.b.value().expect_shape("scan: b", &[n_tok, d_state]);
        scan.c.value().expect_shape("scan: c", &[n_tok, d_state]);
        scan.skip.value().expect_shape("scan: skip", &[d_inner]);
        if let Some(bias) = scan.delta_bias {
            bias.value().expect_shape("scan: delta_bias", &[d_inner]);
        }
        if let Some(gate) = scan.gate {
            gate.value().expect_shape("scan: gate", &wide);
        }
        let n_pad = d_state.next_multiple_of(TILE);
        Job {
            x: scan.x.value().clone(),
            delta: scan.delta.value().clone(),
            delta_bias: scan.delta_bias.map(|bias| bias.value().clone()),
            a_log: scan.a_log.value().clone(),
            b: padded(scan.b.value(), n_pad),
            c: padded(scan.c.value(), n_pad),
            skip: scan.skip.value().clone(),
            gate: scan.gate.map(|gate| gate.value().clone()),
            segments: segments.clone(),
            entry: Vec::new(),
            d_inner,
            d_state,
            n_pad,
        }
    }

    /// What each task reads: segment by segment, group by group.
    fn sources(&self) -> Vec<Source<'_>> {
        let mut sources = Vec::new();
        for (idx, &segment) in self.segments.iter().enumerate() {
            for first in (0..self.d_inner).step_by(GROUP) {
                let channels = first..self.d_inner.min(first + GROUP);
                sources.push(Source {
                    x: self.x.f32(),
                    delta: self.delta.f32(),
                    delta_bias: self.delta_bias.as_ref().map(|bias| &bias.f32()[channels.clone()]),
                    a_log: &self.a_log.f32()[first * self.d_state..channels.end * self.d_state],
                    b: &self.b.f32()[segment.start * self.n_pad..segment.rows().end * self.n_pad],
                    c: &self.c.f32()[segment.start * self.n_pad..segment.rows().end * self.n_pad],
                    skip: &self.skip.f32()[channels.clone()],
                    gate: self.gate.as_ref().map(Tensor::f32),
                    entry: self.entry.get(idx).map(Tensor::f32),
                    segment,
                    width: channels.len().next_multiple_of(LANES_MAX),
                    channels,
                    d_inner: self.d_inner,
                    d_state: self.d_state,
                    n_pad: self.n_pad,
                });
            }
        }
        sources
    }

    /// Cuts the columns of `y` between the tasks: for each, its piece of every row.
    fn columns<'a>(&self, y: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
        let n_groups = self.d_inner.div_ceil(GROUP);
        let mut rows = y.chunks_mut(self.d_inner);
        let mut tasks = Vec::with_capacity(self.segments.len() * n_groups);
        for segment in self.segments.iter() {
            let first = tasks.len();
            tasks.extend((0..n_groups).map(|_| Vec::with_capacity(segment.n_tok)));
            for row in rows.by_ref().take(segment.n_tok) {
                for (task, piece) in tasks[first..].iter_mut().zip(row.chunks_mut(GROUP)) {
                    task.push(piece);
                }
            }
        }
        tasks
    }

    /// Runs the tasks, side by side when there is enough to do.
    fn run<T: Send>(&self, cpu: &Cpu, tasks: Vec<T>, f: impl Fn(T) + Send + Sync) {
        if self.x.n_elem() * self.n_pad < PARALLEL_MIN {
            tasks.into_iter().for_each(f);
        } else {
            cpu.map(tasks, f);
        }
    }
}

/// Rows of `x` with zeros after them, to a length of `n_pad`.
fn padded(x: &Tensor, n_pad: usize) -> Tensor {
    let (n_rows, d) = x.dims2();
    if d == n_pad {
        return x.clone();
    }
    let mut y = Tensor::zeros(x.device(), &[n_rows, n_pad]);
    for (y, x) in y.f32_mut().chunks_exact_mut(n_pad).zip(x.f32().chunks_exact(d)) {
        y[..d].copy_from_slice(x);
    }
    y
}

/// `exit` receives the states after the segments; empty when nobody wants them.
fn forward(job: &Job, exit: &mut [&mut Tensor]) -> Tensor {
    let device = job.x.device();
    let Device::Cpu(cpu) = device;
    let mut y = Tensor::uninit(device, job.x.shape());
    let sources = job.sources();
    let mut exits: Vec<Vec<&mut [f32]>> = Vec::with_capacity(sources.len());
    for state in exit.iter_mut() {
        let first = exits.len();
        exits.extend((0..job.d_inner.div_ceil(GROUP)).map(|_| Vec::with_capacity(job.d_state)));
        for row in state.f32_mut().chunks_mut(job.d_inner) {
            for (task, piece) in exits[first..].iter_mut().zip(row.chunks_mut(GROUP)) {
                task.push(piece);
            }
        }
    }
    exits.resize_with(sources.len(), Vec::new);
    let tasks = sources.iter().zip(job.columns(y.f32_mut())).zip(exits).collect();
    job.run(cpu, tasks, |((source, y), exit)| {
        let mut scratch = Tensor::uninit(device, &[source.forward_scratch()]);
        cpu.simd(Forward { source, y, exit, scratch: scratch.f32_mut() });
    });
    y
}

/// Inverts `forward`: gradients in the order of the recorded inputs.
fn backward(job: &Job, dy: &Tensor) -> Vec<Option<Tensor>> {
    let device = job.x.device();
    let Device::Cpu(cpu) = device;
    let (d_inner, d_state, n_pad) = (job.d_inner, job.d_state, job.n_pad);
    let n_tok = job.segments.n_tok();
    let n_groups = d_inner.div_ceil(GROUP);
    let mut dx = Tensor::uninit(device, job.x.shape());
    let mut ddelta = Tensor::uninit(device, job.x.shape());
    let mut dgate = job.gate.as_ref().map(|gate| Tensor::uninit(device, gate.shape()));
    // Of each group of channels, for each token: db, then dc.
    let mut shared = Tensor::uninit(device, &[n_groups, n_tok * 2 * n_pad]);
    // Of each segment, for each channel: da_log, dskip and ddelta_bias.
    let mut sums = Tensor::uninit(device, &[job.segments.len(), d_inner * (d_state + 2)]);

    let mut slabs: Vec<&mut [f32]> =
        shared.f32_mut().chunks_mut((n_tok * 2 * n_pad).max(1)).collect();
    let mut shareds = Vec::new();
    for segment in job.segments.iter() {
        for slab in slabs.iter_mut() {
            let part = slab.split_off_mut(..segment.n_tok * 2 * n_pad);
            shareds.push(part.expect("segments cover the rows"));
        }
    }
    let per_segment = sums.f32_mut().chunks_mut((d_inner * (d_state + 2)).max(1));
    let per_task = per_segment.flat_map(|sums| sums.chunks_mut(GROUP * (d_state + 2)));
    let mut dgates = match &mut dgate {
        Some(dgate) => job.columns(dgate.f32_mut()),
        None => Vec::new(),
    };
    let sources = job.sources();
    dgates.resize_with(sources.len(), Vec::new);
    let columns = job.columns(dx.f32_mut()).into_iter().zip(job.columns(ddelta.f32_mut()));
    let outs = columns.zip(dgates).zip(shareds.into_iter().zip(per_task));
    let outs = outs.map(|(((dx, ddelta), dgate), (shared, sums))| Grads {
        dx,
        ddelta,
        dgate,
        shared,
        sums,
    });
    let tasks: Vec<_> = sources.iter().zip(outs).collect();
    job.run(cpu, tasks, |(source, grads)| {
        let mut scratch = Tensor::uninit(device, &[source.backward_scratch()]);
        cpu.simd(Backward { source, dy: dy.f32(), grads, scratch: scratch.f32_mut() });
    });

    let (db, dc) = add_groups(job, &shared);
    let sums = sum_rows(&sums);
    let mut da_log = Tensor::uninit(device, job.a_log.shape());
    let mut dskip = Tensor::uninit(device, &[d_inner]);
    let mut dbias = Tensor::uninit(device, &[d_inner]);
    for (ch, sums) in sums.f32().chunks_exact(d_state + 2).enumerate() {
        da_log.f32_mut()[ch * d_state..][..d_state].copy_from_slice(&sums[..d_state]);
        dskip.f32_mut()[ch] = sums[d_state];
        dbias.f32_mut()[ch] = sums[d_state + 1];
    }
    let mut grads = vec![Some(dx), Some(ddelta), Some(da_log), Some(db), Some(dc), Some(dskip)];
    if job.delta_bias.is_some() {
        grads.push(Some(dbias));
    }
    if job.gate.is_some() {
        grads.push(dgate);
    }
    grads
}

/// Sums over the groups of channels, in order, and takes db and dc apart.
fn add_groups(job: &Job, shared: &Tensor) -> (Tensor, Tensor) {
    let device = job.x.device();
    let Device::Cpu(cpu) = device;
    let (d_state, n_pad) = (job.d_state, job.n_pad);
    let mut db = Tensor::uninit(device, &[job.segments.n_tok(), d_state]);
    let mut dc = Tensor::uninit(device, &[job.segments.n_tok(), d_state]);
    let pieces = db.f32_mut().chunks_mut(CHUNK * d_state);
    let pieces = pieces.zip(dc.f32_mut().chunks_mut(CHUNK * d_state)).enumerate().collect();
    let slab_len = shared.dims2().1;
    job.run(cpu, pieces, |(idx, (db, dc))| {
        let rows = db.chunks_exact_mut(d_state).zip(dc.chunks_exact_mut(d_state));
        for (row, (db, dc)) in rows.enumerate() {
            db.fill(0.0);
            dc.fill(0.0);
            for slab in shared.f32().chunks_exact(slab_len) {
                let part = &slab[(idx * CHUNK + row) * 2 * n_pad..][..2 * n_pad];
                db.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                dc.iter_mut().zip(&part[n_pad..]).for_each(|(sum, part)| *sum += part);
            }
        }
    });
    (db, dc)
}

/// What the task of one segment and one group of channels reads.
struct Source<'a> {
    /// All rows and channels, as `delta` and `gate`.
    x: &'a [f32],
    delta: &'a [f32],
    gate: Option<&'a [f32]>,
    /// The rows of the segment, as `c`.
    b: &'a [f32],
    c: &'a [f32],
    /// The channels of the group, as `a_log` and `skip`.
    delta_bias: Option<&'a [f32]>,
    a_log: &'a [f32],
    skip: &'a [f32],
    /// The whole state before the segment.
    entry: Option<&'a [f32]>,
    segment: Segment,
    channels: Range<usize>,
    /// Channels rounded up to whole vectors: the length of a row of scratch.
    width: usize,
    d_inner: usize,
    d_state: usize,
    n_pad: usize,
}

impl Source<'_> {
    /// The group's piece of the row of token `tok` of the segment.
    #[inline(always)]
    fn row<'t>(&self, all: &'t [f32], tok: usize) -> &'t [f32] {
        let first = (self.segment.start + tok) * self.d_inner + self.channels.start;
        &all[first..first + self.channels.len()]
    }

    /// States of the group: (n_pad, width).
    fn n_state(&self) -> usize {
        self.n_pad * self.width
    }

    fn forward_scratch(&self) -> usize {
        2 * self.n_state() + 3 * CHUNK_FORWARD * self.width
    }

    fn backward_scratch(&self) -> usize {
        let n_tok = self.segment.n_tok.min(CHUNK);
        let n_starts = self.segment.n_tok.div_ceil(CHUNK);
        (3 + n_starts) * self.n_state()
            + (8 * n_tok + 2) * self.width
            + ((2 * n_tok + 1) * TILE + 2 * n_tok * self.n_pad) * LANES_MAX
    }

    /// Decay per unit of delta as a power of two, `-exp(a_log) / ln 2`, transposed.
    #[inline(always)]
    fn rates<S: Simd>(&self, simd: S, rates: &mut [f32]) {
        let factor = F32s::splat(simd, -std::f32::consts::LOG2_E);
        rates.fill(0.0);
        for (ch, a_log) in self.a_log.chunks_exact(self.d_state).enumerate() {
            for (n, &a_log) in a_log.iter().enumerate() {
                rates[n * self.width + ch] = a_log;
            }
        }
        for at in (0..self.d_state * self.width).step_by(F32s::<S>::LANES) {
            (F32s::load(simd, &rates[at..]).exp() * factor).store(&mut rates[at..]);
        }
    }

    /// Copies the group's piece of the state before the segment.
    fn enter(&self, h: &mut [f32]) {
        h.fill(0.0);
        if let Some(entry) = self.entry {
            let rows = h.chunks_exact_mut(self.width).zip(entry.chunks_exact(self.d_inner));
            for (h, entry) in rows {
                h[..self.channels.len()].copy_from_slice(&entry[self.channels.clone()]);
            }
        }
    }

    /// Where the vectors of a row of scratch begin.
    #[inline(always)]
    fn vectors<S: Simd>(&self) -> std::iter::StepBy<Range<usize>> {
        (0..self.width).step_by(F32s::<S>::LANES)
    }

    /// Where the tiles begin: first channel and first state.
    #[inline(always)]
    fn tiles<S: Simd>(&self) -> impl Iterator<Item = (usize, usize)> {
        let n_pad = self.n_pad;
        self.vectors::<S>().flat_map(move |ch| (0..n_pad).step_by(TILE).map(move |n| (ch, n)))
    }
}

/// A vector of scratch.
#[inline(always)]
fn get<S: Simd>(simd: S, x: &[f32], at: usize) -> F32s<S> {
    F32s::load(simd, &x[at..at + F32s::<S>::LANES])
}

/// Writes a vector of scratch.
#[inline(always)]
fn put<S: Simd>(y: &mut [f32], at: usize, v: F32s<S>) {
    v.store(&mut y[at..at + F32s::<S>::LANES]);
}

/// A vector of a row that ends where the channels end: zeros beyond.
#[inline(always)]
fn get_row<S: Simd>(simd: S, row: &[f32], ch: usize) -> F32s<S> {
    F32s::load(simd, row.get(ch..).unwrap_or_default())
}

/// Writes what the row has room for.
#[inline(always)]
fn put_row<S: Simd>(row: &mut [f32], ch: usize, v: F32s<S>) {
    v.store(row.get_mut(ch..).unwrap_or_default());
}

/// Cuts `len` numbers from the front of the scratch.
#[inline(always)]
fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    scratch.split_off_mut(..len).expect("the scratch was counted")
}

struct Forward<'a> {
    source: &'a Source<'a>,
    y: Vec<&'a mut [f32]>,
    exit: Vec<&'a mut [f32]>,
    scratch: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { source, mut y, exit, mut scratch } = self;
        let width = source.width;
        let rates = take(&mut scratch, source.n_state());
        let h = take(&mut scratch, source.n_state());
        let delta = take(&mut scratch, CHUNK_FORWARD * width);
        let u = take(&mut scratch, CHUNK_FORWARD * width);
        let out = take(&mut scratch, CHUNK_FORWARD * width);
        source.rates(simd, rates);
        source.enter(h);
        for first in (0..source.segment.n_tok).step_by(CHUNK_FORWARD) {
            let toks = first..source.segment.n_tok.min(first + CHUNK_FORWARD);
            open(simd, source, &toks, (delta, u, None));
            for at in source.tiles::<S>() {
                Walk::new(source, &toks, (rates, delta, u), at).forward(simd, h, out);
            }
            close_forward(simd, source, &toks, out, &mut y[toks.clone()]);
        }
        for (exit, h) in exit.into_iter().zip(h.chunks_exact(width)) {
            exit.copy_from_slice(&h[..exit.len()]);
        }
    }
}

/// `delta`, `u = delta x` and the slope of the softplus, of some tokens.
///
/// Down the columns, as all loops over rows here: a fixed stride is what the prefetcher finds.
#[inline(always)]
fn open<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    (delta, u, mut slope): (&mut [f32], &mut [f32], Option<&mut [f32]>),
) {
    for ch in source.vectors::<S>() {
        let bias = match source.delta_bias {
            Some(bias) => get_row(simd, bias, ch),
            None => F32s::zero(simd),
        };
        for (row, tok) in toks.clone().enumerate() {
            let at = row * source.width + ch;
            let raw = get_row(simd, source.row(source.delta, tok), ch);
            let (step, step_slope) = (raw + bias).softplus_and_slope();
            put(delta, at, step);
            put(u, at, step * get_row(simd, source.row(source.x, tok), ch));
            if let Some(slope) = &mut slope {
                put(slope, at, step_slope);
            }
        }
    }
}

/// `y = (out + skip x) silu(gate)`, where `out` is `c . h`.
#[inline(always)]
fn close_forward<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    out: &[f32],
    y: &mut [&mut [f32]],
) {
    for ch in source.vectors::<S>() {
        let skip = get_row(simd, source.skip, ch);
        for (row, tok) in toks.clone().enumerate() {
            let x = get_row(simd, source.row(source.x, tok), ch);
            let out = skip.mul_add(x, get(simd, out, row * source.width + ch));
            let out = match source.gate {
                Some(gate) => {
                    let gate = get_row(simd, source.row(gate, tok), ch);
                    out * gate * gate.sigmoid()
                }
                None => out,
            };
            put_row(y[row], ch, out);
        }
    }
}

/// One vector of channels and one tile of states, on their way over some tokens.
struct Walk<'a> {
    /// (n_pad, width)
    rates: &'a [f32],
    /// (tokens, width), as `u`
    delta: &'a [f32],
    u: &'a [f32],
    /// (tokens, n_pad), as `c`
    b: &'a [f32],
    c: &'a [f32],
    n_tok: usize,
    n_pad: usize,
    width: usize,
    /// First channel.
    ch: usize,
    /// First state.
    state: usize,
}

impl<'a> Walk<'a> {
    #[inline(always)]
    fn new(
        source: &Source<'a>,
        toks: &Range<usize>,
        (rates, delta, u): (&'a [f32], &'a [f32], &'a [f32]),
        (ch, state): (usize, usize),
    ) -> Walk<'a> {
        let (width, n_pad) = (source.width, source.n_pad);
        let b = &source.b[toks.start * n_pad..toks.end * n_pad];
        let c = &source.c[toks.start * n_pad..toks.end * n_pad];
        Walk { rates, delta, u, b, c, n_tok: toks.len(), n_pad, width, ch, state }
    }

    /// The tile of an array (n_pad, width).
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, from: &[f32]) -> [F32s<S>; TILE] {
        let mut tile = [F32s::zero(simd); TILE];
        for n in 0..TILE {
            tile[n] = get(simd, from, (self.state + n) * self.width + self.ch);
        }
        tile
    }

    #[inline(always)]
    fn save<S: Simd>(&self, tile: &[F32s<S>; TILE], to: &mut [f32]) {
        for n in 0..TILE {
            put(to, (self.state + n) * self.width + self.ch, tile[n]);
        }
    }

    /// The tile's numbers of a row of `b` or `c`.
    #[inline(always)]
    fn shared(&self, all: &'a [f32], tok: usize) -> &'a [f32; TILE] {
        all[tok * self.n_pad + self.state..].first_chunk().expect("tiles fill the row")
    }

    /// A sum over states so far: nothing before the first tile.
    #[inline(always)]
    fn state_sum<S: Simd>(&self, simd: S, sums: &[f32], at: usize) -> F32s<S> {
        if self.state == 0 { F32s::zero(simd) } else { get(simd, sums, at) }
    }

    /// A sum over channels so far: nothing before the first vector.
    #[inline(always)]
    fn channel_sum<S: Simd>(&self, simd: S, sums: &[f32], at: usize) -> F32s<S> {
        if self.ch == 0 { F32s::zero(simd) } else { get(simd, sums, at) }
    }

    /// Moves `h` on and adds `c . h` to `out`.
    #[inline(always)]
    fn forward<S: Simd>(&self, simd: S, h_all: &mut [f32], outs: &mut [f32]) {
        let rates = self.load(simd, self.rates);
        let mut h = self.load(simd, h_all);
        for tok in 0..self.n_tok {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let mut out = self.state_sum(simd, outs, at);
            for n in 0..TILE {
                let decay = (delta * rates[n]).exp2_of_negative();
                h[n] = decay.mul_add(h[n], u * u.same(b[n]));
                out = h[n].mul_add(u.same(c[n]), out);
            }
            put(outs, at, out);
        }
        self.save(&h, h_all);
    }

    /// As `forward`, for `h` only.
    #[inline(always)]
    fn advance<S: Simd>(&self, simd: S, h_all: &mut [f32]) {
        let rates = self.load(simd, self.rates);
        let mut h = self.load(simd, h_all);
        for tok in 0..self.n_tok {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let b = self.shared(self.b, tok);
            for n in 0..TILE {
                let decay = (delta * rates[n]).exp2_of_negative();
                h[n] = decay.mul_add(h[n], u * u.same(b[n]));
            }
        }
        self.save(&h, h_all);
    }

    /// As `forward`, from `start`; keeps every state and decay, and adds to dc.
    #[inline(always)]
    fn replay<S: Simd>(&self, simd: S, start: &[f32], held: &mut Held) {
        let lanes = F32s::<S>::LANES;
        let rates = self.load(simd, self.rates);
        let mut h = self.load(simd, start);
        for n in 0..TILE {
            put(held.h, n * lanes, h[n]);
        }
        let dcs = &mut held.dc[self.state * self.n_tok * lanes..];
        for tok in 0..self.n_tok {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let dout = get(simd, held.dout, at);
            let h_after = &mut held.h[(tok + 1) * TILE * lanes..][..TILE * lanes];
            let decays = &mut held.decay[tok * TILE * lanes..][..TILE * lanes];
            let dcs = &mut dcs[tok * TILE * lanes..][..TILE * lanes];
            let mut out = self.state_sum(simd, held.out, at);
            for n in 0..TILE {
                let decay = (delta * rates[n]).exp2_of_negative();
                let after = decay.mul_add(h[n], u * u.same(b[n]));
                put(decays, n * lanes, decay);
                put(h_after, n * lanes, after);
                out = after.mul_add(u.same(c[n]), out);
                let dc = self.channel_sum(simd, dcs, n * lanes);
                put(dcs, n * lanes, after.mul_add(dout, dc));
                h[n] = after;
            }
            put(held.out, at, out);
        }
    }

    /// Inverts `replay`, from the last token to the first: moves `g` back and adds to the sums.
    #[inline(always)]
    fn backward<S: Simd>(&self, simd: S, g_all: &mut [f32], da_all: &mut [f32], held: &mut Held) {
        let lanes = F32s::<S>::LANES;
        let rates = self.load(simd, self.rates);
        let (mut g, mut da) = (self.load(simd, g_all), self.load(simd, da_all));
        let dbs = &mut held.db[self.state * self.n_tok * lanes..];
        for tok in (0..self.n_tok).rev() {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let dout = get(simd, held.dout, at);
            let h_before = &held.h[tok * TILE * lanes..][..TILE * lanes];
            let decays = &held.decay[tok * TILE * lanes..][..TILE * lanes];
            let dbs = &mut dbs[tok * TILE * lanes..][..TILE * lanes];
            let mut g_b = self.state_sum(simd, held.g_b, at);
            let mut q_rate = self.state_sum(simd, held.q_rate, at);
            for n in 0..TILE {
                let g_after = dout.mul_add(u.same(c[n]), g[n]);
                let db = self.channel_sum(simd, dbs, n * lanes);
                put(dbs, n * lanes, g_after.mul_add(u, db));
                g_b = g_after.mul_add(u.same(b[n]), g_b);
                g[n] = g_after * get(simd, decays, n * lanes);
                let q = g[n] * get(simd, h_before, n * lanes);
                q_rate = q.mul_add(rates[n], q_rate);
                da[n] = q.mul_add(delta, da[n]);
            }
            put(held.g_b, at, g_b);
            put(held.q_rate, at, q_rate);
        }
        self.save(&g, g_all);
        self.save(&da, da_all);
    }
}

/// What backward holds of one chunk.
struct Held<'a> {
    /// (tokens, width): the gradient of `out`; `dy silu'(gate)`.
    dout: &'a mut [f32],
    dsilu: &'a mut [f32],
    /// (tokens, width), sums over states: `c . h`, `g . b` and `q . rate`.
    out: &'a mut [f32],
    g_b: &'a mut [f32],
    q_rate: &'a mut [f32],
    /// (tokens + 1, TILE, lanes): the states of a tile before and after each token.
    h: &'a mut [f32],
    /// (tokens, TILE, lanes)
    decay: &'a mut [f32],
    /// (n_pad / TILE, tokens, TILE, lanes): sums over channels, lane by lane.
    db: &'a mut [f32],
    dc: &'a mut [f32],
}

/// What one task writes.
struct Grads<'a> {
    /// The group's piece of each row of the segment, as `ddelta` and `dgate`.
    dx: Vec<&'a mut [f32]>,
    ddelta: Vec<&'a mut [f32]>,
    dgate: Vec<&'a mut [f32]>,
    /// (tokens, 2 n_pad): the group's part of db, then of dc.
    shared: &'a mut [f32],
    /// (channels, d_state + 2): the segment's part of da_log, dskip and ddelta_bias.
    sums: &'a mut [f32],
}

struct Backward<'a> {
    source: &'a Source<'a>,
    /// All rows and channels.
    dy: &'a [f32],
    grads: Grads<'a>,
    scratch: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { source, dy, mut grads, mut scratch } = self;
        let (width, n_state) = (source.width, source.n_state());
        let n_tok = source.segment.n_tok;
        let steps = Steps::new(source, &mut scratch);
        let starts = take(&mut scratch, n_state * n_tok.div_ceil(CHUNK));
        let g = take(&mut scratch, n_state);
        let da = take(&mut scratch, n_state);
        let sums = take(&mut scratch, 2 * width);
        let mut held = Held::new(source, &mut scratch);
        source.rates(simd, steps.rates);
        source.enter(&mut starts[..n_state]);
        for sum in [&mut *g, &mut *da, &mut *sums] {
            sum.fill(0.0);
        }
        for first in (0..n_tok.saturating_sub(CHUNK)).step_by(CHUNK) {
            let toks = first..first + CHUNK;
            open(simd, source, &toks, (steps.delta, steps.u, None));
            let (before, after) = starts[first / CHUNK * n_state..].split_at_mut(n_state);
            after[..n_state].copy_from_slice(before);
            for at in source.tiles::<S>() {
                steps.walk(source, &toks, at).advance(simd, &mut after[..n_state]);
            }
        }
        for first in (0..n_tok).step_by(CHUNK).rev() {
            let toks = first..n_tok.min(first + CHUNK);
            let start = &starts[first / CHUNK * n_state..][..n_state];
            open(simd, source, &toks, (steps.delta, steps.u, Some(steps.slope)));
            begin_chunk(simd, source, &toks, dy, &mut held);
            for at in source.tiles::<S>() {
                let walk = steps.walk(source, &toks, at);
                walk.replay(simd, start, &mut held);
                walk.backward(simd, g, da, &mut held);
            }
            finish_chunk(simd, source, &toks, (&steps, &held), (sums, &mut grads));
            add_lanes(simd, source, &toks, &held, grads.shared);
        }
        let (dskip, dbias) = sums.split_at(width);
        for (ch, sums) in grads.sums.chunks_exact_mut(source.d_state + 2).enumerate() {
            for n in 0..source.d_state {
                let at = n * width + ch;
                sums[n] = da[at] * steps.rates[at] * std::f32::consts::LN_2;
            }
            sums[source.d_state] = dskip[ch];
            sums[source.d_state + 1] = dbias[ch];
        }
    }
}

/// What backward makes once for the whole segment.
struct Steps<'a> {
    /// (n_pad, width)
    rates: &'a mut [f32],
    /// (tokens, width): the step, `delta x`, and the slope of the softplus.
    delta: &'a mut [f32],
    u: &'a mut [f32],
    slope: &'a mut [f32],
}

impl<'a> Steps<'a> {
    fn new(source: &Source, scratch: &mut &'a mut [f32]) -> Steps<'a> {
        let len = source.segment.n_tok.min(CHUNK) * source.width;
        Steps {
            rates: take(scratch, source.n_state()),
            delta: take(scratch, len),
            u: take(scratch, len),
            slope: take(scratch, len),
        }
    }

    #[inline(always)]
    fn walk<'t>(
        &'t self,
        source: &Source<'t>,
        toks: &Range<usize>,
        at: (usize, usize),
    ) -> Walk<'t> {
        Walk::new(source, toks, (self.rates, self.delta, self.u), at)
    }
}

impl<'a> Held<'a> {
    fn new(source: &Source, scratch: &mut &'a mut [f32]) -> Held<'a> {
        let n_tok = source.segment.n_tok.min(CHUNK);
        Held {
            dout: take(scratch, n_tok * source.width),
            dsilu: take(scratch, n_tok * source.width),
            out: take(scratch, n_tok * source.width),
            g_b: take(scratch, n_tok * source.width),
            q_rate: take(scratch, n_tok * source.width),
            h: take(scratch, (n_tok + 1) * TILE * LANES_MAX),
            decay: take(scratch, n_tok * TILE * LANES_MAX),
            db: take(scratch, n_tok * source.n_pad * LANES_MAX),
            dc: take(scratch, n_tok * source.n_pad * LANES_MAX),
        }
    }
}

/// Makes `dout` and `dsilu` of a chunk.
#[inline(always)]
fn begin_chunk<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    dy: &[f32],
    held: &mut Held,
) {
    for ch in source.vectors::<S>() {
        for (row, tok) in toks.clone().enumerate() {
            let at = row * source.width + ch;
            let dy = get_row(simd, source.row(dy, tok), ch);
            match source.gate {
                Some(gate) => {
                    let gate = get_row(simd, source.row(gate, tok), ch);
                    let one = gate.same(1.0);
                    let s = gate.sigmoid();
                    put(held.dout, at, dy * gate * s);
                    put(held.dsilu, at, dy * s * gate.mul_add(one - s, one));
                }
                None => put(held.dout, at, dy),
            }
        }
    }
}

/// The gradients of a chunk that belong to one token and one channel; `sums` are dskip and dbias.
#[inline(always)]
fn finish_chunk<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    (steps, held): (&Steps, &Held),
    (sums, grads): (&mut [f32], &mut Grads),
) {
    let width = source.width;
    let (dskips, dbiases) = sums.split_at_mut(width);
    for ch in source.vectors::<S>() {
        let skip = get_row(simd, source.skip, ch);
        let (mut dskip, mut dbias) = (get(simd, dskips, ch), get(simd, dbiases, ch));
        for (row, tok) in toks.clone().enumerate() {
            let at = row * width + ch;
            let x = get_row(simd, source.row(source.x, tok), ch);
            let (dout, g_b) = (get(simd, held.dout, at), get(simd, held.g_b, at));
            let q_a = get(simd, held.q_rate, at) * x.same(std::f32::consts::LN_2);
            let ddelta = x.mul_add(g_b, q_a) * get(simd, steps.slope, at);
            let dx = get(simd, steps.delta, at).mul_add(g_b, dout * skip);
            put_row(grads.dx[tok], ch, dx);
            put_row(grads.ddelta[tok], ch, ddelta);
            if let Some(dgate) = grads.dgate.get_mut(tok) {
                let out = skip.mul_add(x, get(simd, held.out, at));
                put_row(dgate, ch, get(simd, held.dsilu, at) * out);
            }
            dskip = dout.mul_add(x, dskip);
            dbias = dbias + ddelta;
        }
        put(dskips, ch, dskip);
        put(dbiases, ch, dbias);
    }
}

/// Sums db and dc of a chunk over the lanes.
#[inline(always)]
fn add_lanes<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    held: &Held,
    shared: &mut [f32],
) {
    let n_pad = source.n_pad;
    let rows = shared[toks.start * 2 * n_pad..toks.end * 2 * n_pad].chunks_exact_mut(2 * n_pad);
    for (row, shared) in rows.enumerate() {
        let (db, dc) = shared.split_at_mut(n_pad);
        for n in 0..n_pad {
            let at = (n / TILE * toks.len() + row) * TILE + n % TILE;
            db[n] = get(simd, held.db, at * F32s::<S>::LANES).sum();
            dc[n] = get(simd, held.dc, at * F32s::<S>::LANES).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::tape::Gradients;

    #[derive(Clone, Copy, PartialEq)]
    enum Parts {
        All,
        NoGate,
        NoBias,
    }

    /// x, delta, a_log, b, c, skip, delta_bias, gate; real models' sizes of delta and a.
    fn inputs(n_tok: usize, d_inner: usize, d_state: usize) -> Vec<Input> {
        vec![
            Input::normal(1, &[n_tok, d_inner], 1.0),
            Input::map(2, &[n_tok, d_inner], |x| x - 1.0),
            Input::map(3, &[d_inner, d_state], |x| 0.7 * x),
            Input::normal(4, &[n_tok, d_state], 1.0),
            Input::normal(5, &[n_tok, d_state], 1.0),
            Input::normal(6, &[d_inner], 1.0),
            Input::normal(7, &[d_inner], 0.5),
            Input::normal(8, &[n_tok, d_inner], 1.0),
        ]
    }

    fn tensors(device: &Device, inputs: &[Input]) -> Vec<Tensor> {
        inputs.iter().map(|x| x.tensor(device)).collect()
    }

    fn op(
        tape: &Tape,
        v: &[Var],
        parts: Parts,
        segments: &Segments,
        states: Option<&mut [&mut Tensor]>,
    ) -> Var {
        let scan = Scan {
            x: &v[0],
            delta: &v[1],
            a_log: &v[2],
            b: &v[3],
            c: &v[4],
            skip: &v[5],
            delta_bias: (parts != Parts::NoBias).then_some(&v[6]),
            gate: (parts != Parts::NoGate).then_some(&v[7]),
        };
        selective_scan(tape, &scan, segments, states)
    }

    /// The rows of some tokens, and the parameters.
    fn rows(inputs: &[Tensor], toks: Range<usize>) -> Vec<Tensor> {
        let cut = |(idx, x): (usize, &Tensor)| match idx {
            0 | 1 | 3 | 4 | 7 => x.rows(toks.clone()),
            _ => x.clone(),
        };
        inputs.iter().enumerate().map(cut).collect()
    }

    /// Runs one segment on constants; `state` is updated.
    fn run(inputs: &[Tensor], state: Option<&mut Tensor>) -> Tensor {
        let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
        let segments = Segments::from_lengths(&[inputs[0].dims2().0]);
        let y = match state {
            Some(state) => op(&Tape::off(), &v, Parts::All, &segments, Some(&mut [state])),
            None => op(&Tape::off(), &v, Parts::All, &segments, None),
        };
        y.value().clone()
    }

    /// Output and gradients of one segment from the formulas above, number by number in f64.
    struct Slow {
        y: Vec<f64>,
        /// In the order of the inputs.
        grads: Vec<Vec<f64>>,
        /// (d_state, d_inner)
        state: Vec<f64>,
    }

    fn slow(inputs: &[Tensor], entry: &[f32], dy: &[f32]) -> Slow {
        let (n_tok, d_inner) = inputs[0].dims2();
        let d_state = inputs[2].dims2().1;
        let v: Vec<Vec<f64>> =
            inputs.iter().map(|x| x.f32().iter().map(|&x| x as f64).collect()).collect();
        let [x, raw, a_log, b, c, skip, bias, gate] = &v[..] else { panic!("eight inputs") };
        let mut grads: Vec<Vec<f64>> = v.iter().map(|x| vec![0.0; x.len()]).collect();
        let mut y = vec![0.0; x.len()];
        let mut state = vec![0.0; d_state * d_inner];
        let softplus = |z: f64| z.max(0.0) + (-z.abs()).exp().ln_1p();
        let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
        for ch in 0..d_inner {
            let at = |tok: usize| tok * d_inner + ch;
            let a: Vec<f64> = (0..d_state).map(|n| -a_log[ch * d_state + n].exp()).collect();
            let delta: Vec<f64> = (0..n_tok).map(|tok| softplus(raw[at(tok)] + bias[ch])).collect();
            let mut h = vec![vec![0.0; d_state]; n_tok + 1];
            let mut out = vec![0.0; n_tok];
            h[0] = (0..d_state).map(|n| entry[n * d_inner + ch] as f64).collect();
            for tok in 0..n_tok {
                out[tok] = skip[ch] * x[at(tok)];
                for n in 0..d_state {
                    h[tok + 1][n] = (delta[tok] * a[n]).exp() * h[tok][n]
                        + delta[tok] * b[tok * d_state + n] * x[at(tok)];
                    out[tok] += c[tok * d_state + n] * h[tok + 1][n];
                }
                y[at(tok)] = out[tok] * gate[at(tok)] * sigmoid(gate[at(tok)]);
            }
            (0..d_state).for_each(|n| state[n * d_inner + ch] = h[n_tok][n]);
            let mut g = vec![0.0; d_state];
            for tok in (0..n_tok).rev() {
                let (i, s) = (at(tok), sigmoid(gate[at(tok)]));
                let dout = dy[i] as f64 * gate[i] * s;
                grads[7][i] = dy[i] as f64 * out[tok] * s * (1.0 + gate[i] * (1.0 - s));
                grads[5][ch] += dout * x[i];
                grads[0][i] = dout * skip[ch];
                let mut ddelta = 0.0;
                for n in 0..d_state {
                    let row = tok * d_state + n;
                    g[n] += dout * c[row];
                    grads[4][row] += dout * h[tok + 1][n];
                    grads[3][row] += g[n] * delta[tok] * x[i];
                    grads[0][i] += g[n] * delta[tok] * b[row];
                    g[n] *= (delta[tok] * a[n]).exp();
                    let before = g[n] * h[tok][n];
                    ddelta += g[n] * h[tok][n] * a[n];
                    grads[2][ch * d_state + n] += before * delta[tok] * a[n];
                }
                // g was multiplied by the decay above: the input's share is what it was before.
                let input: f64 = grads[0][i] - dout * skip[ch];
                ddelta += input / delta[tok] * x[i];
                grads[1][i] = ddelta * sigmoid(raw[i] + bias[ch]);
                grads[6][ch] += grads[1][i];
            }
        }
        Slow { y, grads, state }
    }

    /// Largest difference, in units of the root mean square of `want`.
    fn distance(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
        let scale = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
        got.zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max) / scale.max(1e-30)
    }

    fn wide(x: &Tensor) -> impl Iterator<Item = f64> {
        x.f32().iter().map(|&x| x as f64)
    }

    #[test]
    fn gradients() {
        let check = |lengths: &[usize], d_inner: usize, d_state: usize, parts: Parts| {
            let segments = Segments::from_lengths(lengths);
            let inputs = inputs(segments.n_tok(), d_inner, d_state);
            check_gradients(&inputs, |tape, v| vec![op(tape, v, parts, &segments, None)]);
        };
        check(&[1], 1, 1, Parts::All); // no recurrence
        check(&[7], 1, 1, Parts::All); // recurrence only
        check(&[5, 1, 3], 3, 4, Parts::NoGate); // every stride distinct
        check(&[1, CHUNK, 2], 17, 16, Parts::NoBias); // a vector and one channel
        check(&[CHUNK + 1, 1], GROUP + 3, 8, Parts::All); // two groups
        check(&[2 * CHUNK + 5, CHUNK - 1], 2, 11, Parts::All); // three tiles, three chunks
    }

    #[test]
    fn gradients_with_states_take_them_as_constants() {
        let segments = Segments::from_lengths(&[3, CHUNK + 2, 1]);
        check_gradients(&inputs(segments.n_tok(), 5, 3), |tape, v| {
            let device = v[0].value().device();
            let state = |seed: u64| Input::normal(50 + seed, &[3, 5], 1.0).tensor(device);
            let mut states = [state(0), state(1), state(2)];
            let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
            vec![op(tape, v, Parts::All, &segments, Some(&mut states))]
        });
    }

    #[test]
    fn agrees_with_the_slow_twin_also_for_extreme_steps() {
        let device = Device::cpu(2).unwrap();
        let (n_tok, d_inner, d_state) = (2 * CHUNK + 3, 21, 16);
        let mut extreme = inputs(n_tok, d_inner, d_state);
        // Step sizes from 1e-11 to 12, decays per step from 1 to exp(-3800).
        extreme[1] = Input::map(2, &[n_tok, d_inner], |x| (12.0 * x - 6.0).clamp(-25.0, 12.0));
        extreme[2] = Input::map(3, &[d_inner, d_state], |x| (2.0 * x + 1.0).min(16f32.ln() + 3.0));
        extreme[6] = Input::normal(7, &[d_inner], 0.0);
        for inputs in [inputs(n_tok, d_inner, d_state), extreme] {
            let inputs = tensors(&device, &inputs);
            let mut state = Input::normal(60, &[d_state, d_inner], 1.0).tensor(&device);
            let entry = state.f32().to_vec();
            let tape = Tape::new();
            let v: Vec<Var> = inputs.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
            let segments = Segments::from_lengths(&[n_tok]);
            let y = op(&tape, &v, Parts::All, &segments, Some(&mut [&mut state]));
            let dy = Input::normal(61, &[n_tok, d_inner], 1.0).tensor(&device);
            let want = slow(&inputs, &entry, dy.f32());
            assert!(distance(wide(y.value()), &want.y) < 2e-5);
            assert!(distance(wide(&state), &want.state) < 2e-5);
            let mut grads = Gradients::default();
            tape.walk(vec![(y, dy)], &mut grads);
            for (key, want) in want.grads.iter().enumerate() {
                let got = grads.get(key).unwrap();
                let off = distance(wide(got), want);
                assert!(off < 2e-5, "input {key}: off by {off:e}");
            }
            // The slope of softplus hides small steps: without it they must be right as well.
            let slope = |i: usize| {
                let z = inputs[1].f32()[i] as f64 + inputs[6].f32()[i % d_inner] as f64;
                1.0 / (1.0 + (-z).exp())
            };
            let bare: Vec<f64> =
                want.grads[1].iter().enumerate().map(|(i, want)| want / slope(i)).collect();
            let got = wide(grads.get(1).unwrap()).enumerate().map(|(i, got)| got / slope(i));
            let off = distance(got, &bare);
            assert!(off < 2e-5, "ddelta without its slope: off by {off:e}");
        }
    }

    #[test]
    fn steps_with_a_state_equal_the_whole_from_any_split() {
        let device = Device::cpu(1).unwrap();
        let (n_tok, d_inner, d_state) = (2 * CHUNK + 7, 19, 5);
        let inputs = tensors(&device, &inputs(n_tok, d_inner, d_state));
        let zeros = || Tensor::zeros(&device, &[d_state, d_inner]);
        let mut last = zeros();
        let whole = run(&inputs, Some(&mut last));
        assert_eq!(whole.f32(), run(&inputs, None).f32());
        for split in [1, 2, CHUNK, CHUNK + 1, n_tok - 1] {
            let mut state = zeros();
            let mut y = run(&rows(&inputs, 0..split), Some(&mut state)).f32().to_vec();
            for tok in split..n_tok {
                let one = run(&rows(&inputs, tok..tok + 1), Some(&mut state));
                y.extend_from_slice(one.f32());
            }
            assert_eq!(y, whole.f32(), "split at {split}");
            assert_eq!(state.f32(), last.f32(), "split at {split}");
        }
    }

    #[test]
    fn segments_do_not_see_each_other() {
        let device = Device::cpu(1).unwrap();
        let lengths = [3, 1, CHUNK + 1, 2];
        let segments = Segments::from_lengths(&lengths);
        let inputs = tensors(&device, &inputs(segments.n_tok(), GROUP + 1, 4));
        let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
        let together = op(&Tape::off(), &v, Parts::All, &segments, None);
        for segment in segments.iter() {
            let alone = run(&rows(&inputs, segment.rows()), None);
            assert_eq!(alone.f32(), together.value().rows(segment.rows()).f32());
        }
    }

    #[test]
    fn another_handle_of_a_state_keeps_its_numbers() {
        let device = Device::cpu(1).unwrap();
        let inputs = tensors(&device, &inputs(4, 3, 2));
        let mut state = Input::normal(9, &[2, 3], 1.0).tensor(&device);
        let (snapshot, before) = (state.clone(), state.f32().to_vec());
        run(&inputs, Some(&mut state));
        assert_eq!(snapshot.f32(), before);
        assert_ne!(state.f32(), before);
    }

    #[test]
    fn a_token_changes_nothing_before_it() {
        let device = Device::cpu(1).unwrap();
        let n_tok = CHUNK + 6;
        let inputs = tensors(&device, &inputs(n_tok, 5, 3));
        let before = run(&inputs, None);
        for tok in [0, 3, CHUNK, n_tok - 1] {
            for idx in [0, 1, 3, 4, 7] {
                let mut changed = inputs.clone();
                let mut x = inputs[idx].to_f32();
                let width = x.dims2().1;
                x.f32_mut()[tok * width..][..width].fill(1.5);
                changed[idx] = x;
                let after = run(&changed, None);
                assert_eq!(before.rows(0..tok).f32(), after.rows(0..tok).f32());
                assert_ne!(before.rows(tok..n_tok).f32(), after.rows(tok..n_tok).f32());
            }
        }
    }
}
