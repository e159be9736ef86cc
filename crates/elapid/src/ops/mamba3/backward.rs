//! Backward of `mamba3`, on the CPU: inverts `forward`; the header of `mod.rs` has the mathematics.

use super::kernels::*;
use super::tile::*;
use super::*;
use crate::ops::ssd::chunk::{CHUNK, Chunk, ChunkBackward, Rows, Terms, Work, advance, chunks_of};
use crate::ops::ssd::{deal_columns, deal_pieces, heads_per_task};
use crate::tensor::cpu::{AddInto, Dot, Mat, MatMut, Scope};
use crate::tensor::segment::Segment;
use std::f32::consts::TAU;
use std::ops::Range;

/// A task: some heads of one segment, all of one group.
struct Task<'a> {
    segment: Segment,
    idx: usize,
    heads: Range<usize>,
    /// Its columns of every token's `dx`.
    dx: Vec<&'a mut [f32]>,
    /// Gradients by delta, a and trap as they are projected: (heads, 3, n_tok).
    draw: &'a mut [f32],
    /// What its heads add up for their group, a row of `Partial` per token.
    partial: &'a mut [f32],
    /// What its heads add up over their tokens, a row of `Sums` each.
    sums: &'a mut [f32],
}

/// Lengths of what heads add up for their group, per token: by the rows k and q before they are
/// turned, and by the turns for a step size of 1.
fn partial_lengths(dims: &Mamba3Dims) -> [usize; 3] {
    [dims.rank * dims.d_state, dims.rank * dims.d_state, dims.n_angle]
}

/// Lengths of what a head adds up over its tokens: by b_bias, c_bias, mimo_x, delta_bias, skip.
fn sum_lengths(dims: &Mamba3Dims) -> [usize; 5] {
    let n_bias = dims.rank * dims.d_state;
    [n_bias, n_bias, dims.rank * dims.d_head, 1, 1]
}

/// Gradients by the inputs, in the order in which the op records them.
pub(super) fn backward(
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Vec<Tensor>; 4]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    if let Device::Gpu(gpu) = inputs.xbc.device() {
        return gpu::backward(gpu, inputs, segments, initial, dy);
    }
    let (cpu, dims, device) = (inputs.cpu(), inputs.dims, inputs.xbc.device());
    let n_heads = heads_per_task((dims.n_head, dims.heads_per_group()), segments);
    let (n_block, n_tok) = (dims.n_head / n_heads, segments.n_tok());
    let n_partial: usize = partial_lengths(&dims).iter().sum();
    let n_sum: usize = sum_lengths(&dims).iter().sum();
    let prepared = Prepared::new(inputs, n_tok);
    let mut dxbc = Tensor::uninit(device, inputs.xbc.shape());
    let mut by_head = inputs.scratch(n_tok * dims.n_head * 3);
    let mut partial = inputs.scratch(n_tok * n_block * n_partial);
    let mut sums = inputs.scratch(segments.len() * dims.n_head * n_sum);
    let columns = (dims.width(), dims.d_inner());
    let dxs = deal_columns(dxbc.f32_mut(), segments, n_block, columns).into_iter();
    let parts = dxs.zip(deal_pieces(by_head.f32_mut(), segments, n_block, 3 * n_heads));
    let parts = parts.zip(deal_pieces(partial.f32_mut(), segments, n_block, n_partial));
    let parts = parts.zip(sums.f32_mut().chunks_mut(n_heads * n_sum)).enumerate();
    let tasks = parts.map(|(idx, (((dx, draw), partial), sums))| {
        let heads = idx % n_block * n_heads..(idx % n_block + 1) * n_heads;
        let (idx, segment) = (idx / n_block, segments[idx / n_block]);
        Task { segment, idx, heads, dx, draw, partial, sums }
    });
    cpu.map(tasks.collect(), |task| backward_heads(inputs, &prepared, initial, dy, task));
    let mut draw = Tensor::uninit(device, inputs.raw.shape());
    let by = ByHead { n_block, partial: partial.f32(), draw: by_head.f32() };
    let [db_norm, dc_norm] =
        sum_over_heads(inputs, &prepared, segments, by, (&mut dxbc, &mut draw));
    let [db_bias, dc_bias, dmimo_x, ddelta_bias, dskip] = sum_over_segments(inputs, sums.f32());
    let mut grads = vec![dxbc, draw, ddelta_bias, db_norm, dc_norm, db_bias, dc_bias, dskip];
    grads.extend(inputs.mimo_x.as_ref().map(|_| dmimo_x));
    grads.into_iter().map(Some).collect()
}

