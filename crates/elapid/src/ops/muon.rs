//! Muon: momentum made orthogonal, for matrices (Jordan et al., 2024).
//!
//! ```text
//! mu = mu + (1 - momentum) (g - mu)
//! n  = g + momentum (mu - g)                       Nesterov's look ahead
//! o  = newton_schulz(n)                            about u @ v^T of n = u @ s @ v^T
//! p  = (1 - lr wd) p - lr 0.2 sqrt(max(rows, cols)) o
//! ```
//!
//! `newton_schulz` takes `x = n / |n|` on its shorter side and repeats, five times,
//!
//! ```text
//! s = x @ x^T        x = a x + (b s + c s @ s) @ x        a, b, c: `COEFFICIENTS`
//! ```
//!
//! which brings the singular values near to one, between 0.7 and 1.2. The factor 0.2 sqrt(max)
//! gives the update the size of AdamW's, so that its rate and decay carry over (Liu et al., "Muon
//! is Scalable for LLM Training", 2025). As torch's `Muon` with `match_rms_adamw`, but in f32 where
//! torch takes bfloat16 for the iteration.
//!
//! | name | shape        |          | name | shape            |
//! |------|--------------|----------|------|------------------|
//! | `p`  | (rows, cols) |          | `s`  | (short, short)   |
//! | `mu` | (rows, cols) |          | `x`  | as `p`           |
//!
//! Contract: in place, `mu` starts at zero, a gradient of zero gives an update of zero. Not here:
//! which parameters are matrices. There is no backward.
//! (tidy: allow unchecked)

use super::grad_norm::grad_norm;
use super::scale::scaled_by;
use crate::ops::adamw::AdamW;
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Kernel, Work, bind};
use crate::tensor::product::{Side, for_products, product_stacked};
use pulp::{Simd, WithSimd};

const MOMENTUM: f64 = 0.95;
/// Chosen for a steep slope at zero (Jordan et al.).
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
const N_ITER: usize = 5;
/// A norm below this is taken for this.
const NORM_MIN: f64 = 1e-7;
/// Size of an update of AdamW, as found by Liu et al.
const RMS: f64 = 0.2;
const PIECE: usize = 1 << 14;

/// Numbers of matrices that a GPU with tensor cores makes orthogonal at once: products of one alone
/// leave most of it idle.
const STACK: usize = 1 << 25;

/// A matrix that is trained.
pub struct Matrix<'a> {
    pub p: &'a mut Tensor,
    pub g: &'a Tensor,
    pub mu: &'a mut Tensor,
}

/// Makes one step on matrices of one shape. Of the settings it takes rate, decay, gradient scale
/// and trust.
pub fn muon(list: &mut [Matrix], config: &AdamW) {
    let Some(first) = list.first() else { return };
    let (device, shape) = (first.p.device().clone(), first.p.shape().to_vec());
    let n_elem = shape[0] * shape[1];
    let is_wide = device.gpu().is_some_and(|gpu| {
        gpu.caps().tensor_cores && (4 * n_elem).is_multiple_of(gpu.offset_align())
    });
    // With trust each has a rate of its own.
    let n_each = match is_wide && config.trust.is_none() {
        true => (STACK / n_elem.max(1)).max(1),
        false => 1,
    };
    list.chunks_mut(n_each).for_each(|list| step(list, &shape, config));
}

fn step(list: &mut [Matrix], shape: &[usize], config: &AdamW) {
    let (rows, cols) = (shape[0], shape[1]);
    let device = list[0].p.device().clone();
    let mut ahead = Tensor::uninit(&device, &[list.len() * rows, cols]);
    for (at, Matrix { p, g, mu }) in list.iter_mut().enumerate() {
        for (what, tensor) in [("p", &**p), ("g", *g), ("mu", &**mu)] {
            tensor.expect_shape(&format!("muon: {what}"), shape);
        }
        let to = (&mut ahead, at * rows * cols);
        if mu.device().is_same(&device) {
            look_ahead(g, mu, to, config.grad_scale);
        } else {
            // In the memory of the CPU between steps.
            let mut over = mu.to(&device);
            look_ahead(g, &mut over, to, config.grad_scale);
            **mu = over.to(mu.device());
        }
    }
    let update = orthogonal(ahead, list.len());
    for (at, Matrix { p, .. }) in list.iter_mut().enumerate() {
        put(p, &update.rows(at * rows..(at + 1) * rows), config);
    }
}

