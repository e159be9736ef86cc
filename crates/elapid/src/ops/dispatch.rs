//! Moves tokens to their experts and back.
//!
//! Rows are sorted by expert, so that each expert works on one run of rows:
//!
//! ```text
//! gather:   y[row] = x[token of row]
//! combine:  y[tok] = sum over slots of weights[tok, slot] * y_sorted[row of (tok, slot)]
//! ```
//!
//! Backward, `row` being the row of (tok, slot) and slots added in order of choice:
//!
//! ```text
//! gather:   dx[tok] = sum over slots of dy[row]
//! combine:  dy_sorted[row] = weights[tok, slot] * dy[tok]
//!           dweights[tok, slot] = dy[tok] . y_sorted[row]
//! ```
//!
//! | name       | shape              |                                  |
//! |------------|--------------------|----------------------------------|
//! | `x`        | (n_tok, d)         | tokens in order                  |
//! | `y_sorted` | (n_tok * n_used, d)| rows sorted by expert            |
//! | `weights`  | (n_tok, n_used)    | per token in order of choice     |
//!
//! No token is dropped and none is padded. `combine` keeps `y_sorted` only when the weights want a
//! gradient. Not here: the choice (`router`); what experts compute on their rows.

use crate::ops::router::Routing;
use crate::ops::softmax::row_threads;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Const, Kernel, Work, bind};
use pulp::{Simd, WithSimd};

/// Numbers a task writes, about.
const PIECE: usize = 1 << 14;

fn rows_per_task(d: usize) -> usize {
    (PIECE / d.max(1)).max(1)
}

static GATHER: Kernel =
    Kernel::new("dispatch_gather", include_str!("dispatch.wgsl"), include_str!("dispatch.cu"));
static SUM: Kernel = Kernel { entry: "dispatch_sum", ..GATHER };
static COMBINE_BACKWARD: Kernel = Kernel { entry: "dispatch_combine_backward", ..GATHER };

/// Constants of all entries: the width of rows, rows of a token, what is there.
fn consts(d: usize, routing: &Routing, has_weights: bool, has_y_sorted: bool) -> [Const; 4] {
    let flags = [has_weights, has_y_sorted].map(usize::from);
    [("D", d), ("N_USED", routing.n_used()), ("HAS_W", flags[0]), ("HAS_Y", flags[1])]
}

/// The rows of every expert: (n_tok, d) to (n_tok * n_used, d).
pub fn gather(tape: &Tape, x: &Var, routing: &Routing) -> Var {
    let (_, d) = x.value().dims2();
    x.value().expect_shape("gather: x", &[routing.n_tok(), d]);
    let y = gather_forward(x.value(), routing);
    let routing = routing.clone();
    tape.record("gather", &[x], y, move |dy| vec![Some(sum_of_rows(&dy, &routing, None))])
}

fn gather_forward(x: &Tensor, routing: &Routing) -> Tensor {
    let ((_, d), n_rows) = (x.dims2(), routing.choices.len());
    let mut y = Tensor::uninit_as(x, &[n_rows, d]);
    match x.device() {
        Device::Cpu(cpu) => {
            let len = rows_per_task(d);
            cpu.each_piece(y.f32_mut(), len * d, |idx, y| {
                for (row, y) in (idx * len..).zip(y.chunks_exact_mut(d)) {
                    y.copy_from_slice(&x.f32()[routing.token(row) * d..][..d]);
                }
            });
        }
        Device::Gpu(gpu) => {
            let mut args = bind([x, &routing.tables().choices], [&mut y]);
            let (work, consts) =
                (Work::groups(n_rows, row_threads(d)), consts(d, routing, false, false));
            gpu.launch(&GATHER, work, &consts, &mut args, &[n_rows.into()]);
        }
    }
    y
}

