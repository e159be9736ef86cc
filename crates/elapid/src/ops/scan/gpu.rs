//! `scan` on GPUs.
//!
//! A thread takes one channel of a piece, in CUDA a few states of two channels. A piece is rows of
//! one segment, as many as leave enough pieces to fill the machine. Where all pieces are whole
//! segments one pass does forward. Else three do:
//!
//! 1. of each piece, the state it ends with from zero, and the sum of its steps (its decay is an
//!    exponential of that);
//! 2. piece after piece, the states they start with;
//! 3. all outputs.
//!
//! Backward has the states before every sub-chunk of a few rows and walks each piece from its last
//! sub-chunk to its first, whose states it makes again and holds. Between pieces the gradient of
//! the state goes the same three ways from the last to the first. Sums over channels are made for
//! each group of channels and added in order, sums over rows for each piece.
//!
//! CUDA keeps those states in forward, in the dtype of activations: with 16 states of a channel
//! twice the size of `x`; backward is spared a pass over everything. Where they would be much more
//! (more states, segments shorter than a sub-chunk) backward runs forward again for them. It is one
//! kernel. WebGPU allows eight buffers: there backward makes the states itself, and an elementwise
//! kernel before and one after carry what belongs to one number of `x`.

use super::*;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, N_ROUNDS_MAX, Word, Work, bind};

const CUDA: &str = concat!(include_str!("scan.cu"), include_str!("backward.cu"));
const WGSL: &str =
    concat!(include_str!("scan.wgsl"), include_str!("backward.wgsl"), include_str!("sums.wgsl"));
static FORWARD: Kernel = Kernel { entry: "scan_forward", wgsl: WGSL, cuda: CUDA };
static COEFS: Kernel = Kernel { entry: "scan_coefs", ..FORWARD };
static ENDS: Kernel = Kernel { entry: "scan_ends", ..FORWARD };
static CARRY: Kernel = Kernel { entry: "scan_carry", ..FORWARD };
static ENDS_BACK: Kernel = Kernel { entry: "scan_ends_back", ..FORWARD };
static CARRY_BACK: Kernel = Kernel { entry: "scan_carry_back", ..FORWARD };
static SUM_SHARED: Kernel = Kernel { entry: "scan_sum_shared", ..FORWARD };
static SUMS: Kernel = Kernel { entry: "scan_sums", ..FORWARD };
// For wgpu.
static STATES: Kernel = Kernel { entry: "scan_states", wgsl: WGSL, cuda: "" };
static OPEN: Kernel = Kernel { entry: "scan_open", wgsl: WGSL, cuda: "" };
static BACKWARD: Kernel = Kernel { entry: "scan_backward", wgsl: WGSL, cuda: "" };
static FINISH: Kernel = Kernel { entry: "scan_finish", wgsl: WGSL, cuda: "" };
static PART: Kernel = Kernel { entry: "scan_part", wgsl: WGSL, cuda: "" };
// For CUDA.
const CUDA_STEP: &str = concat!(include_str!("scan.cu"), include_str!("step.cu"));
static STEP: Kernel = Kernel { entry: "scan_step", wgsl: "", cuda: CUDA_STEP };
static RATES: Kernel = Kernel { entry: "scan_rates", ..STEP };
static BACKWARD_ALL: Kernel = Kernel { entry: "scan_backward_all", wgsl: "", cuda: CUDA };

/// Channels of a group of threads.
const GROUP: usize = 64;
/// Channels, over all pieces, that fill a machine.
const N_FULL: usize = 16_384;
/// Rows of the shortest piece, but for the last of a segment.
const PIECE_MIN: usize = 64;
/// Rows of a partial sum of dskip and ddelta_bias.
const N_ROWS: usize = 64;
/// Rows whose states backward holds on wgpu, at most.
const SUB_WGPU: usize = 16;
/// Numbers that CUDA keeps for backward, for each one of `x` at most.
const N_KEPT: usize = 3;

