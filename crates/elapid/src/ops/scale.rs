//! Multiplication by a constant: `y = factor * x`, as Granite and Falcon-H1 do all over.
//!
//! Backward: `dx = factor * dy`.

use crate::device::Device;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

const PIECE: usize = 1 << 15;

/// `factor * x`; a factor of one is free.
pub fn scale(tape: &Tape, x: &Var, factor: f32) -> Var {
    if factor == 1.0 {
        return x.clone();
    }
    let y = scaled(x.value(), factor);
    tape.record("scale", &[x], y, move |dy| vec![Some(scaled(&dy, factor))])
}

fn scaled(x: &Tensor, factor: f32) -> Tensor {
    let Device::Cpu(cpu) = x.device();
    let mut y = Tensor::uninit(x.device(), x.shape());
    cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
        for (y, x) in y.iter_mut().zip(&x.f32()[idx * PIECE..]) {
            *y = factor * x;
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
        let inputs = [Input::normal(1, &[3, 7], 1.0)];
        check_gradients(&inputs, |tape, vars| vec![scale(tape, &vars[0], -1.7)]);
    }
}
