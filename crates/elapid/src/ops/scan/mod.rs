//! Selective scan: the recurrence of a Mamba-1 block, with its step size, skip and gate.
//!
//! For each segment and channel, with a state `h` of `d_state` numbers that starts at zero or at
//! the state carried over, and with `a = -exp(a_log)`:
//!
//! ```text
//! delta[t] = softplus(delta_raw[t] + delta_bias)
//! h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t]
//! out[t] = c[t] . h[t] + skip x[t]
//! y[t] = out[t] silu(gate[t])
//! ```
//!
//! Backward, with `g[t]` the gradient of the loss by `h[t]`, from the last token to the first, and
//! `q[t] = g[t] exp(delta[t] a) h[t-1]`:
//!
//! ```text
//! dout[t] = dy[t] silu(gate[t])                dgate[t] = dy[t] out[t] silu'(gate[t])
//! g[t] = dout[t] c[t] + exp(delta[t+1] a) g[t+1]
//! dx[t] = dout[t] skip + delta[t] (g[t] . b[t])
//! ddelta[t] = x[t] (g[t] . b[t]) + q[t] . a    times sigmoid(delta_raw[t] + delta_bias)
//! dc[t] = sum over channels of dout[t] h[t]    dskip = sum over t of dout[t] x[t]
//! db[t] = sum over channels of g[t] delta[t] x[t]
//! da_log = a times the sum over t of delta[t] q[t]
//! ```
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
//! the inputs, on CUDA some states (gpu.rs). Keeping every state would cost `d_state` times the
//! memory of `x`: backward walks a segment once to find the states at the start of each chunk, then
//! makes those of one chunk and one vector of channels at a time.
//!
//! In generation a few tokens go another way, `step`, to the same bits. On GPUs: gpu.rs.
//!
//! Not here: the projections that make `delta`, `b` and `c`; the scan of Mamba-2, whose decay is
//! one number per head.

mod backward;
mod gpu;
mod kernels;
mod step;
#[cfg(test)]
mod tests;

use super::norm::sum_rows;
use super::{columns, own, split, transpose};
use crate::tape::{Tape, Var};
use crate::tensor::cpu::{Cpu, F32s};
use crate::tensor::device::Device;
use crate::tensor::segment::{Segment, Segments};
use crate::tensor::{Derivation, Tensor};
use pulp::{Simd, WithSimd};
use std::ops::Range;

use backward::*;
use gpu::{Kept, backward_gpu, forward_gpu, step_gpu};
use kernels::*;
use step::{N_STEP_MAX, rates, step};

/// The operands of `selective_scan`; shapes in the module's header.
pub struct Scan<'a> {
    pub x: &'a Var,
    /// Before bias and softplus.
    pub delta: &'a Var,
    pub delta_bias: Option<&'a Var>,
    pub a_log: &'a Var,
    pub b: &'a Var,
    pub c: &'a Var,
    pub skip: &'a Var,
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
/// `states` has one tensor (d_state, d_inner) per segment: the state before it on entry, the state
/// after it on return. Other handles keep the old numbers.
pub fn selective_scan(
    tape: &Tape,
    scan: &Scan,
    segments: &Segments,
    states: Option<&mut [&mut Tensor]>,
) -> Var {
    let mut job = Job::new(scan, segments);
    let inputs = [scan.x, scan.delta, scan.a_log, scan.b, scan.c, scan.skip];
    let inputs = || inputs.into_iter().chain(scan.delta_bias).chain(scan.gate);
    let is_recorded = tape.is_recording() && inputs().any(Var::needs_grad);
    let (y, kept) = match states {
        Some(states) => {
            let shape = [job.d_state, job.d_inner];
            assert_eq!(states.len(), segments.len(), "scan: states, one per segment");
            states.iter().for_each(|state| state.expect_shape("scan: state", &shape));
            let is_short = segments.iter().all(|segment| segment.n_tok <= N_STEP_MAX);
            if is_short && !is_recorded {
                return Var::constant(step(&job, states));
            }
            for state in states.iter_mut() {
                // A GPU brings its own.
                let shape = if job.x.device().gpu().is_some() { &[1][..] } else { &shape };
                let exit = Tensor::uninit(job.x.device(), shape);
                job.entry.push(std::mem::replace(*state, exit));
            }
            forward(&job, states, is_recorded)
        }
        None => forward(&job, &mut [], is_recorded),
    };
    job.kept = kept;
    let inputs: Vec<&Var> = inputs().collect();
    // What can be made again is not held meanwhile.
    let (x, delta) = (scan.x.kept(), scan.delta.kept());
    let nothing = Tensor::uninit(job.x.device(), &[0]);
    (job.x, job.delta) = (nothing.clone(), nothing);
    tape.record("scan", &inputs, y, move |dy| {
        (job.x, job.delta) = (x.get(), delta.get());
        backward(&job, &dy)
    })
}

