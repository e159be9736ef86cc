//! `elapid info`: what this machine has, what a model is.

use super::convert::stored;
use crate::files;
use crate::report::{Done, count, line, mebibytes, n_threads_default};
use elapid::error::Error;
use elapid::model::checkpoint::Checkpoint;
use elapid::model::config::{Config, FeedForwardConfig, LayerConfig, MixerConfig};
use elapid::model::state::State;
use elapid::model::weights::Role;
use elapid::tensor::device::Device;
use elapid::text::fim::FimTokens;
use elapid::text::tokenizer::Tokenizer;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show this machine, or what a model is.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid info\n  elapid info --devices\n  \
    elapid info golden/sets/jamba\n  elapid info model.gguf --json")]
pub struct Info {
    /// Directory, .gguf or .elapid file
    model: Option<PathBuf>,
    /// List the devices to compute on, with memory, limits and features
    #[arg(long, conflicts_with = "model")]
    devices: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Info {
    pub fn run(&self) -> Done<ExitCode> {
        match &self.model {
            Some(dir) => self.model(dir)?,
            None if self.devices => self.devices()?,
            None => self.machine()?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn machine(&self) -> Done<()> {
        let device = Device::cpu(n_threads_default())?;
        let version = env!("CARGO_PKG_VERSION");
        if self.json {
            line(format!("{}", json!({"version": version, "device": device.describe()})));
        } else {
            line(format!("elapid  {version}"));
            line(format!("device  {}", device.describe()));
            line(format!("models  {}", elapid::model::config::Family::names()));
        }
        Ok(())
    }

    /// One line for each device, under the name that `--device` takes.
    fn devices(&self) -> Done<()> {
        let cpu = Device::cpu(n_threads_default())?;
        let mut list = vec![json!({"device": "cpu", "name": cpu.describe()})];
        for (idx, cuda) in elapid::tensor::gpu::cuda::list().into_iter().enumerate() {
            list.push(json!({
                "device": format!("cuda:{idx}"), "name": cuda.name, "memory": cuda.memory,
                "memory_free": cuda.memory_free, "compute_capability": cuda.capability,
                "multiprocessors": cuda.n_multiprocessors,
            }));
        }
        for (idx, adapter) in elapid::tensor::gpu::list_wgpu().into_iter().enumerate() {
            let opened = elapid::tensor::gpu::Gpu::wgpu(idx, cpu.host().clone());
            let used = opened.map(|gpu| gpu.features()).unwrap_or_default();
            list.push(json!({
                "device": format!("wgpu:{idx}"), "name": adapter.name, "kind": adapter.kind,
                "backend": adapter.backend, "buffer_max": adapter.buffer_bytes_max,
                "binding_max": adapter.binding_bytes_max, "features": adapter.features,
                "features_used": used,
            }));
        }
        if self.json {
            line(format!("{}", json!({"devices": list})));
            return Ok(());
        }
        for one in &list {
            let text = |name: &str| one[name].as_str().unwrap_or_default().to_string();
            let size = |name: &str| one[name].as_u64().map(|n| mebibytes(n as f64));
            let mut facts = vec![text("name"), text("kind"), text("backend")];
            facts.extend(size("memory").map(|n| format!("{n} of memory")));
            facts.extend(size("memory_free").map(|n| format!("{n} free")));
            let capability = one["compute_capability"].as_str();
            facts.extend(capability.map(|it| format!("compute capability {it}")));
            facts.extend(size("buffer_max").map(|n| format!("buffers to {n}")));
            facts.extend(size("binding_max").map(|n| format!("bindings to {n}")));
            let names = |field: &str| one[field].as_array().cloned().unwrap_or_default();
            let used = names("features_used");
            facts.extend(names("features").iter().filter_map(|it| {
                let not = if used.contains(it) { "" } else { " (not used)" };
                Some(format!("{}{not}", it.as_str()?))
            }));
            facts.retain(|fact| !fact.is_empty());
            line(format!("{:<8}{}", text("device"), facts.join(", ")));
        }
        Ok(())
    }

    fn model(&self, path: &Path) -> Done<()> {
        if let Some(adapter) = super::adapter::detect(path)? {
            let (lines, json) = super::adapter::describe(&adapter)?;
            match self.json {
                true => line(json),
                false => lines.iter().for_each(line),
            }
            return Ok(());
        }
        let checkpoint = files::open(path)?;
        let dtypes = checkpoint.dtype_bytes()?;
        let mut by_role = [0usize; 4];
        for spec in checkpoint.model().specs() {
            by_role[spec.role as usize] += spec.shape.iter().product::<usize>();
        }
        // A tokenizer we cannot read does not hide the model.
        let tokenizer = checkpoint.tokenizer();
        let memory = Memory::of(checkpoint.model().config(), dtypes.values().sum());
        let facts = Facts { checkpoint: &checkpoint, dtypes, by_role, memory };
        match self.json {
            true => facts.print_json(tokenizer.as_ref().ok().and_then(Option::as_ref)),
            false => facts.print(&tokenizer),
        }
        Ok(())
    }
}

/// Memory at run time, in bytes.
struct Memory {
    weights: usize,
    /// State of a sequence before its first token.
    state: usize,
    /// What each token adds to it.
    per_token: usize,
}

impl Memory {
    fn of(config: &Config, weights: usize) -> Memory {
        let per_token = |layer: &LayerConfig| match &layer.mixer {
            MixerConfig::Attention(c) | MixerConfig::Parallel(_, c) => {
                2 * 4 * c.dims.n_kv_head * c.dims.d_head
            }
            _ => 0,
        };
        let per_token = config.layers.iter().map(per_token).sum();
        Memory { weights, state: State::n_bytes_at_start(config), per_token }
    }
}

struct Facts<'a> {
    checkpoint: &'a Checkpoint,
    /// Bytes by name.
    dtypes: BTreeMap<&'static str, usize>,
    by_role: [usize; 4],
    memory: Memory,
}

impl Facts<'_> {
    fn of(&self, role: Role) -> usize {
        self.by_role[role as usize]
    }

    fn architecture(&self) -> Option<&str> {
        self.checkpoint.gguf().and_then(|gguf| gguf.str("general.architecture").ok().flatten())
    }

    fn print_json(&self, tokenizer: Option<&Tokenizer>) {
        let config = self.checkpoint.model().config();
        line(json!({
            "name": self.checkpoint.name(), "architecture": self.architecture(),
            "family": config.family.name(), "layers": kinds(config), "n_layer": config.layers.len(),
            "d_model": config.d_model, "n_vocab": config.n_vocab, "n_ctx": config.n_ctx,
            "tied": config.tied,
            "n_params": self.by_role.iter().sum::<usize>(),
            "n_params_matrices": self.of(Role::Matrix),
            "n_params_embedding": self.of(Role::Embedding),
            "n_params_vectors": self.of(Role::Vector), "n_params_buffers": self.of(Role::Buffer),
            "dtype_bytes": self.dtypes, "weight_bytes": self.memory.weights,
            "state_bytes": self.memory.state, "state_bytes_per_token": self.memory.per_token,
            "tokenizer": tokenizer.map(|tokenizer| json!({
                "kind": tokenizer.kind(), "n_vocab": tokenizer.n_vocab(),
                "bos": tokenizer.bos(), "eos": tokenizer.eos(),
                "fim": FimTokens::detect(&|token| tokenizer.id(token)).is_some(),
            })),
            "chat_template": self.checkpoint.chat_template().is_ok_and(|t| t.is_some()),
        }));
    }

    fn print(&self, tokenizer: &Result<Option<Tokenizer>, Error>) {
        let config = self.checkpoint.model().config();
        let architecture = match self.architecture() {
            Some(name) if name != config.family.name() => format!(" (gguf {name})"),
            _ => String::new(),
        };
        line(format!(
            "model   {}: {}{architecture}, {} layers, d_model {}",
            self.checkpoint.name(),
            config.family,
            config.layers.len(),
            config.d_model
        ));
        for (kind, n) in kinds(config) {
            line(format!("layers  {n} x {kind}"));
        }
        let head = if config.tied { "tied" } else { "untied" };
        line(format!("vocab   {} tokens, head {head}", config.n_vocab));
        match tokenizer {
            Ok(Some(tokenizer)) => {
                let chat = match self.checkpoint.chat_template() {
                    Ok(Some(_)) => ", with a chat template",
                    _ => "",
                };
                let (kind, n_vocab) = (tokenizer.kind(), tokenizer.n_vocab());
                let fim = match FimTokens::detect(&|token| tokenizer.id(token)) {
                    Some(_) => ", fills in the middle",
                    None => "",
                };
                line(format!("tokens  {kind}, {n_vocab} tokens{chat}{fim}"));
            }
            Ok(None) => line("tokens  no tokenizer"),
            Err(error) => line(format!("tokens  {}", error.to_string().replace("\n\n", "; "))),
        }
        line(format!(
            "params  {} in all: matrices {}, embedding {}, vectors {}, buffers {}",
            count(self.by_role.iter().sum::<usize>() as f64),
            count(self.of(Role::Matrix) as f64),
            count(self.of(Role::Embedding) as f64),
            count(self.of(Role::Vector) as f64),
            count(self.of(Role::Buffer) as f64)
        ));
        line(format!("stored  {}", stored(&self.dtypes)));
        let per_token = match self.memory.per_token {
            0 => String::new(),
            n => format!(", each token {:.1} KiB more", n as f64 / 1024.0),
        };
        line(format!(
            "memory  weights {}, state of an empty sequence {}{per_token}",
            mebibytes(self.memory.weights as f64),
            mebibytes(self.memory.state as f64)
        ));
    }
}

/// Kinds of layers in order of appearance, with how many of each.
fn kinds(config: &Config) -> Vec<(String, usize)> {
    let mut list: Vec<(String, usize)> = Vec::new();
    for layer in &config.layers {
        let mixer = match &layer.mixer {
            MixerConfig::Mamba1(c) => format!("mamba1 ({} x {})", c.d_inner, c.d_state),
            MixerConfig::Mamba2(c) => format!("mamba2 ({} heads of {})", c.n_head, c.d_head),
            MixerConfig::Attention(c) => {
                format!("attention ({} heads, {} kv)", c.dims.n_head, c.dims.n_kv_head)
            }
            MixerConfig::ShortConv(c) => format!("short convolution ({} taps)", c.d_conv),
            MixerConfig::Parallel(m, a) => {
                format!("mamba2 ({} heads) beside attention ({} heads)", m.n_head, a.dims.n_head)
            }
        };
        let kind = match &layer.feed_forward {
            FeedForwardConfig::None => mixer,
            FeedForwardConfig::Dense(c) => format!("{mixer}, feed-forward {}", c.d_ff),
            FeedForwardConfig::Experts(c) => {
                format!("{mixer}, {} of {} experts of {}", c.router.n_used, c.n_expert, c.d_ff)
            }
        };
        match list.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, n)) => *n += 1,
            None => list.push((kind, 1)),
        }
    }
    list
}