/// Channels and threads of a group of `scan_step`.
const STEP_CHANNELS: usize = 32;
const STEP_THREADS: usize = 256;

/// States are there on entry; states are wanted on exit.
const READ: u32 = 1;
const WRITE: u32 = 2;

/// What forward keeps for backward, on CUDA.
pub(super) struct Kept {
    /// (n_subs, d_state, d_inner): the states before every sub-chunk.
    states: Tensor,
    /// The sums of the steps of pieces, where these are not whole segments.
    totals: Option<Tensor>,
    coefs: Tensor,
}

/// A job as the kernels take it.
struct Plan<'a> {
    gpu: &'a Gpu,
    job: &'a Job,
    n_pieces: usize,
    n_subs: usize,
    /// Pieces of each segment.
    counts: Vec<usize>,
    coefs: Tensor,
}

impl<'a> Plan<'a> {
    fn new(gpu: &'a Gpu, job: &'a Job) -> Plan<'a> {
        let len = (job.segments.n_tok() * job.d_inner).div_ceil(N_FULL);
        let mut len = len.next_multiple_of(PIECE_MIN);
        if !gpu.caps().warps {
            // Backward takes some four rounds of loops for each state.
            len = len.min(N_ROUNDS_MAX / (8 * job.d_state)).max(1);
        }
        let sub = sub_of(gpu, job);
        let (mut pieces, mut segments) = (Vec::new(), Vec::new());
        let (mut counts, mut n_subs) = (Vec::new(), 0);
        for (idx, segment) in job.segments.iter().enumerate() {
            let first_piece = pieces.len() / 4;
            for first in segment.rows().step_by(len) {
                let n_rows = len.min(segment.rows().end - first);
                pieces.extend([first, n_rows, n_subs, idx].map(|n| n as u32));
                n_subs += n_rows.div_ceil(sub);
            }
            counts.push(pieces.len() / 4 - first_piece);
            segments.extend([first_piece as u32, counts[idx] as u32]);
        }
        let n_pieces = pieces.len() / 4;
        pieces.extend(segments);
        let coefs = match &job.kept {
            Some(kept) => kept.coefs.clone(),
            None => coefs(gpu, job, &pieces),
        };
        Plan { gpu, job, n_pieces, n_subs, counts, coefs }
    }

    fn params(&self, n_parts: usize, flags: u32) -> [Word; 8] {
        let n_segments = self.counts.len();
        let counts = [self.n_pieces, n_segments, 0, 0, self.job.segments.n_tok(), self.n_subs];
        let [a, b, c, d, e, f] = counts.map(Word::from);
        [a, b, c, d, e, f, n_parts.into(), flags.into()]
    }

    fn launch(
        &self,
        kernel: &'static Kernel,
        work: Work,
        mut args: Vec<Arg>,
        (n_parts, flags): (usize, u32),
    ) {
        let consts = consts(self.gpu, self.job, false);
        self.gpu.launch(kernel, work, &consts, &mut args, &self.params(n_parts, flags));
    }

    fn work(&self) -> Work {
        group_work(self.gpu, self.job, self.n_pieces)
    }

    /// One thread for each state of each segment.
    fn carry_work(&self) -> Work {
        let n_threads = self.counts.len() * self.job.d_state * self.job.d_inner;
        Work::groups(n_threads.div_ceil(64), 64)
    }

    /// `n` tensors of states, behind one another.
    fn states(&self, n: usize) -> Tensor {
        Tensor::uninit(self.job.x.device(), &[n * self.job.d_state, self.job.d_inner])
    }

    /// The states before the pieces, or none when they are zero, and the sums of their steps where
    /// pieces are not whole segments.
    fn starts(&self) -> (Option<Tensor>, Option<Tensor>) {
        let job = self.job;
        let entry = (!job.entry.is_empty()).then(|| Tensor::stack(&job.entry));
        if self.n_pieces == self.counts.len() {
            return (entry, None);
        }
        let mut ends = self.states(self.n_pieces);
        let mut totals = Tensor::uninit(job.x.device(), &[self.n_pieces, job.d_inner]);
        let args = bind([&job.x, &job.delta, &self.coefs, &job.b], [&mut ends, &mut totals]);
        self.launch(&ENDS, self.work(), args, (0, 0));
        let flags = if entry.is_some() { READ } else { 0 };
        let args = bind([&totals, entry.as_ref().unwrap_or(&totals), &self.coefs], [&mut ends]);
        self.launch(&CARRY, self.carry_work(), args, (0, flags));
        (Some(ends), Some(totals))
    }

    /// Fills `y`, and `held` with the states before every sub-chunk. Returns the sums of steps.
    fn forward(
        &self,
        exit: &mut [&mut Tensor],
        y: &mut Tensor,
        held: Option<&mut Tensor>,
    ) -> Option<Tensor> {
        let Plan { gpu, job, .. } = self;
        let (starts, totals) = self.starts();
        let read = if starts.is_some() { READ } else { 0 };
        let write = if exit.is_empty() { 0 } else { WRITE };
        let mut states = match starts {
            Some(starts) => starts,
            None if exit.is_empty() => Tensor::uninit(job.x.device(), &[1]),
            None => self.states(self.n_pieces),
        };
        let params = self.params(0, read | write);
        let work = (self.work(), &params[..]);
        launch_forward(gpu, job, (&self.coefs, &mut states, y), held, work);
        let mut last = 0;
        for (exit, count) in exit.iter_mut().zip(&self.counts) {
            last += count * job.d_state;
            **exit = states.rows(last - job.d_state..last).copied();
        }
        totals
    }

    /// As `forward`, with what the backward pass of CUDA wants.
    fn forward_kept(&self, exit: &mut [&mut Tensor], y: &mut Tensor) -> Kept {
        let shape = [self.n_subs * self.job.d_state, self.job.d_inner];
        let mut states = Tensor::activation(self.job.x.device(), &shape);
        let totals = self.forward(exit, y, Some(&mut states));
        Kept { states, totals, coefs: self.coefs.clone() }
    }
}

