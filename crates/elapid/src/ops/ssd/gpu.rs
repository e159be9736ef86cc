//! `ssd` on a graphics processor: the same chunks, all heads and chunks at once.
//!
//! | kernel       | a group takes                  | makes                                  |
//! |--------------|--------------------------------|----------------------------------------|
//! | `ssd_steps`  | a chunk of a head              | `steps`                                |
//! | `ssd_states` | a tile of a head, along a run  | states before chunks, or the gradients |
//! |              |                                | by those after them                    |
//! | `ssd_scores` | a chunk of a group             | `scores`                               |
//! | `ssd_output` | 64 columns of a head, a chunk  | y                                      |
//! | `ssd_dx`     | 64 columns of a head, a chunk  | dx, what leaves the chunk              |
//! | `ssd_inside` | a few heads, a chunk           | dscores, what passes inside the chunk  |
//! | `ssd_dbc`    | 64 columns of a group, a chunk | dc and what enters the chunk, then db  |
//! | `ssd_finish` | a chunk of a head              | ddelta, sums of the chunk              |
//! | `ssd_sums`   | a head                         | gradients by delta_bias, a_log, skip   |
//! | `ssd_step`   | 16 columns of a head           | y and the state after a few tokens     |
//!
//! Only `ssd_states` walks from chunk to chunk. Sums over heads and over chunks have a fixed order.
//!
//! | name     | shape                             |                                             |
//! |----------|-----------------------------------|---------------------------------------------|
//! | `steps`  | (6, n_head, n_tok),               | delta, slope, cum, cum_low, since, until;   |
//! |          | (n_head, 2)                       | a, skip                                     |
//! | `table`  | (n_chunk, 4), (runs, 2)           | first row, rows, flags; first chunk, chunks |
//! | `states` | (chunks, n_head, d_state, d_head) | in the dtype of activations                 |
//! | `terms`  | (series, n_head, n_tok),          | ddelta, ddecay, dskip inside; entering by   |
//! |          | (tiles, n_chunk, n_head)          | tile of d_state, leaving by tile of d_head; |
//! |          |                                   | h . dh by tile                              |
//!
//! Flags: 1 where there is a state before the chunk, 2 where there is a gradient after it.
//!
//! Where the states of all chunks are too large they are made for one stretch of chunks after the
//! other. A run is what a segment has in a stretch; its `carry` comes from the stretch before.

use super::*;
use crate::gpu::{Arg, Const, Gpu, Kernel, Word, Work};

static STEPS: Kernel = Kernel {
    entry: "ssd_steps",
    wgsl: concat!(include_str!("ssd.wgsl"), include_str!("ssd_backward.wgsl")),
    cuda: concat!(include_str!("ssd.cu"), include_str!("ssd_backward.cu")),
};
static STATES: Kernel = Kernel { entry: "ssd_states", ..STEPS };
static SCORES: Kernel = Kernel { entry: "ssd_scores", ..STEPS };
static OUTPUT: Kernel = Kernel { entry: "ssd_output", ..STEPS };
static DX: Kernel = Kernel { entry: "ssd_dx", ..STEPS };
static INSIDE: Kernel = Kernel { entry: "ssd_inside", ..STEPS };
static DBC: Kernel = Kernel { entry: "ssd_dbc", ..STEPS };
static FINISH: Kernel = Kernel { entry: "ssd_finish", ..STEPS };
static SUMS: Kernel = Kernel { entry: "ssd_sums", ..STEPS };
static STEP: Kernel = Kernel { entry: "ssd_step", ..STEPS };

/// Side of a tile of a product.
const TILE: usize = 64;
/// Columns of a state that a group of `ssd_step` takes.
const STEP_COLUMNS: usize = 16;
/// Threads that make a tile.
const THREADS: usize = 256;
/// Most bytes of the states of a stretch.
const STATE_BYTES_MAX: usize = 1 << 29;
/// Most chunks of a stretch: groups along an axis.
const N_CHUNK_MAX: usize = 65_535;

/// Groups that `ssd_inside` should have, so that no processor waits.
const N_GROUP_MIN: usize = 512;
/// Most heads that it takes one after the other: fewer parts of dscores to add later.
const N_HEADS_MAX: usize = 8;

/// Which way through time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// States, from the first chunk.
    Forward,
    /// Gradients by states, from the last chunk.
    Backward,
}

