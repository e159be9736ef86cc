//! The same kernel on many tensors in one launch: small ones alone would leave a machine idle.
//!
//! Only where a kernel may follow addresses (`Caps::addresses`). It gets one table:
//!
//! ```text
//! (n_groups, 2)   the row, and the group among those of its row
//! rows            addresses (two words each), then parameters, padded to eight bytes
//! ```
//!
//! and as its parameter the word where the rows begin. The kernel's file says what a row is.

use super::{Arg, Const, Gpu, Kernel, Word, Work};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};

/// What the kernel does on one tensor, and those that belong to it.
pub(crate) struct Row<'a> {
    pub n_groups: usize,
    /// Whole tensors; the address of `None` is zero.
    pub tensors: Vec<Option<Arg<'a>>>,
    pub params: Vec<Word>,
}

impl Gpu {
    /// Whether a row may hold a tensor: a kernel reads it from its first number by four in f32.
    pub(crate) fn can_follow(&self, x: &Tensor) -> bool {
        let is_f32 = x.dtype() == DType::F32 && u32::try_from(x.n_elem()).is_ok();
        self.caps().addresses && is_f32 && x.cuda_address().is_multiple_of(16)
    }

    /// Starts a kernel on all rows; `out` is an argument behind the table.
    pub(crate) fn launch_many(
        &self,
        kernel: &'static Kernel,
        consts: &[Const],
        rows: Vec<Row>,
        out: Option<&mut Tensor>,
    ) {
        let (mut groups, mut words) = (Vec::new(), Vec::new());
        for (idx, Row { n_groups, tensors, params }) in rows.into_iter().enumerate() {
            groups.extend((0..n_groups as u32).flat_map(|group| [idx as u32, group]));
            for mut arg in tensors {
                if let Some(Arg::Out(tensor) | Arg::Window(tensor, _)) = &mut arg {
                    tensor.expect_unique();
                }
                let tensor = arg.as_ref().map(Arg::tensor);
                if tensor.is_some_and(Tensor::is_spoiled) {
                    return self.fail("a tensor was not written".into());
                }
                let at = tensor.map_or(0, Tensor::cuda_address);
                if at == 0 && tensor.is_some() {
                    // Memory that could not be had: the device keeps the failure.
                    return;
                }
                words.extend([at as u32, (at >> 32) as u32]);
            }
            words.extend(params.iter().map(|word| word.0));
            words.resize(words.len().next_multiple_of(2), 0);
        }
        if groups.is_empty() {
            return;
        }
        let (first, n_groups) = (groups.len(), groups.len() / 2);
        groups.extend(words);
        let table = Tensor::from_u32(&Device::Gpu(self.clone()), &groups);
        let mut args: Vec<Arg> = [Arg::In(&table)].into_iter().chain(out.map(Arg::Out)).collect();
        let params = [first.into(), n_groups.into()];
        self.launch(kernel, Work::groups(n_groups, 256), consts, &mut args, &params);
    }
}
