//! `mamba3` on a GPU: rows v, k and q of all heads are made, the products are those of `ssd`, and
//! gradients are taken back to the inputs.
//!
//! | kernel            | a group takes            | makes                                         |
//! |-------------------|--------------------------|-----------------------------------------------|
//! | `mamba3_pack`     |                          | `packed`                                      |
//! | `mamba3_ratios`   | a row of b or c          | `1 / rms`                                     |
//! | `mamba3_steps`    | a chunk of a head        | `steps` of `ssd`, turns of the chunk          |
//! | `mamba3_starts`   |                          | angles before chunks and behind segments      |
//! | `mamba3_rows`     | a chunk of a head        | `wide`, k and x of last tokens                |
//! | `mamba3_fold`     |                          | states with the token before in them          |
//! | `mamba3_by_token` |                          | y, dy in the other order, where ranks are     |
//! | `mamba3_found`    | a chunk of a head        | `found`, from the terms of `ssd`; skip        |
//! | `mamba3_back`     | a chunk of a head        | gradients by k and q turned back; `th`        |
//! | `mamba3_after`    |                          | sums of `th` over later chunks                |
//! | `mamba3_before`   | a head of a segment      | what goes through the token before it         |
//! | `mamba3_draw`     | a chunk of a head        | gradients by raw delta, a, trap               |
//! | `mamba3_dangle`   | a chunk                  | gradients by raw angles                       |
//! | `mamba3_norm`     | a row of b or c, some    | gradients by b, c and the norms               |
//! |                   | tokens                   |                                               |
//! | `mamba3_dx`       | a chunk of a head        | gradients by x and mimo_x                     |
//! | `mamba3_step`     | a head                   | y and the states after a few tokens           |
//!
//! | name     | shape                                 |                                           |
//! |----------|---------------------------------------|-------------------------------------------|
//! | `packed` | all parameters, one behind the other  | delta_bias, skip, b_norm, c_norm, b_bias, |
//! |          |                                       | c_bias, mimo_x                            |
//! | `table`  | (n_chunk, 4), (n_segment, 2)          | first token, tokens, segment, flags;      |
//! |          |                                       | first chunk, chunks                       |
//! | `wide`   | (n_tok rank, n_head (d_head +         | v, k, q, as `xbc` of `ssd` with a group   |
//! |          | 2 d_state))                           | for each head                             |
//! | `th`     | (n_tok + n_chunk, n_head, n_angle)    | by angles, summed over later tokens of    |
//! |          |                                       | the chunk; behind it, over later chunks   |
//! | `found`  | (3, n_head, n_tok), (n_segment,       | by s, gamma and g; by w of first tokens   |
//! |          | n_head)                               |                                           |
//!
//! Flags: 1 the first chunk of its segment, 2 the last.
//!
//! Where `wide` would be too large, some segments are computed after the others.

use super::*;
use crate::ops::norm::sum_rows;
use crate::ops::ssd::SsdDims;
use crate::ops::ssd::chunk::{CHUNK, chunks_of};
use crate::ops::ssd::gpu::plan::{Cut, Form, Plan, n_chunk_max};
use crate::ops::ssd::gpu::{Core, Found, pieces};
use crate::tensor::add::add_into;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Word, Work, bind};
use std::ops::Range;

static PACK: Kernel = Kernel {
    entry: "mamba3_pack",
    wgsl: concat!(include_str!("mamba3.wgsl"), include_str!("mamba3_backward.wgsl")),
    cuda: concat!(include_str!("mamba3.cu"), include_str!("mamba3_backward.cu")),
};
static RATIOS: Kernel = Kernel { entry: "mamba3_ratios", ..PACK };
static STEPS: Kernel = Kernel { entry: "mamba3_steps", ..PACK };
static STARTS: Kernel = Kernel { entry: "mamba3_starts", ..PACK };
static ROWS: Kernel = Kernel { entry: "mamba3_rows", ..PACK };
static FOLD: Kernel = Kernel { entry: "mamba3_fold", ..PACK };
static BY_TOKEN: Kernel = Kernel { entry: "mamba3_by_token", ..PACK };
static STEP: Kernel = Kernel { entry: "mamba3_step", ..PACK };
static FOUND: Kernel = Kernel { entry: "mamba3_found", ..PACK };
static BACK: Kernel = Kernel { entry: "mamba3_back", ..PACK };
static AFTER: Kernel = Kernel { entry: "mamba3_after", ..PACK };
static BEFORE: Kernel = Kernel { entry: "mamba3_before", ..PACK };
static DRAW: Kernel = Kernel { entry: "mamba3_draw", ..PACK };
static DANGLE: Kernel = Kernel { entry: "mamba3_dangle", ..PACK };
static NORM: Kernel = Kernel { entry: "mamba3_norm", ..PACK };
static DX: Kernel = Kernel { entry: "mamba3_dx", ..PACK };

