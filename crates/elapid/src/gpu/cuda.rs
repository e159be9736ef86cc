//! CUDA: opened at run time, kernels compiled by NVRTC, products by cuBLASLt.

use super::{Failure, Launch};
use crate::error::{Error, Result};

/// A device of CUDA.
pub struct Cuda {
    failure: Failure,
}

/// What `elapid info --devices` says of a GPU.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Its name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of memory that nobody uses.
    pub memory_free: u64,
    /// Compute capability, as in `9.0`.
    pub capability: String,
    /// Multiprocessors.
    pub n_multiprocessors: u32,
}

/// What CUDA finds.
pub fn list() -> Vec<CudaDevice> {
    Vec::new()
}

/// Memory of one buffer.
pub(crate) struct Memory;

impl Cuda {
    pub(super) fn new(index: usize, failure: Failure) -> Result<Cuda> {
        let _ = Cuda { failure };
        Err(Error::Device {
            problem: format!("there is no CUDA device {index}"),
            hint: "`elapid info --devices` lists what is there".into(),
        })
    }

    pub(super) fn name(&self) -> String {
        "cuda".into()
    }

    pub(super) fn allocate(&self, _n_bytes: usize) -> std::result::Result<Memory, String> {
        Err("no CUDA".into())
    }

    pub(super) fn free(&self, _memory: Memory) {}

    pub(super) fn upload(&self, _to: &Memory, _offset: usize, _bytes: &[u8]) {}

    pub(super) fn download(&self, _from: &Memory, _offset: usize, _bytes: &mut [u8]) {}

    pub(super) fn copy(&self, _from: (&Memory, usize), _to: (&Memory, usize), _n_bytes: usize) {}

    pub(super) fn fill(&self, _buffer: &Memory, _offset: usize, _n_bytes: usize, _word: u32) {}

    pub(super) fn launch(&self, launch: &Launch) {
        self.failure.set(launch.kernel.entry.into());
    }

    pub(super) fn wait(&self) {}
}
