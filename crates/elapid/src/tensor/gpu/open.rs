//! Opening a GPU: by its place in the list of wgpu or of CUDA.

use super::{Backend, Failure, Gpu, Opaque, Precision, cuda, wgpu};
use crate::error::Result;
use crate::tensor::cpu::Cpu;
use std::sync::Arc;

impl Gpu {
    /// The `index`-th adapter that wgpu finds, best first.
    pub async fn wgpu(index: usize, host: Arc<Cpu>) -> Result<Gpu> {
        Gpu::wgpu_with(index, host, usize::MAX, &wgpu::FEATURE_NAMES).await
    }

    /// The same with bindings of at most so many bytes, and of what not every adapter has with
    /// these features alone: for tests of what is split, and of kernels that have a twin.
    #[cfg(test)]
    pub fn wgpu_plain(
        index: usize,
        host: Arc<Cpu>,
        bytes_max: usize,
        features: &[&str],
    ) -> Result<Gpu> {
        super::block_on(Gpu::wgpu_with(index, host, bytes_max, features)).expect("tests wait")
    }

    /// As if the driver had lost it.
    #[cfg(test)]
    pub fn lose(&self) {
        if let Backend::Wgpu(wgpu) = &self.0.backend {
            wgpu.lose();
        }
    }

    async fn wgpu_with(
        index: usize,
        host: Arc<Cpu>,
        bytes_max: usize,
        features: &[&str],
    ) -> Result<Gpu> {
        let failure = Failure::default();
        let backend = wgpu::Wgpu::new(index, failure.clone(), bytes_max, features).await?;
        Ok(Gpu::with(Backend::Wgpu(Opaque::new(backend)), host, failure, Precision::F32))
    }

    /// The `index`-th GPU that CUDA finds.
    pub fn cuda(index: usize, host: Arc<Cpu>, precision: Precision) -> Result<Gpu> {
        let failure = Failure::default();
        let backend = cuda::Cuda::new(index, failure.clone())?;
        Ok(Gpu::with(Backend::Cuda(Box::new(backend)), host, failure, precision))
    }
}
