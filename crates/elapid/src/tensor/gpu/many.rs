//! The same kernel on many tensors in one launch: small ones alone would leave a machine idle.
//!
//! CUDA alone, where a kernel may follow addresses. It gets one table:
//!
//!     (n_groups, 2)   the row, and the group among those of its row
//!     rows            addresses (two words each), then parameters, padded to eight bytes
//!
//! and as its parameter the word where the rows begin. The kernel's file says what a row is.

use super::{Arg, Const, Gpu, Kernel, Word, Work};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};

/// Tensors that wait for their launch.
///
/// Nothing but what is added may use them in between: `finish` starts the work on what lay at
/// their addresses.
#[derive(Default)]
pub(crate) struct Many {
    groups: Vec<[u32; 2]>,
    rows: Vec<u32>,
    n_rows: usize,
}

impl Gpu {
    /// Whether a tensor of numbers may be added to `Many`: read from its first by four in f32.
    pub(crate) fn can_wait(&self, x: &Tensor) -> bool {
        let is_f32 = x.dtype() == DType::F32 && x.n_elem() < 1 << 32;
        self.as_cuda().is_some() && is_f32 && x.cuda_address().is_multiple_of(16)
    }
}

impl Many {
    /// A row: tensors, zero where there is none, and parameters.
    pub fn add(&mut self, n_groups: usize, tensors: &[Option<&Tensor>], params: &[Word]) {
        let row = self.n_rows as u32;
        self.groups.extend((0..n_groups as u32).map(|group| [row, group]));
        for tensor in tensors {
            if let Some(tensor) = tensor.filter(|tensor| tensor.is_spoiled()) {
                tensor.gpu_buffer().0.gpu().fail("a tensor was not written".into());
            }
            let at = tensor.map_or(0, Tensor::cuda_address);
            self.rows.extend([at as u32, (at >> 32) as u32]);
        }
        self.rows.extend(params.iter().map(|word| word.0));
        self.rows.resize(self.rows.len().next_multiple_of(2), 0);
        self.n_rows += 1;
    }

    /// Starts the work on all rows.
    pub fn finish(self, gpu: &Gpu, kernel: &'static Kernel, consts: &[Const]) {
        if self.groups.is_empty() {
            return;
        }
        let n_groups = self.groups.len();
        let first: Word = (2 * n_groups).into();
        let words: Vec<u32> = self.groups.into_iter().flatten().chain(self.rows).collect();
        let table = Tensor::from_u32(&Device::Gpu(gpu.clone()), &words);
        let work = Work::groups(n_groups, 256);
        gpu.launch(kernel, work, consts, &mut [Arg::In(&table)], &[first, n_groups.into()]);
    }
}
