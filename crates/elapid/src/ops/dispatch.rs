//! Moves tokens to their experts and back.
//!
//! Rows are sorted by expert, so that each expert works on one run of rows:
//!
//!     gather:   y[row] = x[token of row]
//!     combine:  y[tok] = sum over slots of weights[tok, slot] * y_sorted[row of (tok, slot)]
//!
//! Backward, `row` being the row of (tok, slot) and slots added in order of choice:
//!
//!     gather:   dx[tok] = sum over slots of dy[row]
//!     combine:  dy_sorted[row] = weights[tok, slot] * dy[tok]
//!               dweights[tok, slot] = dy[tok] . y_sorted[row]
//!
//! | name       | shape              |                                  |
//! |------------|--------------------|----------------------------------|
//! | `x`        | (n_tok, d)         | tokens in order                  |
//! | `y_sorted` | (n_tok * n_used, d)| rows sorted by expert            |
//! | `weights`  | (n_tok, n_used)    | per token in order of choice     |
//!
//! No token is dropped and none is padded. `combine` keeps `y_sorted` only when the weights want a
//! gradient. Not here: the choice (`router`); what experts compute on their rows.

use crate::cpu::F32s;
use crate::device::Device;
use crate::ops::router::Routing;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};

/// Numbers a task writes, about.
const PIECE: usize = 1 << 14;

fn rows_per_task(d: usize) -> usize {
    (PIECE / d.max(1)).max(1)
}

/// The rows of every expert: (n_tok, d) to (n_tok * n_used, d).
pub fn gather(tape: &Tape, x: &Var, routing: &Routing) -> Var {
    let (_, d) = x.value().dims2();
    x.value().expect_shape("gather: x", &[routing.n_tok(), d]);
    let y = gather_forward(x.value(), routing);
    let routing = routing.clone();
    tape.record("gather", &[x], y, move |dy| vec![Some(gather_backward(&dy, &routing))])
}

fn gather_forward(x: &Tensor, routing: &Routing) -> Tensor {
    let Device::Cpu(cpu) = x.device();
    let (_, d) = x.dims2();
    let mut y = Tensor::uninit(x.device(), &[routing.choices.len(), d]);
    let len = rows_per_task(d);
    cpu.each_piece(y.f32_mut(), len * d, |idx, y| {
        for (row, y) in y.chunks_exact_mut(d).enumerate() {
            y.copy_from_slice(&x.f32()[routing.token(idx * len + row) * d..][..d]);
        }
    });
    y
}

/// Inverts `gather_forward`.
fn gather_backward(dy: &Tensor, routing: &Routing) -> Tensor {
    sum_of_rows(dy, routing, None)
}

/// The weighted sum of what a token's experts made: (n_tok * n_used, d) to (n_tok, d).
pub fn combine(tape: &Tape, y_sorted: &Var, routing: &Routing) -> Var {
    let (_, d) = y_sorted.value().dims2();
    y_sorted.value().expect_shape("combine: y_sorted", &[routing.choices.len(), d]);
    let weights = &routing.weights;
    let y = combine_forward(y_sorted.value(), routing);
    let kept = weights.needs_grad().then(|| y_sorted.value().clone());
    let wanted = y_sorted.needs_grad();
    let routing_kept = routing.clone();
    tape.record("combine", &[y_sorted, weights], y, move |dy| {
        let dy_sorted = wanted.then(|| rows_backward(&dy, &routing_kept));
        let dweights = kept.map(|y_sorted| weights_backward(&dy, &y_sorted, &routing_kept));
        vec![dy_sorted, dweights]
    })
}

fn combine_forward(y_sorted: &Tensor, routing: &Routing) -> Tensor {
    sum_of_rows(y_sorted, routing, Some(routing.weights.value()))
}

/// Inverts `combine_forward` by `y_sorted`.
fn rows_backward(dy: &Tensor, routing: &Routing) -> Tensor {
    let Device::Cpu(cpu) = dy.device();
    let (_, d) = dy.dims2();
    let (n_used, weights) = (routing.n_used(), routing.weights.value());
    let mut dy_sorted = Tensor::uninit(dy.device(), &[routing.choices.len(), d]);
    let len = rows_per_task(d);
    cpu.each_piece(dy_sorted.f32_mut(), len * d, |idx, dy_sorted| {
        for (row, dy_sorted) in dy_sorted.chunks_exact_mut(d).enumerate() {
            let choice = routing.choices[idx * len + row] as usize;
            let dy = &dy.f32()[choice / n_used * d..][..d];
            cpu.simd(Scale { x: dy, factor: weights.f32()[choice], y: dy_sorted });
        }
    });
    dy_sorted
}