/// Everything `forward` and `backward` read.
struct Job {
    x: Tensor,
    delta: Tensor,
    delta_bias: Option<Tensor>,
    a_log: Tensor,
    /// (n_tok, n_pad), as `c`; (n_tok, d_state) on a GPU.
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
    /// What forward has left for backward.
    kept: Option<Kept>,
}

impl Job {
    fn new(scan: &Scan, segments: &Segments) -> Job {
        let (d_inner, d_state) = scan.a_log.value().dims2();
        let n_tok = segments.n_tok();
        let n_pad = d_state.next_multiple_of(TILE);
        let (wide, narrow) = ([n_tok, d_inner], [n_tok, d_state]);
        let value = |what: &str, var: &Var, shape: &[usize]| {
            var.value().expect_shape(what, shape);
            var.value().clone()
        };
        Job {
            x: value("scan: x", scan.x, &wide),
            delta: value("scan: delta", scan.delta, &wide),
            delta_bias: scan.delta_bias.map(|it| value("scan: delta_bias", it, &[d_inner])),
            a_log: scan.a_log.value().clone(),
            b: padded(value("scan: b", scan.b, &narrow), n_pad),
            c: padded(value("scan: c", scan.c, &narrow), n_pad),
            skip: value("scan: skip", scan.skip, &[d_inner]),
            gate: scan.gate.map(|it| value("scan: gate", it, &wide)),
            segments: segments.clone(),
            entry: Vec::new(),
            d_inner,
            d_state,
            n_pad,
            kept: None,
        }
    }

    fn operands<'a>(&'a self, rates: &'a [f32]) -> Operands<'a> {
        Operands {
            x: self.x.f32(),
            delta: self.delta.f32(),
            delta_bias: self.delta_bias.as_ref().map(Tensor::f32),
            rates,
            b: self.b.f32(),
            c: self.c.f32(),
            skip: self.skip.f32(),
            gate: self.gate.as_ref().map(Tensor::f32),
            d_inner: self.d_inner,
            d_state: self.d_state,
            n_pad: self.n_pad,
        }
    }

    /// What each task reads: segment by segment, group by group.
    fn sources<'a>(&'a self, rates: &'a [f32]) -> Vec<Source<'a>> {
        let mut sources = Vec::new();
        for (idx, &segment) in self.segments.iter().enumerate() {
            for first in (0..self.d_inner).step_by(GROUP) {
                let channels = first..self.d_inner.min(first + GROUP);
                let (all, entry) = (self.operands(rates), self.entry.get(idx).map(Tensor::f32));
                let width = channels.len().next_multiple_of(LANES_MAX);
                sources.push(Source { all, entry, segment, channels, width });
            }
        }
        sources
    }

