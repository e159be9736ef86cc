//! The gated RMSNorm at the end of a Mamba-2 block, over groups of channels.
//!
//! With `silu(z) = z s`, `s = 1 / (1 + e^-z)`, and means over the channels of one group:
//!
//! ```text
//! gate first:  u = x silu(z),  r = 1 / sqrt(mean(u^2) + eps),  y = w u r
//! norm first:                  r = 1 / sqrt(mean(x^2) + eps),  y = w x r silu(z)
//! ```
//!
//! Backward, with `silu'(z) = s (1 + z (1 - s))`:
//!
//! ```text
//! gate first:  g = w dy             norm first:  g = w silu(z) dy
//!              du = r (g - u r^2 mean(g u))      dx = r (g - x r^2 mean(g x))
//!              dx = silu(z) du                   dz = silu'(z) w x r dy
//!              dz = silu'(z) x du                dw = sum over rows of x r silu(z) dy
//!              dw = sum over rows of u r dy
//! ```
//!
//! | name     | shape              |                                          |
//! |----------|--------------------|------------------------------------------|
//! | `x`, `z` | (n_tok, d_inner)   | what the state space gave, and the gate  |
//! | `w`      | (d_inner)          | weight                                   |
//! | `r`      | (n_tok, n_group)   | kept for backward, with `x` and `z`      |
//!
//! `u` and the gate are not kept: backward recomputes them.
//!
//! Not here: the norm without a gate.

use super::norm::sum_rows;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Const, Gpu, Kernel, Work, bind};
use pulp::{Simd, WithSimd};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The product with the gate is normalised.
    GateFirst,
    /// What is normalised is multiplied by the gate.
    NormFirst,
}

/// What the norm is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedNorm {
    /// Groups of equal width, each with a mean of its own.
    pub n_group: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Gate or norm first.
    pub order: Order,
}

/// Rows of a task: the partial sums of `dw` then take 1/32 of the bytes of `x`.
const ROWS: usize = 32;

/// The gated norm of `x` (n_tok, d_inner) with gate `z` and weight `w`.
pub fn gated_norm(tape: &Tape, x: &Var, z: &Var, w: &Var, config: &GatedNorm) -> Var {
    let (_, d_inner) = x.value().dims2();
    z.value().expect_shape("gated norm: z", x.value().shape());
    w.value().expect_shape("gated norm: w", &[d_inner]);
    assert!(
        config.n_group > 0 && d_inner.is_multiple_of(config.n_group),
        "gated norm: {d_inner} channels in {} groups",
        config.n_group
    );
    let [x_value, z_value, w_value] = [x, z, w].map(|var| var.value().clone());
    let inputs = Inputs { x: x_value, z: z_value, w: w_value, config: *config };
    let (y, r) = forward(&inputs);
    let wants_dw = w.needs_grad();
    tape.record("gated norm", &[x, z, w], y, move |dy| backward(&inputs, &r, &dy, wants_dw))
}

struct Inputs {
    x: Tensor,
    z: Tensor,
    w: Tensor,
    config: GatedNorm,
}

/// What a task reads: some rows of `x` and `z`, and all of `w`.
struct Rows<'a> {
    x: &'a [f32],
    z: &'a [f32],
    w: &'a [f32],
    config: GatedNorm,
}

impl Inputs {
    fn rows(&self, task_idx: usize) -> Rows<'_> {
        let Inputs { x, z, w, config } = self;
        let piece = ROWS * w.n_elem();
        let range = task_idx * piece..x.n_elem().min((task_idx + 1) * piece);
        Rows { x: &x.f32()[range.clone()], z: &z.f32()[range], w: w.f32(), config: *config }
    }
}

static FORWARD: Kernel = Kernel::new(
    "gated_norm_forward",
    include_str!("gated_norm.wgsl"),
    include_str!("gated_norm.cu"),
);
static BACKWARD: Kernel = Kernel { entry: "gated_norm_backward", ..FORWARD };
static DW: Kernel = Kernel { entry: "gated_norm_dw", ..FORWARD };
static BACKWARD_ROWS: Kernel = Kernel { entry: "gated_norm_backward_rows", ..FORWARD };

