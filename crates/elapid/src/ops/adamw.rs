//! AdamW in one pass over parameter, gradient and both moments, as torch computes it.
//!
//! ```text
//! p = p - lr wd p
//! m = m + (1 - beta1) (g - m)                 v = beta2 v + (1 - beta2) g^2
//! p = p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! Scalars are worked out in f64 and rounded once, as torch does. `g` is the stored gradient times
//! `grad_scale`, which is how clipping comes without a pass of its own. 28 bytes per parameter.
//!
//! Contract: equal lengths, in place, `v >= 0`, finite in gives finite out while `g^2` fits.
//! Not here: which parameter decays, and the schedule of `lr`. There is no backward.
//! (tidy: allow unchecked)

use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::product::IN_BF16;
use crate::tensor::gpu::{Arg, Gpu, Kernel, Row, Word, Work, bind};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// The settings of one step; Muon takes rate, decay, gradient scale and trust from here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    /// AdamW beta1: decay rate of the first moment.
    pub beta1: f64,
    /// AdamW beta2: decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    pub weight_decay: f64,
    /// Factor of the gradient: below one when it is clipped.
    pub grad_scale: f64,
    /// The largest update, as a share of the parameter's size; decay is not counted.
    pub trust: Option<f64>,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            grad_scale: 1.0,
            trust: None,
        }
    }
}

const PIECE: usize = 1 << 14;

/// Makes step number `t` (from 1) on one parameter. `m` and `v` start at zero.
pub fn adamw(p: &mut Tensor, g: &Tensor, m: &mut Tensor, v: &mut Tensor, t: u64, config: &AdamW) {
    expect_shapes(p, [g, m, v]);
    let scalars = scalars(t, config);
    let cpu = match p.device().clone() {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return step_gpu(&gpu, p, g, [m, v], &scalars),
    };
    let pieces = p.f32_mut().chunks_mut(PIECE).zip(g.f32().chunks(PIECE));
    let moments = m.f32_mut().chunks_mut(PIECE).zip(v.f32_mut().chunks_mut(PIECE));
    cpu.map(pieces.zip(moments).collect(), |((p, g), (m, v))| {
        cpu.simd(Step { p, g, m, v, scalars });
    });
}

/// Step number `t` of many parameters, which stay borrowed until `finish`. Each is done when it is
/// added, or by `finish` where one launch can take all that wait: it then also makes the copies in
/// bf16 that products read.
pub struct Steps<'a> {
    t: u64,
    waiting: Vec<Waiting<'a>>,
}

struct Waiting<'a> {
    p: &'a mut Tensor,
    g: &'a Tensor,
    moments: [&'a mut Tensor; 2],
    scalars: Scalars,
}

impl<'a> Steps<'a> {
    pub fn new(t: u64) -> Steps<'a> {
        Steps { t, waiting: Vec::new() }
    }

    /// As `adamw`.
    pub fn add(
        &mut self,
        p: &'a mut Tensor,
        g: &'a Tensor,
        m: &'a mut Tensor,
        v: &'a mut Tensor,
        config: &AdamW,
    ) {
        if p.device().gpu().is_none_or(|gpu| !gpu.can_follow(g)) {
            return adamw(p, g, m, v, self.t, config);
        }
        expect_shapes(p, [g, m, v]);
        let scalars = scalars(self.t, config);
        self.waiting.push(Waiting { p, g, moments: [m, v], scalars });
    }

    pub fn finish(mut self) {
        let gpu = self.waiting.first().and_then(|first| first.p.device().gpu()).cloned();
        let Some(gpu) = gpu else { return };
        let copy = |it: &mut Waiting| it.p.take_derived(IN_BF16);
        let mut copies: Vec<Option<Tensor>> = self.waiting.iter_mut().map(copy).collect();
        let mut rows = Vec::with_capacity(copies.len());
        for (Waiting { p, g, moments: [m, v], scalars }, copy) in
            self.waiting.iter_mut().zip(&mut copies)
        {
            let n = p.n_elem();
            let outs = [Some(&mut **p), Some(m), Some(v), copy.as_mut()];
            let outs = outs.into_iter().map(|out| out.map(Arg::Out));
            let tensors = [Some(Arg::In(g))].into_iter().chain(outs).collect();
            let params = words(n, scalars);
            rows.push(Row { n_groups: n.div_ceil(PIECE), tensors, params });
        }
        gpu.launch_many(&STEPS, &[("PIECE", PIECE)], rows, None);
        for (it, copy) in self.waiting.iter().zip(copies) {
            if let Some(copy) = copy {
                it.p.keep_derived(IN_BF16, copy);
            }
        }
    }
}

