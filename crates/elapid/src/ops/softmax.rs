//! Softmax of one short row, and its gradient, and the sigmoid: kernels of `router` and `balance`.
//!
//! ```text
//! p = e^(x - max x) / sum of e^(x - max x)
//! dx = p (g - sum of g p),  g the gradient of p
//! ```
//!
//! On a GPU both stand within the kernels of those ops.
//!
//! Not here: the softmax inside attention and inside the loss, which never write p down.
//! (tidy: allow unchecked: a kernel of ops that are checked)

use crate::tensor::cpu::F32s;
use pulp::{Simd, WithSimd};

/// Threads of a group that takes a row of `d` numbers, on a GPU.
pub(super) fn row_threads(d: usize) -> usize {
    d.next_power_of_two().clamp(32, 256)
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `y = softmax(x)`
pub(super) struct Softmax<'a> {
    pub x: &'a [f32],
    pub y: &'a mut [f32],
}

impl WithSimd for Softmax<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Softmax { x, y } = self;
        let lanes = F32s::<S>::LANES;
        let (whole, tail) = x.split_at(x.len() / lanes * lanes);
        let mut largest = F32s::splat(simd, f32::NEG_INFINITY);
        for at in (0..whole.len()).step_by(lanes) {
            largest = largest.max(F32s::load(simd, &whole[at..]));
        }
        // A short load would put zeros among the logits.
        let largest = tail.iter().copied().fold(largest.max_lane(), f32::max);
        let largest = F32s::splat(simd, largest);
        let y = &mut y[..x.len()];
        let mut sum = F32s::zero(simd);
        for at in (0..x.len()).step_by(lanes) {
            (F32s::load(simd, &x[at..]) - largest).exp().store(&mut y[at..]);
            sum = sum + F32s::load(simd, &y[at..]);
        }
        let inverse = F32s::splat(simd, 1.0 / sum.sum());
        for at in (0..x.len()).step_by(lanes) {
            (F32s::load(simd, &y[at..]) * inverse).store(&mut y[at..]);
        }
    }
}

/// `dx = scale p (g - sum of g p)`, p the softmax of x.
pub(super) struct SoftmaxBackward<'a> {
    pub x: &'a [f32],
    pub g: &'a [f32],
    pub scale: f32,
    pub dx: &'a mut [f32],
}

impl WithSimd for SoftmaxBackward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let SoftmaxBackward { x, g, scale, dx } = self;
        Softmax { x, y: dx }.with_simd(simd);
        let mut mean = F32s::zero(simd);
        for at in (0..x.len()).step_by(F32s::<S>::LANES) {
            mean = F32s::load(simd, &dx[at..]).mul_add(F32s::load(simd, &g[at..]), mean);
        }
        let mean = F32s::splat(simd, mean.sum());
        let scale = F32s::splat(simd, scale);
        for at in (0..x.len()).step_by(F32s::<S>::LANES) {
            let p = F32s::load(simd, &dx[at..]);
            (scale * p * (F32s::load(simd, &g[at..]) - mean)).store(&mut dx[at..]);
        }
    }
}

/// `y = 1 / (1 + e^-x)`
pub(super) struct Sigmoid<'a> {
    pub x: &'a [f32],
    pub y: &'a mut [f32],
}

impl WithSimd for Sigmoid<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for at in (0..self.x.len()).step_by(F32s::<S>::LANES) {
            F32s::load(simd, &self.x[at..]).sigmoid().store(&mut self.y[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_any_length_agrees_with_f64() {
        for n in [1, 7, 16, 37, 64] {
            // All far below zero: the empty lanes of a short vector must not be the largest.
            let x: Vec<f32> = (0..n).map(|i| (i * 7 % n) as f32 * 0.3 - 200.0).collect();
            let g: Vec<f32> = (0..n).map(|i| (i * 5 % n) as f32 - 2.0).collect();
            let e: Vec<f64> = x.iter().map(|x| (*x as f64 + 200.0).exp()).collect();
            let p: Vec<f64> = e.iter().map(|x| x / e.iter().sum::<f64>()).collect();
            let mean: f64 = p.iter().zip(&g).map(|(p, g)| p * *g as f64).sum();
            let (mut y, mut dx) = (vec![0.0; n], vec![0.0; n]);
            pulp::Arch::new().dispatch(Softmax { x: &x, y: &mut y });
            pulp::Arch::new().dispatch(SoftmaxBackward { x: &x, g: &g, scale: 2.0, dx: &mut dx });
            for i in 0..n {
                assert!((y[i] as f64 - p[i]).abs() < 1e-6, "{} {}", y[i], p[i]);
                let want = 2.0 * p[i] * (g[i] as f64 - mean);
                assert!((dx[i] as f64 - want).abs() < 1e-5 * n as f64, "{} {want}", dx[i]);
            }
        }
    }
}
