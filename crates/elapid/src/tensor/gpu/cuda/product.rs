//! Products of tensors: what `gpu::product` describes as cuBLASLt takes it.

use super::Cuda;
use super::blas::{Multiply, Stored, Vector};
use crate::tensor::gpu::product::{Epilogue, Operand, Product};
use crate::tensor::gpu::{Gpu, Precision};
use crate::tensor::{DType, Tensor};
use cudarc::driver::sys::CUdeviceptr;

/// Address of a number of a tensor; nothing where memory could not be had.
fn address(tensor: &Tensor, first: usize) -> Option<CUdeviceptr> {
    let skip = tensor.dtype().n_bytes(first).expect("numbers of whole bytes") as CUdeviceptr;
    let at = tensor.cuda_address();
    (at != 0).then_some(at + skip)
}

/// A side that the product sees as `rows` by `cols`.
fn stored(operand: &Operand, (rows, cols): (usize, usize)) -> Option<Stored> {
    let transposed = operand.is_transposed;
    let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
    let (at, dtype) = (address(&operand.tensor, operand.first)?, operand.tensor.dtype());
    Some(Stored { at, dtype, rows, cols, row: operand.stride, transposed })
}

impl Cuda {
    /// With an epilogue; false where cuBLASLt has none for this and nothing was done.
    pub(in crate::tensor::gpu) fn product_with(
        &self,
        gpu: &Gpu,
        product: Product,
        epilogue: Epilogue,
    ) -> bool {
        let is_written = matches!(epilogue, Epilogue::Sums(..));
        let (tensor, first, n, vector): (&Tensor, _, _, fn(_) -> _) = match epilogue {
            Epilogue::Bias(tensor, first) => (tensor, first, product.n, Vector::Bias),
            Epilogue::Sums(tensor, first) => {
                tensor.expect_unique();
                (tensor, first, product.m, Vector::Sums)
            }
        };
        let (n_elem, dtype) = (tensor.n_elem(), tensor.dtype());
        assert!(first + n <= n_elem, "product: numbers {first} and {n} of {n_elem}");
        assert_eq!(dtype, product.out.dtype(), "product: dtype of the epilogue's numbers");
        let vector_buffer = tensor.gpu_buffer().0;
        let sums = is_written.then_some(vector_buffer);
        let out = product.out.gpu_buffer().0;
        let (mut at, written) = (None, sums.into_iter().chain([out]));
        gpu.attempt([vector_buffer], written, || at = address(tensor, first));
        let Some(at) = at else { return true };
        product.k > 0 && self.product(gpu, product, Some(vector(at)), 1)
    }

    /// Of as many matrices behind each other as `n_stacked` says. False where cuBLASLt has no such
    /// epilogue and nothing was done.
    pub(in crate::tensor::gpu) fn product(
        &self,
        gpu: &Gpu,
        product: Product,
        vector: Option<Vector>,
        n_stacked: usize,
    ) -> bool {
        let Product { out, out_first, out_stride, a, b, m, n, k, alpha, beta } = product;
        out.expect_unique();
        if k == 0 {
            empty(out, m * n, beta);
            return true;
        }
        let (dtype, to) = (a.tensor.dtype(), out.dtype());
        let (from, into) = (dtype.name(), to.name());
        assert!(to == DType::F32 || to == dtype, "a product of {from} into {into}");
        let all = [&a.tensor, &b.tensor, &*out].into_iter().map(|tensor| tensor.gpu_buffer().0);
        let mut is_done = true;
        gpu.attempt(all, [out.gpu_buffer().0], || {
            let (Some(a), Some(b), Some(at)) =
                (stored(&a, (m, k)), stored(&b, (k, n)), address(out, out_first))
            else {
                return;
            };
            let out =
                Stored { at, dtype: to, rows: m, cols: n, row: out_stride, transposed: false };
            let tf32 = gpu.precision() == Precision::Tf32;
            is_done = self.multiply(&Multiply { a, b, out, vector, n_stacked, alpha, beta, tf32 });
        });
        is_done
    }
}

/// A sum of nothing, as for an expert without tokens.
fn empty(out: &mut Tensor, n_elem: usize, beta: f32) {
    if beta == 1.0 {
        return;
    }
    assert_eq!(beta, 0.0, "a product over nothing is added to");
    assert_eq!(out.n_elem(), n_elem, "a product over nothing sets a part");
    out.fill_zero();
}
