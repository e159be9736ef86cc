//! Products of few rows with a stored matrix: `out = alpha x @ w^T + beta out`, as generation makes
//! them. Every byte of the matrix is read once, as it is stored, and nothing is decoded aside.
//!
//! | name  | shape  |                                                     |
//! |-------|--------|-----------------------------------------------------|
//! | `x`   | (m, k) | at most eight rows, f32 or on CUDA bf16             |
//! | `w`   | (n, k) | any dtype                                           |
//! | `out` | (m, n) | rows and columns of a tensor that may have more     |
//!
//! A row of the result has the same bits however many there are.

use super::decode::kind;
use super::product::Block;
use super::{Arg, Gpu, Kernel, Work};
use crate::tensor::{DType, Tensor};

static VECTOR: Kernel = Kernel {
    entry: "vector",
    wgsl: concat!(include_str!("formats.wgsl"), include_str!("vector.wgsl")),
    cuda: concat!(include_str!("formats.cu"), include_str!("vector.cu")),
};

/// The same for a matrix in f16 on wgpu, which has its own ways to read one.
static VECTOR_F16: Kernel = Kernel {
    entry: "vector",
    wgsl: concat!(include_str!("vector_f16.wgsl"), include_str!("vector.wgsl")),
    cuda: "",
};

/// Rows that are few.
pub const N_FEW: usize = 8;
const N_THREADS: usize = 256;