/// Most bytes of `wide`.
const WIDE_BYTES_MAX: usize = 1 << 29;
/// Threads of most groups.
const THREADS: usize = 256;
/// Threads for the tokens of a chunk, or for a row of b or c.
const FEW_THREADS: usize = 64;
/// Tokens that `mamba3_norm` takes.
const N_TOKENS: usize = 16;
/// Bytes that `mamba3_step` shares besides k and q, at most, and that CUDA shares unasked.
const SHARED_MORE: usize = 6 << 10;
const SHARED_MAX: usize = 48 << 10;

pub(super) fn forward(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    states: Option<[&mut [&mut Tensor]; 4]>,
) -> Tensor {
    let is_short = segments.iter().all(|segment| segment.n_tok < RECURRENT);
    // The step holds k and q of a head in shared memory.
    let shared = 8 * inputs.dims.rank * inputs.dims.d_state + SHARED_MORE;
    let fits = shared <= gpu.caps().shared_bytes_max.min(SHARED_MAX);
    match states {
        Some(states) if is_short && fits => recurrent(gpu, inputs, segments, states),
        states => chunked(gpu, inputs, segments, states, WIDE_BYTES_MAX),
    }
}

/// One token after the other, in the storage of the states.
fn recurrent(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    [angle, h, k, v]: [&mut [&mut Tensor]; 4],
) -> Tensor {
    let packed = pack(gpu, inputs);
    let mut y = Tensor::activation(inputs.xbc.device(), &[segments.n_tok(), inputs.dims.y_width()]);
    let states = angle.iter_mut().zip(h).zip(k).zip(v);
    for (segment, (((angle, h), k), v)) in segments.iter().zip(states) {
        let outs = [&mut **angle, &mut **h, &mut **k, &mut **v, &mut y];
        let mut args = bind([&inputs.xbc, &inputs.raw, &packed], outs);
        let params = params(&inputs.dims, Before::Given, [segment.n_tok, 0, segment.start, 0]);
        let work = Work::grid([inputs.dims.n_head, 1, 1], step_threads(gpu));
        gpu.launch(&STEP, work, &consts(inputs), &mut args, &params);
    }
    y
}

/// Threads of a group of `mamba3_step`: few groups have all of the state to read.
fn step_threads(gpu: &Gpu) -> usize {
    if gpu.caps().warps { 4 * THREADS } else { THREADS }
}

/// Cuts all segments into runs whose `wide` has at most so many bytes, or is of one segment.
fn parts(inputs: &Inputs, segments: &Segments, n_bytes_max: usize) -> Vec<Range<usize>> {
    let gpu = inputs.xbc.device().gpu().expect("a GPU");
    let n_bytes_max = n_bytes_max.min(gpu.binding_bytes_max());
    let per_tok = inputs.dims.rank * wide_width(&inputs.dims) * inputs.xbc.dtype().block().1;
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut n_bytes = 0;
    for (idx, segment) in segments.iter().enumerate() {
        n_bytes += segment.n_tok * per_tok;
        match parts.last_mut() {
            Some(part) if n_bytes <= n_bytes_max => part.end += 1,
            _ => {
                parts.push(idx..idx + 1);
                n_bytes = segment.n_tok * per_tok;
            }
        }
    }
    parts
}

