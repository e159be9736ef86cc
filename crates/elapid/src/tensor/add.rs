//! Sum of two tensors of one shape: what `ops/add.rs` computes and how the tape adds gradients.

use crate::tensor::Tensor;
use crate::tensor::cpu::AddInto;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Gpu, Kernel};

/// Numbers a task works on: large enough to hide its start, small enough to share out.
const PIECE: usize = 1 << 15;

/// `sum + x`, in the storage of `sum` when nobody else holds it.
pub fn add_into(mut sum_so_far: Tensor, x: &Tensor) -> Tensor {
    if !sum_so_far.is_unique() {
        return sum(&sum_so_far, x);
    }
    x.expect_shape("add: gradient", sum_so_far.shape());
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => {
            let (n, mut args) = (x.n_elem(), [Arg::In(x), Arg::Out(&mut sum_so_far)]);
            gpu.launch(&ADD_INTO, gpu.each_eight(n), &[], &mut args, &[n.into()]);
            return sum_so_far;
        }
    };
    cpu.each_piece(sum_so_far.f32_mut(), PIECE, |idx, y| {
        cpu.simd(AddInto { x: &x.f32()[idx * PIECE..], y });
    });
    sum_so_far
}

/// `a + b`.
pub fn sum(a: &Tensor, b: &Tensor) -> Tensor {
    b.expect_shape("add: b", a.shape());
    let cpu = match a.device() {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return sum_gpu(gpu, a, b),
    };
    let mut y = Tensor::uninit(a.device(), a.shape());
    cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
        let from = idx * PIECE;
        y.copy_from_slice(&a.f32()[from..from + y.len()]);
        cpu.simd(AddInto { x: &b.f32()[from..], y });
    });
    y
}

static ADD: Kernel =
    Kernel { entry: "add_forward", wgsl: include_str!("add.wgsl"), cuda: include_str!("add.cu") };
static ADD_INTO: Kernel = Kernel { entry: "add_into", ..ADD };

fn sum_gpu(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Tensor {
    let mut y = Tensor::uninit_as(a, a.shape());
    let n = a.n_elem();
    let mut args = [Arg::In(a), Arg::In(b), Arg::Out(&mut y)];
    gpu.launch(&ADD, gpu.each_eight(n), &[], &mut args, &[n.into()]);
    y
}
