//! Where to compute: the flags `--device`, `--precision` and `--threads` of every command.

use crate::report::{Done, between, n_threads_default};
use elapid::device::Device;
use elapid::gpu::Precision;

/// Where to compute.
#[derive(clap::Args, Clone, Debug)]
pub struct Compute {
    /// Where to compute: auto, cpu, gpu, wgpu, cuda, or one of several, such as cuda:1
    #[arg(long, value_name = "D", default_value = "auto")]
    pub device: String,
    /// Arithmetic on CUDA: bf16, tf32 or f32 [default: bf16; elsewhere f32]
    #[arg(long, value_name = "P", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Threads [default: all]
    #[arg(long, short = 't', value_name = "N", value_parser = between(1, 1024))]
    pub threads: Option<usize>,
}

impl Default for Compute {
    fn default() -> Compute {
        Compute { device: "auto".into(), precision: None, threads: None }
    }
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

    fn open_in(&self, precision: Precision) -> Done<Device> {
        // To look for graphics processors loads their drivers: time and memory for nothing where
        // the system has none.
        let name = match self.device.as_str() {
            "auto" if !has_graphics() => "cpu",
            name => name,
        };
        Ok(Device::by_name(name, precision, self.n_threads())?)
    }

    /// Threads, asked for or all.
    pub fn n_threads(&self) -> usize {
        self.threads.unwrap_or_else(n_threads_default)
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

/// Whether there may be a graphics processor at all.
fn has_graphics() -> bool {
    let doors = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg"];
    !cfg!(target_os = "linux") || doors.iter().any(|door| std::path::Path::new(door).exists())
}
