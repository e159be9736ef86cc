//! One head in one chunk: the products that `ssd` and `mamba3` share. The headers of the two have
//! the mathematics.
//!
//! A token has `rank` rows, which lie together: one in Mamba-2. Its log decay, its weight `input`
//! for later tokens and its weight `own` for itself are given one by one; in Mamba-2 they are
//! `delta a`, `delta` and `delta`. With tok(i) the token of row i:
//!
//! ```text
//! mix[i,j] = exp(cum[i] - cum[j]) input[j] scores[i,j]     where tok(j) < tok(i)
//!          = own[j] scores[i,j]                            where tok(j) = tok(i)
//!          = 0                                             otherwise
//! y        = mix x + since c h + skip x
//! h_next   = exp(cum[last]) h + b^T (until input x)
//! ```

use crate::ops::split;
use crate::tensor::cpu::{AddInto, Cpu, Dot, F32s, Mat, MatMut, Scope};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Most rows of a chunk.
pub const CHUNK: usize = 64;

/// `n` in chunks of at most `len`.
pub fn chunks_of(
    n: usize,
    len: usize,
) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    (0..n.div_ceil(len)).map(move |idx| idx * len..n.min((idx + 1) * len))
}

/// The same few columns of consecutive rows.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a [f32],
    pub n_row: usize,
    pub width: usize,
    pub stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows without gaps.
    pub fn dense(data: &'a [f32], n_row: usize, width: usize) -> Rows<'a> {
        Rows { data, n_row, width, stride: width }
    }

    /// (n_row, width)
    pub fn mat(self) -> Mat<'a> {
        Mat::strided(self.data, self.n_row, self.width, self.stride)
    }

    #[inline(always)]
    pub fn row(self, idx: usize) -> &'a [f32] {
        &self.data[idx * self.stride..][..self.width]
    }

    /// Packs the rows into `to`.
    pub fn copy(self, to: &mut [f32]) {
        for (idx, to) in to.chunks_mut(self.width).enumerate() {
            to.copy_from_slice(self.row(idx));
        }
    }
}

/// What one head reads.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    pub x: Rows<'a>,
    pub b: Rows<'a>,
    pub c: Rows<'a>,
    pub skip: f32,
}

/// Weights and decays of one head in a chunk, one number per row.
#[derive(Clone, Copy)]
pub struct Steps<'a> {
    /// Rows of a token.
    pub rank: usize,
    /// Weight of a row for later tokens.
    pub input: &'a [f32],
    /// Weight of a row for its own token.
    pub own: &'a [f32],
    /// Sum of log decays from the first token to this one.
    pub cum: &'a [f32],
    /// What `cum` lost in rounding.
    pub cum_low: &'a [f32],
    /// `exp(cum)`
    pub since: &'a [f32],
    /// `exp(cum[last] - cum)`
    pub until: &'a [f32],
    /// `until input`
    pub weight: &'a [f32],
}

impl Steps<'_> {
    /// Decay over all tokens.
    pub fn total(&self) -> f32 {
        self.since.last().copied().unwrap_or(1.0)
    }
}

/// `since`, `until` and `weight` from the sums and `input`.
pub struct Exponentials<'a> {
    pub cum: &'a [f32],
    pub cum_low: &'a [f32],
    pub input: &'a [f32],
    pub since: &'a mut [f32],
    pub until: &'a mut [f32],
    pub weight: &'a mut [f32],
}

impl WithSimd for Exponentials<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Exponentials { cum, cum_low, input, since, until, weight } = self;
        let [last, last_low] =
            [cum, cum_low].map(|it| F32s::splat(simd, it.last().copied().unwrap_or(0.0)));
        for at in (0..cum.len()).step_by(F32s::<S>::LANES) {
            let (high, low) = (F32s::load(simd, &cum[at..]), F32s::load(simd, &cum_low[at..]));
            high.exp().store(&mut since[at..]);
            let decay = ((last - high) + (last_low - low)).exp();
            decay.store(&mut until[at..]);
            (decay * F32s::load(simd, &input[at..])).store(&mut weight[at..]);
        }
    }
}

/// What one head has in one chunk.
#[derive(Clone, Copy)]
pub struct Chunk<'a> {
    pub head: Head<'a>,
    pub steps: Steps<'a>,
    /// `c b^T`
    pub scores: &'a [f32],
    /// Before the chunk; none is zero.
    pub state: Option<&'a [f32]>,
}