    /// Cuts the columns of `y` between the tasks: for each, its piece of every row.
    fn columns<'a>(&self, mut y: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
        let rows = |segment: &Segment| y.split_off_mut(..segment.n_tok * self.d_inner);
        let rows = self.segments.iter().filter_map(rows);
        rows.flat_map(|rows| columns(rows, (self.d_inner, self.d_inner), GROUP)).collect()
    }

    /// Gradients in the order of the recorded inputs.
    fn list(
        &self,
        always: [Tensor; 6],
        dbias: Tensor,
        dgate: Option<Tensor>,
    ) -> Vec<Option<Tensor>> {
        let dbias = self.delta_bias.is_some().then_some(dbias);
        let dgate = dgate.filter(|_| self.gate.is_some());
        always.into_iter().chain(dbias).chain(dgate).map(Some).collect()
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

/// Rows of `x` with zeros after them, to a length of `n_pad`; kernels of GPUs need none.
fn padded(x: Tensor, n_pad: usize) -> Tensor {
    let (n_rows, d) = x.dims2();
    if d == n_pad || x.device().gpu().is_some() {
        return x;
    }
    let mut y = Tensor::zeros(x.device(), &[n_rows, n_pad]);
    for (y, x) in y.f32_mut().chunks_exact_mut(n_pad).zip(x.f32().chunks_exact(d)) {
        y[..d].copy_from_slice(x);
    }
    y
}

/// `exit` receives the states after the segments; empty when nobody wants them. `keeps`: whether
/// there will be a backward pass.
fn forward(job: &Job, exit: &mut [&mut Tensor], keeps: bool) -> (Tensor, Option<Kept>) {
    let device = job.x.device();
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return forward_gpu(gpu, job, exit, keeps),
    };
    let mut y = Tensor::uninit(device, job.x.shape());
    let rates = job.a_log.derived(Derivation::Rates, rates);
    let sources = job.sources(rates.f32());
    let width = job.d_inner;
    let exits = exit.iter_mut();
    let exits = exits.flat_map(|state| columns(state.f32_mut(), (width, width), GROUP));
    let mut exits: Vec<Vec<&mut [f32]>> = exits.collect();
    exits.resize_with(sources.len(), Vec::new);
    let tasks = sources.iter().zip(job.columns(y.f32_mut())).zip(exits).collect();
    job.run(cpu, tasks, |((source, y), exit)| {
        let mut scratch = Tensor::uninit(device, &[source.forward_lengths().iter().sum()]);
        cpu.simd(Forward { source, y, exit, scratch: scratch.f32_mut() });
    });
    (y, None)
}

/// Inverts `forward`: gradients in the order of the recorded inputs.
fn backward(job: &Job, dy: &Tensor) -> Vec<Option<Tensor>> {
    let device = job.x.device();
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return backward_gpu(gpu, job, dy),
    };
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
    let mut dgates = dgate.as_mut().map_or_else(Vec::new, |it| job.columns(it.f32_mut()));
    let rates = job.a_log.derived(Derivation::Rates, rates);
    let sources = job.sources(rates.f32());
    dgates.resize_with(sources.len(), Vec::new);
    let columns = job.columns(dx.f32_mut()).into_iter().zip(job.columns(ddelta.f32_mut()));
    let outs = columns.zip(dgates).zip(shareds.into_iter().zip(per_task));
    let grads = |(((dx, ddelta), dgate), (shared, sums))| Grads { dx, ddelta, dgate, shared, sums };
    let outs = outs.map(grads);
    let tasks: Vec<_> = sources.iter().zip(outs).collect();
    job.run(cpu, tasks, |(source, grads)| {
        let mut scratch = Tensor::uninit(device, &[source.backward_lengths().iter().sum()]);
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
    job.list([dx, ddelta, da_log, db, dc, dskip], dbias, dgate)
}

/// Sums over the groups of channels, in order, and takes db and dc apart.
fn add_groups(job: &Job, shared: &Tensor) -> (Tensor, Tensor) {
    let device = job.x.device();
    let cpu = device.expect_cpu();
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