/// The weighted sum of what a token's experts made: (n_tok * n_used, d) to (n_tok, d).
pub fn combine(tape: &Tape, y_sorted: &Var, routing: &Routing) -> Var {
    let (_, d) = y_sorted.value().dims2();
    y_sorted.value().expect_shape("combine: y_sorted", &[routing.choices.len(), d]);
    let weights = &routing.weights;
    let y = sum_of_rows(y_sorted.value(), routing, Some(weights.value()));
    let kept = weights.needs_grad().then(|| y_sorted.value().clone());
    let routing_kept = routing.clone();
    tape.record("combine", &[y_sorted, weights], y, move |dy| {
        let (dy_sorted, dweights) = combine_backward(&dy, kept.as_ref(), &routing_kept);
        vec![Some(dy_sorted), dweights]
    })
}

/// The backward pass of `combine`; without `y_sorted` there is no gradient of the weights.
///
/// Walks the sorted rows, so that the large tensors are read and written once and in order. The
/// gradient of `y_sorted` is made even where only the weights want one, which happens in the first
/// layer of a model whose routers alone are trained.
fn combine_backward(
    dy: &Tensor,
    y_sorted: Option<&Tensor>,
    routing: &Routing,
) -> (Tensor, Option<Tensor>) {
    let ((_, d), n_used, n_rows) = (dy.dims2(), routing.n_used(), routing.choices.len());
    let weights = routing.weights.value();
    let mut dy_sorted = Tensor::uninit_as(dy, &[n_rows, d]);
    let mut dweights = y_sorted.map(|_| Tensor::uninit_as(weights, weights.shape()));
    match dy.device() {
        Device::Cpu(cpu) => {
            let len = rows_per_task(d);
            // The gradients of the weights, still in order of rows.
            let mut dots = Tensor::uninit(dy.device(), &[n_rows]);
            let dots_of_tasks = dots.f32_mut().chunks_mut(len);
            let pieces = dy_sorted.f32_mut().chunks_mut(len * d).zip(dots_of_tasks);
            cpu.map(pieces.enumerate().collect(), |(idx, (dy_sorted, dots))| {
                let rows = dy_sorted.chunks_exact_mut(d).zip(dots);
                for (row, (dy_sorted, dot)) in (idx * len..).zip(rows) {
                    let choice = routing.choices[row] as usize;
                    let (weight, dy) =
                        (weights.f32()[choice], &dy.f32()[choice / n_used * d..][..d]);
                    let y_sorted = y_sorted.map(|y_sorted| &y_sorted.f32()[row * d..][..d]);
                    *dot = cpu.simd(RowBackward { weight, dy, y_sorted, dy_sorted });
                }
            });
            if let Some(dweights) = &mut dweights {
                for (dweight, &row) in dweights.f32_mut().iter_mut().zip(&*routing.rows) {
                    *dweight = dots.f32()[row as usize];
                }
            }
        }
        Device::Gpu(gpu) => {
            // A kernel wants something to bind.
            let mut nothing = Tensor::uninit_as(weights, &[1]);
            let ins = [dy, &routing.tables().choices, weights, y_sorted.unwrap_or(dy)];
            let outs = [&mut dy_sorted, dweights.as_mut().unwrap_or(&mut nothing)];
            let consts = consts(d, routing, true, y_sorted.is_some());
            let work = Work::groups(n_rows, row_threads(d));
            let mut args = bind(ins, outs);
            gpu.launch(&COMBINE_BACKWARD, work, &consts, &mut args, &[n_rows.into()]);
        }
    }
    (dy_sorted, dweights)
}

/// The sum over each token's sorted rows, in order of choice, under `weights` or plain.
fn sum_of_rows(x: &Tensor, routing: &Routing, weights: Option<&Tensor>) -> Tensor {
    let ((_, d), n_tok, n_used) = (x.dims2(), routing.n_tok(), routing.n_used());
    let mut y = Tensor::uninit_as(x, &[n_tok, d]);
    match x.device() {
        Device::Cpu(cpu) => {
            let len = rows_per_task(d);
            cpu.each_piece(y.f32_mut(), len * d, |idx, y| {
                for (tok, y) in (idx * len..).zip(y.chunks_exact_mut(d)) {
                    let choices = tok * n_used..(tok + 1) * n_used;
                    let weights = weights.map(|weights| &weights.f32()[choices.clone()]);
                    cpu.simd(SumOfRows { x: x.f32(), rows: &routing.rows[choices], weights, y });
                }
            });
        }
        Device::Gpu(gpu) => {
            let mut args = bind([x, &routing.tables().rows, weights.unwrap_or(x)], [&mut y]);
            let consts = consts(d, routing, weights.is_some(), false);
            let work = Work::groups(n_tok, row_threads(d));
            gpu.launch(&SUM, work, &consts, &mut args, &[n_tok.into()]);
        }
    }
    y
}