impl Chunk<'_> {
    /// Sets `y`, with scratch for `mix`.
    pub fn forward(&self, cpu: &Cpu, mix: &mut [f32], y: &mut [f32]) {
        let Head { x, c, skip, .. } = self.head;
        cpu.simd(Mix { steps: self.steps, scores: self.scores, mix });
        match self.state {
            None => y.fill(0.0),
            Some(state) => {
                let state = Mat::new(state, c.width, x.width);
                let y = MatMut::new(y, x.n_row, x.width);
                cpu.gemm(y, 0.0, 1.0, c.mat(), state, Scope::Thread);
            }
        }
        cpu.simd(Blend { y, scale: self.steps.since, x, skip });
        let (y, mix) = (MatMut::new(y, x.n_row, x.width), Mat::new(mix, x.n_row, x.n_row));
        cpu.gemm(y, 1.0, 1.0, mix, x.mat(), Scope::Thread);
    }
}

/// `state = beta state + b^T (until input x)`, with scratch for the bracket.
pub fn advance(
    cpu: &Cpu,
    head: &Head,
    steps: &Steps,
    x_chunk: &mut [f32],
    (beta, state): (f32, &mut [f32]),
) {
    cpu.simd(ScaleRows { y: x_chunk, scale: steps.weight, x: head.x });
    let x = Mat::new(x_chunk, head.x.n_row, head.x.width);
    let state = MatMut::new(state, head.b.width, head.x.width);
    cpu.gemm(state, beta, 1.0, head.b.mat().t(), x, Scope::Thread);
}

/// Inverts `Chunk::forward` and `advance`.
pub struct ChunkBackward<'a> {
    pub chunk: Chunk<'a>,
    pub dy: Rows<'a>,
    /// Whether there is a gradient by the state after the chunk.
    pub has_after: bool,
    /// Whether that by the state before it is wanted.
    pub wants_before: bool,
}

/// Scratch for one chunk.
pub struct Work<'a> {
    x_chunk: &'a mut [f32],
    dy_chunk: &'a mut [f32],
    /// Gradient by x.
    pub dx: &'a mut [f32],
    dc: &'a mut [f32],
    mix: &'a mut [f32],
    dmix: &'a mut [f32],
    sent: &'a mut [f32],
    own: &'a mut [f32],
    over: &'a mut [f32],
    entering: &'a mut [f32],
    leaving: &'a mut [f32],
}

impl<'a> Work<'a> {
    /// Numbers that `new` cuts, for `n_row` rows of a head.
    pub fn len(d_head: usize, d_state: usize, n_row: usize) -> usize {
        Work::lengths(d_head, d_state, n_row).iter().sum()
    }

    fn lengths(d_head: usize, d_state: usize, n_row: usize) -> [usize; 11] {
        let (x, c, square) = (n_row * d_head, n_row * d_state, n_row * n_row);
        [x, x, x, c, square, square, n_row, n_row, n_row, n_row, n_row]
    }

    pub fn new(buffer: &'a mut [f32], d_head: usize, d_state: usize, n_row: usize) -> Work<'a> {
        let pieces = split(buffer, Work::lengths(d_head, d_state, n_row));
        let [x_chunk, dy_chunk, dx, dc, mix, dmix, sent, own, over, entering, leaving] = pieces;
        Work { x_chunk, dy_chunk, dx, dc, mix, dmix, sent, own, over, entering, leaving }
    }
}

/// Gradients of the tokens of a chunk, one number each.
pub struct Terms<'a> {
    /// By `input`.
    pub dinput: &'a mut [f32],
    /// By `own`.
    pub down: &'a mut [f32],
    /// By the log decay.
    pub ddecay: &'a mut [f32],
}

