//! Kernels of `mamba3`: norms, rates of the tokens, rows k and q, one token.

use super::tile::*;
use super::*;
use crate::tensor::cpu::F32s;
use pulp::{Simd, WithSimd};

/// `y = x / rms(x) w`, row by row, and the ratios `1 / rms(x)`.
pub(super) struct NormRow<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub eps: f32,
    pub y: &'a mut [f32],
}

impl WithSimd for NormRow<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let NormRow { x, w, eps, y } = self;
        let lanes = F32s::<S>::LANES;
        let mut sum = F32s::zero(simd);
        for at in (0..x.len()).step_by(lanes) {
            let x = F32s::load(simd, &x[at..]);
            sum = x.mul_add(x, sum);
        }
        let ratio = 1.0 / (sum.sum() / x.len() as f32 + eps).sqrt();
        for at in (0..x.len()).step_by(lanes) {
            let x = F32s::load(simd, &x[at..]) * F32s::splat(simd, ratio);
            (x * F32s::load(simd, &w[at..])).store(&mut y[at..]);
        }
        ratio
    }
}

/// Inverts `NormRow`: `dx` from `dy`; adds to `dw`.
pub(super) struct NormRowBackward<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub ratio: f32,
    pub dy: &'a [f32],
    pub dx: &'a mut [f32],
    pub dw: &'a mut [f32],
}

impl WithSimd for NormRowBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let NormRowBackward { x, w, ratio, dy, dx, dw } = self;
        let lanes = F32s::<S>::LANES;
        let mut sum = F32s::zero(simd);
        let splat = F32s::splat(simd, ratio);
        for at in (0..x.len()).step_by(lanes) {
            let (x, dy) = (F32s::load(simd, &x[at..]), F32s::load(simd, &dy[at..]));
            sum = (dy * F32s::load(simd, &w[at..])).mul_add(x, sum);
            (dy * x).mul_add(splat, F32s::load(simd, &dw[at..])).store(&mut dw[at..]);
        }
        let share = F32s::splat(simd, -ratio * ratio * sum.sum() / x.len() as f32);
        for at in (0..x.len()).step_by(lanes) {
            let (x, dy) = (F32s::load(simd, &x[at..]), F32s::load(simd, &dy[at..]));
            let direct = dy * F32s::load(simd, &w[at..]);
            (splat * x.mul_add(share, direct)).store(&mut dx[at..]);
        }
    }
}

/// `y = tanh(y) / 2`
pub(super) struct HalfTanh<'a>(pub &'a mut [f32]);

impl WithSimd for HalfTanh<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for at in (0..self.0.len()).step_by(F32s::<S>::LANES) {
            let x = F32s::load(simd, &self.0[at..]);
            (x.same(0.5) * x.tanh()).store(&mut self.0[at..]);
        }
    }
}

/// From raw numbers in `delta`, `a` and `lam` to all series.
pub(super) struct MakeRates<'a, 'b> {
    pub dims: Mamba3Dims,
    pub series: &'b mut [&'a mut [f32]; RATES],
}

impl WithSimd for MakeRates<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [delta, delta_slope, a, a_slope, lam] = self.series;
        let (zero, one) = (F32s::zero(simd), F32s::splat(simd, 1.0));
        let floor = F32s::splat(simd, self.dims.a_floor);
        for at in (0..delta.len()).step_by(F32s::<S>::LANES) {
            let (soft, slope) = F32s::load(simd, &delta[at..]).softplus_and_slope();
            soft.store(&mut delta[at..]);
            slope.store(&mut delta_slope[at..]);
            let raw = F32s::load(simd, &a[at..]);
            let (f, slope) = if self.dims.softplus_a {
                raw.softplus_and_slope()
            } else {
                let below = one / (one - zero.min(raw));
                (raw.select_less(zero, below, one + raw), below * below)
            };
            floor.select_less(f, -slope, zero).store(&mut a_slope[at..]);
            // In this order a NaN stays one.
            (-floor.max(f)).store(&mut a[at..]);
            F32s::load(simd, &lam[at..]).sigmoid().store(&mut lam[at..]);
        }
    }
}