/// `y = sum over i of weights[i] * row rows[i] of x`; without weights each is one.
struct SumOfRows<'a> {
    x: &'a [f32],
    rows: &'a [u32],
    weights: Option<&'a [f32]>,
    y: &'a mut [f32],
}

impl SumOfRows<'_> {
    /// `N` runs of `len` columns from `at` on, each at most a vector: rows are far apart, so each
    /// visit takes a stretch.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, simd: S, at: usize, len: usize) {
        let mut sums = [F32s::zero(simd); N];
        for (i, &row) in self.rows.iter().enumerate() {
            let x = &self.x[row as usize * self.y.len() + at..][..N * len];
            let weight = F32s::splat(simd, self.weights.map_or(1.0, |weights| weights[i]));
            for v in 0..N {
                sums[v] = weight.mul_add(F32s::load(simd, &x[v * len..][..len]), sums[v]);
            }
        }
        let y = &mut self.y[at..][..N * len];
        for v in 0..N {
            sums[v].store(&mut y[v * len..][..len]);
        }
    }
}

impl WithSimd for SumOfRows<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, d) = (F32s::<S>::LANES, self.y.len());
        let n_wide = d - d % (4 * lanes);
        for at in (0..n_wide).step_by(4 * lanes) {
            self.columns::<S, 4>(simd, at, lanes);
        }
        for at in (n_wide..d).step_by(lanes) {
            self.columns::<S, 1>(simd, at, lanes.min(d - at));
        }
    }
}

/// `dy_sorted = weight * dy`, and returns `dy . y_sorted`, or zero without `y_sorted`.
struct RowBackward<'a> {
    weight: f32,
    dy: &'a [f32],
    y_sorted: Option<&'a [f32]>,
    dy_sorted: &'a mut [f32],
}