/// The sums of all heads, in the shapes of the inputs.
fn sum_over_segments(inputs: &Inputs, sums: &[f32]) -> [Tensor; 5] {
    let Mamba3Dims { n_head, d_head, d_state, rank, .. } = inputs.dims;
    let lengths = sum_lengths(&inputs.dims);
    let width: usize = lengths.iter().sum();
    let shapes: [&[usize]; 5] = [
        &[n_head, rank, d_state],
        &[n_head, rank, d_state],
        &[n_head, rank, d_head],
        &[n_head],
        &[n_head],
    ];
    std::array::from_fn(|part| {
        let first: usize = lengths[..part].iter().sum();
        let mut to = Tensor::uninit(inputs.xbc.device(), shapes[part]);
        for (idx, to) in to.f32_mut().iter_mut().enumerate() {
            let at = idx / lengths[part] * width + first + idx % lengths[part];
            let of_segments = sums.iter().skip(at).step_by(n_head * width);
            *to = of_segments.map(|&sum| sum as f64).sum::<f64>() as f32;
        }
        to
    })
}

fn backward_heads(
    inputs: &Inputs,
    prepared: &Prepared,
    initial: Option<&[Vec<Tensor>; 4]>,
    dy: &Tensor,
    task: Task,
) {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let Task { segment, idx: segment_idx, heads, mut dx, draw, partial, sums } = task;
    let Mamba3Dims { d_head, d_state, rank, n_angle, .. } = dims;
    let (n_tok, n_state, n_v) = (segment.n_tok, dims.n_state(), rank * d_head);
    let n_chunk = n_tok.div_ceil(CHUNK / rank);
    let n_work = Work::len(d_head, d_state, CHUNK);
    let (n_k, square) = (CHUNK * d_state, CHUNK * CHUNK);
    let lengths = [n_tok * RATES, n_chunk * n_state, n_chunk * n_angle, n_state, n_work];
    let more = [4 * n_tok, square, square, n_k, n_k, CHUNK * d_head, n_angle, n_angle];
    let n_tile = TileBuffer::len(&dims);
    let mut scratch = inputs.scratch(lengths.iter().chain(&more).sum::<usize>() + n_tile);
    let (first, second) = scratch.f32_mut().split_at_mut(lengths.iter().sum());
    let [buffer, states, angles, dstate, work] = split(first, lengths);
    let (second, tile) = second.split_at_mut(more.iter().sum());
    let [terms, scores, dscores, dk, dq, dy_chunk, dth, after] = split(second, more);
    let mut tile = TileBuffer::new(&dims, tile);
    let n_partial: usize = partial_lengths(&dims).iter().sum();
    partial.fill(0.0);
    sums.fill(0.0);
    let all_sums = sums.chunks_mut(sum_lengths(&dims).iter().sum());
    for ((idx, head), sums) in heads.enumerate().zip(all_sums) {
        let sums = split(sums, sum_lengths(&dims));
        let [db_bias, dc_bias, dmimo_x, ddelta_bias, dskip] = sums;
        let rates = inputs.rates(head, &segment, buffer);
        let before = initial.map(|initial| InitialHead::new(&dims, initial, segment_idx, head));
        let of_head = HeadOfSegment { inputs, prepared, segment, head, rates };
        of_head.recompute_states(before.as_ref(), &mut tile, work, (states, angles));
        let [dinput, down, ddecay, ddelta] = split(terms, [n_tok; 4]);
        after.fill(0.0);
        for (chunk_idx, chunk) in chunks_of(n_tok, CHUNK / rank).enumerate().rev() {
            let span = Span { head, start: segment.start + chunk.start, n_tok: chunk.len() };
            let n_row = chunk.len() * rank;
            tile.angle.copy_from_slice(&angles[chunk_idx * n_angle..][..n_angle]);
            let Tile { head: rows, steps, cos, sin } =
                tile.make(inputs, prepared, span, (&rates, chunk.clone(), Wanted::All));
            let (scores, dscores) = (&mut scores[..n_row * n_row], &mut dscores[..n_row * n_row]);
            let (dk, dq) = (&mut dk[..n_row * d_state], &mut dq[..n_row * d_state]);
            let to = MatMut::new(scores, n_row, n_row);
            cpu.gemm(to, 0.0, 1.0, rows.c.mat(), rows.b.mat().t(), Scope::Thread);
            for (to, tok) in dy_chunk.chunks_mut(n_v).zip(chunk.clone()) {
                let at = (segment.start + tok) * dims.y_width() + head * n_v;
                to.copy_from_slice(&dy.f32()[at..][..n_v]);
            }
            let has_state = chunk_idx > 0 || before.is_some();
            let chunk_backward = ChunkBackward {
                chunk: Chunk {
                    head: rows,
                    steps,
                    scores,
                    state: has_state.then(|| &states[chunk_idx * n_state..][..n_state]),
                },
                dy: Rows::dense(dy_chunk, n_row, d_head),
                has_after: chunk.end < n_tok,
                wants_before: has_state,
            };
            let mut work = Work::new(work, d_head, d_state, n_row);
            [&mut *dscores, dk, dq].into_iter().for_each(|it| it.fill(0.0));
            let terms = Terms {
                dinput: &mut dinput[chunk.clone()],
                down: &mut down[chunk.clone()],
                ddecay: &mut ddecay[chunk.clone()],
            };
            let products = [&mut *dscores, dk, dq];
            dskip[0] += chunk_backward.run(cpu, &mut work, products, dstate, terms) as f32;
            let dscores = Mat::new(dscores, n_row, n_row);
            let to = MatMut::new(dk, n_row, d_state);
            cpu.gemm(to, 1.0, 1.0, dscores.t(), rows.c.mat(), Scope::Thread);
            let to = MatMut::new(dq, n_row, d_state);
            cpu.gemm(to, 1.0, 1.0, dscores, rows.b.mat(), Scope::Thread);
            let dx = &mut dx[chunk.clone()];
            of_head.by_x(span, work.dx, (dx, idx * d_head), dmimo_x);
            let partial = &mut partial[chunk.start * n_partial..];
            let made = Tile { head: rows, steps, cos, sin };
            let biases = [&mut *db_bias, &mut *dc_bias];
            of_head.by_rows(&made, (chunk, [dk, dq]), (partial, biases), [dth, after, ddelta]);
        }
        let dw = before.as_ref().map_or(0.0, |it| {
            let w = rates.w(0);
            it.backward(inputs, head, w, (dstate, &mut work[..n_v]), dmimo_x)
        });
        let draw = split(&mut draw[idx * 3 * n_tok..], [n_tok; 3]);
        ddelta_bias[0] = finish(&rates, [dinput, down, ddecay, ddelta], dw, draw) as f32;
    }
}

