//! What `mamba3` makes of its inputs on the CPU: normed rows and angles of a token, rates of a
//! head, and k, q and v of a head in a chunk.

use super::kernels::*;
use super::*;
use crate::ops::ssd::chunk::{CHUNK, Exponentials, Head, Rows, Steps};
use crate::tensor::segment::Segment;
use std::ops::Range;

/// Tokens that are prepared, or summed over heads, at a time.
pub(super) const PIECE: usize = 64;

/// What all heads share.
pub(super) struct Prepared {
    /// b and c, normed and weighted: (n_tok, 2 d_bc).
    pub normed: Tensor,
    /// `1 / rms` of their rows: (n_tok, 2 rank n_group).
    pub ratios: Tensor,
    /// `tanh(raw_angle) / 2`, turns for a step size of 1: (n_tok, n_angle).
    pub turns: Tensor,
}

impl Prepared {
    pub(super) fn new(inputs: &Inputs, n_tok: usize) -> Prepared {
        let (cpu, dims) = (inputs.cpu(), inputs.dims);
        let (d_inner, n_angle) = (dims.d_inner(), dims.n_angle);
        let (n_normed, n_ratio) = (2 * dims.d_bc(), 2 * dims.rank * dims.n_group);
        let mut normed = inputs.scratch(n_tok * n_normed);
        let mut ratios = inputs.scratch(n_tok * n_ratio);
        let mut turns = inputs.scratch(n_tok * n_angle);
        let pieces = normed.f32_mut().chunks_mut(PIECE * n_normed);
        let pieces = pieces.zip(ratios.f32_mut().chunks_mut(PIECE * n_ratio));
        let pieces = pieces.zip(turns.f32_mut().chunks_mut(PIECE * n_angle)).enumerate();
        let weights = [inputs.b_norm.f32(), inputs.c_norm.f32()];
        cpu.map(pieces.collect(), |(idx, ((normed, ratios), turns))| {
            let rows = normed.chunks_mut(n_normed).zip(ratios.chunks_mut(n_ratio));
            for (tok, ((normed, ratios), turns)) in rows.zip(turns.chunks_mut(n_angle)).enumerate()
            {
                let tok = idx * PIECE + tok;
                let bc = &inputs.xbc.f32()[tok * dims.width() + d_inner..][..n_normed];
                let rows = bc.chunks(dims.d_state).zip(normed.chunks_mut(dims.d_state));
                for (row, ((x, y), ratio)) in rows.zip(ratios).enumerate() {
                    let w = weights[row / (n_ratio / 2)];
                    *ratio = cpu.simd(NormRow { x, w, eps: dims.eps, y });
                }
                let raw = &inputs.raw.f32()[tok * dims.raw_width() + 3 * dims.n_head..];
                turns.copy_from_slice(&raw[..n_angle]);
                cpu.simd(HalfTanh(turns));
            }
        });
        Prepared { normed, ratios, turns }
    }
}

/// Series of `Rates`.
pub(super) const RATES: usize = 5;

/// What one head takes from `raw`, one number for each token of a segment.
#[derive(Clone, Copy)]
pub(super) struct Rates<'a> {
    pub delta: &'a [f32],
    /// Of `delta` by its raw number, as are the other slopes.
    pub delta_slope: &'a [f32],
    pub a: &'a [f32],
    pub a_slope: &'a [f32],
    pub lam: &'a [f32],
}

/// Series of `Steps`.
pub(super) const SERIES: usize = 7;

impl Rates<'_> {
    /// `w`, zero behind the last token.
    pub(super) fn w(&self, tok: usize) -> f32 {
        if tok < self.delta.len() { (1.0 - self.lam[tok]) * self.delta[tok] } else { 0.0 }
    }

    /// Of the rows of the tokens `chunk`, in a buffer of `SERIES` numbers for each.
    pub(super) fn steps<'a>(
        &self,
        cpu: &Cpu,
        rank: usize,
        chunk: Range<usize>,
        buffer: &'a mut [f32],
    ) -> Steps<'a> {
        let n_row = chunk.len() * rank;
        let [input, own, cum, cum_low, since, until, weight] = split(buffer, [n_row; SERIES]);
        let mut sum = 0.0f64;
        for (idx, tok) in chunk.enumerate() {
            sum += self.delta[tok] as f64 * self.a[tok] as f64;
            let rows = idx * rank..(idx + 1) * rank;
            let gamma = self.lam[tok] * self.delta[tok];
            own[rows.clone()].fill(gamma);
            input[rows.clone()].fill(gamma + self.w(tok + 1));
            cum[rows.clone()].fill(sum as f32);
            cum_low[rows].fill((sum - sum as f32 as f64) as f32);
        }
        let (input, own, cum, cum_low) = (&*input, &*own, &*cum, &*cum_low);
        cpu.simd(Exponentials { cum, cum_low, input, since, until, weight });
        let (since, until, weight) = (&*since, &*until, &*weight);
        Steps { rank, input, own, cum, cum_low, since, until, weight }
    }
}