impl WithSimd for RowBackward<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let RowBackward { weight, dy, y_sorted, dy_sorted } = self;
        let weight = F32s::splat(simd, weight);
        // Two sums take turns, so that an addition need not wait for the last.
        let (mut sum, mut other) = (F32s::zero(simd), F32s::zero(simd));
        for at in (0..dy.len()).step_by(F32s::<S>::LANES) {
            let dy = F32s::load(simd, &dy[at..]);
            if let Some(y_sorted) = y_sorted {
                (sum, other) = (other, dy.mul_add(F32s::load(simd, &y_sorted[at..]), sum));
            }
            (weight * dy).store(&mut dy_sorted[at..]);
        }
        (sum + other).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices};
    use crate::ops::router::{Router, Score, route};

    fn routing(device: &Device, n_tok: usize, n_expert: usize, n_used: usize) -> Routing {
        let logits = Input::normal(5, &[n_tok, n_expert], 1.0).tensor(device);
        let router = Router {
            n_used,
            score: Score::Softmax,
            normalise: true,
            scale: 1.0,
            n_group: 1,
            n_group_used: 1,
        };
        route(&Tape::off(), &Var::constant(logits), &router, None)
    }

    /// (n_tok, n_expert, n_used, d): one token; one expert; experts without tokens; widths around
    /// a vector and a stretch of four; several tasks.
    const SHAPES: [(usize, usize, usize, usize); 7] = [
        (1, 1, 1, 1),
        (1, 4, 2, 19),
        (3, 40, 3, 64),
        (9, 3, 3, 65),
        (17, 1, 1, 130),
        (23, 5, 2, 400),
        (2, 3, 1, 17_000),
    ];

    #[test]
    fn gradients() {
        for (n_tok, n_expert, n_used, d) in SHAPES {
            let x = Input::normal(1, &[n_tok, d], 1.0);
            check_gradients(&[x], |tape, v| {
                let routing = routing(v[0].value().device(), n_tok, n_expert, n_used);
                vec![gather(tape, &v[0], &routing)]
            });
            let y_sorted = Input::normal(2, &[n_tok * n_used, d], 1.0);
            let weights = Input::normal(3, &[n_tok, n_used], 1.0);
            check_gradients(&[y_sorted, weights], |tape, v| {
                let mut routing = routing(v[0].value().device(), n_tok, n_expert, n_used);
                routing.weights = v[1].clone();
                vec![combine(tape, &v[0], &routing)]
            });
        }
    }

    #[test]
    fn every_expert_sees_its_tokens_and_every_token_its_experts() {
        let device = Device::cpu(2).unwrap();
        for (n_tok, n_expert, n_used, d) in SHAPES {
            let routing = routing(&device, n_tok, n_expert, n_used);
            let x = Input::normal(1, &[n_tok, d], 1.0).tensor(&device);
            let sorted = gather(&Tape::off(), &Var::constant(x.clone()), &routing);
            // Expert e multiplies by e + 1.
            let mut worked = sorted.value().to_f32();
            for expert in 0..n_expert {
                let rows = routing.rows_of(expert);
                let rows = &mut worked.f32_mut()[rows.start * d..rows.end * d];
                rows.iter_mut().for_each(|y| *y *= (expert + 1) as f32);
            }
            let y = combine(&Tape::off(), &Var::constant(worked), &routing);
            for tok in 0..n_tok {
                let choices = tok * n_used..(tok + 1) * n_used;
                let factor: f64 = choices
                    .map(|choice| {
                        let weight = routing.weights.value().f32()[choice];
                        weight as f64 * (routing.experts[choice] + 1) as f64
                    })
                    .sum();
                for at in tok * d..(tok + 1) * d {
                    let (got, want) = (y.value().f32()[at] as f64, factor * x.f32()[at] as f64);
                    assert!((got - want).abs() <= 1e-6 * (1.0 + want.abs()), "{got} {want}");
                }
            }
        }
    }

    #[test]
    fn frozen_weights_keep_nothing_of_the_rows() {
        let device = Device::cpu(1).unwrap();
        let routing = routing(&device, 8, 4, 2);
        let tape = Tape::new();
        let y_sorted = tape.leaf(0, &Tensor::zeros(&device, &[16, 1 << 12]));
        let y = combine(&tape, &y_sorted, &routing);
        let before = device.memory().live;
        drop(y_sorted);
        assert!(device.memory().live <= before - (16 << 14), "y_sorted is still held");
        assert!(y.needs_grad());
    }

    /// Numbers from 1e-6 to 1e6 in size.
    #[test]
    fn numbers_of_any_size_are_the_same_on_every_device() {
        let wide = |x: f32| 10f32.powf((3.0 * x).clamp(-6.0, 6.0)).copysign((x * 1e3).sin());
        let (x, dy) = (Input::map(1, &[9, 70], wide), Input::map(2, &[9, 70], wide));
        let y_sorted = Input::map(3, &[27, 70], wide);
        let run = |device: &Device| {
            let routing = routing(device, 9, 5, 3);
            let [x, dy, y_sorted] = [&x, &dy, &y_sorted].map(|input| input.tensor(device));
            let (dy_sorted, dweights) = combine_backward(&dy, Some(&y_sorted), &routing);
            let dx = sum_of_rows(&y_sorted, &routing, None);
            let y = sum_of_rows(&y_sorted, &routing, Some(routing.weights.value()));
            let all = [gather_forward(&x, &routing), dx, y, dy_sorted, dweights.unwrap()];
            all.map(|x| x.to_vec())
        };
        let want = run(&Device::cpu(1).unwrap());
        for (device, tolerance) in devices() {
            for (want, got) in want.iter().zip(run(device)) {
                compare_devices(&format!("{device:?}"), want, &got, *tolerance);
            }
        }
    }
}
