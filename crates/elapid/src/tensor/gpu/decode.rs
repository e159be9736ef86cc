//! Stored matrices on a GPU: f16, bf16 and every block format to f32 or bf16, with
//! the bits that `Tensor::read_f32` gives.
//!
//! | name    | shape       |                                                   |
//! |---------|-------------|---------------------------------------------------|
//! | `x`     | (n_rows, d) | any dtype; rows are whole blocks                  |
//! | `ids`   | (n)         | which rows, u32; or all of a range in order       |
//! | `y`     | (n, d)      | f32, or on CUDA bf16                              |
//!
//! A matrix that is larger than a binding is read in runs of rows: a launch writes the rows of the
//! result whose source it holds.

use super::{Arg, Gpu, Kernel, Word, Work};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};
use std::ops::Range;

static DECODE: Kernel = Kernel {
    entry: "decode",
    wgsl: concat!(include_str!("formats.wgsl"), include_str!("decode.wgsl")),
    cuda: concat!(include_str!("formats.cu"), include_str!("decode.cu")),
};

/// From f32, f16 or bf16 without rows; CUDA alone.
static CAST: Kernel = Kernel { entry: "cast", wgsl: "", cuda: include_str!("cast.cu") };

/// What the kernels call a dtype: block formats in the order of `BlockType`.
pub(super) fn kind(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::U32 => panic!("whole numbers are not decoded"),
        DType::Block(block) => 3 + block as usize,
    }
}

impl Gpu {
    /// The numbers in this dtype, f32 or bf16; the same tensor where they are.
    pub fn cast(&self, x: &Tensor, dtype: DType) -> Tensor {
        if x.dtype() == dtype {
            return x.clone();
        }
        let (n_rows, d) = x.dims2();
        let mut y = Tensor::raw(x.device(), x.shape(), dtype);
        if self.as_cuda().is_some() && !matches!(x.dtype(), DType::Block(_)) {
            let n = x.n_elem();
            let work = Work::each(n.div_ceil(4));
            self.launch(&CAST, work, &[], &mut [Arg::In(x), Arg::Out(&mut y)], &[n.into()]);
            return y;
        }
        self.decode(&x.reshape(&[n_rows, d]), 0..n_rows, None, &mut y);
        y
    }

    /// Some rows of a matrix, in f32 or bf16.
    pub fn decode_rows(&self, x: &Tensor, rows: Range<usize>, dtype: DType) -> Tensor {
        if x.dtype() == dtype {
            return x.rows(rows);
        }
        let mut y = Tensor::raw(x.device(), &[rows.len(), x.dims2().1], dtype);
        self.decode(x, rows, None, &mut y);
        y
    }

    /// The rows of a matrix with these numbers (`Tensor::from_u32`), in f32 or bf16.
    pub fn gather_rows(&self, x: &Tensor, ids: &Tensor, dtype: DType) -> Tensor {
        let device = Device::Gpu(self.clone());
        let mut y = Tensor::raw(&device, &[ids.n_elem(), x.dims2().1], dtype);
        self.decode(x, 0..x.dims2().0, Some(ids), &mut y);
        y
    }

