//! Forward of `mamba3`, on the CPU: by chunks, or one token after the other.

use super::kernels::*;
use super::tile::*;
use super::*;
use crate::ops::ssd::chunk::{CHUNK, Chunk, advance, chunks_of};
use crate::ops::ssd::{STATE_PIECE, deal_columns, divisor_at_most, heads_per_task};
use crate::tensor::cpu::{MatMut, Scope};
use crate::tensor::segment::Segment;
use std::ops::Range;

/// How `forward` is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    Recurrent,
    Chunked,
}

pub(super) fn forward(
    inputs: &Inputs,
    segments: &Segments,
    states: Option<[&mut [&mut Tensor]; 4]>,
) -> Tensor {
    if let Device::Gpu(gpu) = inputs.xbc.device() {
        return gpu::forward(gpu, inputs, segments, states);
    }
    let is_short = segments.iter().all(|segment| segment.n_tok < RECURRENT);
    let path = if is_short { Path::Recurrent } else { Path::Chunked };
    forward_by(path, inputs, segments, states)
}

/// A task of forward: some heads of one segment.
struct Task<'a> {
    segment: Segment,
    heads: Range<usize>,
    /// Its columns of every token's `y`.
    y: Vec<&'a mut [f32]>,
    carried: Option<Carried<'a>>,
}

/// The state of the heads of a task, or of one of them.
struct Carried<'a> {
    angle: &'a mut [f32],
    h: &'a mut [f32],
    /// Of each rank.
    k: Vec<&'a mut [f32]>,
    v: &'a mut [f32],
}

impl Carried<'_> {
    /// Of one head of the task.
    fn head(&mut self, dims: &Mamba3Dims, idx: usize) -> Carried<'_> {
        fn part(x: &mut [f32], idx: usize, len: usize) -> &mut [f32] {
            &mut x[idx * len..][..len]
        }
        Carried {
            angle: part(self.angle, idx, dims.n_angle),
            h: part(self.h, idx, dims.n_state()),
            k: self.k.iter_mut().map(|k| part(k, idx, dims.d_state)).collect(),
            v: part(self.v, idx, dims.d_head),
        }
    }

    fn before(&self) -> Before<'_> {
        Before { k: self.k.iter().map(|k| &**k).collect(), v: self.v }
    }

    /// Stores what a segment leaves, but h: angles in turns, the rows k of its last token, its x.
    fn leave(&mut self, angle: &[f32], k: &[f32], x: &[f32]) {
        self.angle.iter_mut().zip(angle).for_each(|(to, &turns)| *to = to_radians(turns));
        let rows = k.chunks(k.len() / self.k.len());
        self.k.iter_mut().zip(rows).for_each(|(to, from)| to.copy_from_slice(from));
        self.v.copy_from_slice(x);
    }
}

pub(super) fn forward_by(
    path: Path,
    inputs: &Inputs,
    segments: &Segments,
    states: Option<[&mut [&mut Tensor]; 4]>,
) -> Tensor {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let n_heads = match path {
        Path::Recurrent => divisor_at_most(dims.n_head, STATE_PIECE.div_ceil(dims.n_state())),
        Path::Chunked => heads_per_task((dims.n_head, dims.heads_per_group()), segments),
    };
    let (n_block, width) = (dims.n_head / n_heads, dims.y_width());
    let prepared = Prepared::new(inputs, segments.n_tok());
    let mut y = Tensor::uninit(inputs.xbc.device(), &[segments.n_tok(), width]);
    let ys = deal_columns(y.f32_mut(), segments, n_block, (width, width));
    let mut all = Vec::new();
    if let Some([angle, h, k, v]) = states {
        for (((angle, h), k), v) in angle.iter_mut().zip(h).zip(k).zip(v) {
            let row = dims.n_head * dims.d_state;
            let k = columns(k.f32_mut(), (row, row), n_heads * dims.d_state);
            let parts = angle.f32_mut().chunks_mut(n_heads * dims.n_angle).zip(k);
            let parts = parts.zip(h.f32_mut().chunks_mut(n_heads * dims.n_state()));
            let parts = parts.zip(v.f32_mut().chunks_mut(n_heads * dims.d_head));
            all.extend(parts.map(|(((angle, k), h), v)| Some(Carried { angle, h, k, v })));
        }
    }
    let all = all.into_iter().chain(std::iter::repeat_with(|| None));
    let tasks = ys.into_iter().zip(all).enumerate().map(|(idx, (y, carried))| {
        let first = idx % n_block * n_heads;
        let segment = segments[idx / n_block];
        Task { segment, heads: first..first + n_heads, y, carried }
    });
    cpu.map(tasks.collect(), |task| match path {
        Path::Recurrent => recurrent(inputs, &prepared, task),
        Path::Chunked => chunked(inputs, &prepared, task),
    });
    y
}

