//! `ssd` on a GPU: the same chunks, all heads and chunks at once.
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
//! Where heads are 64 wide, `d_state` is 64 or 128 and all is bf16, CUDA has others (`cores.cu`):
//!
//! | kernel          | a group takes               | in place of                              |
//! |-----------------|-----------------------------|------------------------------------------|
//! | `ssd_walk`      | a head, along a run         | `ssd_states`                             |
//! | `ssd_outputs`   | a few heads, a chunk        | `ssd_scores`, `ssd_output`               |
//! | `ssd_gradients` | all heads of a group, chunk | the rest down to `ssd_dbc`               |
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
//! |          |                                   | h . dh by tile; of Mamba-3 also (n_head,    |
//! |          |                                   | n_tok): what tokens are to themselves       |
//!
//! Mamba-3 uses the same kernels, but for `ssd_steps`, `ssd_finish`, `ssd_sums` and `ssd_step`:
//! rows v, k and q of all heads in `xbc`, a group for each head, the weights for later tokens and
//! for the own in place of delta and slope, a row for each rank of a token in place of a token.
//!
//! Flags: 1 where there is a state before the chunk, 2 where there is a gradient after it.
//!
//! Where the states of all chunks are too large they are made for one stretch of chunks after the
//! other. A run is what a segment has in a stretch; its `carry` comes from the stretch before.

pub mod plan;

use super::*;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Word, Work, bind};
use plan::*;

static STEPS: Kernel = Kernel {
    entry: "ssd_steps",
    wgsl: concat!(include_str!("ssd.wgsl"), include_str!("ssd_backward.wgsl")),
    cuda: concat!(
        include_str!("ssd.cu"),
        include_str!("ssd_backward.cu"),
        include_str!("cores.cu"),
        include_str!("cores_backward.cu"),
    ),
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
static WALK: Kernel = Kernel { entry: "ssd_walk", ..STEPS };
static OUTPUTS: Kernel = Kernel { entry: "ssd_outputs", ..STEPS };
static GRADIENTS: Kernel = Kernel { entry: "ssd_gradients", ..STEPS };

/// Side of a tile of a product.
const TILE: usize = 64;
/// Columns of a state that a group of `ssd_step` takes.
const STEP_COLUMNS: usize = 16;
/// Threads that make a tile.
const THREADS: usize = 256;

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
    let consts = consts(&dims, (1, Form::Mamba2), Pass::Forward, Before::Given, device);
    let work = Work::grid([dims.d_head.div_ceil(STEP_COLUMNS), dims.n_head, 1], THREADS);
    for (segment, state) in segments.iter().zip(states) {
        let mut args = bind(
            [&inputs.xbc, &inputs.delta, &inputs.delta_bias, &inputs.a_log, &inputs.skip],
            [state, &mut y],
        );
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
    states: Option<&mut [&mut Tensor]>,
    n_chunk_max: usize,
) -> Tensor {
    let mut y = Tensor::activation(inputs.xbc.device(), &[segments.n_tok(), inputs.dims.d_inner()]);
    let given: Option<Vec<Tensor>> =
        states.as_deref().map(|states| states.iter().map(|state| (**state).clone()).collect());
    let core = core(gpu, inputs, segments, given.is_some(), None, n_chunk_max);
    let after = core.forward(given.as_deref(), &mut y);
    for (state, after) in states.into_iter().flatten().zip(after) {
        **state = after;
    }
    y
}

fn core<'a>(
    gpu: &'a Gpu,
    inputs: &'a Inputs,
    segments: &Segments,
    has_initial: bool,
    dy: Option<&Tensor>,
    n_chunk_max: usize,
) -> Core<'a> {
    let cut = Cut { segments, len: CHUNK, has_initial, n_chunk_max };
    let plan = Plan::new((inputs.dims, Form::Mamba2), &inputs.xbc, cut, dy);
    let steps = steps(gpu, inputs, &plan);
    Core { gpu, xbc: &inputs.xbc, plan, steps }
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
    let core = core(gpu, inputs, segments, initial.is_some(), Some(dy), n_chunk_max);
    let Found { dxbc, terms, .. } = core.backward(initial, dy);
    let [draw, ddelta_bias, da_log, dskip] = finish(&core, &inputs.delta, &terms);
    vec![Some(dxbc), Some(draw), Some(ddelta_bias), Some(da_log), Some(dskip)]
}

