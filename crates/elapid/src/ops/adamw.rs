//! AdamW in one pass over parameter, gradient and both moments, as torch computes it.
//!
//!     p = p - lr wd p
//!     m = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g^2
//!     p = p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//!
//! Scalars are worked out in f64 and rounded once, as torch does. `g` is the stored gradient times
//! `grad_scale`, which is how clipping comes without a pass of its own. 28 bytes per parameter.
//!
//! Contract: equal lengths, in place, `v >= 0`, finite in gives finite out while `g^2` fits.
//! Not here: which parameter decays, and the schedule of `lr`. There is no backward.
//! (tidy: allow unchecked)

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
        let [grad_scale, keep, new1, old1, beta2, new2, root2, eps, step] = [
            scalars.grad_scale,
            scalars.keep,
            scalars.new1,
            1.0 - scalars.new1,
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
            // The first form loses g where m is much larger and beta1 is near zero.
            let m_at = match scalars.new1 < 0.5 {
                true => (g_at - m_at).mul_add(new1, m_at),
                false => (g_at - m_at).mul_add(-old1, g_at),
            };
            let v_at = (g_at * g_at).mul_add(new2, F32s::load(simd, &v[at..]) * beta2);
            let denominator = v_at.sqrt() / root2 + eps;
            let p_at = F32s::load(simd, &p[at..]) * keep;
            (p_at - step * (m_at / denominator)).store(&mut p[at..]);
            m_at.store(&mut m[at..]);
            v_at.store(&mut v[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::safetensors::SafeTensors;
    use std::sync::Arc;

    struct Golden(SafeTensors, Device);

    impl Golden {
        fn open() -> Golden {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/adamw.safetensors");
            let bytes = Arc::new(std::fs::read(path).unwrap());
            Golden(SafeTensors::parse("adamw", bytes).unwrap(), Device::cpu(2).unwrap())
        }

        fn tensor(&self, name: &str) -> Tensor {
            self.0.tensor(&self.1, name).unwrap().unwrap().to_f32()
        }

        fn settings(&self, name: &str, row: usize) -> AdamW {
            let x = self.0.doubles(name).unwrap().unwrap();
            let x = &x[row * 5..][..5];
            AdamW {
                lr: x[0],
                beta1: x[1],
                beta2: x[2],
                eps: x[3],
                weight_decay: x[4],
                grad_scale: 1.0,
            }
        }
    }

    /// Relative, but for what is below the least normal number; what is not a number is not close.
    fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
        assert_eq!(got.len(), want.len(), "{what}");
        for (idx, (got, want)) in got.iter().zip(want).enumerate() {
            let close = (got - want).abs() <= tolerance * want.abs().max(1e-37);
            assert!(close, "{what}[{idx}]: {got:e}, torch says {want:e}");
        }
    }

    #[test]
    fn single_steps_equal_torch_for_gradients_from_1e_12_to_1e6_and_steps_from_1_to_1e5() {
        let golden = Golden::open();
        let times = golden.0.integers("single.t").unwrap().unwrap();
        let all = ["p", "g", "m", "v", "p_out", "m_out", "v_out"]
            .map(|name| golden.tensor(&format!("single.{name}")));
        for (row, &t) in times.iter().enumerate() {
            let [mut p, g, mut m, mut v, p_out, m_out, v_out] =
                all.each_ref().map(|tensor| tensor.rows(row..row + 1).to_f32());
            adamw(&mut p, &g, &mut m, &mut v, t as u64, &golden.settings("single.hyper", row));
            // Where m and g cancel, torch's own rounding shows; see golden/README.md.
            assert_close("p", p.f32(), p_out.f32(), 2e-5);
            assert_close("m", m.f32(), m_out.f32(), 2e-5);
            assert_close("v", v.f32(), v_out.f32(), 1e-6);
        }
    }

    #[test]
    fn trajectories_equal_torch() {
        let golden = Golden::open();
        for path in 0..5 {
            let of = |name: &str| golden.tensor(&format!("path.{path}.{name}"));
            let settings = golden.settings(&format!("path.{path}.hyper"), 0);
            let (grads, want) = (of("g"), of("p"));
            let mut p = of("p_start");
            let mut m = Tensor::zeros(&golden.1, p.shape());
            let mut v = Tensor::zeros(&golden.1, p.shape());
            for step in 0..grads.shape()[0] {
                let g = grads.rows(step..step + 1).reshape(p.shape());
                adamw(&mut p, &g, &mut m, &mut v, step as u64 + 1, &settings);
                let want = want.rows(step..step + 1);
                assert_close("p", p.f32(), want.f32(), 1e-4);
            }
        }
    }

    #[test]
    fn finite_in_gives_finite_out() {
        let device = Device::cpu(1).unwrap();
        let g = Tensor::from_f32(&device, &[5], &[1e-30, -1e-12, 0.0, 1e6, -1e15]);
        let mut p = Tensor::zeros(&device, &[5]);
        let (mut m, mut v) = (p.to_f32(), p.to_f32());
        for t in 1..200 {
            adamw(&mut p, &g, &mut m, &mut v, t, &AdamW::default());
            assert!(p.f32().iter().chain(m.f32()).all(|x| x.is_finite()));
            assert!(v.f32().iter().all(|&v| v >= 0.0));
        }
    }
}