/// Whether a thread takes eight channels at a time, and keeps all of a group in registers.
fn has_eights(gpu: &Gpu, inputs: &Inputs) -> bool {
    let d_group = inputs.w.n_elem() / inputs.config.n_group;
    gpu.caps().wide_loads && d_group.is_multiple_of(8) && d_group <= 2048
}

/// Constants of all kernels, and the work of one workgroup to each group of channels of a row.
fn launch_of(gpu: &Gpu, inputs: &Inputs) -> ([Const; 5], Work) {
    let n_group = inputs.config.n_group;
    let (n_tok, d_inner) = inputs.x.dims2();
    let d_group = d_inner / n_group;
    let gate_first = usize::from(inputs.config.order == Order::GateFirst);
    let consts = [
        ("D_GROUP", d_group),
        ("N_GROUP", n_group),
        ("GATE_FIRST", gate_first),
        ("N_ROWS", ROWS),
        ("EIGHTS", usize::from(has_eights(gpu, inputs))),
    ];
    let threads = d_group.div_ceil(4).next_power_of_two().clamp(32, 256);
    (consts, Work::groups(n_tok * n_group, threads))
}

/// `y` and `r`.
fn forward(inputs: &Inputs) -> (Tensor, Tensor) {
    let Inputs { x, z, w, config } = inputs;
    let (n_tok, d_inner) = x.dims2();
    let mut y = Tensor::activation(x.device(), x.shape());
    let mut r = Tensor::uninit(x.device(), &[n_tok, config.n_group]);
    match x.device() {
        Device::Cpu(cpu) => {
            let ys = y.f32_mut().chunks_mut(ROWS * d_inner);
            let rs = r.f32_mut().chunks_mut(ROWS * config.n_group);
            cpu.map(ys.zip(rs).enumerate().collect(), |(idx, (y, r))| {
                cpu.simd(Forward { rows: inputs.rows(idx), y, r });
            });
        }
        Device::Gpu(gpu) => {
            let (consts, mut work) = launch_of(gpu, inputs);
            if has_eights(gpu, inputs) {
                work = Work::groups((n_tok * config.n_group).div_ceil(4), 128);
            }
            let mut args = bind([x, z, w], [&mut y, &mut r]);
            gpu.launch(&FORWARD, work, &consts, &mut args, &[n_tok.into(), config.eps.into()]);
        }
    }
    (y, r)
}

/// Inverts `forward`: the gradients of `x`, `z` and, if somebody wants it, `w`.
fn backward(inputs: &Inputs, r: &Tensor, dy: &Tensor, wants_dw: bool) -> Vec<Option<Tensor>> {
    let Inputs { x, z, w, config } = inputs;
    let (n_tok, d_inner) = x.dims2();
    let n_parts = n_tok.div_ceil(ROWS);
    let mut dx = Tensor::uninit_as(x, x.shape());
    let mut dz = Tensor::uninit_as(z, z.shape());
    // The sums of `dw` over the rows of each task.
    let mut parts = Tensor::uninit(x.device(), &[n_parts, d_inner]);
    match x.device() {
        Device::Cpu(cpu) => {
            let dxs = dx.f32_mut().chunks_mut(ROWS * d_inner);
            let dzs = dz.f32_mut().chunks_mut(ROWS * d_inner);
            let tasks = dxs.zip(dzs).zip(parts.f32_mut().chunks_mut(d_inner));
            cpu.map(tasks.enumerate().collect(), |(idx, ((dx, dz), dw))| {
                let r = &r.f32()[idx * ROWS * config.n_group..];
                let dy = &dy.f32()[idx * ROWS * d_inner..][..dx.len()];
                dw.fill(0.0);
                cpu.simd(Backward { rows: inputs.rows(idx), r, dy, dx, dz, dw });
            });
        }
        Device::Gpu(gpu) => {
            let (consts, work) = launch_of(gpu, inputs);
            let params = [n_tok.into(), config.eps.into()];
            if has_eights(gpu, inputs) {
                let mut args = bind([x, z, w, r, dy], [&mut dx, &mut dz, &mut parts]);
                let threads = (d_inner / config.n_group).div_ceil(8).next_multiple_of(32);
                let work = Work::grid([config.n_group, n_parts, 1], threads);
                gpu.launch(&BACKWARD_ROWS, work, &consts, &mut args, &params);
            } else {
                let mut args = bind([x, z, w, r, dy], [&mut dx, &mut dz]);
                gpu.launch(&BACKWARD, work, &consts, &mut args, &params);
                if wants_dw {
                    let work = Work::grid([d_inner.div_ceil(256), n_parts, 1], 256);
                    gpu.launch(&DW, work, &consts, &mut bind([x, z, r, dy], [&mut parts]), &params);
                }
            }
        }
    }
    vec![Some(dx), Some(dz), wants_dw.then(|| sum_rows(&parts))]
}