/// From the gradients of a head by the weights and decays to those by the raw numbers. `dw`: by w
/// of the first token. Returns the sum of those by the step sizes.
fn finish(
    rates: &Rates,
    [dinput, down, ddecay, ddelta]: [&mut [f32]; 4],
    mut dw: f32,
    [draw_delta, draw_a, draw_trap]: [&mut [f32]; 3],
) -> f64 {
    let Rates { delta, delta_slope, a, a_slope, lam } = *rates;
    let mut sum = 0.0;
    for tok in 0..delta.len() {
        let (delta, lam) = (delta[tok], lam[tok]);
        let dgamma = down[tok] + dinput[tok];
        let by_delta = lam * dgamma + (1.0 - lam) * dw + a[tok] * ddecay[tok] + ddelta[tok];
        draw_delta[tok] = by_delta * delta_slope[tok];
        draw_a[tok] = delta * ddecay[tok] * a_slope[tok];
        draw_trap[tok] = delta * (dgamma - dw) * lam * (1.0 - lam);
        sum += draw_delta[tok] as f64;
        dw = dinput[tok];
    }
    sum
}

/// `dx = sum_r dv[r] factors[r]`, and adds `dv x` to the gradient by the factors.
fn by_factors(dv: &[f32], factors: &[f32], x: &[f32], (dx, dfactors): (&mut [f32], &mut [f32])) {
    dx.fill(0.0);
    let rows = dv.chunks(x.len()).zip(factors.chunks(x.len())).zip(dfactors.chunks_mut(x.len()));
    for ((dv, factors), dfactors) in rows {
        for (p, dv) in dv.iter().enumerate() {
            dx[p] += dv * factors[p];
            dfactors[p] += dv * x[p];
        }
    }
}

