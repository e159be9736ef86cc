//! `elapid info`: what this machine has, what a model is.

use crate::files;
use crate::report::{Done, count, line, mebibytes, n_threads_default};
use elapid::config::{Config, FeedForwardConfig, MixerConfig};
use elapid::device::Device;
use elapid::model::Model;
use elapid::state::State;
use elapid::weights::Role;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show this machine, or what a model directory holds.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid info\n  elapid info golden/sets/jamba\n  \
    elapid info DIR --json")]
pub struct Info {
    /// Directory with config.json and model.safetensors
    model_dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Info {
    pub fn run(&self) -> Done<ExitCode> {
        match &self.model_dir {
            Some(dir) => self.model(dir)?,
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
            line(format!("models  {}", elapid::config::FAMILIES.join(", ")));
        }
        Ok(())
    }

    fn model(&self, dir: &std::path::Path) -> Done<()> {
        let config = files::read_config(dir)?;
        let model = Model::new(config);
        let device = Device::cpu(1)?;
        let weights = files::load_weights(&device, &model, dir)?;
        let mut by_role = [0usize; 4];
        let mut n_bytes = 0;
        for id in weights.ids() {
            let tensor = weights.tensor(id);
            by_role[weights.role(id) as usize] += tensor.n_elem();
            n_bytes += tensor.n_bytes();
        }
        let of = |role: Role| by_role[role as usize];
        let config = model.config();
        let state_bytes = State::n_bytes_at_start(config);
        let layers = kinds(config);
        if self.json {
            let object = json!({
                "family": config.family, "layers": layers, "n_layer": config.layers.len(),
                "d_model": config.d_model, "n_vocab": config.n_vocab, "tied": config.tied,
                "n_params": weights.n_elem(), "n_params_matrices": of(Role::Matrix),
                "n_params_embedding": of(Role::Embedding), "n_params_vectors": of(Role::Vector),
                "n_params_buffers": of(Role::Buffer),
                "weight_bytes": n_bytes, "state_bytes": state_bytes,
            });
            line(object);
            return Ok(());
        }
        line(format!(
            "model   {}, {} layers, d_model {}",
            config.family,
            config.layers.len(),
            config.d_model
        ));
        for (kind, n) in layers {
            line(format!("layers  {n} x {kind}"));
        }
        let head = if config.tied { "tied" } else { "untied" };
        line(format!("vocab   {} tokens, head {head}", config.n_vocab));
        line(format!(
            "params  {} in all: matrices {}, embedding {}, vectors {}, buffers {}",
            count(weights.n_elem() as f64),
            count(of(Role::Matrix) as f64),
            count(of(Role::Embedding) as f64),
            count(of(Role::Vector) as f64),
            count(of(Role::Buffer) as f64)
        ));
        line(format!(
            "memory  weights {}, state of an empty sequence {}",
            mebibytes(n_bytes as f64),
            mebibytes(state_bytes as f64)
        ));
        Ok(())
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