struct Forward<'a> {
    rows: Rows<'a>,
    y: &'a mut [f32],
    r: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { rows: Rows { x, z, w, config }, y, r } = self;
        let d_group = w.len() / config.n_group;
        let inverse = 1.0 / d_group as f32;
        for (idx, y) in y.chunks_mut(d_group).enumerate() {
            let x = &x[idx * d_group..][..d_group];
            let z = &z[idx * d_group..][..d_group];
            let w = &w[idx % config.n_group * d_group..][..d_group];
            // `y` holds the product with the gate until the mean is known.
            let mut squares = F32s::zero(simd);
            for at in (0..d_group).step_by(F32s::<S>::LANES) {
                let (x, z) = (F32s::load(simd, &x[at..]), F32s::load(simd, &z[at..]));
                let u = x * z * z.sigmoid();
                u.store(&mut y[at..]);
                let normed = if config.order == Order::GateFirst { u } else { x };
                squares = normed.mul_add(normed, squares);
            }
            r[idx] = 1.0 / (squares.sum() * inverse + config.eps).sqrt();
            let scale = F32s::splat(simd, r[idx]);
            for at in (0..d_group).step_by(F32s::<S>::LANES) {
                let u = F32s::load(simd, &y[at..]);
                (F32s::load(simd, &w[at..]) * u * scale).store(&mut y[at..]);
            }
        }
    }
}