/// What a head was given before a segment.
struct InitialHead<'a> {
    angle: &'a [f32],
    h: &'a [f32],
    before: Before<'a>,
}

impl<'a> InitialHead<'a> {
    fn new(
        dims: &Mamba3Dims,
        initial: &'a [Vec<Tensor>; 4],
        segment_idx: usize,
        head: usize,
    ) -> InitialHead<'a> {
        let [angle, h, k, v] = initial.each_ref().map(|list| list[segment_idx].f32());
        let part = |x: &'a [f32], len: usize| &x[head * len..][..len];
        let k = k.chunks(dims.n_head * dims.d_state).map(|k| part(k, dims.d_state)).collect();
        InitialHead {
            angle: part(angle, dims.n_angle),
            h: part(h, dims.n_state()),
            before: Before { k, v: part(v, dims.d_head) },
        }
    }

    /// The gradient by w of the first token; adds to that by `mimo_x`, through v of the token
    /// before. `v` is scratch.
    fn backward(
        &self,
        inputs: &Inputs,
        head: usize,
        w: f32,
        (dstate, v): (&[f32], &mut [f32]),
        dmimo_x: &mut [f32],
    ) -> f32 {
        let d_head = inputs.dims.d_head;
        inputs.values_before(head, &self.before, v);
        let mut dw = 0.0f64;
        let rows = v.chunks(d_head).zip(dmimo_x.chunks_mut(d_head));
        for (k, (v, dfactor)) in self.before.k.iter().zip(rows) {
            for (dh, k) in dstate.chunks(d_head).zip(*k) {
                for (p, dh) in dh.iter().enumerate() {
                    dw += (dh * k * v[p]) as f64;
                    dfactor[p] += w * dh * k * self.before.v[p];
                }
            }
        }
        dw as f32
    }
}

/// A head along a segment.
struct HeadOfSegment<'a> {
    inputs: &'a Inputs,
    prepared: &'a Prepared,
    segment: Segment,
    head: usize,
    rates: Rates<'a>,
}

