//! `elapid doctor`: what this machine has, what Elapid uses of it, what would give more.

use super::here;
use super::info::{device_json, device_line};
use crate::compute::Compute;
use crate::report::text::bytes;
use crate::report::{Done, line, n_threads_default};
use crate::{machine, project};
use elapid::{Device, DeviceInfo, Error, Precision};
use serde_json::json;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Less free disk than a model, its checkpoints and an adapter take is worth a word.
const DISK_BYTES_FEW: u64 = 2 << 30;
/// What PCI calls NVIDIA.
const NVIDIA: &str = "0x10de";

/// Show what this machine has, what Elapid uses of it, and what to install for more.
///
/// Exit code 0 in any case: Elapid runs on every machine that it starts on. Nothing is installed
/// or changed, but that the built-in model is put into the cache directory.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid doctor\n  elapid doctor --json")]
pub struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
struct Findings {
    cpu: Option<String>,
    /// What kernels are chosen by, the widest first.
    simd: Vec<&'static str>,
    memory: [Option<u64>; 2],
    disk: Option<u64>,
    git: Option<String>,
    /// GPUs.
    devices: Vec<DeviceInfo>,
    /// Kinds of GPUs of which none can be used, and why.
    missing: Vec<(&'static str, Error)>,
    used: String,
    model: String,
}

impl Doctor {
    pub fn run(&self) -> Done<ExitCode> {
        let found = Findings::new()?;
        if self.json {
            found.print_json()
        } else {
            found.print()
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Findings {
    fn new() -> Done<Findings> {
        let mut devices = Device::list(n_threads_default())?;
        devices.retain(|one| one.id != "cpu");
        let open = |kind: &'static str| {
            let opened = Device::by_name(kind, Precision::F32, 1);
            opened.err().map(|error| (kind, error))
        };
        Ok(Findings {
            cpu: machine::cpu(),
            simd: simd(),
            memory: [machine::total_bytes(), machine::free_bytes()],
            disk: machine::free_disk(Path::new(".")),
            git: git_version(),
            devices,
            missing: ["cuda", "wgpu"].into_iter().filter_map(open).collect(),
            used: Compute::default().open()?.describe(),
            model: project::choose(&here())?.why,
        })
    }

    /// What to do for more, in sentences.
    fn advice(&self) -> Vec<String> {
        let lacks = |kind: &str| self.missing.iter().any(|it| it.0 == kind);
        let is_hardware = |one: &DeviceInfo| one.kind.as_deref() != Some("software");
        let has_gpu = self.devices.iter().any(is_hardware);
        let mut list = Vec::new();
        if lacks("cuda") && has_nvidia() {
            list.push(
                "an NVIDIA GPU is not used by CUDA: install NVIDIA's driver for CUDA 12 or newer, \
                 and the libraries NVRTC and cuBLASLt (the CUDA toolkit)",
            );
        } else if !has_gpu && cfg!(target_os = "linux") {
            list.push(
                "if there is a GPU, install NVIDIA's driver for CUDA 12 or newer, or the Vulkan \
                 driver of another (Debian: mesa-vulkan-drivers)",
            );
        }
        if self.git.is_none() {
            list.push("install git: `elapid adapt` then measures on what was committed later");
        }
        if self.disk.is_some_and(|n_bytes| n_bytes < DISK_BYTES_FEW) {
            list.push("free some disk: a training run writes checkpoints");
        }
        if cfg!(target_arch = "x86_64") && !self.simd.contains(&"avx2") {
            list.push("this CPU has no AVX2: everything works, several times slower");
        }
        list.into_iter().map(str::to_string).collect()
    }

    fn print_json(&self) {
        let missing = self.missing.iter().map(
            |(kind, error)| json!({"device": kind, "why": error.to_string(), "hint": error.hint()}),
        );
        line(json!({
            "version": env!("CARGO_PKG_VERSION"), "cpu": self.cpu, "simd": self.simd,
            "threads": n_threads_default(), "memory": self.memory[0],
            "memory_free": self.memory[1], "disk_free": self.disk, "git": self.git,
            "gpus": self.devices.iter().map(device_json).collect::<Vec<_>>(),
            "missing": missing.collect::<Vec<_>>(), "use": self.used, "model": self.model,
            "more": self.advice(),
        }));
    }

    fn print(self) {
        let advice = self.advice();
        let size = |n: Option<u64>| n.map_or("unknown".into(), |n| bytes(n as f64));
        let [total, free] = self.memory.map(size);
        let cpu = self.cpu.unwrap_or("unknown".into());
        let simd = if self.simd.is_empty() { "no SIMD".into() } else { self.simd.join(" ") };
        line(format!("elapid  {}", env!("CARGO_PKG_VERSION")));
        line(format!("cpu     {cpu}, {} threads, {simd}", n_threads_default()));
        line(format!("memory  {total}, {free} free"));
        line(format!("disk    {} free here", size(self.disk)));
        line(format!("git     {}", self.git.as_deref().unwrap_or("not found")));
        self.devices.into_iter().for_each(|one| line(device_line(one)));
        for (kind, error) in &self.missing {
            line(format!("{:<8}{error}", format!("no {kind}")));
        }
        line(format!("use     {}", self.used));
        line(format!("model   {}", self.model));
        match advice.is_empty() {
            true => line("more    nothing is missing"),
            false => advice.iter().for_each(|sentence| line(format!("more    {sentence}"))),
        }
    }
}

/// Instructions that kernels are written for and this CPU has.
fn simd() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let list = [
        ("avx512vnni", std::is_x86_feature_detected!("avx512vnni")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("fma", std::is_x86_feature_detected!("fma")),
        ("f16c", std::is_x86_feature_detected!("f16c")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let list = [("neon", cfg!(target_arch = "aarch64"))];
    list.into_iter().filter(|it| it.1).map(|it| it.0).collect()
}

fn git_version() -> Option<String> {
    let output = Command::new("git").arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(text.trim().trim_start_matches("git version ").to_string())
}

/// Whether Linux sees a device of NVIDIA, with or without its driver.
fn has_nvidia() -> bool {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let vendor = |path: &Path| std::fs::read_to_string(path.join("vendor")).unwrap_or_default();
    devices.map(|entry| entry.path()).any(|path| vendor(&path).trim() == NVIDIA)
}
