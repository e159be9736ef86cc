//! Kernels of `ssd`: step sizes and decays, mixing inside a chunk, small products.

use super::*;

/// From `raw + bias` in the first of `series` to all of them, in the order of `Steps`.
pub(super) struct StepSizes<'a, 'b> {
    pub a: f32,
    pub limits: (f32, f32),
    pub series: &'b mut [&'a mut [f32]; SERIES],
}

impl WithSimd for StepSizes<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [delta, slope, cum, cum_low, since, until, weight] = self.series;
        let n_tok = delta.len();
        let (min, max) = (F32s::splat(simd, self.limits.0), F32s::splat(simd, self.limits.1));
        let zero = F32s::zero(simd);
        for at in (0..n_tok).step_by(F32s::<S>::LANES) {
            let raw = F32s::load(simd, &delta[at..]);
            let soft = raw.softplus();
            let below_max = max.select_less(soft, zero, raw.sigmoid());
            soft.select_less(min, zero, below_max).store(&mut slope[at..]);
            // In this order a NaN stays one.
            max.min(min.max(soft)).store(&mut delta[at..]);
        }
        let mut sum = 0.0f64;
        for tok in 0..n_tok {
            sum += delta[tok] as f64 * self.a as f64;
            cum[tok] = sum as f32;
            cum_low[tok] = (sum - cum[tok] as f64) as f32;
        }
        let [last, last_low] =
            [&cum, &cum_low].map(|it| F32s::splat(simd, it.last().copied().unwrap_or(0.0)));
        for at in (0..n_tok).step_by(F32s::<S>::LANES) {
            let (high, low) = (F32s::load(simd, &cum[at..]), F32s::load(simd, &cum_low[at..]));
            high.exp().store(&mut since[at..]);
            let decay = ((last - high) + (last_low - low)).exp();
            decay.store(&mut until[at..]);
            (decay * F32s::load(simd, &delta[at..])).store(&mut weight[at..]);
        }
    }
}

/// 0, 1, 2, ... for as many lanes as any machine has.
pub(super) const LANE: [f32; 16] =
    [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// `exp(cum[i] - cum[j])` for `LANES` tokens j from `at` on, 0 where j > i.
#[inline(always)]
pub(super) fn decay<S: Simd>(simd: S, steps: &Steps, i: usize, at: usize) -> F32s<S> {
    let high = F32s::splat(simd, steps.cum[i]) - F32s::load(simd, &steps.cum[at..]);
    let low = F32s::splat(simd, steps.cum_low[i]) - F32s::load(simd, &steps.cum_low[at..]);
    let bound = F32s::splat(simd, (i - at) as f32 + 0.5);
    F32s::load(simd, &LANE).select_less(bound, (high + low).exp(), F32s::zero(simd))
}

/// `mix` from `scores`.
pub(super) struct Mix<'a> {
    pub steps: Steps<'a>,
    pub scores: &'a [f32],
    pub mix: &'a mut [f32],
}

impl WithSimd for Mix<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Mix { steps, scores, mix } = self;
        let n_tok = steps.delta.len();
        for i in 0..n_tok {
            let (scores, mix) = (&scores[i * n_tok..][..n_tok], &mut mix[i * n_tok..][..n_tok]);
            let mut at = 0;
            while at <= i {
                let delta = F32s::load(simd, &steps.delta[at..]);
                let decay = decay(simd, &steps, i, at);
                (decay * F32s::load(simd, &scores[at..]) * delta).store(&mut mix[at..]);
                at += F32s::<S>::LANES;
            }
            if at < n_tok {
                mix[at..].fill(0.0);
            }
        }
    }
}

/// `mix` again, and from `dmix` what passes between the tokens of a chunk: adds to `dscores` and
/// to `ddelta`, sets `ddecay`.
pub(super) struct MixBackward<'a> {
    pub steps: Steps<'a>,
    pub scores: &'a [f32],
    pub dmix: &'a [f32],
    pub mix: &'a mut [f32],
    pub dscores: &'a mut [f32],
    pub ddelta: &'a mut [f32],
    pub ddecay: &'a mut [f32],
}

