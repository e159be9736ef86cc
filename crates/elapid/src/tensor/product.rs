//! Matrix products on any device: `out = alpha a @ b + beta out`.
//!
//! | name  | shape  |                                                 |
//! |-------|--------|-------------------------------------------------|
//! | `a`   | (m, k) | stored (k, m) where transposed                  |
//! | `b`   | (k, n) | stored (n, k) where transposed                  |
//! | `out` | (m, n) | rows and columns of a tensor that may have more |
//!
//! With `beta` zero `out` is not read.

pub use crate::tensor::gpu::product::{Block, Epilogue, Rows, Side};

use crate::tensor::Tensor;
use crate::tensor::cpu::{Mat, MatMut, Scope};
use crate::tensor::device::Device;
use crate::tensor::gpu::product::in_format;

/// `out = alpha a @ b + beta out`.
pub fn product<'a>(out: impl Into<Block<'a>>, beta: f32, alpha: f32, a: Side, b: Side) {
    let mut out = out.into();
    match a.tensor().device() {
        Device::Cpu(cpu) => {
            cpu.gemm(out.mat_mut(), beta, alpha, a.mat(), b.mat(), Scope::Machine);
        }
        Device::Gpu(gpu) => gpu.product(out, beta, alpha, a, b),
    }
}

/// The same for `n` matrices that lie behind each other in each tensor.
pub fn product_stacked(n: usize, out: &mut Tensor, (beta, alpha): (f32, f32), a: Side, b: Side) {
    if n == 1 {
        return product(out, beta, alpha, a, b);
    }
    let gpu = out.device().gpu().cloned();
    if gpu.is_some_and(|gpu| gpu.product_stacked(n, out, (beta, alpha), a, b)) {
        return;
    }
    for at in 0..n {
        let rows = |tensor: &Tensor| {
            let n_each = tensor.dims2().0 / n;
            at * n_each..(at + 1) * n_each
        };
        let [a_one, b_one] = [&a, &b].map(|side| side.tensor().rows(rows(side.tensor())));
        let rows = rows(out);
        product(Rows { tensor: out, rows }, beta, alpha, a.of(&a_one), b.of(&b_one));
    }
}

/// `out = a @ b` with an epilogue; false where the device has none, and then nothing is done.
pub fn product_with<'a>(epilogue: Epilogue, out: impl Into<Block<'a>>, a: Side, b: Side) -> bool {
    let gpu = a.tensor().device().gpu();
    gpu.is_some_and(|gpu| gpu.product_with(epilogue, out.into(), a, b))
}

/// A side as products read it. A cast of f32 is kept until the tensor is written: cast the whole
/// matrix before taking rows of it.
pub fn for_products(tensor: &Tensor) -> Tensor {
    tensor.device().gpu().map_or_else(|| tensor.clone(), |gpu| in_format(gpu, tensor))
}

impl<'a> Side<'a> {
    /// The same of another tensor.
    fn of<'b>(&self, tensor: &'b Tensor) -> Side<'b> {
        match *self {
            Side::Plain(_) => Side::Plain(tensor),
            Side::Transposed(_) => Side::Transposed(tensor),
            Side::Columns(_, first, n) => Side::Columns(tensor, first, n),
        }
    }

    fn mat(&self) -> Mat<'a> {
        let (numbers, (rows, cols)) = (self.tensor().f32(), self.dims());
        match self {
            Side::Plain(_) => Mat::new(numbers, rows, cols),
            Side::Transposed(_) => Mat::new(numbers, cols, rows).t(),
            Side::Columns(tensor, first, _) => {
                let numbers = numbers.get(*first..).unwrap_or_default();
                Mat::strided(numbers, rows, cols, tensor.dims2().1)
            }
        }
    }
}

impl Rows<'_> {
    /// The same rows for a shorter time.
    pub fn again(&mut self) -> Rows<'_> {
        Rows { tensor: self.tensor, rows: self.rows.clone() }
    }

    /// The numbers of rows in f32 on the CPU, to write.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        let (_, d) = self.tensor.dims2();
        &mut self.tensor.f32_mut()[self.rows.start * d..self.rows.end * d]
    }
}

impl<'a> From<&'a mut Tensor> for Rows<'a> {
    fn from(tensor: &'a mut Tensor) -> Rows<'a> {
        let rows = 0..tensor.dims2().0;
        Rows { tensor, rows }
    }
}

impl Block<'_> {
    fn mat_mut(&mut self) -> MatMut<'_> {
        let (rows, cols, stride) = (self.rows.len(), self.cols.len(), self.tensor.dims2().1);
        let first = self.rows.start * stride + self.cols.start;
        let numbers = self.tensor.f32_mut().get_mut(first..).unwrap_or_default();
        MatMut::strided(numbers, rows, cols, stride)
    }
}