/// `sin(2 pi x)` for `|x| <= 1/4`, good to 2e-7.
#[inline(always)]
fn sin_of_turn<S: Simd>(x: F32s<S>) -> F32s<S> {
    let y = x * x;
    let p = x.same(39.710_92);
    let p = p.mul_add(y, x.same(-76.574_99));
    let p = p.mul_add(y, x.same(81.602_234));
    let p = p.mul_add(y, x.same(-41.341_68));
    p.mul_add(y, x.same(std::f32::consts::TAU)) * x
}

/// Adds a token's `turns delta` to the angles, in turns, and gives their cosines and sines.
pub(super) struct Angles<'a> {
    pub turns: &'a [f32],
    pub delta: f32,
    pub angle: &'a mut [f32],
    pub cos: &'a mut [f32],
    pub sin: &'a mut [f32],
}

impl WithSimd for Angles<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Angles { turns, delta, angle, cos, sin } = self;
        // Adding 1.5 * 2^23 rounds to an integer.
        let (magic, delta) = (F32s::splat(simd, 12_582_912.0), F32s::splat(simd, delta));
        let (quarter, half) = (magic.same(0.25), magic.same(0.5));
        for at in (0..angle.len()).step_by(F32s::<S>::LANES) {
            let sum = delta.mul_add(F32s::load(simd, &turns[at..]), F32s::load(simd, &angle[at..]));
            let x = sum - ((sum + magic) - magic);
            x.store(&mut angle[at..]);
            sin_of_turn(quarter - x.abs()).store(&mut cos[at..]);
            let folded = (-half - x).max(x.min(half - x));
            sin_of_turn(folded).store(&mut sin[at..]);
        }
    }
}

/// `y = turn(x + bias)`
pub(super) struct Turn<'a> {
    pub x: &'a [f32],
    pub bias: &'a [f32],
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub halves: bool,
    pub y: &'a mut [f32],
}

impl WithSimd for Turn<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Turn { x, bias, cos, sin, halves, y } = self;
        for at in (0..y.len()).step_by(F32s::<S>::LANES) {
            (F32s::load(simd, &x[at..]) + F32s::load(simd, &bias[at..])).store(&mut y[at..]);
        }
        let n = cos.len();
        if halves {
            let (a, b) = y.split_at_mut(y.len() / 2);
            let (a, b) = (&mut a[..n], &mut b[..n]);
            for at in (0..n).step_by(F32s::<S>::LANES) {
                let (x, y) = (F32s::load(simd, &a[at..]), F32s::load(simd, &b[at..]));
                let (cos, sin) = (F32s::load(simd, &cos[at..]), F32s::load(simd, &sin[at..]));
                (x * cos - y * sin).store(&mut a[at..]);
                (x * sin + y * cos).store(&mut b[at..]);
            }
        } else {
            // A loop that the compiler makes vectors of.
            let (y, sin) = (&mut y[..2 * n], &sin[..n]);
            for s in 0..n {
                let (a, b) = (y[2 * s], y[2 * s + 1]);
                y[2 * s] = a * cos[s] - b * sin[s];
                y[2 * s + 1] = a * sin[s] + b * cos[s];
            }
        }
    }
}

/// Inverts `Turn`: takes `dy` back to the gradient by `x + bias`, in place, and adds to `dth`.
pub(super) struct TurnBackward<'a> {
    /// What `Turn` gave.
    pub y: &'a [f32],
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub halves: bool,
    pub dy: &'a mut [f32],
    pub dth: &'a mut [f32],
}