/// The recurrence as it is written, one token after the other.
fn recurrent(inputs: &Inputs, prepared: &Prepared, task: Task) {
    let dims = inputs.dims;
    let Task { segment, heads, mut y, mut carried } = task;
    let Mamba3Dims { d_head, d_state, rank, n_angle, .. } = dims;
    let (n_b, n_v) = (rank * d_state, rank * d_head);
    let n_rates = segment.n_tok * RATES;
    let lengths = [n_rates, n_angle, n_angle, n_angle, dims.n_state(), 2 * n_b, n_b, 2 * n_v, n_v];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, angle, cos, sin, zero, b, q, x, last] = split(scratch.f32_mut(), lengths);
    for (idx, head) in heads.enumerate() {
        let rates = inputs.rates(head, &segment, buffer);
        let mut of_head = carried.as_mut().map(|carried| carried.head(&dims, idx));
        match &of_head {
            Some(it) => {
                angle.iter_mut().zip(&*it.angle).for_each(|(to, from)| *to = to_turns(*from));
                b.chunks_mut(d_state).zip(&it.k).for_each(|(to, k)| to.copy_from_slice(k));
                inputs.values_before(head, &it.before(), last);
            }
            None => {
                angle.fill(0.0);
                b.fill(0.0);
                zero.fill(0.0);
                last.fill(0.0);
            }
        }
        for (tok, y) in y.iter_mut().enumerate() {
            let span = Span { head, start: segment.start + tok, n_tok: 1 };
            let (delta, lam) = (rates.delta[tok], rates.lam[tok]);
            inputs.angles(prepared, span, &[delta], angle, [cos, sin]);
            inputs.turned(prepared, (Side::K, span), [cos, sin], &mut b[n_b..]);
            inputs.turned(prepared, (Side::Q, span), [cos, sin], q);
            let decay = (delta * rates.a[tok]).exp();
            let (before, now) = x.split_at_mut(n_v);
            before.iter_mut().zip(&*last).for_each(|(x, v)| *x = decay * rates.w(tok) * v);
            let v = inputs.values(span, last);
            let y = &mut y[idx * n_v..][..n_v];
            for (r, (y, x)) in y.chunks_mut(d_head).zip(now.chunks_mut(d_head)).enumerate() {
                for ((y, x), v) in y.iter_mut().zip(x).zip(v.row(r)) {
                    *y = inputs.skip.f32()[head] * v;
                    *x = lam * delta * v;
                }
            }
            if inputs.mimo_x.is_none() {
                // `values` gave x itself.
                last.copy_from_slice(inputs.x(span).row(0));
            }
            let state = of_head.as_mut().map_or(&mut *zero, |it| &mut *it.h);
            inputs.cpu().simd(Step { decay, b, x, q, state, y, d_head });
            b.copy_within(n_b.., 0);
        }
        let last = Span { head, start: segment.start + segment.n_tok - 1, n_tok: 1 };
        if let Some(it) = &mut of_head {
            it.leave(angle, &b[..n_b], inputs.x(last).row(0));
        }
    }
}

/// The same by products over chunks.
fn chunked(inputs: &Inputs, prepared: &Prepared, task: Task) {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let Task { segment, heads, mut y, mut carried } = task;
    let Mamba3Dims { d_head, d_state, rank, .. } = dims;
    let (square, n_v) = (CHUNK * CHUNK, rank * d_head);
    let n_x = CHUNK * d_head;
    let n_tile = TileBuffer::len(&dims);
    let lengths = [segment.n_tok * RATES, dims.n_state(), square, square, n_x, n_x, n_tile];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, zero, scores, mix, y_chunk, x_chunk, tile] = split(scratch.f32_mut(), lengths);
    let mut tile = TileBuffer::new(&dims, tile);
    for (idx, head) in heads.enumerate() {
        let rates = inputs.rates(head, &segment, buffer);
        let mut of_head = carried.as_mut().map(|carried| carried.head(&dims, idx));
        tile.start(of_head.as_ref().map(|it| &*it.angle));
        if let Some(it) = &mut of_head {
            let before = Before { k: it.k.iter().map(|k| &**k).collect(), v: it.v };
            inputs.fold(head, rates.w(0), &before, &mut tile.v[..n_v], it.h);
        }
        let keeps_state = of_head.is_some();
        for chunk in chunks_of(segment.n_tok, CHUNK / rank) {
            let n_row = chunk.len() * rank;
            let is_zero = !keeps_state && chunk.start == 0;
            let state = of_head.as_mut().map_or(&mut *zero, |it| &mut *it.h);
            let span = Span { head, start: segment.start + chunk.start, n_tok: chunk.len() };
            let Tile { head: rows, steps, .. } =
                tile.make(inputs, prepared, span, (&rates, chunk.clone(), Wanted::All));
            let scores = &mut scores[..n_row * n_row];
            let to = MatMut::new(scores, n_row, n_row);
            cpu.gemm(to, 0.0, 1.0, rows.c.mat(), rows.b.mat().t(), Scope::Thread);
            let (mix, y_chunk) = (&mut mix[..n_row * n_row], &mut y_chunk[..n_row * d_head]);
            let before = (!is_zero).then_some(&*state);
            let of_chunk = Chunk { head: rows, steps, scores, state: before };
            of_chunk.forward(cpu, mix, y_chunk);
            for (y, from) in y[chunk.clone()].iter_mut().zip(y_chunk.chunks(n_v)) {
                y[idx * n_v..][..n_v].copy_from_slice(from);
            }
            if keeps_state || chunk.end < segment.n_tok {
                let beta = if is_zero { 0.0 } else { steps.total() };
                let x_chunk = &mut x_chunk[..n_row * d_head];
                advance(cpu, &rows, &steps, x_chunk, (beta, state));
            }
        }
        let last = Span { head, start: segment.start + segment.n_tok - 1, n_tok: 1 };
        if let Some(it) = &mut of_head {
            let n_last = (segment.n_tok - 1) % (CHUNK / rank) * rank;
            let k = &tile.k[n_last * d_state..][..rank * d_state];
            it.leave(tile.angle, k, inputs.x(last).row(0));
        }
    }
}