/// Where states come from when a run begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Zero,
    Given,
}

/// What a segment has in a stretch.
struct Run {
    segment: usize,
    is_first: bool,
    is_last: bool,
}

/// Chunks whose states are there at the same time.
struct Stretch {
    chunks: Range<usize>,
    runs: Vec<Run>,
    /// In `table`.
    runs_at: usize,
}

/// How a batch is cut.
struct Plan {
    dims: SsdDims,
    n_tok: usize,
    n_chunk: usize,
    n_heads: usize,
    stretches: Vec<Stretch>,
    table: Tensor,
}

impl Plan {
    fn new(inputs: &Inputs, segments: &Segments, has_initial: bool, n_chunk_max: usize) -> Plan {
        let dims = inputs.dims;
        let mut table: Vec<u32> = Vec::new();
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut runs: Vec<u32> = Vec::new();
        for (segment_idx, segment) in segments.iter().enumerate() {
            let n_chunk = chunks(segment.n_tok).len();
            for (idx, chunk) in chunks(segment.n_tok).enumerate() {
                let has_before = idx > 0 || has_initial;
                let has_after = idx + 1 < n_chunk;
                let at = table.len() / 4;
                let flags = u32::from(has_before) + 2 * u32::from(has_after);
                table.extend([(segment.start + chunk.start) as u32, chunk.len() as u32, flags, 0]);
                if stretches.last().is_none_or(|last| last.chunks.len() == n_chunk_max) {
                    stretches.push(Stretch { chunks: at..at, runs: vec![], runs_at: runs.len() });
                }
                let Some(stretch) = stretches.last_mut() else { continue };
                stretch.chunks.end += 1;
                if idx == 0 || stretch.runs.is_empty() {
                    let (is_first, is_last) = (idx == 0, false);
                    stretch.runs.push(Run { segment: segment_idx, is_first, is_last });
                    runs.extend([at as u32, 0]);
                }
                if let (Some(run), Some(count)) = (stretch.runs.last_mut(), runs.last_mut()) {
                    *count += 1;
                    run.is_last = !has_after;
                }
            }
        }
        let n_chunk = table.len() / 4;
        stretches.iter_mut().for_each(|stretch| stretch.runs_at += table.len());
        table.extend(runs);
        let n_heads = (n_chunk * dims.n_head / N_GROUP_MIN).clamp(1, N_HEADS_MAX);
        Plan {
            dims,
            n_tok: segments.n_tok(),
            n_chunk,
            n_heads: divisor_at_most(dims.heads_per_group(), n_heads),
            stretches,
            table: Tensor::from_u32(inputs.xbc.device(), &table),
        }
    }

    fn consts(&self, pass: Pass, before: Before) -> [Const; 8] {
        consts(&self.dims, self.n_heads, pass, before, self.table.device())
    }

    fn params(&self, stretch: &Stretch) -> [Word; 6] {
        let counts = [self.n_tok, self.n_chunk, stretch.chunks.start, stretch.runs_at];
        params(&self.dims, counts)
    }

    /// Whether some stretch begins within a segment.
    fn is_cut(&self) -> bool {
        self.stretches.iter().any(|stretch| stretch.runs.iter().any(|run| !run.is_first))
    }
}

/// Of all entries. `MMA`: whether CUDA multiplies in bf16.
fn consts(
    dims: &SsdDims,
    n_heads: usize,
    pass: Pass,
    before: Before,
    device: &Device,
) -> [Const; 8] {
    [
        ("N_HEAD", dims.n_head),
        ("D_HEAD", dims.d_head),
        ("N_GROUP", dims.n_group),
        ("D_STATE", dims.d_state),
        ("N_PER", n_heads),
        ("PASS", usize::from(pass == Pass::Backward)),
        ("HAS_BEFORE", usize::from(before == Before::Given)),
        ("MMA", usize::from(device.activation_dtype() == DType::BF16)),
    ]
}

/// Of all entries: n_tok, n_chunk, first, runs_at, and limits. A kernel may not be given infinity.
fn params(dims: &SsdDims, counts: [usize; 4]) -> [Word; 6] {
    let [n_tok, n_chunk, first, runs_at] = counts.map(Word::from);
    let limits = [dims.delta_min, dims.delta_max.min(f32::MAX)].map(Word::from);
    [n_tok, n_chunk, first, runs_at, limits[0], limits[1]]
}

