//! Global norm of gradients: `sqrt(sum over all tensors of g^2)`.
//!
//! Squares are summed in f64 over fixed pieces, the pieces in order: the same bits on any number
//! of threads, and no overflow below 1e154. There is no backward.
//!
//! A GPU sums pieces in f32, the host adds them up: squares overflow past 1e19.
//! (tidy: allow unchecked)

use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Gpu, Kernel, Row, Work, bind};

/// Numbers of a task, or of a group of threads.
const PIECE: usize = 1 << 14;

/// The norm of all tensors together.
pub fn grad_norm<'a>(grads: impl Iterator<Item = &'a Tensor>) -> f64 {
    match squares(grads) {
        Squares::Sum(sum) => sum.sqrt(),
        Squares::Parts(parts) => norm_of(&parts.to_vec()),
    }
}

/// Squares of all numbers, on their way to the norm.
pub enum Squares {
    /// The sum of all.
    Sum(f64),
    /// Sums of pieces, on a GPU.
    Parts(Tensor),
}

/// The same before anything is read from a GPU.
pub fn squares<'a>(grads: impl Iterator<Item = &'a Tensor>) -> Squares {
    let mut grads = grads.peekable();
    let gpu = grads.peek().and_then(|grad| grad.device().gpu()).cloned();
    match gpu {
        None => Squares::Sum(grads.map(sum_of_squares).sum()),
        Some(gpu) => Squares::Parts(squares_gpu(&gpu, &grads.collect::<Vec<_>>())),
    }
}

static SUM_SQUARES: Kernel =
    Kernel::new("sum_squares", include_str!("grad_norm.wgsl"), include_str!("grad_norm.cu"));
// For CUDA.
static SUM_ALL: Kernel = Kernel { entry: "sum_squares_all", wgsl: "", ..SUM_SQUARES };

/// All partial sums into one tensor, which the host reads once.
fn squares_gpu(gpu: &Gpu, grads: &[&Tensor]) -> Tensor {
    let device = Device::Gpu(gpu.clone());
    let n_pieces = |x: &Tensor| gpu.parts(x).map(|part| part.len().div_ceil(PIECE)).sum();
    let n_sums: usize = grads.iter().map(|x| -> usize { n_pieces(x) }).sum();
    let mut sums = Tensor::uninit(&device, &[n_sums]);
    let mut first = 0;
    if grads.iter().all(|x| gpu.can_follow(x)) {
        let mut rows = Vec::with_capacity(grads.len());
        for x in grads {
            let n_groups = x.n_elem().div_ceil(PIECE);
            let params = vec![x.n_elem().into(), first.into()];
            rows.push(Row { n_groups, tensors: vec![Some(Arg::In(x))], params });
            first += n_groups;
        }
        gpu.launch_many(&SUM_ALL, &[("PIECE", PIECE)], rows, Some(&mut sums));
        return sums;
    }
    for x in grads {
        for part in gpu.parts(x) {
            let n = part.len();
            let n_groups = n.div_ceil(PIECE);
            let numbers = x.reshape(&[x.n_elem()]).rows(part);
            let mut args = bind([&numbers], [&mut sums]);
            let work = Work::grid([n_groups, 1, 1], 256);
            let params = [n.into(), first.into()];
            gpu.launch(&SUM_SQUARES, work, &[("PIECE", PIECE)], &mut args, &params);
            first += n_groups;
        }
    }
    sums
}

/// The norm from sums of squares.
pub fn norm_of(sums: &[f32]) -> f64 {
    sums.iter().map(|&sum| f64::from(sum)).sum::<f64>().sqrt()
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
    use crate::ops::check::{Input, devices};

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

    #[test]
    fn a_gpu_finds_the_same_norm() {
        let (x, y) = (Input::normal(1, &[70_001], 3.0), Input::normal(2, &[5], 1e-6));
        let norm_on = |device: &Device| grad_norm([x.tensor(device), y.tensor(device)].iter());
        let want = norm_on(&Device::cpu(1).unwrap());
        for (device, _) in devices() {
            let got = norm_on(device);
            device.check().unwrap();
            assert!((got / want - 1.0).abs() < 1e-5, "{device:?}: {got}, not {want}");
        }
    }
}