/// Inverts `combine_forward` by the weights.
fn weights_backward(dy: &Tensor, y_sorted: &Tensor, routing: &Routing) -> Tensor {
    let Device::Cpu(cpu) = dy.device();
    let (_, d) = dy.dims2();
    let n_used = routing.n_used();
    let mut dweights = Tensor::uninit(dy.device(), &[routing.n_tok(), n_used]);
    let len = rows_per_task(d * n_used) * n_used;
    cpu.each_piece(dweights.f32_mut(), len, |idx, dweights| {
        for (choice, dweight) in (idx * len..).zip(dweights) {
            let dy = &dy.f32()[choice / n_used * d..][..d];
            let y_sorted = &y_sorted.f32()[routing.rows[choice] as usize * d..][..d];
            *dweight = cpu.simd(Dot { a: dy, b: y_sorted });
        }
    });
    dweights
}

/// The sum over each token's sorted rows, in order of choice, under `weights` or plain.
fn sum_of_rows(x: &Tensor, routing: &Routing, weights: Option<&Tensor>) -> Tensor {
    let Device::Cpu(cpu) = x.device();
    let ((_, d), n_used) = (x.dims2(), routing.n_used());
    let mut y = Tensor::uninit(x.device(), &[routing.n_tok(), d]);
    let len = rows_per_task(d);
    cpu.each_piece(y.f32_mut(), len * d, |idx, y| {
        for (tok, y) in (idx * len..).zip(y.chunks_exact_mut(d)) {
            let choices = tok * n_used..(tok + 1) * n_used;
            let weights = weights.map(|weights| &weights.f32()[choices.clone()]);
            cpu.simd(SumOfRows { x: x.f32(), rows: &routing.rows[choices], weights, y });
        }
    });
    y
}

/// `y = sum over i of weights[i] * row rows[i] of x`; without weights each is one.
struct SumOfRows<'a> {
    x: &'a [f32],
    rows: &'a [u32],
    weights: Option<&'a [f32]>,
    y: &'a mut [f32],
}

impl WithSimd for SumOfRows<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        /// Vectors summed side by side: the rows are far apart, each visit should take a stretch.
        const WIDE: usize = 4;
        let SumOfRows { x, rows, weights, y } = self;
        let (d, lanes) = (y.len(), F32s::<S>::LANES);
        for (idx, y) in y.chunks_mut(WIDE * lanes).enumerate() {
            let mut sums = [F32s::zero(simd); WIDE];
            for (i, &row) in rows.iter().enumerate() {
                let weight = F32s::splat(simd, weights.map_or(1.0, |weights| weights[i]));
                let x = &x[row as usize * d + idx * WIDE * lanes..][..y.len()];
                for (sum, x) in sums.iter_mut().zip(x.chunks(lanes)) {
                    *sum = weight.mul_add(F32s::load(simd, x), *sum);
                }
            }
            for (sum, y) in sums.into_iter().zip(y.chunks_mut(lanes)) {
                sum.store(y);
            }
        }
    }
}

/// `y = factor * x`
struct Scale<'a> {
    x: &'a [f32],
    factor: f32,
    y: &'a mut [f32],
}

impl WithSimd for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Scale { x, factor, y } = self;
        let factor = F32s::splat(simd, factor);
        for (x, y) in x.chunks(F32s::<S>::LANES).zip(y.chunks_mut(F32s::<S>::LANES)) {
            (factor * F32s::load(simd, x)).store(y);
        }
    }
}

/// `a . b`
struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl WithSimd for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        /// Sums side by side, so that an addition need not wait for the last.
        const WIDE: usize = 4;
        let lanes = F32s::<S>::LANES;
        let mut sums = [F32s::zero(simd); WIDE];
        for (a, b) in self.a.chunks(WIDE * lanes).zip(self.b.chunks(WIDE * lanes)) {
            for ((sum, a), b) in sums.iter_mut().zip(a.chunks(lanes)).zip(b.chunks(lanes)) {
                *sum = F32s::load(simd, a).mul_add(F32s::load(simd, b), *sum);
            }
        }
        ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
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
                let routing = routing(v[0].value().device(), n_tok, n_expert, n_used);
                let routing = Routing { weights: v[1].clone(), ..routing };
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
}