impl HeadOfSegment<'_> {
    /// From the gradients by v to those by x, from column `first` of a token on, and by mimo_x.
    fn by_x(
        &self,
        span: Span,
        dv: &[f32],
        (dx, first): (&mut [&mut [f32]], usize),
        dmimo_x: &mut [f32],
    ) {
        let Mamba3Dims { d_head, rank, .. } = self.inputs.dims;
        for (tok, (dv, dx)) in dv.chunks(rank * d_head).zip(dx).enumerate() {
            let dx = &mut dx[first..first + d_head];
            match self.inputs.factors(self.head) {
                None => dx.copy_from_slice(dv),
                Some(factors) => {
                    by_factors(dv, factors, self.inputs.x(span).row(tok), (dx, dmimo_x));
                }
            }
        }
    }

    /// From the gradients by k and q in a chunk, which are turned back in place: adds to those by
    /// the rows of the group, and by the biases; sets `ddelta`, what comes by the angles. `after`
    /// is the gradient by the angles of all later tokens, and then of these too; `dth` is scratch.
    fn by_rows(
        &self,
        tile: &Tile,
        (chunk, [dk, dq]): (Range<usize>, [&mut [f32]; 2]),
        (partial, [db_bias, dc_bias]): (&mut [f32], [&mut [f32]; 2]),
        [dth, after, ddelta]: [&mut [f32]; 3],
    ) {
        let (cpu, dims) = (self.inputs.cpu(), self.inputs.dims);
        let Mamba3Dims { d_state, rank, n_angle, halves, .. } = dims;
        let n_partial: usize = partial_lengths(&dims).iter().sum();
        for tok in (0..chunk.len()).rev() {
            let row = tok * rank * d_state..(tok + 1) * rank * d_state;
            let [cos, sin] = [tile.cos, tile.sin].map(|it| &it[tok * n_angle..][..n_angle]);
            let partial = &mut partial[tok * n_partial..];
            let [to_k, to_q, to_turns] = split(partial, partial_lengths(&dims));
            dth.fill(0.0);
            for (y, d, to, bias) in [
                (tile.head.b.data, &mut *dk, to_k, &mut *db_bias),
                (tile.head.c.data, &mut *dq, to_q, &mut *dc_bias),
            ] {
                let (y, d) = (&y[row.clone()], &mut d[row.clone()]);
                for (y, dy) in y.chunks(d_state).zip(d.chunks_mut(d_state)) {
                    cpu.simd(TurnBackward { y, cos, sin, halves, dy, dth });
                }
                cpu.simd(AddInto { x: d, y: to });
                cpu.simd(AddInto { x: d, y: bias });
            }
            cpu.simd(AddInto { x: dth, y: after });
            let (at, row) = (chunk.start + tok, self.segment.start + chunk.start + tok);
            let turns = &self.prepared.turns.f32()[row * n_angle..][..n_angle];
            ddelta[at] = TAU * cpu.simd(Dot { a: after, b: turns });
            let factor = TAU * self.rates.delta[at];
            to_turns.iter_mut().zip(&*after).for_each(|(to, th)| *to += factor * th);
        }
    }

    /// State and angles before every chunk.
    fn recompute_states(
        &self,
        before: Option<&InitialHead>,
        tile: &mut TileBuffer,
        x_chunk: &mut [f32],
        (states, angles): (&mut [f32], &mut [f32]),
    ) {
        let HeadOfSegment { inputs, prepared, segment, head, rates } = self;
        let Mamba3Dims { d_head, rank, n_angle, .. } = inputs.dims;
        let n_state = inputs.dims.n_state();
        tile.start(before.map(|it| it.angle));
        states[..n_state].fill(0.0);
        if let Some(it) = before {
            states[..n_state].copy_from_slice(it.h);
            let v = &mut tile.v[..rank * d_head];
            inputs.fold(*head, rates.w(0), &it.before, v, &mut states[..n_state]);
        }
        let n_chunk = angles.len() / n_angle;
        for (idx, chunk) in chunks_of(segment.n_tok, CHUNK / rank).enumerate() {
            angles[idx * n_angle..][..n_angle].copy_from_slice(tile.angle);
            if idx + 1 == n_chunk {
                break;
            }
            let [before, after] = split(&mut states[idx * n_state..], [n_state; 2]);
            after.copy_from_slice(before);
            let (start, n_tok) = (segment.start + chunk.start, chunk.len());
            let span = Span { head: *head, start, n_tok };
            let Tile { head, steps, .. } =
                tile.make(inputs, prepared, span, (rates, chunk, Wanted::State));
            let x_chunk = &mut x_chunk[..n_tok * rank * d_head];
            advance(inputs.cpu(), &head, &steps, x_chunk, (steps.total(), after));
        }
    }
}