/// Some tokens of a head.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub head: usize,
    /// Row of the batch.
    pub start: usize,
    pub n_tok: usize,
}

/// Which of the two turned rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    K,
    Q,
}

impl Inputs {
    pub(super) fn rates<'a>(
        &self,
        head: usize,
        segment: &Segment,
        buffer: &'a mut [f32],
    ) -> Rates<'a> {
        let (n_head, width) = (self.dims.n_head, self.dims.raw_width());
        let mut series = split(buffer, [segment.n_tok; RATES]);
        let bias = self.delta_bias.f32()[head];
        let rows = self.raw.f32()[segment.start * width..].chunks(width);
        for (tok, row) in rows.take(segment.n_tok).enumerate() {
            series[0][tok] = row[head] + bias;
            series[2][tok] = row[n_head + head];
            series[4][tok] = row[2 * n_head + head];
        }
        self.cpu().simd(MakeRates { dims: self.dims, series: &mut series });
        let [delta, delta_slope, a, a_slope, lam] = series.map(|series| &*series);
        Rates { delta, delta_slope, a, a_slope, lam }
    }

    /// Cosines and sines of each token, (n_tok, n_angle); takes `angle`, in turns, along.
    pub(super) fn angles(
        &self,
        prepared: &Prepared,
        span: Span,
        delta: &[f32],
        angle: &mut [f32],
        [cos, sin]: [&mut [f32]; 2],
    ) {
        let n_angle = self.dims.n_angle;
        let turns = &prepared.turns.f32()[span.start * n_angle..][..span.n_tok * n_angle];
        let rows = cos.chunks_mut(n_angle).zip(sin.chunks_mut(n_angle));
        for ((turns, &delta), (cos, sin)) in turns.chunks(n_angle).zip(delta).zip(rows) {
            self.cpu().simd(Angles { turns, delta, angle, cos, sin });
        }
    }

    /// First numbers in `b_bias` or `c_bias` of a head.
    pub(super) fn bias(&self, side: Side, head: usize) -> &[f32] {
        let n = self.dims.rank * self.dims.d_state;
        let bias = if side == Side::K { &self.b_bias } else { &self.c_bias };
        &bias.f32()[head * n..][..n]
    }

    /// k or q of the rows of a span: (n_tok rank, d_state).
    pub(super) fn turned(
        &self,
        prepared: &Prepared,
        (side, span): (Side, Span),
        [cos, sin]: [&[f32]; 2],
        to: &mut [f32],
    ) {
        let Mamba3Dims { n_group, d_state, rank, n_angle, halves, .. } = self.dims;
        let group = span.head / self.dims.heads_per_group();
        let first = if side == Side::K { 0 } else { self.dims.d_bc() } + group * d_state;
        let biases = self.bias(side, span.head).chunks(d_state);
        for (tok, to) in to.chunks_mut(rank * d_state).enumerate() {
            let normed = &prepared.normed.f32()[(span.start + tok) * 2 * self.dims.d_bc()..];
            let [cos, sin] = [cos, sin].map(|it| &it[tok * n_angle..][..n_angle]);
            for (r, (y, bias)) in to.chunks_mut(d_state).zip(biases.clone()).enumerate() {
                let x = &normed[first + r * n_group * d_state..][..d_state];
                self.cpu().simd(Turn { x, bias, cos, sin, halves, y });
            }
        }
    }

    /// x of a head.
    pub(super) fn x(&self, span: Span) -> Rows<'_> {
        let (stride, width) = (self.dims.width(), self.dims.d_head);
        let data = &self.xbc.f32()[span.start * stride + span.head * width..];
        Rows { data, n_row: span.n_tok, width, stride }
    }

    /// The rows of `mimo_x` of a head.
    pub(super) fn factors(&self, head: usize) -> Option<&[f32]> {
        let n = self.dims.rank * self.dims.d_head;
        self.mimo_x.as_ref().map(|mimo_x| &mimo_x.f32()[head * n..][..n])
    }

    /// v of the rows of a span: (n_tok rank, d_head), in `to` where it is not x itself.
    pub(super) fn values<'a>(&'a self, span: Span, to: &'a mut [f32]) -> Rows<'a> {
        let x = self.x(span);
        let Some(factors) = self.factors(span.head) else { return x };
        for (tok, to) in to.chunks_mut(factors.len()).enumerate() {
            times(to, factors, x.row(tok));
        }
        Rows::dense(to, span.n_tok * self.dims.rank, self.dims.d_head)
    }

    /// Adds `w sum_r k v^T` of the token before a segment to its state; `v` is scratch.
    pub(super) fn fold(&self, head: usize, w: f32, before: &Before, v: &mut [f32], h: &mut [f32]) {
        let d_head = self.dims.d_head;
        self.values_before(head, before, v);
        for (k, v) in before.k.iter().zip(v.chunks(d_head)) {
            for (row, k) in h.chunks_mut(d_head).zip(*k) {
                row.iter_mut().zip(v).for_each(|(h, v)| *h += w * k * v);
            }
        }
    }

    /// v of the token before a segment: (rank, d_head).
    pub(super) fn values_before(&self, head: usize, before: &Before, v: &mut [f32]) {
        match self.factors(head) {
            Some(factors) => times(v, factors, before.v),
            None => v.copy_from_slice(before.v),
        }
    }
}

