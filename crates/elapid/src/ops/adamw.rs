//! AdamW in one pass over parameter, gradient and both moments, as torch computes it.
//!
//!     p = p - lr wd p
//!     m = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g^2
//!     p = p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//!
//! Scalars are worked out in f64 and rounded once, as torch does. `g` is the stored gradient times
//! `grad_scale`, which is how clipping comes without a pass of its own. 28 bytes per parameter.
//!
//! Contract: equal lengths, in place, `v >= 0` stays so, finite in gives finite out while `g^2` fits.
//! Not here: which parameter decays, and the schedule of `lr`. There is no backward.

use crate::cpu::F32s;
use crate::device::Device;
use crate::optim::AdamW;
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};

const PIECE: usize = 1 << 14;

/// Makes step number `t` (from 1) on one parameter. `m` and `v` start at zero.
pub fn adamw(p: &mut Tensor, g: &Tensor, m: &mut Tensor, v: &mut Tensor, t: u64, config: &AdamW) {
    for (what, tensor) in [("g", g), ("m", &*m), ("v", &*v)] {
        tensor.expect_shape(&format!("adamw: {what}"), p.shape());
    }
    let Device::Cpu(cpu) = p.device().clone();
    let steps = t.min(i32::MAX as u64) as i32;
    let correction1 = 1.0 - config.beta1.powi(steps);
    let correction2 = 1.0 - config.beta2.powi(steps);
    let scalars = Scalars {
        grad_scale: config.grad_scale as f32,
        keep: (1.0 - config.lr * config.weight_decay) as f32,
        new1: (1.0 - config.beta1) as f32,
        beta2: config.beta2 as f32,
        new2: (1.0 - config.beta2) as f32,
        root2: correction2.sqrt() as f32,
        eps: config.eps as f32,
        step: (config.lr / correction1) as f32,
    };
    let pieces = p.f32_mut().chunks_mut(PIECE).zip(g.f32().chunks(PIECE));
    let moments = m.f32_mut().chunks_mut(PIECE).zip(v.f32_mut().chunks_mut(PIECE));
    cpu.map(pieces.zip(moments).collect(), |((p, g), (m, v))| {
        cpu.simd(Step { p, g, m, v, scalars });
    });
}

#[derive(Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    keep: f32,
    new1: f32,
    beta2: f32,
    new2: f32,
    root2: f32,
    eps: f32,
    step: f32,
}

struct Step<'a> {
    p: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    scalars: Scalars,
}

impl WithSimd for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Step { p, g, m, v, scalars } = self;
        let [grad_scale, keep, new1, beta2, new2, root2, eps, step] = [
            scalars.grad_scale,
            scalars.keep,
            scalars.new1,
            scalars.beta2,
            scalars.new2,
            scalars.root2,
            scalars.eps,
            scalars.step,
        ]
        .map(|x| F32s::splat(simd, x));
        for at in (0..p.len()).step_by(F32s::<S>::LANES) {
            let g_at = F32s::load(simd, &g[at..]) * grad_scale;
            let m_at = F32s::load(simd, &m[at..]);
            let m_at = (g_at - m_at).mul_add(new1, m_at);
            let v_at = (g_at * g_at).mul_add(new2, F32s::load(simd, &v[at..]) * beta2);
            let denominator = v_at.sqrt() / root2 + eps;
            let p_at = F32s::load(simd, &p[at..]) * keep;
            (p_at - step * (m_at / denominator)).store(&mut p[at..]);
            m_at.store(&mut m[at..]);
            v_at.store(&mut v[at..]);
        }
    }
}