/// Chunks whose states fit into one argument of a kernel.
fn n_chunk_max(gpu: &Gpu, dims: &SsdDims) -> usize {
    let n_bytes = dims.n_head * dims.n_state() * 4;
    (gpu.binding_bytes_max().min(STATE_BYTES_MAX) / n_bytes.max(1)).clamp(1, N_CHUNK_MAX)
}

pub(super) fn forward(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    states: Option<&mut [&mut Tensor]>,
) -> Tensor {
    let is_short = segments.iter().all(|segment| segment.n_tok < RECURRENT);
    match states {
        Some(states) if is_short => recurrent(gpu, inputs, segments, states),
        states => chunked(gpu, inputs, segments, states, n_chunk_max(gpu, &inputs.dims)),
    }
}

/// One token after the other, in the storage of the states.
fn recurrent(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    states: &mut [&mut Tensor],
) -> Tensor {
    let dims = inputs.dims;
    let device = inputs.xbc.device();
    let mut y = Tensor::activation(device, &[segments.n_tok(), dims.d_inner()]);
    let consts = consts(&dims, 1, Pass::Forward, Before::Given, device);
    let work = Work::grid([dims.d_head.div_ceil(STEP_COLUMNS), dims.n_head, 1], THREADS);
    for (segment, state) in segments.iter().zip(states) {
        let mut args = [
            Arg::In(&inputs.xbc),
            Arg::In(&inputs.delta),
            Arg::In(&inputs.delta_bias),
            Arg::In(&inputs.a_log),
            Arg::In(&inputs.skip),
            Arg::Out(state),
            Arg::Out(&mut y),
        ];
        let params = params(&dims, [segment.n_tok, 0, segment.start, 0]);
        gpu.launch(&STEP, work, &consts, &mut args, &params);
    }
    y
}

/// By products over chunks, at most `n_chunk_max` at the same time.
pub(super) fn chunked(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    mut states: Option<&mut [&mut Tensor]>,
    n_chunk_max: usize,
) -> Tensor {
    let mut y = Tensor::activation(inputs.xbc.device(), &[segments.n_tok(), inputs.dims.d_inner()]);
    let plan = Plan::new(inputs, segments, states.is_some(), n_chunk_max);
    let op = Op { gpu, inputs, plan: &plan, steps: steps(gpu, inputs, &plan) };
    let mut carry = None;
    for stretch in &plan.stretches {
        let given: Option<Vec<Tensor>> = states
            .as_deref()
            .map(|states| stretch.runs.iter().map(|run| (*states[run.segment]).clone()).collect());
        let before = before_runs(&plan, stretch, given, carry.as_ref());
        let (made, after) = op.states(stretch, before);
        op.output(stretch, &op.scores(stretch), &made, &mut y);
        for (idx, run) in stretch.runs.iter().enumerate() {
            match &mut states {
                Some(states) if run.is_last => *states[run.segment] = of_run(&plan, &after, idx),
                _ => {}
            }
        }
        let cut = stretch.runs.iter().position(|run| !run.is_last);
        carry = cut.map(|idx| of_run(&plan, &after, idx));
    }
    y
}

/// Inverts `forward`: gradients by xbc, delta, delta_bias, a_log and skip.
pub(super) fn backward(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Tensor]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    backward_by(gpu, inputs, segments, (initial, dy), n_chunk_max(gpu, &inputs.dims))
}

