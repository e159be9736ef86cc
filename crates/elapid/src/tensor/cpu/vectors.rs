//! Kernels on whole vectors that several ops need.

use super::F32s;
use pulp::{Simd, WithSimd};

/// `a . b`, over the length of `a`.
pub struct Dot<'a> {
    pub a: &'a [f32],
    /// The other, at least as long.
    pub b: &'a [f32],
}

impl WithSimd for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        dot(simd, self.a, self.b)
    }
}

/// The same inside another kernel.
#[inline(always)]
pub fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let lanes = F32s::<S>::LANES;
    let (whole, rest) = a.split_at(a.len() - a.len() % lanes);
    let mut sum = F32s::load(simd, rest) * F32s::load(simd, &b[whole.len()..a.len()]);
    for (a, b) in whole.chunks_exact(lanes).zip(b.chunks_exact(lanes)) {
        sum = F32s::load(simd, a).mul_add(F32s::load(simd, b), sum);
    }
    sum.sum()
}

/// `y += x`, over the length of `y`.
pub struct AddInto<'a> {
    /// What is added, at least as long.
    pub x: &'a [f32],
    /// What it is added to.
    pub y: &'a mut [f32],
}

impl WithSimd for AddInto<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let AddInto { x, y } = self;
        let x = &x[..y.len()];
        for at in (0..y.len()).step_by(F32s::<S>::LANES) {
            (F32s::load(simd, &y[at..]) + F32s::load(simd, &x[at..])).store(&mut y[at..]);
        }
    }
}
