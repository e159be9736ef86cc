//! Clamp: `y = min(max(x, -limit), limit)`, as OLMoE does with queries, keys and values.
//!
//! Backward: `dx = dy` where `-limit <= x <= limit`, else 0. Kept: x.

use crate::device::Device;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

const PIECE: usize = 1 << 15;

/// `x` between minus and plus `limit`.
pub fn clamp(tape: &Tape, x: &Var, limit: f32) -> Var {
    let y = each_pair(x.value(), x.value(), |x, _| x.clamp(-limit, limit));
    let x_value = x.value().clone();
    tape.record("clamp", &[x], y, move |dy| {
        vec![Some(each_pair(&x_value, &dy, |x, dy| if x.abs() <= limit { dy } else { 0.0 }))]
    })
}

fn each_pair(a: &Tensor, b: &Tensor, f: impl Fn(f32, f32) -> f32 + Send + Sync) -> Tensor {
    let cpu = a.device().expect_cpu();
    let mut y = Tensor::uninit(a.device(), a.shape());
    cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
        let (a, b) = (&a.f32()[idx * PIECE..], &b.f32()[idx * PIECE..]);
        for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
            *y = f(a, b);
        }
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        // Away from the edges at 0.8, which finite differences would straddle.
        let away = |x: f32| if (x.abs() - 0.8).abs() < 0.1 { x * 1.5 } else { x };
        let inputs = [Input::map(1, &[5, 9], away)];
        check_gradients(&inputs, |tape, v| vec![clamp(tape, &v[0], 0.8)]);
    }
}