/// Threads that share the states of two channels, in CUDA: with four each, or more where there are
/// too many.
fn split_of(job: &Job) -> usize {
    job.d_state.div_ceil(4).next_power_of_two().min(8)
}

/// Rows whose states backward holds: in CUDA all in registers, and what belongs to them in shared
/// memory.
fn sub_of(gpu: &Gpu, job: &Job) -> usize {
    match (gpu.caps().warps, job.d_state) {
        // By fours; WebGPU allows 8 KiB of variables of a thread.
        (false, d_state) => (SUB_WGPU.min(1024 / d_state) / 4 * 4).max(4),
        (true, ..=16) => 8,
        (true, ..=64) => 4,
        (true, ..=128) => 2,
        (true, _) => 1,
    }
}

fn group_work(gpu: &Gpu, job: &Job, n_pieces: usize) -> Work {
    let threads = if gpu.caps().warps { GROUP / 2 * split_of(job) } else { GROUP };
    Work::groups(n_pieces * job.d_inner.div_ceil(GROUP), threads)
}

/// Constants of all kernels.
fn consts(gpu: &Gpu, job: &Job, keeps: bool) -> [Const; 9] {
    [
        ("D_INNER", job.d_inner),
        ("D_STATE", job.d_state),
        ("HAS_GATE", usize::from(job.gate.is_some())),
        ("HAS_BIAS", usize::from(job.delta_bias.is_some())),
        ("GROUP", GROUP),
        ("SPLIT", split_of(job)),
        ("SUB", sub_of(gpu, job)),
        ("N_ROWS", N_ROWS),
        ("KEEP", usize::from(keeps)),
    ]
}

impl Job {
    /// Where there is none, what takes its place in a kernel.
    fn gate_or_x(&self) -> &Tensor {
        self.gate.as_ref().unwrap_or(&self.x)
    }

