//! The time of launches, for benchmarks.

use super::{Backend, Gpu};
use std::collections::HashMap;

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

/// Of each name how often, and milliseconds.
pub(super) type Sums = HashMap<String, (u64, f64)>;

/// The longest first.
pub(super) fn listed(sums: Sums) -> Vec<KernelTime> {
    let mut list: Vec<KernelTime> = sums
        .into_iter()
        .map(|(name, (n_launches, ms))| KernelTime { name, n_launches, ms })
        .collect();
    list.sort_by(|a, b| b.ms.total_cmp(&a.ms).then_with(|| a.name.cmp(&b.name)));
    list
}

impl Gpu {
    /// From here on the time of every launch is taken, where the device can.
    pub fn profile_start(&self) {
        match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.profile_start(),
            Backend::Cuda(cuda) => cuda.profile_start(),
        }
    }

    /// Times since `profile_start`, by name, the longest first. Waits.
    pub fn profile_stop(&self) -> Vec<KernelTime> {
        match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.profile_stop(),
            Backend::Cuda(cuda) => cuda.profile_stop(),
        }
    }
}