/// What the tasks found.
#[derive(Clone, Copy)]
struct ByHead<'a> {
    n_block: usize,
    partial: &'a [f32],
    draw: &'a [f32],
}

/// Columns b and c of `dxbc` and all of `draw`: adds what the tasks of a group found and takes it
/// back through the norms. Returns the gradients by these.
fn sum_over_heads(
    inputs: &Inputs,
    prepared: &Prepared,
    segments: &Segments,
    by: ByHead,
    (dxbc, draw): (&mut Tensor, &mut Tensor),
) -> [Tensor; 2] {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let Mamba3Dims { n_head, n_group, d_state, rank, n_angle, .. } = dims;
    let (width, raw_width) = (dims.width(), dims.raw_width());
    let n_partial: usize = partial_lengths(&dims).iter().sum();
    let (mut dxbc, mut draw) = (dxbc.f32_mut(), draw.f32_mut());
    let mut tasks = Vec::new();
    for segment in segments.iter() {
        for piece in chunks_of(segment.n_tok, PIECE) {
            let dxbc = dxbc.split_off_mut(..piece.len() * width).expect("rows of a piece");
            let draw = draw.split_off_mut(..piece.len() * raw_width).expect("rows of a piece");
            tasks.push((segment, piece, dxbc, draw));
        }
    }
    let per_group = by.n_block / n_group;
    let parts = cpu.map(tasks, |(segment, piece, dxbc, draw)| {
        let mut sum = vec![0.0; n_partial];
        let mut dnorms = [vec![0.0; d_state], vec![0.0; d_state]];
        let rows = dxbc.chunks_mut(width).zip(draw.chunks_mut(raw_width));
        for (tok, (dxbc, draw)) in piece.zip(rows) {
            let ratios = &prepared.ratios.f32()[(segment.start + tok) * 2 * rank * n_group..];
            let xbc = &inputs.xbc.f32()[(segment.start + tok) * width..][..width];
            let (raw, dangle) = draw.split_at_mut(3 * n_head);
            dangle.fill(0.0);
            for group in 0..n_group {
                sum.fill(0.0);
                for block in group * per_group..(group + 1) * per_group {
                    let at = segment.start * by.n_block + block * segment.n_tok + tok;
                    cpu.simd(AddInto { x: &by.partial[at * n_partial..], y: &mut sum });
                }
                let (rows, turns) = sum.split_at(n_partial - n_angle);
                dangle.iter_mut().zip(turns).for_each(|(to, from)| *to += from);
                for (row, dy) in rows.chunks(d_state).enumerate() {
                    let at = row * n_group + group;
                    let columns =
                        dims.d_inner() + at * d_state..dims.d_inner() + (at + 1) * d_state;
                    let norms = [&inputs.b_norm, &inputs.c_norm];
                    cpu.simd(NormRowBackward {
                        x: &xbc[columns.clone()],
                        w: norms[row / rank].f32(),
                        ratio: ratios[at],
                        dy,
                        dx: &mut dxbc[columns],
                        dw: &mut dnorms[row / rank],
                    });
                }
            }
            // The slope of tanh / 2.
            let turns = &prepared.turns.f32()[(segment.start + tok) * n_angle..];
            dangle.iter_mut().zip(turns).for_each(|(d, half)| *d *= 0.5 - 2.0 * half * half);
            for (idx, to) in raw.iter_mut().enumerate() {
                let (which, head) = (idx / n_head, idx % n_head);
                let of_head = segment.start * n_head + head * segment.n_tok;
                *to = by.draw[of_head * 3 + which * segment.n_tok + tok];
            }
        }
        dnorms
    });
    [0, 1].map(|which| {
        let mut sum = vec![0.0f64; d_state];
        for dnorms in &parts {
            sum.iter_mut().zip(&dnorms[which]).for_each(|(sum, &x)| *sum += x as f64);
        }
        let sum: Vec<f32> = sum.into_iter().map(|sum| sum as f32).collect();
        Tensor::from_f32(inputs.xbc.device(), &[d_state], &sum)
    })
}