    fn bias_or_any(&self) -> &Tensor {
        self.delta_bias.as_ref().unwrap_or(&self.skip)
    }
}

/// Rates, bias and skip, and a table behind them.
fn coefs(gpu: &Gpu, job: &Job, table: &[u32]) -> Tensor {
    let device = job.x.device();
    let len = (job.d_state + 2) * job.d_inner + table.len();
    let mut coefs = Tensor::uninit(device, &[len]);
    let words = (!table.is_empty()).then(|| Tensor::from_u32(device, table));
    let table_or_any = words.as_ref().unwrap_or(&job.skip);
    let mut args = bind([&job.a_log, job.bias_or_any(), &job.skip, table_or_any], [&mut coefs]);
    let mut params = [Word(0); 8];
    params[6] = table.len().into();
    gpu.launch(&COEFS, Work::each(len), &consts(gpu, job, false), &mut args, &params);
    coefs
}

/// `held`: what CUDA is to keep.
fn launch_forward(
    gpu: &Gpu,
    job: &Job,
    (coefs, state, y): (&Tensor, &mut Tensor, &mut Tensor),
    held: Option<&mut Tensor>,
    (work, params): (Work, &[Word]),
) {
    let consts = consts(gpu, job, held.is_some());
    let ins = [&job.x, &job.delta, coefs, &job.b, &job.c, job.gate_or_x()];
    let mut args = bind(ins, [y, state]);
    match held {
        Some(held) => args.push(Arg::Out(held)),
        None if gpu.caps().warps => args.push(Arg::In(&job.x)),
        None => {}
    }
    gpu.launch(&FORWARD, work, &consts, &mut args, params);
}

/// As `forward`.
pub(super) fn forward_gpu(
    gpu: &Gpu,
    job: &Job,
    exit: &mut [&mut Tensor],
    keeps: bool,
) -> (Tensor, Option<Kept>) {
    let device = job.x.device();
    let mut y = Tensor::activation(device, job.x.shape());
    if job.x.n_elem() == 0 {
        return (y, None);
    }
    let plan = Plan::new(gpu, job);
    let is_small = plan.n_subs * job.d_state <= N_KEPT * job.segments.n_tok();
    if keeps && is_small && gpu.caps().warps {
        let kept = plan.forward_kept(exit, &mut y);
        return (y, Some(kept));
    }
    plan.forward(exit, &mut y, None);
    (y, None)
}

/// As `step`: one launch for each sequence, whose state is a tensor of its own and changes where it
/// is.
pub(super) fn step_gpu(gpu: &Gpu, job: &Job, states: &mut [&mut Tensor]) -> Tensor {
    own(states);
    if gpu.caps().warps {
        return step_cuda(gpu, job, states);
    }
    let mut y = Tensor::activation(job.x.device(), job.x.shape());
    let coefs = coefs(gpu, job, &[]);
    for (segment, state) in job.segments.iter().zip(states) {
        let mut params = [Word(0); 8];
        params[2] = segment.start.into();
        params[3] = segment.n_tok.into();
        params[4] = job.segments.n_tok().into();
        params[7] = (READ | WRITE).into();
        let work = group_work(gpu, job, 1);
        launch_forward(gpu, job, (&coefs, state, &mut y), None, (work, &params));
    }
    y
}