/// Moves a matrix by its update.
fn put(p: &mut Tensor, update: &Tensor, config: &AdamW) {
    let (rows, cols) = p.dims2();
    let mut lr = config.lr;
    let factor = RMS * (rows.max(cols) as f64).sqrt();
    if config.trust.is_some() {
        let rms = |x: &Tensor| grad_norm(std::iter::once(x)) / (x.n_elem().max(1) as f64).sqrt();
        lr *= config.trust_factor(lr * factor * rms(update), rms(p));
    }
    let keep = (1.0 - lr * config.weight_decay) as f32;
    let step = -(lr * factor) as f32;
    match p.device().clone() {
        Device::Cpu(cpu) => {
            let pieces = p.f32_mut().chunks_mut(PIECE).zip(update.f32().chunks(PIECE));
            cpu.map(pieces.collect(), |(y, x)| cpu.simd(Combine { y, keep, x, factor: step }));
        }
        Device::Gpu(gpu) => {
            let n = p.n_elem();
            let params = [n.into(), keep.into(), step.into()];
            gpu.launch(&COMBINE, Work::each(n), &[], &mut bind([update], [p]), &params);
        }
    }
}

/// Moves the momentum, and writes where it would be one step later to `ahead`, from one of its
/// numbers on.
fn look_ahead(g: &Tensor, mu: &mut Tensor, (ahead, first): (&mut Tensor, usize), grad_scale: f64) {
    let (momentum, new, scale) = (MOMENTUM as f32, (1.0 - MOMENTUM) as f32, grad_scale as f32);
    let n_elem = g.n_elem();
    match g.device() {
        Device::Cpu(cpu) => {
            let ahead = &mut ahead.f32_mut()[first..first + n_elem];
            let pieces = mu.f32_mut().chunks_mut(PIECE).zip(ahead.chunks_mut(PIECE));
            let pieces = pieces.zip(g.f32().chunks(PIECE)).collect();
            cpu.map(pieces, |((mu, n), g): ((&mut [f32], &mut [f32]), &[f32])| {
                for ((mu, n), g) in mu.iter_mut().zip(n).zip(g) {
                    let g = g * scale;
                    *mu += new * (g - *mu);
                    *n = *mu + (1.0 - momentum) * (g - *mu);
                }
            });
        }
        Device::Gpu(gpu) => {
            let params = [n_elem.into(), new.into(), scale.into()];
            let bytes = 4 * first..4 * (first + n_elem);
            let mut args = [Arg::In(g), Arg::Out(mu), Arg::Window(ahead, bytes)];
            gpu.launch(&LOOK_AHEAD, Work::each(n_elem), &[], &mut args, &params);
        }
    }
}

/// Each of `n` matrices behind each other over its norm.
fn unit(mut x: Tensor, n: usize) -> Tensor {
    if let (Device::Gpu(gpu), true) = (x.device().clone(), n > 1) {
        let params = [(x.n_elem() / n).into(), (NORM_MIN as f32).into(), 0.0.into()];
        gpu.launch(&UNIT, Work::groups(n, 1024), &[], &mut [Arg::Out(&mut x)], &params);
        return x;
    }
    let inverse = (1.0 / grad_norm(std::iter::once(&x)).max(NORM_MIN)) as f32;
    scaled_by(&x, inverse)
}