impl ChunkBackward<'_> {
    /// Sets `work.dx` and `terms`, adds to `dscores`, `db` and `dc`, takes `dstate` from after the
    /// chunk to before it, and returns the gradient by `skip`.
    ///
    /// What `dscores` gives b and c is left to the caller: in Mamba-2 heads share it.
    pub fn run(
        &self,
        cpu: &Cpu,
        work: &mut Work,
        [dscores, db, dc]: [&mut [f32]; 3],
        dstate: &mut [f32],
        terms: Terms,
    ) -> f64 {
        let (Head { x, c, skip, .. }, steps) = (self.chunk.head, self.chunk.steps);
        let n_row = x.n_row;
        self.inside(cpu, work, dscores);
        self.entering(cpu, work, dc);
        let through = self.leaving(cpu, work, db, dstate);
        self.finish(work, through, terms);
        cpu.simd(Blend { y: work.dx, scale: steps.weight, x: self.dy, skip });
        let dx = MatMut::new(work.dx, n_row, x.width);
        let mix = Mat::new(work.mix, n_row, n_row);
        cpu.gemm(dx, 1.0, 1.0, mix.t(), self.dy.mat(), Scope::Thread);
        if self.wants_before {
            if self.chunk.state.is_none() {
                cpu.simd(ScaleRows { y: work.dy_chunk, scale: steps.since, x: self.dy });
            }
            let beta = if self.has_after { steps.total() } else { 0.0 };
            let dstate = MatMut::new(dstate, c.width, x.width);
            let dy = Mat::new(work.dy_chunk, n_row, x.width);
            cpu.gemm(dstate, beta, 1.0, c.mat().t(), dy, Scope::Thread);
        }
        work.dmix.iter().step_by(n_row + 1).map(|&dmix| dmix as f64).sum()
    }

    /// From row to row: `mix`, `dmix`, `dscores`, and the first terms of the others.
    fn inside(&self, cpu: &Cpu, work: &mut Work, dscores: &mut [f32]) {
        let n_row = self.dy.n_row;
        self.chunk.head.x.copy(work.x_chunk);
        let x = Mat::new(work.x_chunk, n_row, self.dy.width);
        let dmix = MatMut::new(work.dmix, n_row, n_row);
        cpu.gemm(dmix, 0.0, 1.0, self.dy.mat(), x.t(), Scope::Thread);
        work.sent.fill(0.0);
        cpu.simd(MixBackward {
            steps: self.chunk.steps,
            scores: self.chunk.scores,
            dmix: work.dmix,
            mix: work.mix,
            dscores,
            sent: work.sent,
            own: work.own,
            over: work.over,
        });
    }

    /// From the state before the chunk to its rows; `work.dy_chunk` becomes `since dy`.
    fn entering(&self, cpu: &Cpu, work: &mut Work, dc: &mut [f32]) {
        let Some(state) = self.chunk.state else { return work.entering.fill(0.0) };
        let Head { c, .. } = self.chunk.head;
        let (n_row, d_head, d_state) = (self.dy.n_row, self.dy.width, c.width);
        cpu.simd(ScaleRows { y: work.dy_chunk, scale: self.chunk.steps.since, x: self.dy });
        let dy = Mat::new(work.dy_chunk, n_row, d_head);
        let state = Mat::new(state, d_state, d_head);
        cpu.gemm(MatMut::new(work.dc, n_row, d_state), 0.0, 1.0, dy, state.t(), Scope::Thread);
        row_dots(cpu, work.dc, c, work.entering);
        cpu.simd(AddInto { x: work.dc, y: dc });
    }

    /// From the rows to the state after the chunk; `work.dx` becomes `b dh`. Returns the term of
    /// `ddecay` that goes straight through.
    fn leaving(&self, cpu: &Cpu, work: &mut Work, db: &mut [f32], dstate: &[f32]) -> f32 {
        if !self.has_after {
            work.dx.fill(0.0);
            work.leaving.fill(0.0);
            return 0.0;
        }
        let (Head { x, b, .. }, steps) = (self.chunk.head, self.chunk.steps);
        let dh = Mat::new(dstate, b.width, x.width);
        cpu.gemm(MatMut::new(work.dx, x.n_row, x.width), 0.0, 1.0, b.mat(), dh, Scope::Thread);
        row_dots(cpu, work.dx, x, work.leaving);
        for (leaving, until) in work.leaving.iter_mut().zip(steps.until) {
            *leaving *= until;
        }
        cpu.simd(ScaleRows { y: work.x_chunk, scale: steps.weight, x });
        let weighted = Mat::new(work.x_chunk, x.n_row, x.width);
        let db = MatMut::new(db, x.n_row, b.width);
        cpu.gemm(db, 1.0, 1.0, weighted, dh.t(), Scope::Thread);
        let dot = |state| cpu.simd(Dot { a: state, b: dstate });
        self.chunk.state.map_or(0.0, |state| steps.total() * dot(state))
    }

    /// Adds up the terms of every token, over its rows and what passes over it.
    fn finish(&self, work: &Work, through: f32, terms: Terms) {
        let Steps { rank, input, .. } = self.chunk.steps;
        let rows = |tok: usize| tok * rank..(tok + 1) * rank;
        let mut before = through;
        for tok in 0..terms.ddecay.len() {
            terms.dinput[tok] = rows(tok).map(|row| work.sent[row] + work.leaving[row]).sum();
            terms.down[tok] = rows(tok).map(|row| work.own[row]).sum();
            terms.ddecay[tok] = work.over[tok * rank] + before;
            before += rows(tok).map(|row| work.leaving[row] * input[row]).sum::<f32>();
        }
        let mut after = 0.0;
        for tok in (0..terms.ddecay.len()).rev() {
            after += rows(tok).map(|row| work.entering[row]).sum::<f32>();
            terms.ddecay[tok] += after;
        }
    }
}

