//! Counts of launches, and the time of each: for benchmarks.

use super::Gpu;
use super::cuda::Cuda;

/// Time that launches of one name took.
#[derive(Clone, Debug)]
pub struct KernelTime {
    /// The kernel, or a product with its sizes.
    pub name: String,
    /// How often.
    pub n_launches: u64,
    /// Milliseconds of all of them.
    pub ms: f64,
}

impl Gpu {
    /// Kernels and products started so far; 0 for wgpu.
    pub fn n_launches(&self) -> u64 {
        self.as_cuda().map_or(0, Cuda::n_launches)
    }

    /// From here on the time of every launch is taken; CUDA alone.
    pub fn profile_start(&self) {
        if let Some(cuda) = self.as_cuda() {
            cuda.profile_start();
        }
    }

    /// Times since `profile_start`, by name, the longest first. Waits.
    pub fn profile_stop(&self) -> Vec<KernelTime> {
        self.as_cuda().map_or(Vec::new(), Cuda::profile_stop)
    }
}