/// Gradients by delta, delta_bias, a_log and skip.
fn finish(core: &Core, delta: &Tensor, terms: &Tensor) -> [Tensor; 4] {
    let (n_head, n_chunk) = (core.plan.dims.n_head, core.plan.n_chunk);
    let device = core.xbc.device();
    let consts = core.plan.consts(Pass::Forward, Before::Zero);
    let mut draw = Tensor::uninit_as(delta, delta.shape());
    let mut sums = Tensor::uninit(device, &[3 * n_head, n_chunk]);
    for chunks in pieces(n_chunk) {
        let work = Work::grid([n_head, chunks.len(), 1], CHUNK);
        let mut args = bind([terms, &core.steps, &core.plan.table], [&mut draw, &mut sums]);
        let params = core.plan.params(chunks.start, 0);
        core.gpu.launch(&FINISH, work, &consts, &mut args, &params);
    }
    let mut totals = [(); 3].map(|()| Tensor::uninit(device, &[n_head]));
    let [ddelta_bias, da_log, dskip] = &mut totals;
    let mut args = bind([&sums], [ddelta_bias, da_log, dskip]);
    let params = core.plan.params(0, 0);
    let work = Work::grid([n_head, 1, 1], THREADS);
    core.gpu.launch(&SUMS, work, &consts, &mut args, &params);
    let [ddelta_bias, da_log, dskip] = totals;
    [draw, ddelta_bias, da_log, dskip]
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

/// The same in the backward pass.
fn after_runs(plan: &Plan, stretch: &Stretch, dcarry: Option<&Tensor>) -> Option<Tensor> {
    let continues = stretch.runs.last().is_some_and(|run| !run.is_last);
    let dcarry = dcarry.filter(|_| continues)?;
    let mut parts = zero_states(plan, stretch.runs.len() - 1);
    parts.push(dcarry.clone());
    Some(Tensor::stack(&parts))
}

/// Of all segments those that runs of a stretch belong to.
fn of_runs(stretch: &Stretch, all: Option<&[Tensor]>) -> Option<Vec<Tensor>> {
    all.map(|all| stretch.runs.iter().map(|run| all[run.segment].clone()).collect())
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
    let mut args = bind(
        [&inputs.delta, &inputs.delta_bias, &plan.table, &inputs.a_log, &inputs.skip],
        [&mut steps],
    );
    for chunks in pieces(plan.n_chunk) {
        let work = Work::grid([n_head, chunks.len(), 1], CHUNK);
        let consts = plan.consts(Pass::Forward, Before::Zero);
        gpu.launch(&STEPS, work, &consts, &mut args, &plan.params(chunks.start, 0));
    }
    steps
}

/// All chunks, in ranges that a launch can take.
pub fn pieces(n_chunk: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_chunk).step_by(N_CHUNK_MAX).map(move |at| at..n_chunk.min(at + N_CHUNK_MAX))
}

/// A batch on its way through the kernels.
pub struct Core<'a> {
    pub gpu: &'a Gpu,
    pub xbc: &'a Tensor,
    pub plan: Plan,
    pub steps: Tensor,
}

/// What the backward pass finds.
pub struct Found {
    pub dxbc: Tensor,
    pub terms: Tensor,
    /// By the state before each segment.
    pub dbefore: Vec<Tensor>,
}