/// The same with at most `n_chunk_max` chunks at the same time.
pub(super) fn backward_by(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    (initial, dy): (Option<&[Tensor]>, &Tensor),
    n_chunk_max: usize,
) -> Vec<Option<Tensor>> {
    let plan = Plan::new(inputs, segments, initial.is_some(), n_chunk_max);
    let op = Op { gpu, inputs, plan: &plan, steps: steps(gpu, inputs, &plan) };
    let given = |stretch: &Stretch| -> Option<Vec<Tensor>> {
        initial.map(|list| stretch.runs.iter().map(|run| list[run.segment].clone()).collect())
    };
    // What comes into each stretch from the one before.
    let mut carries: Vec<Option<Tensor>> = vec![None];
    if plan.is_cut() {
        for stretch in &plan.stretches[..plan.stretches.len() - 1] {
            let carry = carries.last().and_then(Option::as_ref);
            let (_, after) = op.states(stretch, before_runs(&plan, stretch, given(stretch), carry));
            carries.push(Some(of_run(&plan, &after, stretch.runs.len() - 1)));
        }
    }
    let mut dxbc = Tensor::uninit_as(&inputs.xbc, inputs.xbc.shape());
    let mut terms = Tensor::uninit(inputs.xbc.device(), &[op.n_terms()]);
    let mut dcarry = None;
    for (idx, stretch) in plan.stretches.iter().enumerate().rev() {
        let carry = carries.get(idx).and_then(Option::as_ref);
        let (h, _) = op.states(stretch, before_runs(&plan, stretch, given(stretch), carry));
        let after = after_runs(&plan, stretch, dcarry.as_ref());
        let (dh, before) = op.dstates(stretch, after, (dy, &h), &mut terms);
        let cut = stretch.runs.iter().position(|run| !run.is_first);
        dcarry = cut.map(|idx| of_run(&plan, &before, idx));
        let scores = op.scores(stretch);
        op.dx(stretch, (dy, &scores, &dh), &mut dxbc, &mut terms);
        let dscores = op.inside(stretch, (dy, &scores), &mut terms);
        let (c, b) = ((dy, &h, &dscores), (&inputs.xbc, &dh, &dscores));
        op.dbc(stretch, Pass::Forward, c, &mut dxbc, &mut terms);
        op.dbc(stretch, Pass::Backward, b, &mut dxbc, &mut terms);
    }
    let [draw, ddelta_bias, da_log, dskip] = op.finish(&terms);
    vec![Some(dxbc), Some(draw), Some(ddelta_bias), Some(da_log), Some(dskip)]
}

/// What comes into the runs of a stretch, if anything does: given states, and the carry of the
/// stretch before.
fn before_runs(
    plan: &Plan,
    stretch: &Stretch,
    given: Option<Vec<Tensor>>,
    carry: Option<&Tensor>,
) -> Option<Tensor> {
    let continues = stretch.runs.first().is_some_and(|run| !run.is_first);
    if given.is_none() && !continues {
        return None;
    }
    let mut parts = given.unwrap_or_else(|| zero_states(plan, stretch.runs.len()));
    if let (true, Some(carry)) = (continues, carry) {
        parts[0] = carry.clone();
    }
    Some(Tensor::stack(&parts))
}

/// The same on the way back.
fn after_runs(plan: &Plan, stretch: &Stretch, dcarry: Option<&Tensor>) -> Option<Tensor> {
    let continues = stretch.runs.last().is_some_and(|run| !run.is_last);
    let dcarry = dcarry.filter(|_| continues)?;
    let mut parts = zero_states(plan, stretch.runs.len() - 1);
    parts.push(dcarry.clone());
    Some(Tensor::stack(&parts))
}

fn zero_states(plan: &Plan, n: usize) -> Vec<Tensor> {
    let SsdDims { n_head, d_state, d_head, .. } = plan.dims;
    vec![Tensor::zeros(plan.table.device(), &[n_head, d_state, d_head]); n]
}

/// The state of one run, with storage of its own.
fn of_run(plan: &Plan, carry: &Tensor, idx: usize) -> Tensor {
    let n_head = plan.dims.n_head;
    carry.rows(idx * n_head..(idx + 1) * n_head).copied()
}

/// Step sizes and decays of all heads and tokens.
fn steps(gpu: &Gpu, inputs: &Inputs, plan: &Plan) -> Tensor {
    let n_head = plan.dims.n_head;
    let n_elem = (6 * plan.n_tok + 2) * n_head;
    let mut steps = Tensor::uninit(inputs.xbc.device(), &[n_elem]);
    let mut args = [
        Arg::In(&inputs.delta),
        Arg::In(&inputs.delta_bias),
        Arg::In(&plan.table),
        Arg::In(&inputs.a_log),
        Arg::In(&inputs.skip),
        Arg::Out(&mut steps),
    ];
    for chunks in pieces(plan.n_chunk) {
        let work = Work::grid([n_head, chunks.len(), 1], CHUNK);
        let stretch = Stretch { chunks, runs: vec![], runs_at: 0 };
        let consts = plan.consts(Pass::Forward, Before::Zero);
        gpu.launch(&STEPS, work, &consts, &mut args, &plan.params(&stretch));
    }
    steps
}