fn expect_shapes(p: &Tensor, others: [&Tensor; 3]) {
    for (what, tensor) in ["g", "m", "v"].into_iter().zip(others) {
        tensor.expect_shape(&format!("adamw: {what}"), p.shape());
    }
}

/// Root mean squares of the update that `adamw` would make, decay not counted, and of `p`.
///
/// `moments` are m and v before the step; nothing is changed. Sums run within fixed pieces, then
/// over the pieces in order: the same bits on any number of threads.
pub fn adamw_sizes(
    p: &Tensor,
    g: &Tensor,
    moments: [&Tensor; 2],
    t: u64,
    config: &AdamW,
) -> (f64, f64) {
    let [m, v] = moments;
    expect_shapes(p, [g, m, v]);
    let scalars = scalars(t, config);
    let (ratios, sizes) = match p.device() {
        Device::Gpu(gpu) => sizes_gpu(gpu, [p, g, m, v], &scalars),
        Device::Cpu(cpu) => {
            let pieces = p.f32().chunks(PIECE).zip(g.f32().chunks(PIECE));
            let moments = m.f32().chunks(PIECE).zip(v.f32().chunks(PIECE));
            let sums = cpu.map(pieces.zip(moments).collect(), |((p, g), (m, v))| {
                cpu.simd(Sizes { p, g, m, v, scalars })
            });
            let add = |(a, b), (c, d): (f32, f32)| (a + f64::from(c), b + f64::from(d));
            sums.into_iter().fold((0.0, 0.0), add)
        }
    };
    let mean = |sum: f64| (sum / p.n_elem().max(1) as f64).sqrt();
    let step = config.lr / (1.0 - config.beta1.powi(exponent(t)));
    (step * mean(ratios), mean(sizes))
}

static STEP: Kernel =
    Kernel::new("adamw_step", include_str!("adamw.wgsl"), include_str!("adamw.cu"));
static SIZES: Kernel = Kernel { entry: "adamw_sizes", ..STEP };
// For CUDA.
static STEPS: Kernel = Kernel { entry: "adamw_steps", wgsl: "", ..STEP };

fn step_gpu(gpu: &Gpu, p: &mut Tensor, g: &Tensor, [m, v]: [&mut Tensor; 2], scalars: &Scalars) {
    for part in gpu.parts(p) {
        let (n, g) = (part.len(), numbers(g, &part));
        let bytes = || part.start * 4..part.end * 4;
        let mut args = [
            Arg::In(&g),
            Arg::Window(p, bytes()),
            Arg::Window(m, bytes()),
            Arg::Window(v, bytes()),
        ];
        gpu.launch(&STEP, Work::each(n.div_ceil(4)), &[], &mut args, &words(n, scalars));
    }
}

/// These numbers of a tensor.
fn numbers(x: &Tensor, part: &Range<usize>) -> Tensor {
    x.reshape(&[x.n_elem()]).rows(part.clone())
}

/// Sums of the squares of the ratio and of p.
fn sizes_gpu(gpu: &Gpu, [p, g, m, v]: [&Tensor; 4], scalars: &Scalars) -> (f64, f64) {
    let (mut ratios, mut sizes) = (0.0, 0.0);
    for part in gpu.parts(p) {
        let n = part.len();
        let n_groups = n.div_ceil(PIECE).min(1024);
        let mut sums = Tensor::uninit(p.device(), &[n_groups, 2]);
        let [p, g, m, v] = [p, g, m, v].map(|x| numbers(x, &part));
        let work = Work::grid([n_groups, 1, 1], 256);
        gpu.launch(&SIZES, work, &[], &mut bind([&g, &p, &m, &v], [&mut sums]), &words(n, scalars));
        for pair in sums.to_vec().as_chunks::<2>().0 {
            ratios += f64::from(pair[0]);
            sizes += f64::from(pair[1]);
        }
    }
    (ratios, sizes)
}

/// A step number as an exponent: past this one both corrections are one.
fn exponent(t: u64) -> i32 {
    t.min(i32::MAX as u64) as i32
}

/// grad_scale, keep, new1, old1, beta2, new2, root2, eps and step, as the kernels have them.
type Scalars = [f32; 9];

fn scalars(t: u64, config: &AdamW) -> Scalars {
    let [correction1, correction2] =
        [config.beta1, config.beta2].map(|beta| 1.0 - beta.powi(exponent(t)));
    let new1 = (1.0 - config.beta1) as f32;
    [
        config.grad_scale as f32,
        (1.0 - config.lr * config.weight_decay) as f32,
        new1,
        1.0 - new1,
        config.beta2 as f32,
        (1.0 - config.beta2) as f32,
        correction2.sqrt() as f32,
        config.eps as f32,
        (config.lr / correction1) as f32,
    ]
}

