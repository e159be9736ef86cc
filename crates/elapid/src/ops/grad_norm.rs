//! Global norm of gradients: `sqrt(sum over all tensors of g^2)`.
//!
//! Squares are summed in f64 over fixed pieces, the pieces in order: the same bits on any number
//! of threads, and no overflow below 1e154. There is no backward.
//! (tidy: allow unchecked)

use crate::device::Device;
use crate::tensor::Tensor;

const PIECE: usize = 1 << 14;

/// The norm of all tensors together.
pub fn grad_norm<'a>(grads: impl Iterator<Item = &'a Tensor>) -> f64 {
    grads.map(sum_of_squares).sum::<f64>().sqrt()
}

fn sum_of_squares(x: &Tensor) -> f64 {
    let cpu = x.device().expect_cpu();
    let pieces = x.f32().chunks(PIECE).collect();
    let sums = cpu.map(pieces, |piece: &[f32]| {
        // Eight running sums let the compiler use vectors without changing the order.
        let mut sums = [0.0f64; 8];
        for eight in piece.chunks(8) {
            for (sum, &x) in sums.iter_mut().zip(eight) {
                *sum += x as f64 * x as f64;
            }
        }
        sums.iter().sum::<f64>()
    });
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Input;

    #[test]
    fn the_norm_is_right_and_has_the_same_bits_on_any_number_of_threads() {
        let x = Input::normal(1, &[50_001], 3.0);
        let norm_on = |n_threads| {
            let device = Device::cpu(n_threads).unwrap();
            let tensors = [x.tensor(&device), Tensor::from_f32(&device, &[2], &[1e30, 2e30])];
            (grad_norm(tensors[..1].iter()), grad_norm(tensors.iter()))
        };
        let (small, large) = norm_on(1);
        assert!((small - 3.0 * 50_001f64.sqrt()).abs() < 10.0);
        assert!((large / (5f64.sqrt() * 1e30) - 1.0).abs() < 1e-6);
        assert!(norm_on(2) == (small, large) && norm_on(3) == (small, large));
    }
}
