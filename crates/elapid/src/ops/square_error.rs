//! Squared error: `loss = factor / 2 * sum of (y - target)^2`, one number.
//!
//! Backward: `dy = dloss factor (y - target)`. Kept: y. The target has no gradient.
//!
//! The sum is in f64 on the CPU; on a GPU one group makes it, in f32 and in a fixed order: the op
//! is for small outputs.

use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};

/// `factor / 2 * |y - target|^2`.
pub fn square_error(tape: &Tape, y: &Var, target: &Tensor, factor: f32) -> Var {
    target.expect_shape("square error: target", y.value().shape());
    let loss = forward(y.value(), target, factor);
    let (y_value, target) = (y.value().clone(), target.clone());
    tape.record("square error", &[y], loss, move |dloss| {
        vec![Some(backward(&y_value, &target, factor, &dloss))]
    })
}

fn forward(y: &Tensor, target: &Tensor, factor: f32) -> Tensor {
    let mut loss = Tensor::uninit(y.device(), &[1]);
    match y.device() {
        Device::Cpu(_) => {
            let square = |(y, target): (&f32, &f32)| f64::from(y - target).powi(2);
            let sum: f64 = y.f32().iter().zip(target.f32()).map(square).sum();
            loss.write_f32(&[(0.5 * f64::from(factor) * sum) as f32]);
        }
        Device::Gpu(gpu) => {
            let mut args = bind([y, target], [&mut loss]);
            let params = [y.n_elem().into(), factor.into()];
            gpu.launch(&FORWARD, Work::groups(1, 256), &[], &mut args, &params);
        }
    }
    loss
}

/// Inverts `forward`.
fn backward(y: &Tensor, target: &Tensor, factor: f32, dloss: &Tensor) -> Tensor {
    let mut dy = Tensor::uninit_as(y, y.shape());
    match y.device() {
        Device::Cpu(_) => {
            let factor = factor * dloss.f32()[0];
            let numbers = y.f32().iter().zip(target.f32());
            for (dy, (y, target)) in dy.f32_mut().iter_mut().zip(numbers) {
                *dy = factor * (y - target);
            }
        }
        Device::Gpu(gpu) => {
            let n = y.n_elem();
            let mut args = bind([y, target, dloss], [&mut dy]);
            let params = [n.into(), factor.into()];
            gpu.launch(&BACKWARD, Work::each(n), &[], &mut args, &params);
        }
    }
    dy
}

static FORWARD: Kernel = Kernel::new(
    "square_error_forward",
    include_str!("square_error.wgsl"),
    include_str!("square_error.cu"),
);
static BACKWARD: Kernel = Kernel { entry: "square_error_backward", ..FORWARD };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        for (shape, factor) in [([1, 1], 1.0), ([3, 8], 0.5), ([1, 300], 0.1)] {
            let target = Input::normal(2, &shape, 1.0);
            check_gradients(&[Input::normal(1, &shape, 1.0)], |tape, v| {
                let target = target.tensor(v[0].value().device());
                vec![square_error(tape, &v[0], &target, factor)]
            });
        }
    }

    #[test]
    fn the_loss_is_half_the_sum_of_squares() {
        let device = Device::cpu(1).unwrap();
        let y = Tensor::from_f32(&device, &[3], &[1.0, -2.0, 0.5]);
        let target = Tensor::from_f32(&device, &[3], &[0.0, 1.0, 0.5]);
        let loss = square_error(&Tape::off(), &Var::constant(y), &target, 0.5);
        assert_eq!(loss.value().f32(), [2.5]);
    }
}
