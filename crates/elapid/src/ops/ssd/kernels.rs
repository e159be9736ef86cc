//! Kernels of `ssd`: step sizes and decays, one token.

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
        let (input, cum, cum_low) = (&**delta, &**cum, &**cum_low);
        Exponentials { cum, cum_low, input, since, until, weight }.with_simd(simd);
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