/// The same by a kernel with a thread for every few states: what little there is to do is spread
/// out.
fn step_cuda(gpu: &Gpu, job: &Job, states: &mut [&mut Tensor]) -> Tensor {
    let consts = consts(gpu, job, false);
    let rates = job.a_log.derived(Derivation::Rates, |a_log| {
        let mut rates = Tensor::uninit(a_log.device(), &[job.d_state, job.d_inner]);
        let mut args = bind([a_log], [&mut rates]);
        gpu.launch(&RATES, Work::each(a_log.n_elem()), &consts, &mut args, &[Word(0); 8]);
        rates
    });
    let mut y = Tensor::activation(job.x.device(), job.x.shape());
    for (segment, state) in job.segments.iter().zip(states) {
        let mut params = [Word(0); 8];
        params[2] = segment.start.into();
        params[3] = segment.n_tok.into();
        let (gate, bias) = (job.gate_or_x(), job.bias_or_any());
        let ins = [&job.x, &job.delta, &rates, &job.b, &job.c, gate, bias, &job.skip];
        let mut args = bind(ins, [state, &mut y]);
        let work = Work::groups(job.d_inner.div_ceil(STEP_CHANNELS), STEP_THREADS).early();
        gpu.launch(&STEP, work, &consts, &mut args, &params);
    }
    y
}

/// What the backward pass writes, but for the sums at its end.
struct Back {
    dx: Tensor,
    ddelta: Tensor,
    dgate: Tensor,
    /// (groups of channels, n_tok, 2, d_state): db, then dc.
    shared: Tensor,
    /// (parts, 2, d_inner): dskip and ddelta_bias.
    parts: Tensor,
}

impl Back {
    fn new(job: &Job, n_parts: usize, dgate_shape: &[usize]) -> Back {
        let (device, groups) = (job.x.device(), job.d_inner.div_ceil(GROUP));
        Back {
            dx: Tensor::uninit_as(&job.x, job.x.shape()),
            ddelta: Tensor::uninit_as(&job.delta, job.x.shape()),
            dgate: Tensor::uninit_as(job.gate_or_x(), dgate_shape),
            shared: Tensor::uninit(device, &[groups, job.segments.n_tok(), 2, job.d_state]),
            parts: Tensor::uninit(device, &[n_parts, 2, job.d_inner]),
        }
    }
}

/// As `backward`.
pub(super) fn backward_gpu(gpu: &Gpu, job: &Job, dy: &Tensor) -> Vec<Option<Tensor>> {
    let device = job.x.device();
    if job.x.n_elem() == 0 {
        let inputs = [&job.x, &job.delta, &job.a_log, &job.b, &job.c, &job.skip];
        let inputs = inputs.into_iter().chain(&job.delta_bias).chain(&job.gate);
        let zeros = |input: &Tensor| match input.n_elem() {
            0 => Tensor::uninit_as(input, input.shape()),
            _ => Tensor::zeros(device, input.shape()),
        };
        return inputs.map(|input| Some(zeros(input))).collect();
    }
    let plan = Plan::new(gpu, job);
    let (back, ends) = match &job.kept {
        Some(kept) => back_cuda(&plan, dy, kept),
        None if gpu.caps().warps => {
            let mut y = Tensor::activation(device, job.x.shape());
            let kept = plan.forward_kept(&mut [], &mut y);
            drop(y);
            back_cuda(&plan, dy, &kept)
        }
        None => back_wgpu(&plan, dy),
    };
    let n_tok = job.segments.n_tok();
    let mut db = Tensor::uninit_as(&job.b, &[n_tok, job.d_state]);
    let mut dc = Tensor::uninit_as(&job.c, &[n_tok, job.d_state]);
    let args = bind([&back.shared], [&mut db, &mut dc]);
    plan.launch(&SUM_SHARED, Work::each(n_tok * 2 * job.d_state), args, (0, 0));
    let mut da_log = Tensor::uninit(device, job.a_log.shape());
    let [mut dskip, mut dbias] = [(); 2].map(|()| Tensor::uninit(device, &[job.d_inner]));
    let args = bind([&ends, &back.parts, &plan.coefs], [&mut da_log, &mut dskip, &mut dbias]);
    let work = Work::grid([((job.d_state + 2) * job.d_inner).div_ceil(64), 1, 1], 64);
    plan.launch(&SUMS, work, args, (back.parts.shape()[0], 0));
    job.list([back.dx, back.ddelta, da_log, db, dc, dskip], dbias, Some(back.dgate))
}

