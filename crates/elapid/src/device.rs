//! Where tensors live and kernels run.
//!
//! An enum, matched outside the loops: `let Device::Cpu(cpu) = device` stops compiling in every op
//! the day a second kind of device is added, which is the list of what is to do then.

use crate::cpu::{Cpu, Mat, MatMut, MemoryUse, Scope};
use crate::error::{Error, Result};
use std::sync::Arc;

/// A device; clones share its threads and buffers.
#[derive(Clone)]
pub enum Device {
    /// The processor.
    Cpu(Arc<Cpu>),
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

    /// Device by the name a person types: `auto` or `cpu`.
    pub fn by_name(name: &str, n_threads: usize) -> Result<Device> {
        match name {
            "auto" | "cpu" => Device::cpu(n_threads),
            _ => Err(Error::Device {
                problem: format!("there is no device `{name}`"),
                hint: "this build knows `--device cpu` and `--device auto`".into(),
            }),
        }
    }

    /// Runs `f` where the device's threads are: its kernels then start without crossing threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let Device::Cpu(cpu) = self;
        cpu.run(f)
    }

    /// The same for many short tasks: other threads wait without going to sleep.
    pub fn run_awake<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let Device::Cpu(cpu) = self;
        cpu.run_awake(f)
    }

    /// Bytes in use and reserved.
    pub fn memory(&self) -> MemoryUse {
        let Device::Cpu(cpu) = self;
        cpu.pool().usage()
    }

    /// Gives buffers that nobody uses back to the system.
    pub fn trim(&self) {
        let Device::Cpu(cpu) = self;
        cpu.pool().trim();
    }

    /// A matrix product of this size, to be timed: (m, k) @ (k, n), in f32.
    pub fn product_probe(&self, m: usize, n: usize, k: usize) -> impl FnMut() + use<> {
        let Device::Cpu(cpu) = self.clone();
        let (a, b, mut c) = (vec![0.5; m * k], vec![0.25; k * n], vec![0.0; m * n]);
        move || {
            let out = MatMut::new(&mut c, m, n);
            cpu.gemm(out, 0.0, 1.0, Mat::new(&a, m, k), Mat::new(&b, k, n), Scope::Machine);
        }
    }

    /// Reading this many bytes once, by all threads, to be timed.
    pub fn read_probe(&self, n_bytes: usize) -> impl FnMut() + use<> {
        const PIECE: usize = 1 << 14;
        let Device::Cpu(cpu) = self.clone();
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
        let Device::Cpu(cpu) = self;
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