impl Core<'_> {
    /// Sets `y`; returns the states after all segments.
    pub fn forward(&self, given: Option<&[Tensor]>, y: &mut Tensor) -> Vec<Tensor> {
        let plan = &self.plan;
        let (mut carry, mut ends) = (None, Vec::new());
        for stretch in &plan.stretches {
            let before = before_runs(plan, stretch, of_runs(stretch, given), carry.as_ref());
            let (made, after) = self.states(stretch, before);
            self.outputs(stretch, &made, y);
            for (idx, run) in stretch.runs.iter().enumerate() {
                if run.is_last && given.is_some() {
                    ends.push(of_run(plan, &after, idx));
                }
            }
            let cut = stretch.runs.iter().position(|run| !run.is_last);
            carry = cut.map(|idx| of_run(plan, &after, idx));
        }
        ends
    }

    /// Inverts `forward`.
    pub fn backward(&self, initial: Option<&[Tensor]>, dy: &Tensor) -> Found {
        let plan = &self.plan;
        // What comes into each stretch from the one before.
        let mut carries: Vec<Option<Tensor>> = vec![None];
        if plan.is_cut() {
            for stretch in &plan.stretches[..plan.stretches.len() - 1] {
                let carry = carries.last().and_then(Option::as_ref);
                let given = of_runs(stretch, initial);
                let (_, after) = self.states(stretch, before_runs(plan, stretch, given, carry));
                carries.push(Some(of_run(plan, &after, stretch.runs.len() - 1)));
            }
        }
        let mut dxbc = Tensor::uninit_as(self.xbc, self.xbc.shape());
        let mut terms = Tensor::uninit(self.xbc.device(), &[self.n_terms()]);
        let (mut dcarry, mut dbefore) = (None, Vec::new());
        for (idx, stretch) in plan.stretches.iter().enumerate().rev() {
            let carry = carries.get(idx).and_then(Option::as_ref);
            let given = of_runs(stretch, initial);
            let (h, _) = self.states(stretch, before_runs(plan, stretch, given, carry));
            let after = after_runs(plan, stretch, dcarry.as_ref());
            let (dh, before) = self.states_by(Pass::Backward, stretch, after, (dy, &h), &mut terms);
            let cut = stretch.runs.iter().position(|run| !run.is_first);
            dcarry = cut.map(|idx| of_run(plan, &before, idx));
            for (idx, run) in stretch.runs.iter().enumerate().rev() {
                if run.is_first && initial.is_some() {
                    dbefore.push(of_run(plan, &before, idx));
                }
            }
            self.gradients(stretch, (dy, &h, &dh), &mut dxbc, &mut terms);
        }
        dbefore.reverse();
        Found { dxbc, terms, dbefore }
    }

    /// Tiles of a state, whose sums lie in `terms` one by one.
    pub fn tiles(&self) -> (usize, usize) {
        let dims = self.plan.dims;
        match self.plan.cores {
            Some(_) => (1, 1),
            None => (dims.d_state.div_ceil(TILE), dims.d_head.div_ceil(TILE)),
        }
    }

    /// Numbers in `terms`.
    fn n_terms(&self) -> usize {
        let (n_tiles, p_tiles) = self.tiles();
        let per_head = (3 + n_tiles + p_tiles) * self.plan.n_tok;
        let own = if self.plan.form == Form::Mamba2 { 0 } else { self.plan.n_tok };
        (per_head + n_tiles * p_tiles * self.plan.n_chunk + own) * self.plan.dims.n_head
    }

    /// Starts a kernel on a stretch, with xbc, steps and table before `args`.
    fn launch(
        &self,
        kernel: &'static Kernel,
        stretch: &Stretch,
        work: Work,
        pass: Pass,
        args: Vec<Arg>,
    ) {
        let mut all = vec![Arg::In(self.xbc), Arg::In(&self.steps), Arg::In(&self.plan.table)];
        all.extend(args);
        let consts = self.plan.consts(pass, Before::Zero);
        let params = self.plan.params(stretch.chunks.start, stretch.runs_at);
        self.gpu.launch(kernel, work, &consts, &mut all, &params);
    }

    /// The states before the chunks of a stretch, and after its runs.
    fn states(&self, stretch: &Stretch, before: Option<Tensor>) -> (Tensor, Tensor) {
        // A kernel wants something to bind.
        let mut none = Tensor::uninit(self.xbc.device(), &[1]);
        let v = (self.xbc, &self.steps);
        self.states_by(Pass::Forward, stretch, before, v, &mut none)
    }

    /// The same, or the gradients by the states after the chunks, and before the runs.
    fn states_by(
        &self,
        pass: Pass,
        stretch: &Stretch,
        before: Option<Tensor>,
        (v, h): (&Tensor, &Tensor),
        terms: &mut Tensor,
    ) -> (Tensor, Tensor) {
        let SsdDims { n_head, d_state, d_head, .. } = self.plan.dims;
        let device = self.xbc.device();
        let kind = if before.is_some() { Before::Given } else { Before::Zero };
        let n_run = stretch.runs.len();
        let shape = [n_run * n_head, d_state, d_head];
        let mut carry = before.unwrap_or_else(|| Tensor::uninit(device, &shape));
        let n_chunk = stretch.chunks.len();
        let mut states = Tensor::activation(device, &[n_chunk * n_head, d_state, d_head]);
        let ins = [self.xbc, &self.steps, &self.plan.table, v, h];
        let mut args = bind(ins, [&mut carry, &mut states, terms]);
        let (n_tiles, p_tiles) = self.tiles();
        let (kernel, work) = match self.plan.cores {
            Some(cores) => (&WALK, cores.walk_work(n_head, n_run)),
            None => (&STATES, Work::grid([n_tiles * p_tiles, n_head, n_run], THREADS)),
        };
        let consts = self.plan.consts(pass, kind);
        self.gpu.launch(
            kernel,
            work,
            &consts,
            &mut args,
            &self.plan.params(stretch.chunks.start, stretch.runs_at),
        );
        (states, carry)
    }

    fn scores(&self, stretch: &Stretch) -> Tensor {
        let (n_chunk, n_group) = (stretch.chunks.len(), self.plan.dims.n_group);
        let mut scores = Tensor::uninit(self.xbc.device(), &[n_chunk * n_group, CHUNK, CHUNK]);
        let args = vec![Arg::Out(&mut scores)];
        let work = Work::grid([n_group, n_chunk, 1], THREADS);
        self.launch(&SCORES, stretch, work, Pass::Forward, args);
        scores
    }

    fn outputs(&self, stretch: &Stretch, states: &Tensor, y: &mut Tensor) {
        let (n_head, n_chunk) = (self.plan.dims.n_head, stretch.chunks.len());
        if let Some(cores) = self.plan.cores {
            let work = cores.outputs_work(n_head / self.plan.n_heads, n_chunk);
            return self.launch(&OUTPUTS, stretch, work, Pass::Forward, bind([states], [y]));
        }
        let work = Work::grid([self.tiles().1, n_head, n_chunk], THREADS);
        let scores = self.scores(stretch);
        let args = bind([self.xbc, states, &scores], [y]);
        self.launch(&OUTPUT, stretch, work, Pass::Forward, args);
    }

    /// `dxbc` of a stretch, and its part of `terms`.
    fn gradients(
        &self,
        stretch: &Stretch,
        (dy, h, dh): (&Tensor, &Tensor, &Tensor),
        dxbc: &mut Tensor,
        terms: &mut Tensor,
    ) {
        let SsdDims { n_head, n_group, .. } = self.plan.dims;
        let (n_chunk, pass) = (stretch.chunks.len(), Pass::Backward);
        if let Some(cores) = self.plan.cores {
            let work = cores.gradients_work(n_group, n_chunk);
            return self.launch(&GRADIENTS, stretch, work, pass, bind([dy, h, dh], [dxbc, terms]));
        }
        let ((n_tiles, p_tiles), scores) = (self.tiles(), self.scores(stretch));
        let work = Work::grid([p_tiles, n_head, n_chunk], THREADS);
        self.launch(&DX, stretch, work, pass, bind([dy, dh, &scores], [dxbc, terms]));
        // dscores, still to be summed over the blocks of heads of a group.
        let n_block = n_head / self.plan.n_heads;
        let mut dscores = Tensor::uninit(dy.device(), &[n_chunk * n_block, CHUNK, CHUNK]);
        let work = Work::grid([n_block, 1, n_chunk], THREADS);
        self.launch(&INSIDE, stretch, work, pass, bind([dy, &scores], [&mut dscores, terms]));
        // Columns c of `dxbc` by the states, then b by their gradients.
        let work = Work::grid([n_tiles, n_group, n_chunk], THREADS);
        for (pass, v, states) in [(Pass::Forward, dy, h), (pass, self.xbc, dh)] {
            let args = bind([v, states, &dscores], [dxbc, terms]);
            self.launch(&DBC, stretch, work, pass, args);
        }
    }
}