/// Parameters of the kernels.
fn words(n: usize, scalars: &Scalars) -> Vec<Word> {
    std::iter::once(n.into()).chain(scalars.map(Word::from)).collect()
}

/// The scalars in every lane.
struct Lanes<S: Simd> {
    all: [F32s<S>; 9],
    /// Whether the first moment decays slowly.
    is_slow: bool,
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    fn new(simd: S, scalars: &Scalars) -> Self {
        Lanes { all: scalars.map(|x| F32s::splat(simd, x)), is_slow: scalars[2] < 0.5 }
    }

    /// The new moments and `m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`.
    #[inline(always)]
    fn moments(&self, g: F32s<S>, m: F32s<S>, v: F32s<S>) -> (F32s<S>, F32s<S>, F32s<S>) {
        let [grad_scale, _, new1, old1, beta2, new2, root2, eps, _] = self.all;
        let g = g * grad_scale;
        // The first form loses g where m is much larger and beta1 is near zero.
        let m = match self.is_slow {
            true => (g - m).mul_add(new1, m),
            false => (g - m).mul_add(-old1, g),
        };
        let v = (g * g).mul_add(new2, v * beta2);
        (m, v, m / (v.sqrt() / root2 + eps))
    }
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
        let lanes = Lanes::new(simd, &scalars);
        let [_, keep, .., step] = lanes.all;
        for at in (0..p.len()).step_by(F32s::<S>::LANES) {
            let load = |x: &[f32]| F32s::load(simd, &x[at..]);
            let (m_at, v_at, ratio) = lanes.moments(load(g), load(m), load(v));
            (load(p) * keep - step * ratio).store(&mut p[at..]);
            m_at.store(&mut m[at..]);
            v_at.store(&mut v[at..]);
        }
    }
}

struct Sizes<'a> {
    p: &'a [f32],
    g: &'a [f32],
    m: &'a [f32],
    v: &'a [f32],
    scalars: Scalars,
}