/// Some segments alone, with their inputs, and their tokens among all.
fn part_of(
    inputs: &Inputs,
    segments: &Segments,
    part: &Range<usize>,
) -> (Inputs, Segments, Range<usize>) {
    let of_part = &segments[part.clone()];
    let lengths: Vec<usize> = of_part.iter().map(|segment| segment.n_tok).collect();
    let rows = of_part
        .first()
        .map_or(0..0, |first| first.start..first.start + lengths.iter().sum::<usize>());
    let part = Inputs {
        xbc: inputs.xbc.rows(rows.clone()),
        raw: inputs.raw.rows(rows.clone()),
        ..inputs.clone()
    };
    (part, Segments::from_lengths(&lengths), rows)
}

/// By products over chunks, with at most so many bytes of rows at the same time.
pub(super) fn chunked(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    mut states: Option<[&mut [&mut Tensor]; 4]>,
    n_bytes_max: usize,
) -> Tensor {
    let mut ys = Vec::new();
    for part in parts(inputs, segments, n_bytes_max) {
        let (inputs, segments, _) = part_of(inputs, segments, &part);
        let copies = |list: &&mut [&mut Tensor]| -> Vec<Tensor> {
            list[part.clone()].iter().map(|state| (**state).clone()).collect()
        };
        let given = states.as_ref().map(|states| states.each_ref().map(copies));
        let before = if given.is_some() { Before::Given } else { Before::None };
        let (y, ends) = Batch::new(gpu, &inputs, &segments, before).forward(given.as_ref());
        for (list, ends) in states.iter_mut().flatten().zip(ends.into_iter().flatten()) {
            list[part.clone()].iter_mut().zip(ends).for_each(|(state, end)| **state = end);
        }
        ys.push(y);
    }
    match ys.len() {
        0 => Tensor::activation(inputs.xbc.device(), &[0, inputs.dims.y_width()]),
        1 => ys.remove(0),
        _ => Tensor::stack(&ys),
    }
}

/// Inverts `forward`, in the order in which the op records its inputs.
pub(super) fn backward(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Vec<Tensor>; 4]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    backward_by(gpu, inputs, segments, (initial, dy), WIDE_BYTES_MAX)
}

/// The same with at most so many bytes of rows at the same time.
pub(super) fn backward_by(
    gpu: &Gpu,
    inputs: &Inputs,
    segments: &Segments,
    (initial, dy): (Option<&[Vec<Tensor>; 4]>, &Tensor),
    n_bytes_max: usize,
) -> Vec<Option<Tensor>> {
    let (mut by_token, mut sums) = ([vec![], vec![]], Vec::<Tensor>::new());
    for part in parts(inputs, segments, n_bytes_max) {
        let (inputs, segments, rows) = part_of(inputs, segments, &part);
        let given = initial.map(|all| all.each_ref().map(|list| list[part.clone()].to_vec()));
        let dy = dy.rows(rows);
        let before = if given.is_some() { Before::Given } else { Before::None };
        let batch = Batch::new(gpu, &inputs, &segments, before);
        let mut grads = batch.backward(given.as_ref(), &dy).into_iter();
        by_token.iter_mut().zip(&mut grads).for_each(|(list, grad)| list.push(grad));
        sums = match sums.is_empty() {
            true => grads.collect(),
            false => sums.into_iter().zip(grads).map(|(sum, it)| add_into(sum, &it)).collect(),
        };
    }
    let joined = |mut list: Vec<Tensor>| match list.len() {
        1 => list.remove(0),
        _ => Tensor::stack(&list),
    };
    by_token.into_iter().map(joined).chain(sums).map(Some).collect()
}

/// Columns of `wide`.
fn wide_width(dims: &Mamba3Dims) -> usize {
    dims.d_inner() + 2 * dims.n_head * dims.d_state
}

/// Whether there are states before the segments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    None,
    Given,
}

/// The order of the numbers of a token, where it has ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// (n_tok, n_head, rank, d_head), as others know y.
    Tokens,
    /// (n_tok, rank, n_head, d_head), as `ssd` does.
    Rows,
}