/// 0, 1, 2, ... for as many lanes as any machine has.
const LANE: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// `exp(cum[i] - cum[j])` for `LANES` rows j from `at` on, 0 from row `end` on.
#[inline(always)]
fn decay<S: Simd>(simd: S, steps: &Steps, i: usize, at: usize, end: usize) -> F32s<S> {
    let high = F32s::splat(simd, steps.cum[i]) - F32s::load(simd, &steps.cum[at..]);
    let low = F32s::splat(simd, steps.cum_low[i]) - F32s::load(simd, &steps.cum_low[at..]);
    let bound = F32s::splat(simd, (end - at) as f32 - 0.5);
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
        let n_row = steps.cum.len();
        for i in 0..n_row {
            let (scores, mix) = (&scores[i * n_row..][..n_row], &mut mix[i * n_row..][..n_row]);
            let first = i / steps.rank * steps.rank;
            let mut at = 0;
            while at < first {
                let input = F32s::load(simd, &steps.input[at..]);
                let decay = decay(simd, &steps, i, at, first);
                (decay * F32s::load(simd, &scores[at..]) * input).store(&mut mix[at..]);
                at += F32s::<S>::LANES;
            }
            mix[at.min(n_row)..].fill(0.0);
            for j in first..first + steps.rank {
                mix[j] = scores[j] * steps.own[j];
            }
        }
    }
}

/// `mix` again, and from `dmix` what passes between the rows of a chunk: adds to `dscores` and to
/// `sent`, the gradient by `input`; sets `own`, the gradient by itself, and `over`, in the first
/// row of each token what passes over it.
struct MixBackward<'a> {
    steps: Steps<'a>,
    scores: &'a [f32],
    dmix: &'a [f32],
    mix: &'a mut [f32],
    dscores: &'a mut [f32],
    sent: &'a mut [f32],
    own: &'a mut [f32],
    over: &'a mut [f32],
}

impl WithSimd for MixBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let MixBackward { steps, scores, dmix, mix, dscores, sent, own, over } = self;
        let n_row = steps.cum.len();
        // From the last row up, `sent[j]` is the sum over the rows i >= k so far: times
        // `input[j]`, what row j sends over the token of k.
        for k in (0..n_row).rev() {
            let row = k * n_row..(k + 1) * n_row;
            let (scores, dmix) = (&scores[row.clone()], &dmix[row.clone()]);
            let (mix, dscores) = (&mut mix[row.clone()], &mut dscores[row]);
            let first = k / steps.rank * steps.rank;
            let mut passed = F32s::zero(simd);
            let mut at = 0;
            while at < first {
                let input = F32s::load(simd, &steps.input[at..]);
                let dmix = F32s::load(simd, &dmix[at..]);
                let decay = decay(simd, &steps, k, at, first);
                let scored = decay * F32s::load(simd, &scores[at..]);
                (scored * input).store(&mut mix[at..]);
                let dscore = F32s::load(simd, &dscores[at..]);
                (decay * input).mul_add(dmix, dscore).store(&mut dscores[at..]);
                let sum = scored.mul_add(dmix, F32s::load(simd, &sent[at..]));
                sum.store(&mut sent[at..]);
                let bound = F32s::splat(simd, (first - at) as f32 - 0.5);
                let earlier = F32s::load(simd, &LANE).select_less(bound, sum, passed.same(0.0));
                passed = earlier.mul_add(input, passed);
                at += F32s::<S>::LANES;
            }
            over[k] = passed.sum();
            mix[at.min(n_row)..].fill(0.0);
            own[k] = 0.0;
            for j in first..first + steps.rank {
                mix[j] = scores[j] * steps.own[j];
                dscores[j] += steps.own[j] * dmix[j];
                own[k] += scores[j] * dmix[j];
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
        for (idx, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(idx), F32s::splat(simd, scale[idx]));
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
        for (idx, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(idx), F32s::splat(simd, scale[idx]));
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                let scaled = scale * F32s::load(simd, &y[at..]);
                skip.mul_add(F32s::load(simd, &x[at..]), scaled).store(&mut y[at..]);
            }
        }
    }
}

/// `y[i] = a[i] . b[i]`, row by row.
fn row_dots(cpu: &Cpu, a: &[f32], b: Rows, y: &mut [f32]) {
    for (idx, (y, a)) in y.iter_mut().zip(a.chunks_exact(b.width)).enumerate() {
        *y = cpu.simd(Dot { a, b: b.row(idx) });
    }
}
