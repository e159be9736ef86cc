//! The devices of this machine.

use super::device::Device;
use super::gpu::later::wait;
use super::gpu::{self, Gpu};
use crate::error::Result;

/// A device that a model can run on.
#[derive(Clone, Debug, Default)]
pub struct DeviceInfo {
    /// The name that [`Device::by_name`] takes: `cpu`, `cuda:0`, `wgpu:0`.
    pub id: String,
    /// What the driver calls it.
    pub name: String,
    /// `discrete`, `integrated`, `software` (wgpu).
    pub kind: Option<String>,
    /// `Vulkan`, `Metal`, `Dx12` (wgpu).
    pub backend: Option<String>,
    /// Bytes of memory, where the driver tells.
    pub memory: Option<u64>,
    /// Bytes of it that are free.
    pub memory_free: Option<u64>,
    /// `9.0` (CUDA).
    pub compute_capability: Option<String>,
    /// Version of CUDA that the driver knows, as in `13.0`.
    pub driver: Option<String>,
    /// Multiprocessors (CUDA).
    pub n_multiprocessors: Option<u32>,
    /// Largest buffer in bytes (wgpu).
    pub buffer_bytes_max: Option<u64>,
    /// Largest binding of a buffer in bytes (wgpu).
    pub binding_bytes_max: Option<u64>,
    /// Optional features, and whether they are used (wgpu).
    pub features: Vec<(&'static str, bool)>,
}

impl Device {
    /// The devices of this machine: the CPU with `n_threads`, then CUDA, then wgpu.
    #[cfg(not(target_family = "wasm"))]
    pub fn list(n_threads: usize) -> Result<Vec<DeviceInfo>> {
        wait(Device::listed(n_threads))
    }

    pub(crate) async fn listed(n_threads: usize) -> Result<Vec<DeviceInfo>> {
        let cpu = Device::cpu(n_threads)?;
        let name = cpu.describe();
        let mut list = vec![DeviceInfo { id: "cpu".into(), name, ..DeviceInfo::default() }];
        list.extend(gpu::cuda::list());
        for (idx, mut adapter) in gpu::list_wgpu().await.into_iter().enumerate() {
            let opened = Gpu::wgpu(idx, cpu.host().clone()).await;
            let used = opened.map(|gpu| gpu.features()).unwrap_or_default();
            adapter.features.iter_mut().for_each(|(name, is_used)| *is_used = used.contains(name));
            list.push(adapter);
        }
        Ok(list)
    }
}
