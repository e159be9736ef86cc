//! Where to compute: the flags `--device`, `--precision` and `--threads` of every command.

use crate::ranks;
use crate::report::{Done, between};
use elapid::Device;
use elapid::Precision;
use serde::{Deserialize, Serialize};

/// Where to compute.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Compute {
    /// Device: auto, cpu, gpu, wgpu, cuda, or one of several such as cuda:1 [default: auto]
    #[arg(long, value_name = "D")]
    pub device: Option<String>,
    /// Precision on CUDA: bf16, tf32 or f32; other devices use f32 [default: bf16; f32 in eval
    /// and check]
    #[arg(long, value_name = "P", value_parser = precision)]
    pub precision: Option<Precision>,
    /// CPU threads [default: all]
    #[arg(long, short = 't', value_name = "N", value_parser = between(1, 1024))]
    pub threads: Option<usize>,
}

/// Where a run started: it is resumed there unless told otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// As `--device` takes it.
    pub device: String,
    /// Arithmetic.
    pub precision: Precision,
}

impl Compute {
    /// The device.
    pub fn open(&self) -> Done<Device> {
        self.open_in(self.precision.unwrap_or(Precision::Bf16))
    }

    /// The device, in f32 unless told otherwise: for comparisons.
    pub fn open_exact(&self) -> Done<Device> {
        self.open_in(self.precision.unwrap_or(Precision::F32))
    }

    /// The device of a run that began at `place`.
    pub fn open_again(&self, place: Option<&Place>) -> Done<Device> {
        let Some(place) = place else { return self.open() };
        let here = Compute {
            device: Some(self.device.clone().unwrap_or_else(|| place.device.clone())),
            precision: Some(self.precision.unwrap_or(place.precision)),
            threads: self.threads,
        };
        here.open().map_err(|failure| match &self.device {
            Some(_) => failure,
            None => failure.with_more(&format!(
                "the run started on `{}`; `--device cpu` or another resumes it elsewhere",
                place.device
            )),
        })
    }

    /// Where this is, for `open_again`.
    pub fn place(&self, device: &Device) -> Place {
        let name = self.device.as_deref().unwrap_or("auto");
        let (kind, index) = name.split_at(name.find(':').unwrap_or(name.len()));
        let kind = if matches!(kind, "auto" | "gpu") { device.kind() } else { kind };
        Place { device: format!("{kind}{index}"), precision: device.precision() }
    }

    fn open_in(&self, precision: Precision) -> Done<Device> {
        // Looking for GPUs loads their drivers: time and memory for nothing where there are none.
        let name = match self.device.as_deref().unwrap_or("auto") {
            "auto" if !has_graphics() => "cpu",
            name => name,
        };
        let device = match own_gpu(name, precision, self.n_threads()) {
            Some(device) => device,
            None => Device::by_name(name, precision, self.n_threads())?,
        };
        if device.is_software() {
            let name = device.describe();
            eprintln!("note    {name} computes in software, which is slower than `--device cpu`");
        }
        Ok(device)
    }

    /// Threads, asked for or all.
    pub fn n_threads(&self) -> usize {
        self.threads.unwrap_or_else(|| ranks::here().n_threads())
    }
}

/// Where several ranks share a machine and nobody says which GPU: each takes its own, and where
/// there are fewer than ranks some share one.
fn own_gpu(name: &str, precision: Precision, n_threads: usize) -> Option<Device> {
    let ranks = ranks::here();
    if ranks.n_local == 1 || !matches!(name, "auto" | "gpu" | "cuda") {
        return None;
    }
    let mut index = ranks.local;
    loop {
        match Device::by_name(&format!("cuda:{index}"), precision, n_threads) {
            Ok(device) => return Some(device),
            Err(_) if index == 0 => return None,
            // As if there were half as many.
            Err(_) => index -= 1 << index.ilog2(),
        }
    }
}

fn precision(name: &str) -> Result<Precision, String> {
    match name {
        "f32" => Ok(Precision::F32),
        "tf32" => Ok(Precision::Tf32),
        "bf16" => Ok(Precision::Bf16),
        _ => Err("use bf16, tf32 or f32".into()),
    }
}

/// Whether there may be a GPU at all.
fn has_graphics() -> bool {
    let doors = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg"];
    !cfg!(target_os = "linux") || doors.iter().any(|door| std::path::Path::new(door).exists())
}
