//! Where tensors live and kernels run.
//!
//! An enum, matched outside the loops.

use crate::error::{Error, Result};
use crate::tensor::DType;
use crate::tensor::cpu::Cpu;
use crate::tensor::gpu::later::wait;
use crate::tensor::gpu::{Gpu, Precision, list_wgpu};
use crate::tensor::shelf::MemoryUse;
use std::sync::Arc;

/// A device; clones share its threads and buffers.
#[derive(Clone)]
pub enum Device {
    /// The CPU.
    Cpu(Arc<Cpu>),
    /// A GPU.
    Gpu(Gpu),
}

impl Device {
    /// The CPU with `n_threads` threads.
    pub fn cpu(n_threads: usize) -> Result<Device> {
        let cpu = Cpu::new(n_threads).map_err(|error| Error::Device {
            problem: format!("cannot start {n_threads} threads: {error}"),
            hint: "use fewer threads".into(),
        })?;
        Ok(Device::Cpu(Arc::new(cpu)))
    }

    /// Device by the name a person types (awaited in a browser):
    /// `auto`, `cpu`, `gpu`, `wgpu`, `wgpu:1`, `cuda`, `cuda:1`.
    ///
    /// `gpu` is CUDA where there is one, else wgpu. `auto` takes a GPU that is no software, else
    /// the CPU.
    #[cfg(not(target_family = "wasm"))]
    pub fn by_name(name: &str, precision: Precision, n_threads: usize) -> Result<Device> {
        wait(Device::open(name, precision, n_threads))
    }

    pub(crate) async fn open(name: &str, precision: Precision, n_threads: usize) -> Result<Device> {
        let host = || Device::cpu(n_threads).map(|device| device.host().clone());
        let cuda = |index| Gpu::cuda(index, host()?, precision).map(Device::Gpu);
        let wgpu = async |index| Gpu::wgpu(index, host()?).await.map(Device::Gpu);
        let (kind, index) = match name.split_once(':') {
            None => (name, Some(0)),
            Some((kind, index)) => (kind, index.parse().ok()),
        };
        match (kind, index) {
            ("cuda", Some(index)) => return cuda(index),
            ("gpu", Some(index)) | ("auto", Some(index @ 0)) => {
                if let Ok(device) = cuda(index) {
                    return Ok(device);
                }
            }
            _ => {}
        }
        match (kind, index) {
            ("cpu", Some(0)) => Device::cpu(n_threads),
            ("auto", Some(0)) => match list_wgpu().await.first().map(|it| it.kind.as_deref()) {
                Some(Some("discrete")) => wgpu(0).await,
                // A browser does not say more.
                Some(Some("other")) if cfg!(target_family = "wasm") => wgpu(0).await,
                _ => Device::cpu(n_threads),
            },
            ("gpu", Some(index)) => match list_wgpu().await.get(index) {
                Some(adapter) if adapter.kind.as_deref() == Some("software") => {
                    let problem = format!("{} computes in software: it is no GPU", adapter.name);
                    Err(Error::Device {
                        problem,
                        hint: "use `cpu`; `wgpu` takes it as it is".into(),
                    })
                }
                _ => wgpu(index).await,
            },
            ("wgpu", Some(index)) => wgpu(index).await,
            _ => Err(Error::Device {
                problem: format!("there is no device `{name}`"),
                hint: "use `auto`, `cpu`, `gpu`, `wgpu`, `cuda`, or one of several: `cuda:1`"
                    .into(),
            }),
        }
    }

    /// The CPU, or the one that works for a GPU.
    pub(crate) fn host(&self) -> &Arc<Cpu> {
        match self {
            Device::Cpu(cpu) => cpu,
            Device::Gpu(gpu) => gpu.host(),
        }
    }

    /// That CPU as a device of its own.
    pub fn host_device(&self) -> Device {
        Device::Cpu(self.host().clone())
    }

    /// The CPU, for an op that has no other kernel.
    pub(crate) fn expect_cpu(&self) -> &Arc<Cpu> {
        match self {
            Device::Cpu(cpu) => cpu,
            Device::Gpu(gpu) => panic!("an op has no kernel for {}", gpu.name()),
        }
    }

    /// What it is, as `by_name` takes it.
    pub fn kind(&self) -> &'static str {
        match self {
            Device::Cpu(_) => "cpu",
            Device::Gpu(gpu) => gpu.kind(),
        }
    }

    /// What products and activations are computed in.
    pub fn precision(&self) -> Precision {
        self.gpu().map(Gpu::precision).unwrap_or_default()
    }

    /// The GPU, if it is one.
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        match self {
            Device::Cpu(_) => None,
            Device::Gpu(gpu) => Some(gpu),
        }
    }

    /// Whether it is a GPU that a driver emulates: slower than the CPU.
    pub fn is_software(&self) -> bool {
        self.gpu().is_some_and(Gpu::is_software)
    }

    /// Whether tensors of one can be used with tensors of the other.
    pub(crate) fn is_same(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Cpu(_), Device::Cpu(_)) => true,
            (Device::Gpu(a), Device::Gpu(b)) => a.is_same(b),
            _ => false,
        }
    }

    /// What activations are stored in.
    pub(crate) fn activation_dtype(&self) -> DType {
        self.gpu().map_or(DType::F32, Gpu::activation_dtype)
    }

    /// Tells what went wrong on the device, if anything did: ops have no error to return.
    pub(crate) fn check(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), Gpu::check)
    }

    /// Runs `f` where the device's threads are: its kernels then start without crossing threads.
    pub(crate) fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.host().run(f)
    }

    /// The same for many short tasks: other threads wait without going to sleep.
    pub(crate) fn run_awake<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match self {
            Device::Cpu(cpu) => cpu.run_awake(f),
            Device::Gpu(gpu) => gpu.host().run(f),
        }
    }

    /// Bytes in use and reserved.
    pub fn memory(&self) -> MemoryUse {
        match self {
            Device::Cpu(cpu) => cpu.pool().usage(),
            Device::Gpu(gpu) => gpu.memory(),
        }
    }

    /// Bytes of the memory of a GPU that nobody uses, where its driver tells.
    pub fn free_bytes(&self) -> Option<u64> {
        self.gpu().and_then(Gpu::free_bytes)
    }

    /// Waits until the device has done all that it was given, and tells what went wrong.
    pub(crate) fn wait(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| {
            gpu.wait();
            gpu.check()
        })
    }

    /// Gives buffers that nobody uses back to the system.
    pub fn trim(&self) {
        match self {
            Device::Cpu(cpu) => cpu.pool().trim(),
            Device::Gpu(gpu) => gpu.trim(),
        }
    }

    /// In words, for the first lines of a run.
    pub fn describe(&self) -> String {
        let cpu = match self {
            Device::Cpu(cpu) => cpu,
            Device::Gpu(gpu) => return gpu.name(),
        };
        let n_threads = cpu.n_threads();
        let plural = if n_threads == 1 { "" } else { "s" };
        format!("cpu, {n_threads} thread{plural}, {}", cpu.instruction_set())
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}
