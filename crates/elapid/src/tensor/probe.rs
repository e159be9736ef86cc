//! Work to be timed: how fast a device multiplies and reads.

use crate::tensor::Tensor;
use crate::tensor::cpu::{Mat, MatMut, Scope};
use crate::tensor::device::Device;
use crate::tensor::gpu::product::Side;

impl Device {
    /// A matrix product of this size, to be timed: (m, k) @ (k, n), of activations.
    pub fn product_probe(&self, m: usize, n: usize, k: usize) -> Box<dyn FnMut()> {
        if let Device::Gpu(gpu) = self.clone() {
            // No zeros: products of zeros run faster than others.
            let numbers = |n: usize| (0..n).map(|n| (n % 61) as f32 - 30.0).collect::<Vec<_>>();
            let activation = |shape: &[usize]| {
                let numbers = Tensor::from_f32(self, shape, &numbers(shape[0] * shape[1]));
                gpu.cast(&numbers, self.activation_dtype())
            };
            let (a, b) = (activation(&[m, k]), activation(&[k, n]));
            let mut c = Tensor::activation(self, &[m, n]);
            return Box::new(move || {
                gpu.product(&mut c, 0.0, 1.0, Side::Plain(&a), Side::Plain(&b));
                gpu.wait();
            });
        }
        let cpu = self.host().clone();
        let (a, b, mut c) = (vec![0.5; m * k], vec![0.25; k * n], vec![0.0; m * n]);
        Box::new(move || {
            let out = MatMut::new(&mut c, m, n);
            cpu.gemm(out, 0.0, 1.0, Mat::new(&a, m, k), Mat::new(&b, k, n), Scope::Machine);
        })
    }

    /// Reading this many bytes once, by all threads of the CPU, to be timed.
    pub fn read_probe(&self, n_bytes: usize) -> impl FnMut() + use<> {
        const PIECE: usize = 1 << 14;
        let cpu = self.host().clone();
        let numbers: Vec<u64> = (0..n_bytes as u64 / 8).collect();
        move || {
            let sums = cpu.map(numbers.chunks(PIECE).collect(), |piece: &[u64]| {
                let mut sums = [0; 16];
                for numbers in piece.as_chunks::<16>().0 {
                    sums.iter_mut().zip(numbers).for_each(|(sum, n)| *sum ^= n);
                }
                sums.into_iter().fold(0, |a, b| a ^ b)
            });
            std::hint::black_box(sums);
        }
    }
}