impl WithSimd for TurnBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let TurnBackward { y, cos, sin, halves, dy, dth } = self;
        let n = cos.len();
        if halves {
            let ((a, b), (da, db)) = (y.split_at(y.len() / 2), dy.split_at_mut(y.len() / 2));
            let (da, db) = (&mut da[..n], &mut db[..n]);
            for at in (0..n).step_by(F32s::<S>::LANES) {
                let [a, b, cos, sin] =
                    [&a[at..n], &b[at..n], &cos[at..], &sin[at..]].map(|x| F32s::load(simd, x));
                let (dx, dy) = (F32s::load(simd, &da[at..]), F32s::load(simd, &db[at..]));
                (F32s::load(simd, &dth[at..]) + (dy * a - dx * b)).store(&mut dth[at..]);
                (dx * cos + dy * sin).store(&mut da[at..]);
                (dy * cos - dx * sin).store(&mut db[at..]);
            }
        } else {
            // A loop that the compiler makes vectors of.
            let (y, dy) = (&y[..2 * n], &mut dy[..2 * n]);
            let (sin, dth) = (&sin[..n], &mut dth[..n]);
            for s in 0..n {
                let (da, db) = (dy[2 * s], dy[2 * s + 1]);
                dth[s] += db * y[2 * s] - da * y[2 * s + 1];
                dy[2 * s] = da * cos[s] + db * sin[s];
                dy[2 * s + 1] = db * cos[s] - da * sin[s];
            }
        }
    }
}

/// One token of one head, its k, q and v made: `state = decay state + sum of rows b[i] x[i]^T`, and
/// for each rank `y = state^T q + y`.
pub(super) struct Step<'a> {
    pub decay: f32,
    /// (n, d_state)
    pub b: &'a [f32],
    /// (n, d_head)
    pub x: &'a [f32],
    /// (rank, d_state)
    pub q: &'a [f32],
    pub state: &'a mut [f32],
    /// (rank, d_head)
    pub y: &'a mut [f32],
    pub d_head: usize,
}

impl Step<'_> {
    /// `V` vectors of columns from `at` on: with four, a row of the usual state is read at once.
    #[inline(always)]
    fn columns<S: Simd, const V: usize>(&mut self, simd: S, at: usize) {
        let (d_head, decay) = (self.d_head, F32s::splat(simd, self.decay));
        let d_state = self.state.len() / d_head;
        let first = |v: usize| at + v * F32s::<S>::LANES;
        let load = |row: &[f32]| -> [F32s<S>; V] {
            std::array::from_fn(|v| F32s::load(simd, &row[first(v)..]))
        };
        let mut sum = load(&self.y[..d_head]);
        for (n, row) in self.state.chunks_exact_mut(d_head).enumerate() {
            let mut h = load(row).map(|h| decay * h);
            for (b, x) in self.b.chunks_exact(d_state).zip(self.x.chunks_exact(d_head)) {
                let (b, x) = (decay.same(b[n]), load(x));
                for v in 0..V {
                    h[v] = b.mul_add(x[v], h[v]);
                }
            }
            let q = decay.same(self.q[n]);
            for v in 0..V {
                h[v].store(&mut row[first(v)..]);
                sum[v] = q.mul_add(h[v], sum[v]);
            }
        }
        for v in 0..V {
            sum[v].store(&mut self.y[first(v)..d_head]);
        }
        // Other ranks read the state again.
        let rows = self.q.chunks_exact(d_state).zip(self.y.chunks_exact_mut(d_head));
        for (q, y) in rows.skip(1) {
            let mut sum = load(y);
            for (q, row) in q.iter().zip(self.state.chunks_exact(d_head)) {
                let (q, h) = (decay.same(*q), load(row));
                for v in 0..V {
                    sum[v] = q.mul_add(h[v], sum[v]);
                }
            }
            for v in 0..V {
                sum[v].store(&mut y[first(v)..]);
            }
        }
    }
}

impl WithSimd for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, d_head) = (F32s::<S>::LANES, self.d_head);
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