/// k of each rank, and x, of a head in the token before a segment.
pub(super) struct Before<'a> {
    pub k: Vec<&'a [f32]>,
    pub v: &'a [f32],
}

/// `to[r] = factors[r] x`
fn times(to: &mut [f32], factors: &[f32], x: &[f32]) {
    for (to, factors) in to.chunks_mut(x.len()).zip(factors.chunks(x.len())) {
        to.iter_mut().zip(factors).zip(x).for_each(|((to, f), x)| *to = f * x);
    }
}

/// Which rows of a tile are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All but q, which is left as it is: for the state after.
    State,
    All,
}

/// Buffers for one head in one chunk.
pub(super) struct TileBuffer<'a> {
    series: &'a mut [f32],
    pub k: &'a mut [f32],
    q: &'a mut [f32],
    pub v: &'a mut [f32],
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    /// Behind the last chunk that was made, in turns.
    pub angle: &'a mut [f32],
}

/// One head in one chunk.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// v, k and q.
    pub head: Head<'a>,
    pub steps: Steps<'a>,
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl<'a> TileBuffer<'a> {
    pub(super) fn len(dims: &Mamba3Dims) -> usize {
        TileBuffer::lengths(dims).iter().sum()
    }

    fn lengths(dims: &Mamba3Dims) -> [usize; 7] {
        let (n_k, n_angle) = (CHUNK * dims.d_state, CHUNK * dims.n_angle);
        let n_v = CHUNK * dims.d_head;
        [SERIES * CHUNK, n_k, n_k, n_v, n_angle, n_angle, dims.n_angle]
    }

    pub(super) fn new(dims: &Mamba3Dims, buffer: &'a mut [f32]) -> TileBuffer<'a> {
        let [series, k, q, v, cos, sin, angle] = split(buffer, TileBuffer::lengths(dims));
        TileBuffer { series, k, q, v, cos, sin, angle }
    }

    /// Before the first chunk of a segment; `angle` in radians.
    pub(super) fn start(&mut self, angle: Option<&[f32]>) {
        self.angle.fill(0.0);
        let given = angle.into_iter().flatten();
        self.angle.iter_mut().zip(given).for_each(|(to, from)| *to = to_turns(*from));
    }

    /// The tokens `chunk` of a segment, which are `span` of the batch.
    pub(super) fn make<'b>(
        &'b mut self,
        inputs: &'b Inputs,
        prepared: &Prepared,
        span: Span,
        (rates, chunk, wanted): (&Rates, Range<usize>, Wanted),
    ) -> Tile<'b> {
        let Mamba3Dims { d_head, d_state, rank, n_angle, .. } = inputs.dims;
        let (n_tok, n_row) = (span.n_tok, span.n_tok * rank);
        let (cos, sin) = (&mut self.cos[..n_tok * n_angle], &mut self.sin[..n_tok * n_angle]);
        inputs.angles(prepared, span, &rates.delta[chunk.clone()], self.angle, [cos, sin]);
        let (k, q) = (&mut self.k[..n_row * d_state], &mut self.q[..n_row * d_state]);
        inputs.turned(prepared, (Side::K, span), [cos, sin], k);
        if wanted == Wanted::All {
            inputs.turned(prepared, (Side::Q, span), [cos, sin], q);
        }
        let head = Head {
            x: inputs.values(span, &mut self.v[..n_row * d_head]),
            b: Rows::dense(k, n_row, d_state),
            c: Rows::dense(q, n_row, d_state),
            skip: inputs.skip.f32()[span.head],
        };
        let steps = rates.steps(inputs.cpu(), rank, chunk, self.series);
        Tile { head, steps, cos, sin }
    }
}

/// From radians to turns between -1/2 and 1/2, and back.
pub(super) fn to_turns(angle: f32) -> f32 {
    let turns = angle as f64 / std::f64::consts::TAU;
    (turns - turns.round()) as f32
}

pub(super) fn to_radians(turns: f32) -> f32 {
    (turns as f64 * std::f64::consts::TAU) as f32
}
