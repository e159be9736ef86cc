//! Work to be timed: how fast a device multiplies and reads.

use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::Gpu;
use crate::tensor::gpu::product::in_format;
use crate::tensor::product::{Side, product};

impl Device {
    /// A matrix product of this size, to be timed: (m, k) @ (k, n), of activations.
    pub fn product_probe(&self, m: usize, n: usize, k: usize) -> Box<dyn FnMut()> {
        // No zeros: products of zeros run faster than others.
        let numbers = |n: usize| (0..n).map(|n| (n % 61) as f32 - 30.0).collect::<Vec<_>>();
        let gpu = self.gpu().cloned();
        let side = |shape: [usize; 2]| {
            let numbers = Tensor::from_f32(self, &shape, &numbers(shape[0] * shape[1]));
            gpu.as_ref().map_or(numbers.clone(), |gpu| in_format(gpu, &numbers))
        };
        let (a, b) = (side([m, k]), side([k, n]));
        let mut c = Tensor::activation(self, &[m, n]);
        Box::new(move || {
            product(&mut c, 0.0, 1.0, Side::Plain(&a), Side::Plain(&b));
            gpu.iter().for_each(Gpu::wait);
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