/// Of all entries.
fn consts(inputs: &Inputs) -> [Const; 11] {
    let dims = inputs.dims;
    [
        ("N_HEAD", dims.n_head),
        ("D_HEAD", dims.d_head),
        ("N_GROUP", dims.n_group),
        ("D_STATE", dims.d_state),
        ("RANK", dims.rank),
        ("N_ANGLE", dims.n_angle),
        ("HALVES", dims.halves.into()),
        ("SOFTPLUS_A", dims.softplus_a.into()),
        ("HAS_MIMO", inputs.mimo_x.is_some().into()),
        // Tiles of `ssd`, where it matters.
        ("N_TILES", 1),
        ("P_TILES", 1),
    ]
}

/// Of all entries: n_tok, n_chunk, first, n_segment, has_before, the least decay rate, eps.
fn params(dims: &Mamba3Dims, before: Before, counts: [usize; 4]) -> [Word; 7] {
    let [n_tok, n_chunk, first, n_segment] = counts.map(Word::from);
    let has_before = usize::from(before == Before::Given).into();
    [n_tok, n_chunk, first, n_segment, has_before, dims.a_floor.into(), dims.eps.into()]
}

/// All parameters, one behind the other.
fn pack(gpu: &Gpu, inputs: &Inputs) -> Tensor {
    let dims = inputs.dims;
    let n_mimo = inputs.mimo_x.as_ref().map_or(0, Tensor::n_elem);
    let n = 2 * (dims.n_head + dims.d_state + inputs.b_bias.n_elem()) + n_mimo;
    let mut packed = Tensor::uninit(inputs.xbc.device(), &[n]);
    // A kernel wants something to bind.
    let mimo_x = inputs.mimo_x.as_ref().unwrap_or(&inputs.skip);
    let Inputs { delta_bias, skip, b_norm, c_norm, b_bias, c_bias, .. } = inputs;
    let ins = [delta_bias, skip, b_norm, c_norm, b_bias, c_bias, mimo_x];
    let consts = consts(inputs);
    let params = params(&dims, Before::None, [0; 4]);
    gpu.launch(&PACK, Work::each(n), &consts, &mut bind(ins, [&mut packed]), &params);
    packed
}

/// Some segments on their way through the kernels.
struct Batch<'a> {
    gpu: &'a Gpu,
    inputs: &'a Inputs,
    /// In rows, of which a token has `rank`.
    rows: Segments,
    before: Before,
    n_tok: usize,
    n_chunk: usize,
    table: Tensor,
    packed: Tensor,
}

/// What `ssd` reads, and what it was made with.
struct Made {
    wide: Tensor,
    steps: Tensor,
    ratios: Tensor,
    /// Angles before chunks.
    starts: Tensor,
    /// Angles behind segments.
    angles: Tensor,
    /// k and x of the last tokens.
    ends: Tensor,
}