struct Backward<'a> {
    rows: Rows<'a>,
    r: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
    dz: &'a mut [f32],
    dw: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { rows: Rows { x, z, w, config }, r, dy, dx, dz, dw } = self;
        let d_group = w.len() / config.n_group;
        let one = F32s::splat(simd, 1.0);
        let gate_first = config.order == Order::GateFirst;
        for (idx, dx) in dx.chunks_mut(d_group).enumerate() {
            let range = idx * d_group..(idx + 1) * d_group;
            let (x, z, dy) = (&x[range.clone()], &z[range.clone()], &dy[range.clone()]);
            let dz = &mut dz[range];
            let first = idx % config.n_group * d_group;
            let (w, dw) = (&w[first..][..d_group], &mut dw[first..][..d_group]);
            let r = F32s::splat(simd, r[idx]);
            // `w u dy` is g times what was normalised in either order. `dz` holds the sigmoid
            // until the mean is known.
            let mut dot = F32s::zero(simd);
            for at in (0..d_group).step_by(F32s::<S>::LANES) {
                let z = F32s::load(simd, &z[at..]);
                let s = z.sigmoid();
                s.store(&mut dz[at..]);
                let udy = F32s::load(simd, &x[at..]) * z * s * F32s::load(simd, &dy[at..]);
                dot = udy.mul_add(F32s::load(simd, &w[at..]), dot);
                udy.mul_add(r, F32s::load(simd, &dw[at..])).store(&mut dw[at..]);
            }
            let mean = F32s::splat(simd, dot.sum() / d_group as f32);
            let pull = r * r * mean;
            for at in (0..d_group).step_by(F32s::<S>::LANES) {
                let (x, z) = (F32s::load(simd, &x[at..]), F32s::load(simd, &z[at..]));
                let s = F32s::load(simd, &dz[at..]);
                let (silu, slope) = (z * s, s * z.mul_add(one - s, one));
                let wdy = F32s::load(simd, &w[at..]) * F32s::load(simd, &dy[at..]);
                if gate_first {
                    let du = r * (wdy - x * silu * pull);
                    (silu * du).store(&mut dx[at..]);
                    (slope * x * du).store(&mut dz[at..]);
                } else {
                    (r * (wdy * silu - x * pull)).store(&mut dx[at..]);
                    (slope * wdy * x * r).store(&mut dz[at..]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};
    use crate::tape::Gradients;

    const ORDERS: [Order; 2] = [Order::GateFirst, Order::NormFirst];

    fn random(n_tok: usize, d_inner: usize) -> [Input; 3] {
        [
            Input::normal(1, &[n_tok, d_inner], 1.0),
            Input::normal(2, &[n_tok, d_inner], 1.0),
            Input::normal(3, &[d_inner], 1.0),
        ]
    }

    #[test]
    fn gradients() {
        // One number; groups narrower than a vector; tails; rows and columns past one task.
        // On a GPU: eight numbers to a load, four or one, more than threads.
        let shapes = [
            (1, 1, 1),
            (1, 12, 4),
            (3, 57, 3),
            (ROWS + 2, 40, 2),
            (ROWS + 3, 48, 2),
            (3, 1104, 1),
            (2, 1100, 1),
            (2, 2062, 2),
        ];
        for (n_tok, d_inner, n_group) in shapes {
            for order in ORDERS {
                let config = GatedNorm { n_group, eps: 0.1, order };
                check_gradients(&random(n_tok, d_inner), |tape, v| {
                    vec![gated_norm(tape, &v[0], &v[1], &v[2], &config)]
                });
            }
        }
    }

    #[test]
    fn agrees_with_a_plain_twin_in_f64() {
        let device = Device::cpu(2).unwrap();
        for (n_tok, d_inner, n_group) in [(1, 1, 1), (5, 57, 3), (67, 64, 1)] {
            let [x, z, w] = random(n_tok, d_inner).map(|input| input.tensor(&device));
            for order in ORDERS {
                // An eps that is a good part of the mean: leaving it out would show.
                let config = GatedNorm { n_group, eps: 0.3, order };
                let want = twin([x.f32(), z.f32(), w.f32()], config);
                let (x, z, w) = (x.clone(), z.clone(), w.clone());
                let (y, _) = forward(&Inputs { x, z, w, config });
                for (y, want) in y.f32().iter().zip(want) {
                    assert!((*y as f64 - want).abs() < 2e-6 * want.abs().max(1.0), "{y} {want}");
                }
            }
        }
    }

    fn twin([x, z, w]: [&[f32]; 3], config: GatedNorm) -> Vec<f64> {
        let d_group = w.len() / config.n_group;
        let mut y = Vec::new();
        for first in (0..x.len()).step_by(d_group) {
            let silu = |n: usize| z[n] as f64 / (1.0 + (-z[n] as f64).exp());
            let normed = |n: usize| match config.order {
                Order::GateFirst => x[n] as f64 * silu(n),
                Order::NormFirst => x[n] as f64,
            };
            let squares: f64 = (first..first + d_group).map(|n| normed(n).powi(2)).sum();
            let r = 1.0 / (squares / d_group as f64 + config.eps as f64).sqrt();
            for n in first..first + d_group {
                let gate = if config.order == Order::NormFirst { silu(n) } else { 1.0 };
                y.push(w[n % w.len()] as f64 * normed(n) * r * gate);
            }
        }
        y
    }

    #[test]
    fn numbers_of_any_size_are_the_same_on_every_device() {
        let run = |device: &Device, inputs: &[Input; 3], config: &GatedNorm| {
            let tape = Tape::new();
            let v = [0, 1, 2].map(|key| tape.leaf(key, &inputs[key].tensor(device)));
            let y = gated_norm(&tape, &v[0], &v[1], &v[2], config);
            let mut all = vec![y.value().to_vec()];
            let mut grads = Gradients::default();
            tape.walk(vec![(y, inputs[1].tensor(device))], &mut grads);
            (0..3).for_each(|key| all.push(grads.get(key).unwrap().to_vec()));
            all
        };
        let cpu = Device::cpu(1).unwrap();
        for (x_size, z_size) in [(1e-6, 1.0), (1.0, 60.0), (1e6, 1.0)] {
            let mut inputs = random(5, 96);
            inputs[0] = Input::normal(1, &[5, 96], x_size);
            inputs[1] = Input::normal(2, &[5, 96], z_size);
            for order in ORDERS {
                let config = GatedNorm { n_group: 2, eps: 1e-5, order };
                let want = run(&cpu, &inputs, &config);
                for (device, tolerance) in crate::ops::check::devices() {
                    for (want, got) in want.iter().zip(run(device, &inputs, &config)) {
                        let what = format!("{device:?}: {x_size} {z_size}");
                        crate::ops::check::compare_devices(&what, want, &got, *tolerance);
                    }
                }
            }
        }
    }

    #[test]
    fn a_closed_gate_and_zeros_give_finite_numbers() {
        let device = Device::cpu(1).unwrap();
        let tape = Tape::new();
        let x = tape.leaf(0, &Tensor::from_f32(&device, &[2, 2], &[0.0, 0.0, 3.0, -1.0]));
        let z = tape.leaf(1, &Tensor::from_f32(&device, &[2, 2], &[1.0, -2.0, -200.0, -1e6]));
        let w = tape.leaf(2, &Tensor::from_f32(&device, &[2], &[1.0, 1.0]));
        let config = GatedNorm { n_group: 1, eps: 1e-5, order: Order::GateFirst };
        let y = gated_norm(&tape, &x, &z, &w, &config);
        assert!(y.value().f32().iter().all(|y| y.abs() < 1e-30));
        let mut grads = Gradients::default();
        tape.walk(vec![(y, Tensor::from_f32(&device, &[2, 2], &[1.0; 4]))], &mut grads);
        assert!(grads.iter().all(|(_, grad)| grad.f32().iter().all(|g| g.is_finite())));
    }

    #[test]
    fn a_second_run_takes_no_memory_and_gives_the_same_bits() {
        let device = Device::cpu(1).unwrap();
        let tensors = random(ROWS + 5, 24).map(|input| input.tensor(&device));
        let config = GatedNorm { n_group: 2, eps: 1e-5, order: Order::GateFirst };
        let step = || {
            let tape = Tape::new();
            let v: Vec<Var> = (0..3).map(|key| tape.leaf(key, &tensors[key])).collect();
            let y = gated_norm(&tape, &v[0], &v[1], &v[2], &config);
            let mut bits = y.value().f32().to_vec();
            let mut grads = Gradients::default();
            tape.walk(vec![(y, tensors[1].clone())], &mut grads);
            grads.iter().for_each(|(_, grad)| bits.extend(grad.f32()));
            (bits, device.memory().n_alloc)
        };
        // The second finds in its buffers what the first left there.
        assert!(step() == step());
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it() {
        let device = Device::cpu(2).unwrap();
        let [x, z, w] = random(ROWS + 5, 24).map(|input| input.tensor(&device));
        let config = GatedNorm { n_group: 2, eps: 1e-5, order: Order::NormFirst };
        let run = |rows: std::ops::Range<usize>| {
            let (x, z) = (x.rows(rows.clone()), z.rows(rows));
            forward(&Inputs { x, z, w: w.clone(), config }).0
        };
        let whole = run(0..ROWS + 5);
        for row in [0, 7, ROWS, ROWS + 4] {
            assert_eq!(run(row..row + 1).f32(), whole.rows(row..row + 1).f32());
        }
    }
}