impl WithSimd for Sizes<'_> {
    /// Sums of the squares of the ratio and of p.
    type Output = (f32, f32);
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (f32, f32) {
        let Sizes { p, g, m, v, scalars } = self;
        let lanes = Lanes::new(simd, &scalars);
        let (mut ratios, mut ps) = (F32s::zero(simd), F32s::zero(simd));
        // Lanes beyond the end would be 0 / 0 where eps is zero.
        let whole = p.len() / F32s::<S>::LANES * F32s::<S>::LANES;
        for at in (0..whole).step_by(F32s::<S>::LANES) {
            let load = |x: &[f32]| F32s::load(simd, &x[at..]);
            let (_, _, ratio) = lanes.moments(load(g), load(m), load(v));
            ratios = ratio.mul_add(ratio, ratios);
            ps = load(p).mul_add(load(p), ps);
        }
        let (mut ratios, mut ps) = (ratios.sum(), ps.sum());
        for at in whole..p.len() {
            let splat = |x: &[f32]| F32s::splat(simd, x[at]);
            let (_, _, ratio) = lanes.moments(splat(g), splat(m), splat(v));
            let ratio = ratio.max_lane();
            ratios += ratio * ratio;
            ps += p[at] * p[at];
        }
        (ratios, ps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::TensorFile;
    use crate::files::safetensors::SafeTensors;
    use crate::ops::check::{Input, compare_devices, devices};
    use crate::tensor::gpu::product::in_format;
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
                trust: None,
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

    #[test]
    fn the_size_of_an_update_is_known_before_it_is_made() {
        let config = AdamW { weight_decay: 0.0, grad_scale: 0.5, lr: 0.02, ..AdamW::default() };
        let n = PIECE * 2 + 1003;
        let run = |n_threads: usize| {
            let device = Device::cpu(n_threads).unwrap();
            let mut p = Input::normal(1, &[n], 0.1).tensor(&device);
            let (mut m, mut v) = (Tensor::zeros(&device, &[n]), Tensor::zeros(&device, &[n]));
            let mut sizes = Vec::new();
            for t in 1..4 {
                let g = Input::normal(10 + t, &[n], 2.0).tensor(&device);
                let old = p.to_f32();
                let (update, size) = adamw_sizes(&p, &g, [&m, &v], t, &config);
                adamw(&mut p, &g, &mut m, &mut v, t, &config);
                let rms = |f: &dyn Fn(usize) -> f32| {
                    ((0..n).map(|i| (f(i) as f64).powi(2)).sum::<f64>() / n as f64).sqrt()
                };
                let moved = rms(&|i| p.f32()[i] - old.f32()[i]);
                assert!((update / moved - 1.0).abs() < 1e-3, "step {t}: {update} {moved}");
                assert!((size / rms(&|i| old.f32()[i]) - 1.0).abs() < 1e-4, "step {t}: {size}");
                sizes.push((update, size));
            }
            sizes
        };
        let want = run(1);
        assert!(want == run(2) && want == run(3), "other bits on other threads");
    }

    #[test]
    fn a_gpu_makes_the_same_steps() {
        // A tail behind the last four, slow and quick moments, gradients of all sizes.
        let n = 10_007;
        let wild = |x: f32| x * 10f32.powf(6.0 * x.sin());
        for beta1 in [0.9, 0.3] {
            let config = AdamW { beta1, grad_scale: 0.7, lr: 1e-2, ..AdamW::default() };
            let run = |device: &Device| {
                let mut p = Input::normal(1, &[n], 1.0).tensor(device);
                let (mut m, mut v) = (Tensor::zeros(device, &[n]), Tensor::zeros(device, &[n]));
                let mut sizes = (0.0, 0.0);
                for t in 1..4 {
                    let g = Input::map(1 + t, &[n], wild).tensor(device);
                    sizes = adamw_sizes(&p, &g, [&m, &v], t, &config);
                    adamw(&mut p, &g, &mut m, &mut v, t, &config);
                }
                ([p.to_vec(), m.to_vec(), v.to_vec()], sizes)
            };
            let (want, sizes) = run(&Device::cpu(1).unwrap());
            for (device, _) in devices() {
                let (got, sizes_there) = run(device);
                device.check().unwrap();
                for (what, (want, got)) in ["p", "m", "v"].iter().zip(want.iter().zip(&got)) {
                    compare_devices(&format!("{device:?}: {what}"), want, got, 1e-5);
                }
                assert!((sizes_there.0 / sizes.0 - 1.0).abs() < 1e-4, "{device:?}");
                assert!((sizes_there.1 / sizes.1 - 1.0).abs() < 1e-4, "{device:?}");
            }
        }
    }

    #[test]
    fn many_parameters_at_once_make_the_steps_of_each_alone_and_renew_their_copies() {
        let shapes: [&[usize]; 5] = [&[3], &[PIECE - 1], &[1, PIECE], &[70, 1001], &[5, 8]];
        let config = |idx: usize| AdamW { lr: 0.1 / (1 + idx) as f64, ..AdamW::default() };
        for (device, _) in devices() {
            let start = |seed: u64, shape: &[usize]| Input::normal(seed, shape, 1.0).tensor(device);
            let grad = |t: u64, idx: usize| start(100 * t + idx as u64, shapes[idx]);
            let all = || shapes.iter().zip(0u64..);
            let mut alone: Vec<Tensor> = all().map(|(it, seed)| start(seed, it)).collect();
            let mut moments = [0, 1].map(|_| alone.iter().map(|p| zeros(device, p)).collect());
            let mut together: Vec<Tensor> = all().map(|(it, seed)| start(seed, it)).collect();
            let mut others = [0, 1].map(|_| alone.iter().map(|p| zeros(device, p)).collect());
            let gpu = device.gpu().unwrap();
            for t in 1..4 {
                let ([ms, vs], [other_ms, other_vs]): (&mut [Vec<Tensor>; 2], &mut [Vec<_>; 2]) =
                    (&mut moments, &mut others);
                for idx in 0..shapes.len() {
                    let (g, config) = (grad(t, idx), config(idx));
                    adamw(&mut alone[idx], &g, &mut ms[idx], &mut vs[idx], t, &config);
                }
                let grads: Vec<Tensor> = (0..shapes.len()).map(|idx| grad(t, idx)).collect();
                // The last has no copy yet.
                for p in &together[..shapes.len() - 1] {
                    in_format(gpu, p);
                }
                let mut steps = Steps::new(t);
                let moments = other_ms.iter_mut().zip(other_vs.iter_mut());
                let all = together.iter_mut().zip(&grads).zip(moments).enumerate();
                for (idx, ((p, g), (m, v))) in all {
                    steps.add(p, g, m, v, &config(idx));
                }
                steps.finish();
                device.check().unwrap();
                let pairs = [(&alone, &together), (ms, other_ms), (vs, other_vs)];
                // Another kernel: a compiler may fuse other products with their sums.
                for (want, got) in pairs.into_iter().flat_map(|(a, b)| a.iter().zip(b)) {
                    let what = format!("{device:?}: {:?}", want.shape());
                    compare_devices(&what, &want.to_vec(), &got.to_vec(), 1e-6);
                }
                for p in &together {
                    let want = gpu.cast(p, gpu.activation_dtype()).to_vec();
                    assert!(in_format(gpu, p).to_vec() == want, "{device:?}: {:?}", p.shape());
                }
            }
        }
    }

    fn zeros(device: &Device, like: &Tensor) -> Tensor {
        Tensor::zeros(device, like.shape())
    }
}