impl<'a> Batch<'a> {
    fn new(gpu: &'a Gpu, inputs: &'a Inputs, segments: &Segments, before: Before) -> Batch<'a> {
        let rank = inputs.dims.rank;
        let (mut table, mut runs): (Vec<u32>, Vec<u32>) = Default::default();
        for (idx, segment) in segments.iter().enumerate() {
            let n_chunk = chunks_of(segment.n_tok, CHUNK / rank).len();
            runs.extend([table.len() as u32 / 4, n_chunk as u32]);
            for (at, chunk) in chunks_of(segment.n_tok, CHUNK / rank).enumerate() {
                let flags = u32::from(at == 0) + 2 * u32::from(at + 1 == n_chunk);
                let first = (segment.start + chunk.start) as u32;
                table.extend([first, chunk.len() as u32, idx as u32, flags]);
            }
        }
        let n_chunk = table.len() / 4;
        table.extend(runs);
        let n_rows: Vec<usize> = segments.iter().map(|segment| segment.n_tok * rank).collect();
        Batch {
            gpu,
            inputs,
            rows: Segments::from_lengths(&n_rows),
            before,
            n_tok: segments.n_tok(),
            n_chunk,
            table: Tensor::from_u32(inputs.xbc.device(), &table),
            packed: pack(gpu, inputs),
        }
    }

    fn uninit(&self, shape: &[usize]) -> Tensor {
        Tensor::uninit(self.inputs.xbc.device(), shape)
    }

    fn launch(&self, kernel: &'static Kernel, work: Work, mut args: Vec<Arg>) {
        self.launch_at(kernel, work, 0, &mut args);
    }

    fn launch_at(&self, kernel: &'static Kernel, work: Work, first: usize, args: &mut [Arg]) {
        let consts = consts(self.inputs);
        let counts = [self.n_tok, self.n_chunk, first, self.rows.len()];
        self.gpu.launch(
            kernel,
            work,
            &consts,
            args,
            &params(&self.inputs.dims, self.before, counts),
        );
    }

    /// A group for each head and chunk, or for each head and segment.
    fn launch_heads(&self, kernel: &'static Kernel, n: usize, threads: usize, mut args: Vec<Arg>) {
        for piece in pieces(n) {
            let work = Work::grid([self.inputs.dims.n_head, piece.len(), 1], threads);
            self.launch_at(kernel, work, piece.start, &mut args);
        }
    }

    /// A thread for each angle of a segment.
    fn angle_work(&self) -> Work {
        Work::each(self.rows.len() * self.inputs.dims.n_head * self.inputs.dims.n_angle)
    }

    /// `angle`: given before the segments.
    fn make(&self, angle: Option<&[Tensor]>) -> Made {
        let (inputs, dims) = (self.inputs, self.inputs.dims);
        let Mamba3Dims { n_head, d_head, d_state, rank, n_angle, .. } = dims;
        let (n_row, n_ratio) = (self.n_tok * rank, 2 * rank * dims.n_group);
        let n_end = self.rows.len() * n_head * (rank * d_state + d_head);
        let mut made = Made {
            wide: Tensor::activation(inputs.xbc.device(), &[n_row, wide_width(&dims)]),
            steps: self.uninit(&[(6 * n_row + 2) * n_head]),
            ratios: self.uninit(&[self.n_tok * n_ratio]),
            starts: self.uninit(&[self.n_chunk * n_head * n_angle]),
            angles: angle.map_or_else(|| self.uninit(&[1]), Tensor::stack),
            ends: self.uninit(&[if angle.is_some() { n_end } else { 1 }]),
        };
        let work = Work::groups(self.n_tok * n_ratio, FEW_THREADS);
        self.launch(&RATIOS, work, bind([&inputs.xbc], [&mut made.ratios]));
        let ins = [&inputs.raw, &self.packed, &self.table];
        let args = bind(ins, [&mut made.steps, &mut made.starts]);
        self.launch_heads(&STEPS, self.n_chunk, FEW_THREADS, args);
        let args = bind([&self.table], [&mut made.starts, &mut made.angles]);
        self.launch(&STARTS, self.angle_work(), args);
        let Made { wide, ratios, starts, ends, .. } = &mut made;
        let ins = [&inputs.xbc, &inputs.raw, &self.packed, &self.table, ratios, starts];
        self.launch_heads(&ROWS, self.n_chunk, THREADS, bind(ins, [wide, ends]));
        made
    }

    /// The products of `ssd`, with a group for each head.
    fn core<'b>(&'b self, made: &'b Made, dy: Option<&Tensor>) -> Core<'b> {
        let Mamba3Dims { n_head, d_head, d_state, rank, .. } = self.inputs.dims;
        let (delta_min, delta_max) = (0.0, 0.0);
        let dims = SsdDims { n_head, d_head, n_group: n_head, d_state, delta_min, delta_max };
        let cut = Cut {
            segments: &self.rows,
            len: CHUNK / rank * rank,
            has_initial: self.before == Before::Given,
            n_chunk_max: n_chunk_max(self.gpu, &dims),
        };
        let plan = Plan::new((dims, Form::Mamba3(rank)), &made.wide, cut, dy);
        Core { gpu: self.gpu, xbc: &made.wide, plan, steps: made.steps.clone() }
    }

    /// The states h of all segments with the token before in them.
    fn folded(&self, h: &[Tensor], [k, v]: [&Tensor; 2]) -> Vec<Tensor> {
        let n_head = self.inputs.dims.n_head;
        let mut folded = Tensor::stack(h);
        let work = Work::each(folded.n_elem());
        let ins = [&self.inputs.raw, &self.packed, &self.table, k, v];
        self.launch(&FOLD, work, bind(ins, [&mut folded]));
        (0..h.len()).map(|idx| folded.rows(idx * n_head..(idx + 1) * n_head).copied()).collect()
    }

    /// y, or dy, in another order, where a token has several rows.
    fn in_order(&self, x: &Tensor, to: Layout) -> Tensor {
        let (dims, n_tok) = (self.inputs.dims, self.n_tok);
        let shape = match to {
            Layout::Tokens => [n_tok, dims.y_width()],
            Layout::Rows => [n_tok * dims.rank, dims.d_inner()],
        };
        if dims.rank == 1 {
            return x.reshape(&shape);
        }
        let mut y = Tensor::uninit_as(x, &shape);
        let consts = consts(self.inputs);
        let to_rows = usize::from(to == Layout::Rows);
        let params = params(&dims, self.before, [n_tok, self.n_chunk, to_rows, self.rows.len()]);
        let work = Work::each(x.n_elem());
        self.gpu.launch(&BY_TOKEN, work, &consts, &mut bind([x], [&mut y]), &params);
        y
    }

    /// y, and the states behind the segments if some are given.
    fn forward(&self, given: Option<&[Vec<Tensor>; 4]>) -> (Tensor, Option<[Vec<Tensor>; 4]>) {
        let Mamba3Dims { n_head, d_head, d_state, rank, n_angle, .. } = self.inputs.dims;
        let made = self.make(given.map(|[angle, ..]| &angle[..]));
        let folded =
            given.map(|[_, h, k, v]| self.folded(h, [&Tensor::stack(k), &Tensor::stack(v)]));
        let core = self.core(&made, None);
        let n_row = self.n_tok * rank;
        let mut y = Tensor::activation(made.wide.device(), &[n_row, n_head * d_head]);
        let h = core.forward(folded.as_deref(), &mut y);
        let y = self.in_order(&y, Layout::Tokens);
        if given.is_none() {
            return (y, None);
        }
        let n_segment = self.rows.len();
        let (n_k, n_v) = (rank * n_head * d_state, n_head * d_head);
        let angle_of = |idx| made.angles.rows(idx * n_head..(idx + 1) * n_head);
        let end_of = |first: usize, shape: &[usize]| {
            made.ends.rows(first..first + shape.iter().product::<usize>()).reshape(shape)
        };
        let k_of = |idx| end_of(idx * (n_k + n_v), &[rank, n_head, d_state]);
        let v_of = |idx| end_of(idx * (n_k + n_v) + n_k, &[n_head, d_head]);
        let all =
            |of: &dyn Fn(usize) -> Tensor| (0..n_segment).map(|idx| of(idx).copied()).collect();
        debug_assert_eq!(made.angles.n_elem(), n_segment * n_head * n_angle);
        (y, Some([all(&angle_of), h, all(&k_of), all(&v_of)]))
    }

    /// Gradients by the inputs, in the order in which the op records them.
    fn backward(&self, given: Option<&[Vec<Tensor>; 4]>, dy: &Tensor) -> Vec<Tensor> {
        let (inputs, dims, n_tok) = (self.inputs, self.inputs.dims, self.n_tok);
        let Mamba3Dims { n_head, d_head, n_group, d_state, rank, n_angle, .. } = dims;
        let made = self.make(given.map(|[angle, ..]| &angle[..]));
        let before = given.map(|[_, h, k, v]| (h, [Tensor::stack(k), Tensor::stack(v)]));
        let folded = before.as_ref().map(|(h, kv)| self.folded(h, kv.each_ref()));
        let dy = self.in_order(dy, Layout::Rows);
        let core = self.core(&made, Some(&dy));
        let Found { dxbc: mut dwide, terms, dbefore } = core.backward(folded.as_deref(), &dy);
        let mut found = self.uninit(&[n_head * (3 * n_tok + self.rows.len())]);
        let mut sums = self.uninit(&[self.n_chunk, 2 * n_head]);
        self.found(&core, &terms, (&mut found, &mut sums));
        // Gradients by the angles, and the biases of k and q.
        let mut th = self.uninit(&[(n_tok + self.n_chunk) * n_head * n_angle]);
        let n_bias = n_head * rank * d_state;
        let mut by_bias = self.uninit(&[self.n_chunk, 2 * n_bias]);
        let ins = [&made.wide, &inputs.raw, &self.packed, &self.table, &made.starts];
        let args = bind(ins, [&mut dwide, &mut th, &mut by_bias]);
        self.launch_heads(&BACK, self.n_chunk, THREADS, args);
        self.launch(&AFTER, self.angle_work(), bind([&self.table], [&mut th]));
        // Through the token before each segment.
        let n_mimo = if inputs.mimo_x.is_some() { n_head * rank * d_head } else { 1 };
        let n_before = if given.is_some() { self.rows.len() } else { 0 };
        let mut by_mimo = self.uninit(&[self.n_chunk + n_before, n_mimo]);
        if let Some((_, [k, v])) = &before {
            let dh = Tensor::stack(&dbefore);
            let ins = [&inputs.raw, &self.packed, &self.table, k, v, &dh];
            let args = bind(ins, [&mut found, &mut by_mimo]);
            self.launch_heads(&BEFORE, self.rows.len(), FEW_THREADS, args);
        }
        let mut draw = Tensor::uninit_as(&inputs.raw, inputs.raw.shape());
        let ins = [&inputs.raw, &self.packed, &self.table, &found, &th];
        let args = bind(ins, [&mut draw, &mut sums]);
        self.launch_heads(&DRAW, self.n_chunk, FEW_THREADS, args);
        for chunks in pieces(self.n_chunk) {
            let mut args = bind([&inputs.raw, &self.packed, &self.table, &th], [&mut draw]);
            let work = Work::grid([chunks.len(), 1, 1], THREADS);
            self.launch_at(&DANGLE, work, chunks.start, &mut args);
        }
        let mut dxbc = Tensor::uninit_as(&inputs.xbc, inputs.xbc.shape());
        let n_piece = n_tok.div_ceil(N_TOKENS);
        let mut by_norm = self.uninit(&[n_piece * rank * n_group, 2 * d_state]);
        let work = Work::groups(n_piece * 2 * rank * n_group, FEW_THREADS);
        let ins = [&inputs.xbc, &self.packed, &made.ratios, &dwide];
        self.launch(&NORM, work, bind(ins, [&mut dxbc, &mut by_norm]));
        let ins = [&inputs.xbc, &self.packed, &self.table, &dwide];
        let args = bind(ins, [&mut dxbc, &mut by_mimo]);
        self.launch_heads(&DX, self.n_chunk, THREADS, args);
        let halves = |parts: &Tensor, shape: &[usize]| {
            let sum = sum_rows(parts);
            let n = sum.n_elem() / 2;
            [0, n].map(|at| sum.rows(at..at + n).copied().reshape(shape))
        };
        let [ddelta_bias, dskip] = halves(&sums, &[n_head]);
        let [db_norm, dc_norm] = halves(&by_norm, &[d_state]);
        let [db_bias, dc_bias] = halves(&by_bias, &[n_head, rank, d_state]);
        let mut grads = vec![dxbc, draw, ddelta_bias, db_norm, dc_norm, db_bias, dc_bias, dskip];
        if inputs.mimo_x.is_some() {
            grads.push(sum_rows(&by_mimo).reshape(&[n_head, rank, d_head]));
        }
        grads
    }

    /// What `terms` say of tokens, and the parts of the gradient by skip.
    fn found(&self, core: &Core, terms: &Tensor, (found, sums): (&mut Tensor, &mut Tensor)) {
        let dims = self.inputs.dims;
        let mut consts = consts(self.inputs);
        let (n_tiles, p_tiles) = core.tiles();
        consts[9].1 = n_tiles;
        consts[10].1 = p_tiles;
        let mut args = bind([terms, &core.steps, &core.plan.table], [found, sums]);
        for chunks in pieces(self.n_chunk) {
            let work = Work::grid([dims.n_head, chunks.len(), 1], FEW_THREADS);
            let counts = [self.n_tok * dims.rank, self.n_chunk, chunks.start, self.rows.len()];
            self.gpu.launch(&FOUND, work, &consts, &mut args, &params(&dims, self.before, counts));
        }
    }
}