/// The states before every sub-chunk, and behind them room for those of every piece; and the sums
/// of the steps of pieces.
fn make_states(plan: &Plan) -> (Tensor, Option<Tensor>) {
    let Plan { job, coefs, .. } = plan;
    let (starts, totals) = plan.starts();
    let mut held = plan.states(plan.n_subs + plan.n_pieces);
    let starts_or_x = starts.as_ref().unwrap_or(&job.x);
    let args = bind([&job.x, &job.delta, coefs, &job.b, starts_or_x], [&mut held]);
    plan.launch(&STATES, plan.work(), args, (0, if starts.is_some() { READ } else { 0 }));
    (held, totals)
}

/// The gradient behind each piece, in the last `n_pieces` states of `held`. Returns the flag `READ`
/// where it is not zero.
fn carry_back(plan: &Plan, dy: &Tensor, totals: Option<&Tensor>, held: &mut Tensor) -> u32 {
    let Plan { job, coefs, .. } = plan;
    let Some(totals) = totals else { return 0 };
    let args = bind([dy, &job.delta, coefs, &job.c, job.gate_or_x()], [held]);
    plan.launch(&ENDS_BACK, plan.work(), args, (0, 0));
    let args = vec![Arg::In(totals), Arg::Out(held), Arg::In(coefs)];
    plan.launch(&CARRY_BACK, plan.carry_work(), args, (0, 0));
    READ
}

/// Returns also the part of each piece of the gradient by the rates.
fn back_cuda(plan: &Plan, dy: &Tensor, kept: &Kept) -> (Back, Tensor) {
    let Plan { job, coefs, .. } = plan;
    let mut ends = plan.states(plan.n_pieces);
    let flags = carry_back(plan, dy, kept.totals.as_ref(), &mut ends);
    let dgate_shape = if job.gate.is_some() { job.x.shape() } else { &[4] };
    let mut back = Back::new(job, plan.n_pieces, dgate_shape);
    let ins = [&job.x, &job.delta, coefs, &job.b, &job.c, job.gate_or_x(), dy, &kept.states];
    let Back { dx, ddelta, dgate, shared, parts } = &mut back;
    let args = bind(ins, [&mut ends, dx, ddelta, dgate, shared, parts]);
    plan.launch(&BACKWARD_ALL, plan.work(), args, (0, flags));
    (back, ends)
}

fn back_wgpu(plan: &Plan, dy: &Tensor) -> (Back, Tensor) {
    let Plan { job, coefs, .. } = plan;
    let (mut held, totals) = make_states(plan);
    let flags = carry_back(plan, dy, totals.as_ref(), &mut held);
    let n_parts = job.segments.n_tok().div_ceil(N_ROWS);
    let mut back = Back::new(job, n_parts, job.x.shape());
    let gate = job.gate_or_x();
    let elementwise = |kernel: &'static Kernel, back: &mut Back| {
        let ins = [&job.x, &job.delta, coefs, gate, dy];
        let args = bind(ins, [&mut back.ddelta, &mut back.dx, &mut back.dgate]);
        plan.launch(kernel, Work::each(job.x.n_elem()), args, (n_parts, flags));
    };
    elementwise(&OPEN, &mut back);
    let Back { dx, ddelta, dgate, shared, .. } = &mut back;
    let mut args: Vec<Arg> = [ddelta, dx].map(Arg::Out).into();
    args.extend([coefs, &job.b, &job.c].map(Arg::In));
    args.extend([dgate, &mut held, shared].map(Arg::Out));
    plan.launch(&BACKWARD, plan.work(), args, (n_parts, flags));
    elementwise(&FINISH, &mut back);
    let args = bind([&job.x, gate, dy, &back.ddelta], [&mut back.parts]);
    let work = Work::grid([job.d_inner.div_ceil(GROUP), n_parts, 1], GROUP);
    plan.launch(&PART, work, args, (n_parts, flags));
    (back, held)
}