    /// All of a range of rows in order, or those of it that `ids` pick.
    fn decode(&self, x: &Tensor, rows: Range<usize>, ids: Option<&Tensor>, y: &mut Tensor) {
        let d = x.dims2().1;
        let (block, bytes) = x.dtype().block();
        let row_bytes = d / block * bytes;
        let max = self.binding_bytes_max() - 2 * self.offset_align();
        // Without ids a window of the matrix gives the same rows of the result.
        let widest = if ids.is_some() { row_bytes } else { row_bytes.max(4 * d) };
        let n = (max / widest.max(1) / 128 * 128).clamp(1, rows.len().max(1));
        for first in rows.clone().step_by(n) {
            let end = rows.end.min(first + n);
            let (words, lead) =
                x.view(DType::U32, first * row_bytes..end * row_bytes, self.offset_align());
            let size = y.n_bytes() / y.dims2().0.max(1);
            // Rows of a range are counted from its first, as those of the result.
            let (n_out, range, written) = match ids {
                Some(ids) => (ids.n_elem(), first..end, 0..y.n_bytes()),
                None => {
                    let written = (first - rows.start) * size..(end - rows.start) * size;
                    (end - first, 0..end - first, written)
                }
            };
            let consts = [
                ("KIND", kind(x.dtype())),
                ("BLOCK", block),
                ("BYTES", bytes),
                ("GATHER", usize::from(ids.is_some())),
            ];
            let params = [n_out, d, range.start, range.end, lead].map(Word::from);
            let work = Work::each(n_out * d.div_ceil(4));
            let ids = ids.unwrap_or(&words);
            let mut args = [Arg::In(&words), Arg::In(ids), Arg::Window(y, written)];
            self.launch(&DECODE, work, &consts, &mut args, &params);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::devices;
    use crate::tensor::quant::BlockType;
    use crate::tensor::rng::Rng;
    use std::sync::Arc;

    /// Arbitrary bytes; scales that are not numbers are made ordinary ones.
    fn arbitrary(dtype: DType, n_elem: usize) -> Vec<u8> {
        let rng = Rng::new(5, kind(dtype) as u64);
        let n_bytes = dtype.n_bytes(n_elem).unwrap();
        let mut bytes: Vec<u8> = (0..n_bytes as u64).map(|n| rng.below(n, 256) as u8).collect();
        if let DType::Block(BlockType::Nf4) = dtype {
            for block in bytes.chunks_exact_mut(36) {
                let scale = f32::from(block[0]) / 256.0 + 0.01;
                block[..4].copy_from_slice(&scale.to_le_bytes());
            }
        }
        let step = if dtype == DType::F32 { 4 } else { 2 };
        for pair in bytes.chunks_exact_mut(step) {
            let top = &mut pair[step - 1];
            // Neither an infinite half nor an infinite f32, wherever one may be.
            if *top & 0x7c == 0x7c {
                *top ^= 0x40;
            }
        }
        bytes
    }

    #[test]
    fn a_matrix_larger_than_a_binding_is_decoded_in_runs_of_rows() {
        let Some(device) = crate::ops::check::small_bindings() else { return };
        let (gpu, cpu) = (device.gpu().unwrap(), Device::cpu(1).unwrap());
        for (dtype, d) in [(DType::F16, 37), (DType::Block(BlockType::Q6K), 256)] {
            let n_rows = 2100;
            let bytes = Arc::new(arbitrary(dtype, n_rows * d));
            let want = Tensor::from_shared(&cpu, &[n_rows, d], dtype, bytes.clone(), 0).to_f32();
            let there = Tensor::from_shared(device, &[n_rows, d], dtype, bytes, 0);
            assert!(gpu.cast(&there, DType::F32).to_vec() == want.f32(), "{dtype:?}");
            let rows = gpu.decode_rows(&there, 3..1900, DType::F32).to_vec();
            assert!(rows == want.f32()[3 * d..1900 * d], "{dtype:?}");
            let picked = [2099u32, 0, 1300, 700];
            let got = gpu.gather_rows(&there, &Tensor::from_u32(device, &picked), DType::F32);
            for (row, got) in picked.iter().zip(got.to_vec().chunks_exact(d)) {
                assert!(got == &want.f32()[*row as usize * d..][..d], "{dtype:?}, row {row}");
            }
            device.check().unwrap();
        }
    }

    #[test]
    fn every_format_has_the_bits_of_the_cpu() {
        let blocks = BlockType::ALL.into_iter().chain([BlockType::Nf4]).map(DType::Block);
        let cpu = Device::cpu(1).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16].into_iter().chain(blocks) {
            let d = if matches!(dtype, DType::Block(_)) { 512 } else { 37 };
            let n_rows = 9;
            let bytes = Arc::new(arbitrary(dtype, n_rows * d));
            let here = Tensor::from_shared(&cpu, &[n_rows, d], dtype, bytes.clone(), 0);
            let want = here.to_f32();
            let picked = [8u32, 0, 3, 3, 5];
            for (device, _) in devices() {
                let gpu = device.gpu().unwrap();
                let there = Tensor::from_shared(device, &[n_rows, d], dtype, bytes.clone(), 0);
                let same = |what: &str, got: Tensor, rows: &[u32]| {
                    for (idx, &row) in rows.iter().enumerate() {
                        let got = got.to_vec();
                        let got = &got[idx * d..(idx + 1) * d];
                        let want = &want.f32()[row as usize * d..][..d];
                        let differs = (0..d).find(|&i| got[i].to_bits() != want[i].to_bits());
                        let at = differs.map(|i| (i, got[i], want[i]));
                        assert_eq!(at, None, "{dtype:?}, {what}, row {row}, {device:?}");
                    }
                };
                let all: Vec<u32> = (0..n_rows as u32).collect();
                let ids = Tensor::from_u32(device, &picked);
                same("cast", gpu.cast(&there, DType::F32), &all);
                same("rows", gpu.decode_rows(&there, 2..7, DType::F32), &all[2..7]);
                same("gathered", gpu.gather_rows(&there, &ids, DType::F32), &picked);
                device.check().unwrap();
            }
        }
    }
}
