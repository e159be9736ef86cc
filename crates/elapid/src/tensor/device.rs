//! Where tensors live and kernels run.
//!
//! An enum, matched outside the loops.

use crate::error::{Error, Result};
use crate::tensor::cpu::{Cpu, Mat, MatMut, MemoryUse, Scope};
use crate::tensor::gpu::product::Side;
use crate::tensor::gpu::{Gpu, Precision};
use crate::tensor::{DType, Tensor};
use std::sync::Arc;

/// A device; clones share its threads and buffers.
#[derive(Clone)]
pub enum Device {
    /// The processor.
    Cpu(Arc<Cpu>),
    /// A graphics processor.
    Gpu(Gpu),
}

impl Device {
    /// The processor with `n_threads` threads.
    pub fn cpu(n_threads: usize) -> Result<Device> {
        let cpu = Cpu::new(n_threads).map_err(|error| Error::Device {
            problem: format!("cannot start {n_threads} threads: {error}"),
            hint: "use a smaller `--threads`".into(),
        })?;
        Ok(Device::Cpu(Arc::new(cpu)))
    }

    /// Device by the name a person types: `auto`, `cpu`, `gpu`, `wgpu`, `wgpu:1`, `cuda`, `cuda:1`.
    ///
    /// `gpu` is CUDA where there is one, else wgpu. `auto` takes a GPU that is no software, else
    /// the processor.
    pub fn by_name(name: &str, precision: Precision, n_threads: usize) -> Result<Device> {
        let host = || match Device::cpu(n_threads)? {
            Device::Cpu(cpu) => Ok(cpu),
            Device::Gpu(gpu) => Ok(gpu.host().clone()),
        };
        let (kind, index) = match name.split_once(':') {
            None => (name, Some(0)),
            Some((kind, index)) => (kind, index.parse().ok()),
        };
        match (kind, index) {
            ("cpu", Some(0)) => Device::cpu(n_threads),
            ("auto", Some(0)) => match Gpu::cuda(0, host()?, precision) {
                Ok(gpu) => Ok(Device::Gpu(gpu)),
                Err(_)
                    if crate::tensor::gpu::list_wgpu()
                        .first()
                        .is_some_and(|it| it.kind == "discrete") =>
                {
                    Gpu::wgpu(0, host()?).map(Device::Gpu)
                }
                Err(_) => Device::cpu(n_threads),
            },
            ("gpu", Some(index)) => {
                let found = Gpu::cuda(index, host()?, precision);
                let found = found.or_else(|_| Gpu::wgpu(index, host()?));
                found.map(Device::Gpu)
            }
            ("cuda", Some(index)) => Gpu::cuda(index, host()?, precision).map(Device::Gpu),
            ("wgpu", Some(index)) => Gpu::wgpu(index, host()?).map(Device::Gpu),
            _ => Err(Error::Device {
                problem: format!("there is no device `{name}`"),
                hint: "use `auto`, `cpu`, `gpu`, `wgpu`, `cuda`, or one of several: `cuda:1`"
                    .into(),
            }),
        }
    }

    /// The processor, or what a graphics processor leaves to it.
    pub fn host(&self) -> &Arc<Cpu> {
        match self {
            Device::Cpu(cpu) => cpu,
            Device::Gpu(gpu) => gpu.host(),
        }
    }

    /// The processor as a device of its own.
    pub fn host_device(&self) -> Device {
        Device::Cpu(self.host().clone())
    }

    /// The processor, for an op that has no other kernel.
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
            Device::Gpu(gpu) if gpu.as_cuda().is_some() => "cuda",
            Device::Gpu(_) => "wgpu",
        }
    }

    /// What products and activations are computed in.
    pub fn precision(&self) -> Precision {
        self.gpu().map(Gpu::precision).unwrap_or_default()
    }

    /// The graphics processor, if it is one.
    pub fn gpu(&self) -> Option<&Gpu> {
        match self {
            Device::Cpu(_) => None,
            Device::Gpu(gpu) => Some(gpu),
        }
    }

    /// Whether tensors of one can be used with tensors of the other.
    pub fn is_same(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Cpu(_), Device::Cpu(_)) => true,
            (Device::Gpu(a), Device::Gpu(b)) => a.is_same(b),
            _ => false,
        }
    }

    /// What activations are stored in.
    pub fn activation_dtype(&self) -> DType {
        self.gpu().map_or(DType::F32, Gpu::activation_dtype)
    }

    /// Tells what went wrong on the device, if anything did: ops have no error to return.
    pub fn check(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), Gpu::check)
    }

    /// Runs `f` where the device's threads are: its kernels then start without crossing threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.host().run(f)
    }

    /// The same for many short tasks: other threads wait without going to sleep.
    pub fn run_awake<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
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

    /// Gives buffers that nobody uses back to the system.
    pub fn trim(&self) {
        match self {
            Device::Cpu(cpu) => cpu.pool().trim(),
            Device::Gpu(gpu) => gpu.trim(),
        }
    }

    /// A matrix product of this size, to be timed: (m, k) @ (k, n), in f32.
    pub fn product_probe(&self, m: usize, n: usize, k: usize) -> Box<dyn FnMut()> {
        if let Device::Gpu(gpu) = self.clone() {
            // No zeros: products of zeros run faster than others.
            let numbers = |n: usize| (0..n).map(|n| (n % 61) as f32 - 30.0).collect::<Vec<_>>();
            let a = Tensor::from_f32(self, &[m, k], &numbers(m * k));
            let b = Tensor::from_f32(self, &[k, n], &numbers(k * n));
            let mut c = Tensor::activation(self, &[m, n]);
            return Box::new(move || {
                gpu.product(&mut c, 0.0, 1.0, Side::Plain(&a), Side::Plain(&b));
                gpu.wait();
            });
        }
        let cpu = self.host().clone();
        let (a, b, mut c) = (vec![0.5; m * k], vec![0.25; k * n], vec![0.0; m * n]);
        Box::new(move || {
            let out = MatMut::new(&mut c, m, n);
            cpu.gemm(out, 0.0, 1.0, Mat::new(&a, m, k), Mat::new(&b, k, n), Scope::Machine);
        })
    }

    /// Reading this many bytes once, by all threads, to be timed.
    pub fn read_probe(&self, n_bytes: usize) -> impl FnMut() + use<> {
        const PIECE: usize = 1 << 14;
        let cpu = self.host().clone();
        let numbers: Vec<u64> = (0..n_bytes as u64 / 8).collect();
        move || {
            let sums = cpu.map(numbers.chunks(PIECE).collect(), |piece: &[u64]| {
                let mut sums = [0; 16];
                for numbers in piece.as_chunks::<16>().0 {
                    sums.iter_mut().zip(numbers).for_each(|(sum, n)| *sum ^= n);
                }
                sums.into_iter().fold(0, |a, b| a ^ b)
            });
            std::hint::black_box(sums);
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