/// All chunks, in ranges that a launch can take.
fn pieces(n_chunk: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_chunk).step_by(N_CHUNK_MAX).map(move |at| at..n_chunk.min(at + N_CHUNK_MAX))
}

/// A batch on its way through the kernels.
struct Op<'a> {
    gpu: &'a Gpu,
    inputs: &'a Inputs,
    plan: &'a Plan,
    steps: Tensor,
}

impl Op<'_> {
    fn tiles(&self) -> (usize, usize) {
        let dims = self.plan.dims;
        (dims.d_state.div_ceil(TILE), dims.d_head.div_ceil(TILE))
    }

    /// Numbers in `terms`.
    fn n_terms(&self) -> usize {
        let (n_tiles, p_tiles) = self.tiles();
        let per_head = (3 + n_tiles + p_tiles) * self.plan.n_tok;
        (per_head + n_tiles * p_tiles * self.plan.n_chunk) * self.plan.dims.n_head
    }

    /// Starts a kernel on a stretch, with xbc, steps and table before `args`.
    fn launch(
        &self,
        kernel: &'static Kernel,
        stretch: &Stretch,
        groups: [usize; 3],
        pass: Pass,
        args: Vec<Arg>,
    ) {
        let mut all =
            vec![Arg::In(&self.inputs.xbc), Arg::In(&self.steps), Arg::In(&self.plan.table)];
        all.extend(args);
        let consts = self.plan.consts(pass, Before::Zero);
        let params = self.plan.params(stretch);
        self.gpu.launch(kernel, Work::grid(groups, THREADS), &consts, &mut all, &params);
    }

    /// The states before the chunks of a stretch, and after its runs.
    fn states(&self, stretch: &Stretch, before: Option<Tensor>) -> (Tensor, Tensor) {
        // A kernel wants something to bind.
        let mut none = Tensor::uninit(self.inputs.xbc.device(), &[1]);
        let v = (&self.inputs.xbc, &self.steps);
        self.states_by(Pass::Forward, stretch, before, v, &mut none)
    }

    /// Gradients by the states after the chunks of a stretch, and before its runs.
    fn dstates(
        &self,
        stretch: &Stretch,
        after: Option<Tensor>,
        (dy, h): (&Tensor, &Tensor),
        terms: &mut Tensor,
    ) -> (Tensor, Tensor) {
        self.states_by(Pass::Backward, stretch, after, (dy, h), terms)
    }

    fn states_by(
        &self,
        pass: Pass,
        stretch: &Stretch,
        before: Option<Tensor>,
        (v, h): (&Tensor, &Tensor),
        terms: &mut Tensor,
    ) -> (Tensor, Tensor) {
        let SsdDims { n_head, d_state, d_head, .. } = self.plan.dims;
        let device = self.inputs.xbc.device();
        let kind = if before.is_some() { Before::Given } else { Before::Zero };
        let n_run = stretch.runs.len();
        let shape = [n_run * n_head, d_state, d_head];
        let mut carry = before.unwrap_or_else(|| Tensor::uninit(device, &shape));
        let n_chunk = stretch.chunks.len();
        let mut states = Tensor::activation(device, &[n_chunk * n_head, d_state, d_head]);
        let mut args = [
            Arg::In(&self.inputs.xbc),
            Arg::In(&self.steps),
            Arg::In(&self.plan.table),
            Arg::In(v),
            Arg::In(h),
            Arg::Out(&mut carry),
            Arg::Out(&mut states),
            Arg::Out(terms),
        ];
        let (n_tiles, p_tiles) = self.tiles();
        let work = Work::grid([n_tiles * p_tiles, n_head, n_run], THREADS);
        let consts = self.plan.consts(pass, kind);
        self.gpu.launch(&STATES, work, &consts, &mut args, &self.plan.params(stretch));
        (states, carry)
    }

    fn scores(&self, stretch: &Stretch) -> Tensor {
        let (n_chunk, n_group) = (stretch.chunks.len(), self.plan.dims.n_group);
        let mut scores =
            Tensor::uninit(self.inputs.xbc.device(), &[n_chunk * n_group, CHUNK, CHUNK]);
        let args = vec![Arg::Out(&mut scores)];
        self.launch(&SCORES, stretch, [n_group, n_chunk, 1], Pass::Forward, args);
        scores
    }

    fn output(&self, stretch: &Stretch, scores: &Tensor, states: &Tensor, y: &mut Tensor) {
        let args = vec![Arg::In(&self.inputs.xbc), Arg::In(states), Arg::In(scores), Arg::Out(y)];
        let groups = [self.tiles().1, self.plan.dims.n_head, stretch.chunks.len()];
        self.launch(&OUTPUT, stretch, groups, Pass::Forward, args);
    }

    fn dx(
        &self,
        stretch: &Stretch,
        (dy, scores, dh): (&Tensor, &Tensor, &Tensor),
        dxbc: &mut Tensor,
        terms: &mut Tensor,
    ) {
        let args = vec![Arg::In(dy), Arg::In(dh), Arg::In(scores), Arg::Out(dxbc), Arg::Out(terms)];
        let groups = [self.tiles().1, self.plan.dims.n_head, stretch.chunks.len()];
        self.launch(&DX, stretch, groups, Pass::Backward, args);
    }

    /// dscores, still to be summed over the blocks of heads of a group.
    fn inside(
        &self,
        stretch: &Stretch,
        (dy, scores): (&Tensor, &Tensor),
        terms: &mut Tensor,
    ) -> Tensor {
        let n_block = self.plan.dims.n_head / self.plan.n_heads;
        let n_chunk = stretch.chunks.len();
        let mut dscores =
            Tensor::uninit(self.inputs.xbc.device(), &[n_chunk * n_block, CHUNK, CHUNK]);
        let args = vec![Arg::In(dy), Arg::In(scores), Arg::Out(&mut dscores), Arg::Out(terms)];
        self.launch(&INSIDE, stretch, [n_block, 1, n_chunk], Pass::Backward, args);
        dscores
    }

    /// Columns c of `dxbc` by the states, or b by their gradients.
    fn dbc(
        &self,
        stretch: &Stretch,
        pass: Pass,
        (v, states, dscores): (&Tensor, &Tensor, &Tensor),
        dxbc: &mut Tensor,
        terms: &mut Tensor,
    ) {
        let args =
            vec![Arg::In(v), Arg::In(states), Arg::In(dscores), Arg::Out(dxbc), Arg::Out(terms)];
        let groups = [self.tiles().0, self.plan.dims.n_group, stretch.chunks.len()];
        self.launch(&DBC, stretch, groups, pass, args);
    }

    /// Gradients by delta, delta_bias, a_log and skip.
    fn finish(&self, terms: &Tensor) -> [Tensor; 4] {
        let (n_head, n_chunk) = (self.plan.dims.n_head, self.plan.n_chunk);
        let device = self.inputs.xbc.device();
        let consts = self.plan.consts(Pass::Forward, Before::Zero);
        let mut draw = Tensor::uninit_as(&self.inputs.delta, self.inputs.delta.shape());
        let mut sums = Tensor::uninit(device, &[3 * n_head, n_chunk]);
        for chunks in pieces(n_chunk) {
            let work = Work::grid([n_head, chunks.len(), 1], CHUNK);
            let stretch = Stretch { chunks, runs: vec![], runs_at: 0 };
            let mut args = [
                Arg::In(terms),
                Arg::In(&self.steps),
                Arg::In(&self.plan.table),
                Arg::Out(&mut draw),
                Arg::Out(&mut sums),
            ];
            let params = self.plan.params(&stretch);
            self.gpu.launch(&FINISH, work, &consts, &mut args, &params);
        }
        let mut totals = [(); 3].map(|()| Tensor::uninit(device, &[n_head]));
        let [ddelta_bias, da_log, dskip] = &mut totals;
        let mut args = [Arg::In(&sums), Arg::Out(ddelta_bias), Arg::Out(da_log), Arg::Out(dskip)];
        let params = self.plan.params(&Stretch { chunks: 0..n_chunk, runs: vec![], runs_at: 0 });
        let work = Work::grid([n_head, 1, 1], THREADS);
        self.gpu.launch(&SUMS, work, &consts, &mut args, &params);
        let [ddelta_bias, da_log, dskip] = totals;
        [draw, ddelta_bias, da_log, dskip]
    }
}