/// The orthogonal matrices that `n` matrices behind each other are near to, about.
fn orthogonal(x: Tensor, n: usize) -> Tensor {
    let (rows, cols) = (x.dims2().0 / n, x.dims2().1);
    let short = rows.min(cols);
    let mut x = unit(x, n);
    let [a, b, c] = COEFFICIENTS;
    let mut gram = Tensor::activation(x.device(), &[n * short, short]);
    for _ in 0..N_ITER {
        // Once in the format of products, for two of them.
        let seen = for_products(&x);
        let sides = match rows <= cols {
            true => (Side::Plain(&seen), Side::Transposed(&seen)),
            false => (Side::Transposed(&seen), Side::Plain(&seen)),
        };
        product_stacked(n, &mut gram, (0.0, 1.0), sides.0, sides.1);
        let mut square = gram.copied();
        product_stacked(n, &mut square, (b, c), Side::Plain(&gram), Side::Plain(&gram));
        // What was cast is read no more.
        let mut next = if seen.dtype() == x.dtype() { x.copied() } else { x };
        let sides = match rows <= cols {
            true => (Side::Plain(&square), Side::Plain(&seen)),
            false => (Side::Plain(&seen), Side::Plain(&square)),
        };
        product_stacked(n, &mut next, (a, 1.0), sides.0, sides.1);
        x = next;
    }
    x
}

static COMBINE: Kernel =
    Kernel::new("muon_combine", include_str!("muon.wgsl"), include_str!("muon.cu"));
static LOOK_AHEAD: Kernel = Kernel { entry: "muon_look_ahead", ..COMBINE };
/// CUDA alone.
static UNIT: Kernel = Kernel { entry: "muon_unit", ..COMBINE };

/// `y = keep y + factor x`
struct Combine<'a> {
    y: &'a mut [f32],
    keep: f32,
    x: &'a [f32],
    factor: f32,
}