impl WithSimd for MixBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let MixBackward { steps, scores, dmix, mix, dscores, ddelta, ddecay } = self;
        let n_tok = steps.delta.len();
        // From the last row up, `ddelta[j]` is the sum over the rows i >= k so far: times
        // `delta[j]`, what token j sends over k.
        for k in (0..n_tok).rev() {
            let row = k * n_tok..(k + 1) * n_tok;
            let (scores, dmix) = (&scores[row.clone()], &dmix[row.clone()]);
            let (mix, dscores) = (&mut mix[row.clone()], &mut dscores[row]);
            let mut over = F32s::zero(simd);
            let mut at = 0;
            while at <= k {
                let delta = F32s::load(simd, &steps.delta[at..]);
                let dmix = F32s::load(simd, &dmix[at..]);
                let decay = decay(simd, &steps, k, at);
                let scored = decay * F32s::load(simd, &scores[at..]);
                (scored * delta).store(&mut mix[at..]);
                let dscore = F32s::load(simd, &dscores[at..]);
                (decay * delta).mul_add(dmix, dscore).store(&mut dscores[at..]);
                let sum = scored.mul_add(dmix, F32s::load(simd, &ddelta[at..]));
                sum.store(&mut ddelta[at..]);
                let before_k = F32s::splat(simd, (k - at) as f32 - 0.5);
                let sent =
                    F32s::load(simd, &LANE).select_less(before_k, sum * delta, over.same(0.0));
                over = over + sent;
                at += F32s::<S>::LANES;
            }
            ddecay[k] = over.sum();
            if at < n_tok {
                mix[at..].fill(0.0);
            }
        }
    }
}

/// `y = scale x`, row by row.
pub(super) struct ScaleRows<'a> {
    pub y: &'a mut [f32],
    pub scale: &'a [f32],
    pub x: Rows<'a>,
}

impl WithSimd for ScaleRows<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ScaleRows { y, scale, x } = self;
        for (tok, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(tok), F32s::splat(simd, scale[tok]));
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                (scale * F32s::load(simd, &x[at..])).store(&mut y[at..]);
            }
        }
    }
}

/// `y = scale y + skip x`, row by row.
pub(super) struct Blend<'a> {
    pub y: &'a mut [f32],
    pub scale: &'a [f32],
    pub x: Rows<'a>,
    pub skip: f32,
}

impl WithSimd for Blend<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Blend { y, scale, x, skip } = self;
        let skip = F32s::splat(simd, skip);
        for (tok, y) in y.chunks_mut(x.width).enumerate() {
            let (x, scale) = (x.row(tok), F32s::splat(simd, scale[tok]));
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                let scaled = scale * F32s::load(simd, &y[at..]);
                skip.mul_add(F32s::load(simd, &x[at..]), scaled).store(&mut y[at..]);
            }
        }
    }
}

/// `y[tok] = a[tok] . b[tok]`
pub(super) fn row_dots(cpu: &Cpu, a: &[f32], b: Rows, y: &mut [f32]) {
    for (tok, (y, a)) in y.iter_mut().zip(a.chunks_exact(b.width)).enumerate() {
        *y = cpu.simd(Dot { a, b: b.row(tok) });
    }
}

/// One token of one head: `state = decay state + delta b x^T`, `y = state^T c + skip x`.
pub(super) struct Step<'a> {
    pub x: &'a [f32],
    pub b: &'a [f32],
    pub c: &'a [f32],
    pub delta: f32,
    pub decay: f32,
    pub skip: f32,
    pub state: &'a mut [f32],
    pub y: &'a mut [f32],
}

impl Step<'_> {
    /// `N` vectors of columns from `at` on: with four, a row of the usual state is read at once.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, at: usize) {
        let d_head = self.x.len();
        let first = |v: usize| at + v * F32s::<S>::LANES;
        let x: [F32s<S>; N] = std::array::from_fn(|v| F32s::load(simd, &self.x[first(v)..]));
        let input = x.map(|x| x.same(self.delta) * x);
        let decay = F32s::splat(simd, self.decay);
        let mut y = x.map(|x| x.same(self.skip) * x);
        for (n, row) in self.state.chunks_exact_mut(d_head).enumerate() {
            let (b, c) = (decay.same(self.b[n]), decay.same(self.c[n]));
            for v in 0..N {
                let h = decay.mul_add(F32s::load(simd, &row[first(v)..]), input[v] * b);
                h.store(&mut row[first(v)..]);
                y[v] = h.mul_add(c, y[v]);
            }
        }
        for v in 0..N {
            y[v].store(&mut self.y[first(v)..]);
        }
    }
}

impl WithSimd for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, d_head) = (F32s::<S>::LANES, self.x.len());
        let mut at = 0;
        while at + 4 * lanes <= d_head {
            self.columns::<S, 4>(simd, at);
            at += 4 * lanes;
        }
        while at < d_head {
            self.columns::<S, 1>(simd, at);
            at += lanes;
        }
    }
}