impl Gpu {
    /// `out = alpha x @ w^T + beta out`, for at most `N_FEW` rows of x.
    pub fn few<'a>(
        &self,
        out: impl Into<Block<'a>>,
        beta: f32,
        alpha: f32,
        x: &Tensor,
        w: &Tensor,
    ) {
        let Block { tensor, rows, cols } = out.into();
        let ((m, k), n) = (x.dims2(), w.dims2().0);
        assert_eq!((rows.len(), cols.len(), w.dims2().1), (m, n, k), "product of few rows");
        assert!(m <= N_FEW, "{m} are not few rows");
        if m == 0 {
            return;
        }
        let (block, bytes) = w.dtype().block();
        let consts = [("M", m), ("KIND", kind(w.dtype())), ("BLOCK", block), ("BYTES", bytes)];
        let (align, row_bytes) = (self.offset_align(), k / block * bytes);
        let out_size = tensor.dtype().block().1;
        let (x_words, x_lead) = match self.as_cuda() {
            Some(_) => (x.clone(), 0),
            None => x.view(DType::F32, 0..x.n_bytes(), align),
        };
        let has_halves = w.dtype() == DType::F16 && self.as_cuda().is_none();
        let (kernel, read_as) =
            if has_halves { (&VECTOR_F16, DType::F16) } else { (&VECTOR, DType::U32) };
        let max = (self.binding_bytes_max() - 2 * align) / row_bytes.max(1);
        let stride = tensor.dims2().1;
        for first in (0..n).step_by(max.max(1)) {
            let end = n.min(first.saturating_add(max.max(1)));
            let bytes = first * row_bytes..end * row_bytes;
            let (words, lead) = w.view(read_as, bytes, align);
            let out_first = rows.start * stride + cols.start + first;
            let out_lead = out_first * out_size % align;
            let last = out_first + (m - 1) * stride + end - first;
            let written = out_first * out_size - out_lead..last * out_size;
            let params = [
                (end - first).into(),
                k.into(),
                lead.into(),
                (x_lead / 4).into(),
                (out_lead / out_size).into(),
                stride.into(),
                alpha.into(),
                beta.into(),
            ];
            let work = Work::groups((end - first).div_ceil(N_THREADS / 32), N_THREADS).early();
            let mut args = [Arg::In(&words), Arg::In(&x_words), Arg::Window(tensor, written)];
            self.launch(kernel, work, &consts, &mut args, &params);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, compare_devices, devices, small_bindings};
    use crate::tensor::device::Device;
    use crate::tensor::quant::BlockType;
    use std::sync::Arc;

    /// `alpha x @ w^T + beta out` in f64, of the first `m` rows of x.
    fn want(m: usize, x: &[f32], w: &[f32], k: usize, (alpha, beta): (f32, f32)) -> Vec<f32> {
        let dot = |x: &[f32], w: &[f32]| -> f64 {
            x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
        };
        let rows = x.chunks_exact(k).take(m);
        rows.flat_map(|x| w.chunks_exact(k).map(move |w| alpha * dot(x, w) as f32 + beta)).collect()
    }

    /// For all numbers of rows; blocks for some: their kernels are long to make.
    fn run(device: &Device, tolerance: f32, dtype: DType, n: usize, k: usize) {
        let cpu = Device::cpu(1).unwrap();
        let exact = Input::normal(2, &[n, k], 0.5).tensor(&cpu);
        let mut bytes = vec![0; dtype.n_bytes(n * k).unwrap()];
        dtype.encode(exact.f32(), &mut bytes);
        let bytes = Arc::new(bytes);
        let decoded = Tensor::from_shared(&cpu, &[n, k], dtype, bytes.clone(), 0).to_f32();
        let w = Tensor::from_shared(device, &[n, k], dtype, bytes, 0);
        let x_all = Input::normal(1, &[N_FEW, k], 1.0);
        let (here, gpu) = (x_all.tensor(&cpu), device.gpu().unwrap());
        let there = gpu.cast(&x_all.tensor(device), gpu.activation_dtype());
        let mut rows: Option<Vec<f32>> = None;
        let some: &[usize] = match dtype {
            DType::Block(_) => &[8, 1],
            _ => &[8, 7, 6, 5, 4, 3, 2, 1],
        };
        for &m in some {
            let x = there.rows(0..m);
            let what = format!("{device:?}, {dtype:?}, {m} by {n} by {k}");
            // Into rows and columns of something larger, over and beside ones.
            let mut out = Tensor::from_f32(device, &[m + 1, n + 3], &vec![1.0; (m + 1) * (n + 3)]);
            let block = Block { tensor: &mut out, rows: 1..m + 1, cols: 2..n + 2 };
            gpu.few(block, 0.5, 2.0, &x, &w);
            let all = out.to_vec();
            let (first, rest) = all.split_at(n + 3);
            assert!(first.iter().all(|&y| y == 1.0), "{what}");
            let lines = rest.chunks_exact(n + 3);
            let got: Vec<f32> = lines.clone().flat_map(|line| &line[2..n + 2]).copied().collect();
            assert!(lines.clone().all(|line| line[0] == 1.0 && line[n + 2] == 1.0), "{what}");
            let want = want(m, here.f32(), decoded.f32(), k, (2.0, 0.5));
            compare_devices(&what, &want, &got, tolerance);
            let of_more = rows.get_or_insert_with(|| got.clone());
            assert!(got == of_more[..got.len()], "{what}: other bits than with more rows");
        }
        device.check().unwrap();
    }

    #[test]
    fn few_rows_meet_a_matrix_as_it_is_stored() {
        let blocks = BlockType::ALL.into_iter().chain([BlockType::Nf4]).map(DType::Block);
        for (device, tolerance) in devices() {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for (n, k) in [(1, 1), (9, 37), (70, 136), (13, 260), (8, 2)] {
                    run(device, *tolerance, dtype, n, k);
                }
            }
            blocks.clone().for_each(|dtype| run(device, *tolerance, dtype, 11, 512));
        }
    }

    #[test]
    fn a_matrix_larger_than_a_binding_goes_in_runs_of_rows() {
        let Some(device) = small_bindings() else { return };
        run(device, 1e-4, DType::F32, 300, 136);
        run(device, 1e-4, DType::F16, 600, 136);
        run(device, 1e-4, DType::Block(BlockType::Q6K), 400, 512);
    }
}