impl WithSimd for Combine<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Combine { y, keep, x, factor } = self;
        let (keep, factor) = (F32s::splat(simd, keep), F32s::splat(simd, factor));
        for at in (0..y.len()).step_by(F32s::<S>::LANES) {
            let old = F32s::load(simd, &y[at..]) * keep;
            F32s::load(simd, &x[at..]).mul_add(factor, old).store(&mut y[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::TensorFile;
    use crate::files::safetensors::SafeTensors;
    use crate::ops::check::{Input, compare_devices, devices};
    use std::sync::Arc;

    fn golden() -> SafeTensors {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/muon.safetensors");
        SafeTensors::parse("muon", Arc::new(std::fs::read(path).unwrap())).unwrap()
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
    }

    #[test]
    fn trajectories_equal_torch() {
        let (golden, device) = (golden(), Device::cpu(2).unwrap());
        let hyper = golden.doubles("hyper").unwrap().unwrap();
        let config = AdamW { lr: hyper[0], weight_decay: hyper[1], ..AdamW::default() };
        for shape in 0..4 {
            let of = |name: &str| {
                golden.tensor(&device, &format!("{shape}.{name}")).unwrap().unwrap().to_f32()
            };
            let (grads, want, mut p) = (of("g"), of("p"), of("p_start"));
            let mut mu = Tensor::zeros(&device, p.shape());
            for step in 0..grads.shape()[0] {
                let g = grads.rows(step..step + 1).reshape(p.shape());
                muon(&mut [Matrix { p: &mut p, g: &g, mu: &mut mu }], &config);
                let worst = largest_difference(p.f32(), want.rows(step..step + 1).f32());
                assert!(worst < 2e-6, "shape {shape}, step {step}: {worst}");
            }
            // torch's own iteration is in bfloat16: of four updates of 0.02 a few hundredths.
            let worst = largest_difference(p.f32(), of("p_bf16").f32());
            assert!(worst < 2e-2, "shape {shape}: {worst}");
        }
    }

    fn step(n_threads: usize, shape: &[usize], config: &AdamW) -> (Vec<f32>, Vec<f32>) {
        let device = Device::cpu(n_threads).unwrap();
        let mut p = Input::normal(1, shape, 0.02).tensor(&device);
        let g = Input::normal(2, shape, 3.0).tensor(&device);
        let mut mu = Tensor::zeros(&device, shape);
        muon(&mut [Matrix { p: &mut p, g: &g, mu: &mut mu }], config);
        let old = Input::normal(1, shape, 0.02).tensor(&device);
        let moved = p.f32().iter().zip(old.f32()).map(|(new, old)| new - old).collect();
        (p.f32().to_vec(), moved)
    }

    fn rms(x: &[f32]) -> f64 {
        (x.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / x.len() as f64).sqrt()
    }

    #[test]
    fn an_update_is_as_large_as_one_of_adamw_whatever_the_gradient() {
        for shape in [[64, 64], [40, 160], [160, 40]] {
            for grad_scale in [1e-4, 1.0, 1e4] {
                let config = AdamW { lr: 0.01, weight_decay: 0.0, grad_scale, ..AdamW::default() };
                let size = rms(&step(1, &shape, &config).1);
                assert!((size / (0.2 * 0.01) - 1.0).abs() < 0.25, "{shape:?}: {size}");
            }
        }
    }

    #[test]
    fn steps_have_the_same_bits_on_any_number_of_threads() {
        let config = AdamW { trust: Some(0.01), ..AdamW::default() };
        let want = step(1, &[130, 300], &config);
        assert!(want == step(2, &[130, 300], &config) && want == step(3, &[130, 300], &config));
    }

    #[test]
    fn a_trust_region_bounds_the_update() {
        let config = AdamW { lr: 0.1, weight_decay: 0.0, ..AdamW::default() };
        let free = rms(&step(1, &[30, 50], &config).1);
        let bound = rms(&step(1, &[30, 50], &AdamW { trust: Some(0.1), ..config }).1);
        // A tenth of the size of p.
        assert!(free > 0.01 && (bound / (0.1 * 0.02) - 1.0).abs() < 0.05, "{free} {bound}");
        let wide = rms(&step(1, &[30, 50], &AdamW { trust: Some(10.0), ..config }).1);
        assert_eq!(wide, free);
    }

    #[test]
    fn matrices_of_one_shape_are_moved_together_as_each_alone() {
        for shape in [[16, 24], [24, 16], [7, 5]] {
            let config = AdamW::default();
            let run = |device: &Device, n_each: usize| {
                let of = |seed| (seed..seed + 3).map(|seed| Input::normal(seed, &shape, 1.0));
                let tensors = |seed| of(seed).map(|it| it.tensor(device)).collect::<Vec<_>>();
                let (mut p, g) = (tensors(1), tensors(9));
                let mut mu: Vec<_> = (0..3).map(|_| Tensor::zeros(device, &shape)).collect();
                let matrices = p.iter_mut().zip(&g).zip(&mut mu);
                let mut list: Vec<Matrix> =
                    matrices.map(|((p, g), mu)| Matrix { p, g, mu }).collect();
                list.chunks_mut(n_each).for_each(|list| muon(list, &config));
                p.iter().flat_map(|p| p.to_vec()).collect::<Vec<_>>()
            };
            for (device, tolerance) in devices() {
                let (want, got) = (run(device, 1), run(device, 3));
                device.check().unwrap();
                compare_devices(&format!("{device:?} {shape:?}"), &want, &got, *tolerance);
            }
        }
    }

    #[test]
    fn a_gpu_makes_the_same_steps() {
        for shape in [[7, 5], [33, 70]] {
            let config = AdamW { trust: Some(0.1), ..AdamW::default() };
            let run = |device: &Device| {
                let mut p = Input::normal(1, &shape, 1.0).tensor(device);
                let mut mu = Tensor::zeros(device, &shape);
                for step in 0..3 {
                    let g = Input::normal(2 + step, &shape, 1.0).tensor(device);
                    muon(&mut [Matrix { p: &mut p, g: &g, mu: &mut mu }], &config);
                }
                [p.to_vec(), mu.to_vec()]
            };
            let want = run(&Device::cpu(1).unwrap());
            for (device, tolerance) in devices() {
                let got = run(device);
                device.check().unwrap();
                for (want, got) in want.iter().zip(&got) {
                    compare_devices(&format!("{device:?}"), want, got, *tolerance);
                }
            }
        }
    }
}
